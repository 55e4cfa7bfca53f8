"""Online rows and streams in one SQLite file: several processes and threads, no server.

Knows SQL. Does not know what is stored. Write-ahead logging lets readers go on while one writes. What was written survives
the death of any process; the last writes may be lost with the machine's power (`synchronous = NORMAL`).
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from feature_store.errors import NotReady
from feature_store.online import Versioned, check_prefix, split_version, with_version
from feature_store.streams import Item

_SCHEMA = """
CREATE TABLE IF NOT EXISTS row (key TEXT PRIMARY KEY, value BLOB NOT NULL, expires_ms INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS row_expiry ON row (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS wide (key TEXT, field TEXT, value BLOB NOT NULL, PRIMARY KEY (key, field)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wide_expiry (key TEXT PRIMARY KEY, expires_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS item (stream TEXT, id INTEGER, data BLOB NOT NULL, PRIMARY KEY (stream, id));
CREATE TABLE IF NOT EXISTS stream_end (stream TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consumer_group (stream TEXT, name TEXT, read INTEGER NOT NULL, PRIMARY KEY (stream, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pending (stream TEXT, name TEXT, id INTEGER, consumer TEXT, since_ms INTEGER,
  PRIMARY KEY (stream, name, id)) WITHOUT ROWID;
"""
_CHUNK = 500
_POLL_SECONDS = 0.02
PURGE_SECONDS = 60.0
"""Expired rows are never read; writers remove them from the file this often."""


class _File:
    """A database file with a connection a thread."""

    def __init__(self, path: str, *, timeout_seconds: float) -> None:
        self._path, self._timeout = path, timeout_seconds
        self._local = threading.local()
        self._open: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._purge_at = 0.0
        with self._answering():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.connection().executescript(_SCHEMA)

    def connection(self) -> sqlite3.Connection:
        held: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if held is None:
            if self._closed:
                raise sqlite3.ProgrammingError("it was closed")
            held = sqlite3.connect(
                self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False
            )
            held.execute("PRAGMA journal_mode=WAL")
            held.execute("PRAGMA synchronous=NORMAL")
            self._local.connection = held
            with self._lock:
                self._open.append(held)
        return held

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._answering():
            yield self.connection()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; rolled back if anything fails."""
        with self._answering():
            connection = self.connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._purge(connection)
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise NotReady(f"store {self._path} does not answer: {error}; it may be locked or closed") from error

    def _purge(self, db: sqlite3.Connection) -> None:
        """Removes what has expired, once in a while: a file of short-lived rows does not grow for ever."""
        if time.monotonic() < self._purge_at:
            return
        self._purge_at = time.monotonic() + PURGE_SECONDS
        now = (_now_ms(),)
        db.execute("DELETE FROM row WHERE expires_ms <= ?", now)
        db.execute("DELETE FROM wide WHERE key IN (SELECT key FROM wide_expiry WHERE expires_ms <= ?)", now)
        db.execute("DELETE FROM wide_expiry WHERE expires_ms <= ?", now)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._open:
                connection.close()
            self._open.clear()


class SqliteStore:
    """Online rows in a file."""

    def __init__(self, path: str, *, timeout_seconds: float = 1.0) -> None:
        self._file = _File(path, timeout_seconds=timeout_seconds)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of the keys; None where there is none or it has expired."""
        with self._file.reading() as db:
            return self._held(db, keys)

    def _held(self, db: sqlite3.Connection, keys: Sequence[str]) -> list[bytes | None]:
        now, found = _now_ms(), dict[str, bytes]()
        for part in _parts(keys):
            live = "(expires_ms IS NULL OR expires_ms > ?)"
            query = f"SELECT key, value FROM row WHERE key IN ({_marks(part)}) AND {live}"
            found.update(db.execute(query, [*part, now]).fetchall())
        return list(map(found.get, keys))

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes values; they expire after `ttl_ms`."""
        expires = None if ttl_ms is None else _now_ms() + ttl_ms
        with self._file.writing() as db:
            db.executemany(
                "INSERT OR REPLACE INTO row VALUES (?, ?, ?)", [(key, value, expires) for key, value in values.items()]
            )

    def read_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Versioned values in the order of the keys."""
        return [split_version(stored) for stored in self.get_many(keys)]

    def compare_and_set(self, key: str, version: int, value: bytes, *, ttl_ms: int | None = None) -> bool:
        """Writes a versioned value if its version still is `version`; says whether it did."""
        return self.compare_and_set_many({key: Versioned(value, version)}, ttl_ms=ttl_ms)

    def compare_and_set_many(self, changes: Mapping[str, Versioned], *, ttl_ms: int | None = None) -> bool:
        """Writes versioned values in one transaction if the versions of all still are the given ones."""
        expires = None if ttl_ms is None else _now_ms() + ttl_ms
        with self._file.writing() as db:
            held = zip(changes.values(), self._held(db, list(changes)), strict=True)
            if any(split_version(stored).version != change.version for change, stored in held):
                return False
            db.executemany(
                "INSERT OR REPLACE INTO row VALUES (?, ?, ?)",
                [(key, with_version(new.value, new.version + 1), expires) for key, new in changes.items()],
            )
        return True

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Fields of a wide row."""
        found: dict[str, bytes] = {}
        with self._file.reading() as db:
            if not _expired(db, key):
                for part in _parts(fields):
                    query = f"SELECT field, value FROM wide WHERE key = ? AND field IN ({_marks(part)})"
                    found.update(db.execute(query, [key, *part]).fetchall())
        return list(map(found.get, fields))

    def hget_all(self, key: str) -> Mapping[str, bytes]:
        """All fields of a wide row."""
        with self._file.reading() as db:
            if _expired(db, key):
                return {}
            return dict(db.execute("SELECT field, value FROM wide WHERE key = ?", (key,)).fetchall())

    def hset_many(self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes fields of a wide row at once; the row lives at least `ttl_ms` from now."""
        if not values:
            return
        with self._file.writing() as db:
            if _expired(db, key):
                db.execute("DELETE FROM wide WHERE key = ?", (key,))
                db.execute("DELETE FROM wide_expiry WHERE key = ?", (key,))
            db.executemany("INSERT OR REPLACE INTO wide VALUES (?, ?, ?)", [(key, f, v) for f, v in values.items()])
            if ttl_ms is not None:
                db.execute(
                    "INSERT INTO wide_expiry VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET "
                    "expires_ms = max(expires_ms, ?2)",
                    (key, _now_ms() + ttl_ms),
                )

    def find(self, pattern: str) -> list[str]:
        """Names of rows that match a pattern in which * stands for anything."""
        glob = pattern.replace("[", "[[]").replace("?", "[?]")
        query = (
            "SELECT key FROM row WHERE key GLOB ?1 AND (expires_ms IS NULL OR expires_ms > ?2) "
            "UNION SELECT DISTINCT key FROM wide LEFT JOIN wide_expiry USING (key) "
            "WHERE key GLOB ?1 AND (expires_ms IS NULL OR expires_ms > ?2)"
        )
        with self._file.reading() as db:
            return [key for (key,) in db.execute(query, (glob, _now_ms()))]

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows; returns how many there were."""
        removed = 0
        with self._file.writing() as db:
            for key in keys:
                plain = db.execute("DELETE FROM row WHERE key = ?", (key,)).rowcount
                wide = db.execute("DELETE FROM wide WHERE key = ?", (key,)).rowcount
                db.execute("DELETE FROM wide_expiry WHERE key = ?", (key,))
                removed += bool(plain or wide)
        return removed

    def delete_prefix(self, prefix: str) -> int:
        """Removes every row whose name begins so; returns how many."""
        bounds = (check_prefix(prefix), prefix + "\U0010ffff")
        with self._file.writing() as db:
            rows = db.execute("DELETE FROM row WHERE key >= ? AND key < ?", bounds).rowcount
            wide = db.execute("SELECT count(DISTINCT key) FROM wide WHERE key >= ? AND key < ?", bounds).fetchone()[0]
            db.execute("DELETE FROM wide WHERE key >= ? AND key < ?", bounds)
            db.execute("DELETE FROM wide_expiry WHERE key >= ? AND key < ?", bounds)
        return int(rows) + int(wide)

    def ping(self) -> None:
        """Returns if the file can be read."""
        with self._file.reading() as db:
            db.execute("SELECT 1").fetchone()

    def close(self) -> None:
        """Closes every thread's connection."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SqliteStream:
    """A stream in the same file as the rows."""

    def __init__(self, path: str, name: str, *, max_length: int, timeout_seconds: float = 5.0) -> None:
        self._file = _File(path, timeout_seconds=timeout_seconds)
        self._name, self._max_length = name, max_length

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items; they are durable when this returns."""
        if not items:
            return []
        with self._file.writing() as db:
            row = db.execute("SELECT last FROM stream_end WHERE stream = ?", (self._name,)).fetchone()
            first = (row[0] if row else 0) + 1
            ids = list(range(first, first + len(items)))
            db.executemany(
                "INSERT INTO item VALUES (?, ?, ?)", [(self._name, i, d) for i, d in zip(ids, items, strict=True)]
            )
            db.execute("INSERT OR REPLACE INTO stream_end VALUES (?, ?)", (self._name, ids[-1]))
            bound = ids[-1] - self._max_length
            if bound > 0:
                db.execute("DELETE FROM item WHERE stream = ? AND id <= ?", (self._name, bound))
                db.execute("DELETE FROM pending WHERE stream = ? AND id <= ?", (self._name, bound))
        return [str(i) for i in ids]

    def claim(
        self, group: str, consumer: str, limit: int, block_ms: int, *, reclaim_idle_ms: int = 60_000
    ) -> list[Item]:
        """Items that nobody in the group has, or that a consumer has held too long; waits up to `block_ms`."""
        deadline = time.monotonic() + block_ms / 1000
        while True:
            items = self._claim(group, consumer, limit, reclaim_idle_ms)
            if items or time.monotonic() >= deadline:
                return items
            time.sleep(_POLL_SECONDS)

    def _claim(self, group: str, consumer: str, limit: int, reclaim_idle_ms: int) -> list[Item]:
        now, who = _now_ms(), (self._name, group)
        if not self._anything(group, now - reclaim_idle_ms):
            return []
        with self._file.writing() as db:
            db.execute("INSERT OR IGNORE INTO consumer_group VALUES (?, ?, 0)", who)
            idle = "SELECT id FROM pending WHERE stream = ? AND name = ? AND since_ms <= ? ORDER BY id LIMIT ?"
            ids = [row[0] for row in db.execute(idle, (*who, now - reclaim_idle_ms, limit))]
            (read,) = db.execute("SELECT read FROM consumer_group WHERE stream = ? AND name = ?", who).fetchone()
            fresh = "SELECT id FROM item WHERE stream = ? AND id > ? ORDER BY id LIMIT ?"
            new = [row[0] for row in db.execute(fresh, (self._name, read, limit - len(ids)))]
            if new:
                db.execute("UPDATE consumer_group SET read = ? WHERE stream = ? AND name = ?", (new[-1], *who))
            db.executemany(
                "INSERT OR REPLACE INTO pending VALUES (?, ?, ?, ?, ?)",
                [(*who, i, consumer, now) for i in (*ids, *new)],
            )
            found = dict(
                db.execute(
                    f"SELECT id, data FROM item WHERE stream = ? AND id IN ({_marks([*ids, *new])})",
                    [self._name, *ids, *new],
                ).fetchall()
            )
        return [Item(str(i), found[i]) for i in (*ids, *new) if i in found]

    def _anything(self, group: str, idle_since_ms: int) -> bool:
        """Whether a claim could find something: a read, so that waiting consumers do not lock the file."""
        with self._file.reading() as db:
            row = db.execute(
                "SELECT read FROM consumer_group WHERE stream = ? AND name = ?", (self._name, group)
            ).fetchone()
            read = row[0] if row else 0
            fresh = db.execute("SELECT 1 FROM item WHERE stream = ? AND id > ? LIMIT 1", (self._name, read)).fetchone()
            return bool(fresh) or bool(
                db.execute(
                    "SELECT 1 FROM pending WHERE stream = ? AND name = ? AND since_ms <= ? LIMIT 1",
                    (self._name, group, idle_since_ms),
                ).fetchone()
            )

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Items that need not be delivered again."""
        with self._file.writing() as db:
            db.executemany(
                "DELETE FROM pending WHERE stream = ? AND name = ? AND id = ?",
                [(self._name, group, int(i)) for i in ids],
            )

    def lag(self, group: str) -> int:
        """Items that the group has not acknowledged."""
        with self._file.reading() as db:
            row = db.execute(
                "SELECT read FROM consumer_group WHERE stream = ? AND name = ?", (self._name, group)
            ).fetchone()
            (unread,) = db.execute(
                "SELECT count(*) FROM item WHERE stream = ? AND id > ?", (self._name, row[0] if row else 0)
            ).fetchone()
            (held,) = db.execute(
                "SELECT count(*) FROM pending WHERE stream = ? AND name = ?", (self._name, group)
            ).fetchone()
        return int(unread) + int(held)

    def close(self) -> None:
        """Closes every thread's connection."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _expired(db: sqlite3.Connection, key: str) -> bool:
    row = db.execute("SELECT expires_ms FROM wide_expiry WHERE key = ?", (key,)).fetchone()
    return row is not None and row[0] <= _now_ms()


def _parts(keys: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(keys), _CHUNK):
        yield list(keys[first : first + _CHUNK])


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
