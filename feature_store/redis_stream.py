"""A stream in Redis: one Redis Stream with consumer groups.

Knows commands. Does not know what an item says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import redis

from feature_store.redis import connect, translated
from feature_store.streams import RECLAIM_IDLE_MS, Item

_FIELD = b"p"


class RedisStream:
    """The `Stream` of a cluster."""

    def __init__(self, url: str, name: str, *, max_length: int, timeout_seconds: float) -> None:
        self._client = connect(url, timeout_seconds=timeout_seconds)
        self._url, self._timeout_seconds = url, timeout_seconds
        self._key, self._max_length = f"stream/{name}", max_length
        self._groups: set[str] = set()

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items in one transaction."""
        with translated(), self._client.pipeline(transaction=True) as pipeline:
            for item in items:
                pipeline.xadd(self._key, {_FIELD: item}, maxlen=self._max_length, approximate=True)
            return [number.decode() for number in pipeline.execute()]

    def claim(
        self,
        group: str,
        consumer: str,
        limit: int,
        block_ms: int,
        *,
        reclaim_idle_ms: int = RECLAIM_IDLE_MS,
    ) -> list[Item]:
        """Takes idle items by XAUTOCLAIM, then new ones by XREADGROUP."""
        with translated(), self._known(group):
            taken = self._reclaim(group, consumer, limit, reclaim_idle_ms)
            if len(taken) < limit:
                block = block_ms if block_ms > 0 and not taken else None
                taken += self._read(group, consumer, limit - len(taken), block)
        return taken

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """XACK."""
        if ids:
            with translated():
                self._client.xack(self._key, group, *ids)

    def lag(self, group: str) -> int:
        """Pending and unread items of the group."""
        with translated(), self._known(group):
            groups = cast(list[dict[str, Any]], self._client.xinfo_groups(self._key))
            mine = next(each for each in groups if each["name"] == group.encode())
            return int(mine["pending"]) + self._unread(mine)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        """The stream."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    @contextmanager
    def _known(self, group: str) -> Iterator[None]:
        """Makes the group unless this process has seen it; a store that was emptied is found out by the next call."""
        if group not in self._groups:
            try:
                self._client.xgroup_create(self._key, group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
            self._groups.add(group)
        try:
            yield
        except redis.ResponseError:
            self._groups.discard(group)
            raise

    def _reclaim(self, group: str, consumer: str, limit: int, idle_ms: int) -> list[Item]:
        taken: list[Item] = []
        start = b"0-0"
        while len(taken) < limit:
            answer = self._client.xautoclaim(
                self._key, group, consumer, idle_ms, start_id=start, count=limit - len(taken)
            )
            start, entries, *_ = cast(list[Any], answer)
            taken += _items(entries)
            if start == b"0-0":
                break
        return taken

    def _read(self, group: str, consumer: str, limit: int, block_ms: int | None) -> list[Item]:
        taken: list[Item] = []
        step = max(1, int(self._timeout_seconds * 500))
        left = block_ms
        while True:  # a block longer than the socket's timeout is waited for in steps
            wait = None if left is None else max(1, min(left, step))
            answer = self._client.xreadgroup(
                group, consumer, {self._key: ">"}, count=limit, block=wait
            )
            for _, entries in cast(list[Any], answer) or []:
                taken += _items(entries)
            left = None if left is None else left - (wait or 0)
            if taken or left is None or left <= 0:
                return taken

    def _unread(self, group: dict[str, Any]) -> int:
        """Exact at both ends of the stream; between them Redis's own count, which items dropped unread keep too high."""
        stream = cast(dict[str, Any], self._client.xinfo_stream(self._key))
        length, read = int(stream["length"]), _place(group["last-delivered-id"])
        if not length or read >= _place(stream["last-generated-id"]):
            return 0
        if read < _place(stream["first-entry"][0]) or group["lag"] is None:
            return length
        return min(length, int(group["lag"]))


def _place(number: bytes) -> tuple[int, int]:
    """Where an id stands in the stream."""
    milliseconds, _, sequence = number.decode().partition("-")
    return int(milliseconds), int(sequence)


def _items(entries: Sequence[Any]) -> list[Item]:
    return [Item(number.decode(), fields[_FIELD]) for number, fields in entries if fields]
