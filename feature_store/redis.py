"""Online rows and streams in Redis or Valkey: what a cluster uses.

Knows commands and pipelines. Does not know what is stored. One round trip a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from feature_store.errors import NotReady
from feature_store.online import Versioned, check_prefix, split_version, with_version
from feature_store.streams import Item

_COMPARE_AND_SET = """
local ttl = ARGV[1]
for i, key in ipairs(KEYS) do
  local version = redis.call('GETRANGE', key, 0, 7)
  if version == '' then version = string.rep('\\0', 8) end
  if version ~= ARGV[2 * i] then return 0 end
end
for i, key in ipairs(KEYS) do
  if ttl == '' then redis.call('SET', key, ARGV[2 * i + 1]) else redis.call('SET', key, ARGV[2 * i + 1], 'PX', ttl) end
end
return 1
"""
_GLOB = str.maketrans({c: f"\\{c}" for c in "*?[]\\"})
_SCAN = 1000
_FIELD = b"d"


class _Client:
    """A connection pool with a time limit on every call."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self.redis: Any = redis.Redis.from_url(  # redis-py types replies as unions of sync and async
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            # A write whose answer was lost must not be repeated here: it may have happened.
            retry=Retry(NoBackoff(), 0),
        )

    @contextmanager
    def answering(self) -> Iterator[Any]:
        try:
            yield self.redis
        except (redis.RedisError, OSError) as error:
            raise NotReady(f"store {_shown(self.url)} does not answer: {error}") from error

    def close(self) -> None:
        self.redis.close()


