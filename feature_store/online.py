"""Keeps rows that are read while a request waits: by key, in one file or in Redis.

Knows keys, bytes, versions and lifetimes. Does not know what a row says, nor in which store it lies.

A row is either a value with a version, or a wide row of named fields. A version is an opaque number that changes with
every write of its row; `NO_ROW` is the version of a row that is not there. Keys:

    u/<user key>                 history and counters of a user       up/<user key>   a user's features
    a/<ad key>                   an ad's features                     c/<digest>/…    counters that users share
    x/<user key>/<event>         that an event was counted            lf/<space>/<user key>   LoopFM memory
    sol/<space>/p/<user key>     pair embeddings, a wide row

On a Redis Cluster, keys of one `compare_and_set` must share a slot; shared counters do not, so counters need one primary
(or Sentinel) today, while everything else may be spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from feature_store.errors import InvalidInput

NO_ROW = 0
"""Version of a row that does not exist."""
TIMEOUT_SECONDS = 1.0
"""Longest wait for one answer of the store."""


class Versioned(NamedTuple):
    """A row's value and the version to compare with when it is written back."""

    value: bytes | None
    version: int


class Change(NamedTuple):
    """A row's new value, to be written only if its version is still the one that was read."""

    value: bytes
    version: int
    ttl_ms: int | None = None
    """Milliseconds the row lives; None for ever."""


class OnlineStore(Protocol):
    """Rows of bytes. Every method may be called from any thread.

    Every method raises NotReady if the store does not answer and DeadlineExceeded if it takes too long.
    """

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of n rows in the order of keys; None where there is none."""

    def get_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Values of n rows with their versions."""

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes rows, whatever was there; each lives `ttl_ms` milliseconds, or for ever."""

    def compare_and_set(self, changes: Mapping[str, Change]) -> bool:
        """Writes all rows if none has changed since its version was read, else none of them; whether it did."""

    def hget_all(self, key: str) -> dict[str, bytes]:
        """All fields of a wide row; empty if there is none."""

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of n fields of a wide row, in the order asked; None where there is none."""

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        """Writes fields of a wide row, leaving its others; the row lives at least `ttl_ms` more, None leaves its life as is."""

    def keys(self, pattern: str) -> Iterator[str]:
        """Keys of all rows that match a glob of `*` and `?`; walks every key, for upkeep only."""

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows of either kind; how many there were."""

    def delete_prefix(self, prefix: str) -> int:
        """Removes all rows whose key begins so; how many there were."""

    def ping(self) -> None:
        """Returns if the store answers."""

    def close(self) -> None:
        """Gives up connections; the store is not used afterwards."""

    def __enter__(self) -> Self:
        """The store; closed on leaving."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""


def open_store(url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> OnlineStore:
    """The store at `sqlite:///PATH`, `redis://host:port/db` or `rediss://…` (TLS).

    Opening does not wait for the store: `ping` tells whether it is there.

    Raises:
        InvalidInput: the URL is of another kind.
    """
    path = sqlite_path(url)
    if path is not None:
        from feature_store.sqlite import SqliteStore

        return SqliteStore(path, timeout_seconds=timeout_seconds)
    from feature_store.redis import RedisStore

    return RedisStore(url, timeout_seconds=timeout_seconds)


def sqlite_path(url: str) -> str | None:
    """Path of a `sqlite:///PATH` URL; None for one of Redis.

    Raises:
        InvalidInput: it is neither.
    """
    scheme, separator, rest = url.partition("://")
    if scheme == "sqlite" and separator and len(rest) > 1 and rest.startswith("/"):
        return rest[1:]
    if scheme in ("redis", "rediss", "unix") and rest:
        return None
    raise InvalidInput(
        f"store {url!r} is not known; write sqlite:///PATH (four slashes for an absolute path) or redis://host:port/db"
    )
