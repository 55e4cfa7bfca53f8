"""The online rows behind one small protocol: SQLite on a laptop, Redis in a cluster.

Knows bytes under names. Does not know what a row means, nor which store holds it.

Three kinds of rows: plain values; versioned values, changed by compare-and-set; wide rows of named fields.
Every call may raise NotReady: the store did not answer in time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from feature_store.errors import Aborted, InvalidInput

_VERSION = struct.Struct("<Q")
_TRIES = 64


class Versioned(NamedTuple):
    """A value and how often it was written; version 0 and no bytes if it never was."""

    value: bytes
    version: int


class OnlineStore(Protocol):
    """Rows under names."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of the keys; None where there is none or it has expired."""

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes values; they expire after `ttl_ms`."""

    def read_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Versioned values in the order of the keys."""

    def compare_and_set(self, key: str, version: int, value: bytes, *, ttl_ms: int | None = None) -> bool:
        """Writes a versioned value if its version still is `version`; says whether it did."""

    def compare_and_set_many(self, changes: Mapping[str, Versioned], *, ttl_ms: int | None = None) -> bool:
        """Writes versioned values if the versions of all still are the given ones, else none of them; says whether it did.

        In a Redis Cluster the rows of one call must share a slot.
        """

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Fields of a wide row."""

    def hget_all(self, key: str) -> Mapping[str, bytes]:
        """All fields of a wide row."""

    def hset_many(self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes fields of a wide row at once; the row lives at least `ttl_ms` from now."""

    def find(self, pattern: str) -> list[str]:
        """Names of rows that match a pattern in which * stands for anything; looks at every row, for upkeep only."""

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows; returns how many there were."""

    def delete_prefix(self, prefix: str) -> int:
        """Removes every row whose name begins so; returns how many.

        Raises:
            InvalidInput: the prefix is empty.
        """

    def ping(self) -> None:
        """Returns if the store answers."""

    def close(self) -> None:
        """Lets go of the store."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_store(url: str, *, timeout_seconds: float = 1.0) -> OnlineStore:
    """The store at `sqlite:///PATH` or `redis://HOST:PORT/DB` (`rediss://` for TLS).

    Raises:
        InvalidInput: the URL names no known store.
    """
    if url.startswith("sqlite:///"):
        from feature_store.sqlite import SqliteStore

        return SqliteStore(url.removeprefix("sqlite:///"), timeout_seconds=timeout_seconds)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from feature_store.redis import RedisStore

        return RedisStore(url, timeout_seconds=timeout_seconds)
    raise InvalidInput(f"store {url!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")


def update(store: OnlineStore, key: str, change: Callable[[bytes], bytes], *, ttl_ms: int | None = None) -> int:
    """Reads, changes and writes a versioned value until nobody came between; returns its new version.

    Raises:
        Aborted: others kept coming between.
    """
    for _ in range(_TRIES):
        (held,) = store.read_versioned([key])
        if store.compare_and_set(key, held.version, change(held.value), ttl_ms=ttl_ms):
            return held.version + 1
    raise Aborted(f"row {key} changed {_TRIES} times while it was being written; try the whole update again")


def update_many(
    store: OnlineStore,
    keys: Sequence[str],
    change: Callable[[dict[str, bytes], Callable[[Iterable[str]], dict[str, bytes]]], dict[str, bytes]],
) -> None:
    """Reads, changes and writes versioned values, all or none, until nobody came between.

    Args:
        store: the rows.
        keys: names of values that are read first.
        change: from their bytes, and a function that reads more, to the bytes to write; may be called several times.

    Raises:
        Aborted: others kept coming between.
    """
    for _ in range(_TRIES):
        versions: dict[str, int] = {}

        def read(names: Iterable[str], versions: dict[str, int] = versions) -> dict[str, bytes]:
            wanted = list(dict.fromkeys(names))
            held = store.read_versioned(wanted)
            versions.update({name: each.version for name, each in zip(wanted, held, strict=True)})
            return {name: each.value for name, each in zip(wanted, held, strict=True)}

        written = change(read(keys), read)
        if store.compare_and_set_many({name: Versioned(value, versions[name]) for name, value in written.items()}):
            return
    raise Aborted(f"{len(keys)} rows changed {_TRIES} times while they were being written; try the whole update again")


def with_version(value: bytes, version: int) -> bytes:
    """How stores keep a versioned value."""
    return _VERSION.pack(version) + value


def split_version(stored: bytes | None) -> Versioned:
    """The value and version that `with_version` joined."""
    if stored is None:
        return Versioned(b"", 0)
    return Versioned(stored[_VERSION.size :], _VERSION.unpack_from(stored)[0])


def check_prefix(prefix: str) -> str:
    """A prefix that does not mean everything."""
    if not prefix:
        raise InvalidInput("an empty prefix would delete every row; name the rows to delete")
    return prefix