class RedisStore:
    """Online rows in Redis."""

    def __init__(self, url: str, *, timeout_seconds: float = 1.0) -> None:
        self._client = _Client(url, timeout_seconds=timeout_seconds)
        self._swap: Callable[..., Any] = self._client.redis.register_script(_COMPARE_AND_SET)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of the keys; None where there is none or it has expired."""
        if not keys:
            return []
        with self._client.answering() as client:
            return cast(list[bytes | None], client.mget(keys))

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes values; they expire after `ttl_ms`."""
        with self._client.answering() as client, client.pipeline(transaction=False) as pipe:
            for key, value in values.items():
                pipe.set(key, value, px=ttl_ms)
            pipe.execute()

    def read_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Versioned values in the order of the keys."""
        return [split_version(stored) for stored in self.get_many(keys)]

    def compare_and_set(self, key: str, version: int, value: bytes, *, ttl_ms: int | None = None) -> bool:
        """Writes a versioned value if its version still is `version`; says whether it did."""
        return self.compare_and_set_many({key: Versioned(value, version)}, ttl_ms=ttl_ms)

    def compare_and_set_many(self, changes: Mapping[str, Versioned], *, ttl_ms: int | None = None) -> bool:
        """Writes versioned values in one script if the versions of all still are the given ones."""
        if not changes:
            return True
        arguments: list[bytes | int | str] = ["" if ttl_ms is None else ttl_ms]
        for new in changes.values():
            arguments += [with_version(b"", new.version), with_version(new.value, new.version + 1)]
        with self._client.answering():
            return bool(self._swap(keys=list(changes), args=arguments))

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Fields of a wide row."""
        if not fields:
            return []
        with self._client.answering() as client:
            return cast(list[bytes | None], client.hmget(key, fields))

    def hget_all(self, key: str) -> Mapping[str, bytes]:
        """All fields of a wide row."""
        with self._client.answering() as client:
            return {field.decode(): value for field, value in client.hgetall(key).items()}

    def hset_many(self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes fields of a wide row at once; the row lives at least `ttl_ms` from now."""
        if not values:
            return
        with self._client.answering() as client, client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=dict(values))
            if ttl_ms is not None:
                pipe.pexpire(key, ttl_ms, nx=True)
                pipe.pexpire(key, ttl_ms, gt=True)
            pipe.execute()

    def find(self, pattern: str) -> list[str]:
        """Names of rows that match a pattern in which * stands for anything."""
        glob = pattern.translate(_GLOB).replace("\\*", "*")
        with self._client.answering() as client:
            return [key.decode() for key in client.scan_iter(match=glob, count=_SCAN)]

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows; returns how many there were."""
        with self._client.answering() as client:
            parts = (keys[first : first + _SCAN] for first in range(0, len(keys), _SCAN))
            return sum(int(client.unlink(*part)) for part in parts)

    def delete_prefix(self, prefix: str) -> int:
        """Removes every row whose name begins so; returns how many."""
        pattern = check_prefix(prefix).translate(_GLOB) + "*"
        with self._client.answering() as client:
            found = [key.decode() for key in client.scan_iter(match=pattern, count=_SCAN)]
        return self.delete(list(dict.fromkeys(found)))

    def ping(self) -> None:
        """Returns if the server answers."""
        with self._client.answering() as client:
            client.ping()

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RedisStream:
    """A Redis stream with consumer groups."""

    def __init__(self, url: str, name: str, *, max_length: int, timeout_seconds: float = 5.0) -> None:
        self._client = _Client(url, timeout_seconds=timeout_seconds + 5.0)
        self._key, self._max_length = f"stream/{name}", max_length
        self._groups: set[str] = set()

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items."""
        with self._client.answering() as client, client.pipeline(transaction=True) as pipe:
            for item in items:
                pipe.xadd(self._key, {_FIELD: item}, maxlen=self._max_length, approximate=True)
            return [name.decode() for name in pipe.execute()]

    def claim(
        self, group: str, consumer: str, limit: int, block_ms: int, *, reclaim_idle_ms: int = 60_000
    ) -> list[Item]:
        """Items that nobody in the group has, or that a consumer has held too long; waits up to `block_ms`."""
        with self._client.answering() as client, self._joined(client, group):
            items = self._reclaim(client, group, consumer, limit, reclaim_idle_ms)
            if len(items) < limit:
                wait = None if items or block_ms <= 0 else min(block_ms, 4000)
                read = client.xreadgroup(group, consumer, {self._key: ">"}, count=limit - len(items), block=wait)
                items += [item for _, entries in read or [] for item in _items(entries)]
            return items

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Items that need not be delivered again."""
        if ids:
            with self._client.answering() as client:
                client.xack(self._key, group, *ids)

    def lag(self, group: str) -> int:
        """Items that the group has not acknowledged."""
        with self._client.answering() as client, self._joined(client, group):
            info = next(g for g in client.xinfo_groups(self._key) if g["name"] == group.encode())
            return int(info["pending"]) + self._unread(client, info)

    def _reclaim(self, client: Any, group: str, consumer: str, limit: int, idle_ms: int) -> list[Item]:
        items: list[Item] = []
        start = b"0-0"
        while len(items) < limit:
            start, entries, *_ = client.xautoclaim(
                self._key, group, consumer, idle_ms, start_id=start, count=limit - len(items)
            )
            items += _items(entries)
            if start == b"0-0":
                break
        return items

    def _unread(self, client: Any, group: Mapping[str, Any]) -> int:
        """Exact at both ends of the stream; between them Redis's own count, too high after unread items were trimmed."""
        stream = client.xinfo_stream(self._key)
        length, read = int(stream["length"]), _place(group["last-delivered-id"])
        if not length or read >= _place(stream["last-generated-id"]):
            return 0
        if read < _place(stream["first-entry"][0]) or group["lag"] is None:
            return length
        return min(length, int(group["lag"]))

    @contextmanager
    def _joined(self, client: Any, group: str) -> Iterator[None]:
        """Makes the group if it was not seen before; a server that was emptied is found out by the next call."""
        if group not in self._groups:
            try:
                client.xgroup_create(self._key, group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            self._groups.add(group)
        try:
            yield
        except redis.ResponseError:
            self._groups.discard(group)
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _items(entries: Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]) -> list[Item]:
    """Entries that were trimmed while pending have no fields any more."""
    return [Item(name.decode(), fields[_FIELD]) for name, fields in entries if fields]


def _place(entry: bytes) -> tuple[int, int]:
    """Where an entry stands in its stream."""
    milliseconds, _, sequence = entry.decode().partition("-")
    return int(milliseconds), int(sequence)


def _shown(url: str) -> str:
    """The URL without a password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url
