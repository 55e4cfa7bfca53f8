"""Streams behind one small protocol: append, claim, acknowledge.

Knows items and consumer groups. Does not know what an item says, nor which store holds it.

An item is delivered to one consumer of every group, and again to another if it is not acknowledged in time: at least once.
Who must not do a thing twice tells repeats by what the item says.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from feature_store.errors import InvalidInput

MAX_LENGTH = 200_000
"""Items kept; the oldest go first, read or not, so that a stream without a reader cannot fill the store."""


class Item(NamedTuple):
    """An item and its name in the stream."""

    id: str
    data: bytes


class Stream(Protocol):
    """A named sequence of items."""

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items; returns their names."""

    def claim(
        self, group: str, consumer: str, limit: int, block_ms: int, *, reclaim_idle_ms: int = 60_000
    ) -> list[Item]:
        """Up to `limit` items, oldest first; waits up to `block_ms` for the first.

        Items that a consumer of the group has held for `reclaim_idle_ms` without acknowledging come first.
        """

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Items that need not be delivered again."""

    def lag(self, group: str) -> int:
        """Items that the group has not acknowledged, delivered or not."""

    def close(self) -> None:
        """Lets go of the store."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_stream(url: str, name: str, *, max_length: int = MAX_LENGTH) -> Stream:
    """The stream `name` in the store at a URL, as `feature_store.online.open_store` takes it.

    Raises:
        InvalidInput: the URL names no known store.
    """
    if url.startswith("sqlite:///"):
        from feature_store.sqlite import SqliteStream

        return SqliteStream(url.removeprefix("sqlite:///"), name, max_length=max_length)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from feature_store.redis import RedisStream

        return RedisStream(url, name, max_length=max_length)
    raise InvalidInput(f"store {url!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")
