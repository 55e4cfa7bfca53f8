"""Online rows in Redis or Valkey.

Knows commands, pipelines and timeouts. Does not know what a row says.

A row is a string whose first eight bytes are its version. Calls never wait longer than the timeout; a call that failed is
not repeated here, for its caller knows better whether it is worth it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from feature_store.errors import DeadlineExceeded, NotReady
from feature_store.online import NO_ROW, TIMEOUT_SECONDS, Change, Versioned

VERSION_BYTES = 8
_SCAN = 1000
_COMPARE_AND_SET = """
for i, key in ipairs(KEYS) do
  if redis.call('GETRANGE', key, 0, 7) ~= ARGV[3 * i - 2] then return 0 end
end
for i, key in ipairs(KEYS) do
  local ttl = ARGV[3 * i]
  if ttl == '' then redis.call('SET', key, ARGV[3 * i - 1])
  else redis.call('SET', key, ARGV[3 * i - 1], 'PX', ttl) end
end
return 1
"""


class RedisStore:
    """The `OnlineStore` of a cluster."""

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._client = connect(url, timeout_seconds=timeout_seconds)
        self._swap = self._client.register_script(_COMPARE_AND_SET)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of n rows in one MGET."""
        return [row.value for row in self.get_versioned(keys)]

    def get_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Values of n rows with their versions in one MGET."""
        if not keys:
            return []
        with translated():
            stored = cast(list[bytes | None], self._client.mget(list(keys)))
        return [_split(row) for row in stored]

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes rows in one pipeline."""
        with translated(), self._client.pipeline(transaction=False) as pipeline:
            for key, value in values.items():
                pipeline.set(key, _new_version() + value, px=ttl_ms)
            pipeline.execute()

    def compare_and_set(self, changes: Mapping[str, Change]) -> bool:
        """Writes all rows if none has changed, in one script."""
        arguments: list[bytes | str | int] = []
        for change in changes.values():
            expected = change.version.to_bytes(VERSION_BYTES, "big") if change.version else b""
            ttl = "" if change.ttl_ms is None else change.ttl_ms
            arguments += [expected, _new_version() + change.value, ttl]
        if not arguments:
            return True
        with translated():
            return bool(self._swap(keys=list(changes), args=arguments))

    def hget_all(self, key: str) -> dict[str, bytes]:
        """All fields of a wide row."""
        with translated():
            fields = cast(dict[bytes, bytes], self._client.hgetall(key))
        return {field.decode(): value for field, value in fields.items()}

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of n fields of a wide row in one HMGET."""
        if not fields:
            return []
        with translated():
            return cast(list[bytes | None], self._client.hmget(key, list(fields)))

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        """Writes fields of a wide row, and prolongs its life, in one transaction."""
        if not values:
            return
        with translated(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.hset(key, mapping=cast(Any, dict(values)))
            if ttl_ms is not None:
                pipeline.pexpire(key, ttl_ms, nx=True)
                pipeline.pexpire(key, ttl_ms, gt=True)
            pipeline.execute()

    def keys(self, pattern: str) -> Iterator[str]:
        """Keys that match a glob."""
        with translated():
            escaped = re.sub(r"([\[\]\\])", r"\\\1", pattern)
            for key in self._client.scan_iter(match=escaped, count=_SCAN):
                yield cast(bytes, key).decode()

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows of either kind."""
        removed = 0
        with translated():
            for first in range(0, len(keys), _SCAN):
                removed += cast(int, self._client.unlink(*keys[first : first + _SCAN]))
        return removed

    def delete_prefix(self, prefix: str) -> int:
        """Removes all rows whose key begins so."""
        if re.search(r"[*?]", prefix):
            raise ValueError(f"prefix {prefix!r} holds a wildcard; give the plain beginning of keys")
        return self.delete(list(self.keys(f"{prefix}*")))

    def ping(self) -> None:
        """PING."""
        with translated():
            self._client.ping()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        """The store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()


def connect(url: str, *, timeout_seconds: float) -> redis.Redis:
    """A client that gives up after `timeout_seconds` and never tries again by itself."""
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def translated() -> Iterator[None]:
    """Errors of the client as the platform names them."""
    try:
        yield
    except redis.TimeoutError as error:
        raise DeadlineExceeded(f"Redis did not answer in time: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise NotReady(f"Redis does not answer: {error}; check the store's address") from error


def _split(row: bytes | None) -> Versioned:
    if row is None:
        return Versioned(None, NO_ROW)
    return Versioned(row[VERSION_BYTES:], int.from_bytes(row[:VERSION_BYTES], "big"))


def _new_version() -> bytes:
    return (secrets.randbits(62) + 1).to_bytes(VERSION_BYTES, "big")
