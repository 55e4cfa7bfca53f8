"""Online rows in one SQLite file, shared by any number of threads and processes of one machine.

Knows SQL, connections and expiry. Does not know what a row says.

The file is in WAL mode: readers never wait for the writer. A commit survives the death of any process at any instant, and
may be lost with the machine's power (`synchronous = NORMAL`).
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from feature_store.errors import DeadlineExceeded, NotReady
from feature_store.online import NO_ROW, TIMEOUT_SECONDS, Change, Versioned

CHUNK = 900
"""Keys of one statement."""
PURGE_SECONDS = 60.0
"""Expired rows are never read; they are removed this often."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL, expires_ms INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rows_expiry ON rows (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS wide (key TEXT PRIMARY KEY, expires_ms INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fields (key TEXT, field TEXT, value BLOB NOT NULL, PRIMARY KEY (key, field)) WITHOUT ROWID;
"""
_PUT = """
INSERT INTO rows (key, version, value, expires_ms) VALUES (?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET version = excluded.version, value = excluded.value, expires_ms = excluded.expires_ms
"""
_PROLONG = """
INSERT INTO wide (key, expires_ms) VALUES (?, ?)
ON CONFLICT (key) DO UPDATE SET expires_ms = max(
    coalesce(excluded.expires_ms, wide.expires_ms), coalesce(wide.expires_ms, excluded.expires_ms))
"""
_ALIVE = "(expires_ms IS NULL OR expires_ms > ?)"


class Database:
    """One file: a connection for each thread that asks, and errors as the platform names them."""

    def __init__(self, path: str, schema: str, *, timeout_seconds: float) -> None:
        self._path, self._schema, self._timeout_seconds = path, schema, timeout_seconds
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[sqlite3.Connection] = []
        self._closed = False

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection in autocommit: each statement sees one state of the file."""
        with _translated(self._path):
            yield self._connection()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the writer's lock from its start; committed on leaving, rolled back by an error."""
        with _translated(self._path):
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def close(self) -> None:
        """Closes every thread's connection."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                connection.close()
            self._open.clear()

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = self._connect()
        return found

    def _connect(self) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise NotReady(f"store {self._path} is closed; open it again")
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self._path,
                timeout=self._timeout_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
            self._open.append(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(self._schema)
        return connection


class SqliteStore:
    """The `OnlineStore` of one machine."""

    def __init__(
        self,
        path: str,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(path, _SCHEMA, timeout_seconds=timeout_seconds)
        self._clock = clock
        self._purge_at = 0.0

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of n rows in the order of keys."""
        return [row.value for row in self.get_versioned(keys)]

    def get_versioned(self, keys: Sequence[str]) -> list[Versioned]:
        """Values of n rows with their versions."""
        found: dict[str, Versioned] = {}
        with self._database.reading() as connection:
            for some in _chunks(keys):
                statement = (
                    f"SELECT key, value, version FROM rows WHERE key IN ({_marks(some)}) AND {_ALIVE}"
                )
                for key, value, version in connection.execute(statement, [*some, self._now_ms()]):
                    found[key] = Versioned(value, version)
        missing = Versioned(None, NO_ROW)
        return [found.get(key, missing) for key in keys]

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> None:
        """Writes rows in one transaction."""
        expires = self._expiry(ttl_ms)
        with self._database.writing() as connection:
            self._purge(connection)
            connection.executemany(
                _PUT, [(key, _new_version(), value, expires) for key, value in values.items()]
            )

    def compare_and_set(self, changes: Mapping[str, Change]) -> bool:
        """Writes all rows if none has changed, in one transaction."""
        with self._database.writing() as connection:
            self._purge(connection)
            now: dict[str, int] = {}
            for some in _chunks(list(changes)):
                statement = (
                    f"SELECT key, version FROM rows WHERE key IN ({_marks(some)}) AND {_ALIVE}"
                )
                now.update(connection.execute(statement, [*some, self._now_ms()]).fetchall())
            if any(now.get(key, NO_ROW) != change.version for key, change in changes.items()):
                return False
            rows = [
                (key, _new_version(), change.value, self._expiry(change.ttl_ms))
                for key, change in changes.items()
            ]
            connection.executemany(_PUT, rows)
        return True

    def hget_all(self, key: str) -> dict[str, bytes]:
        """All fields of a wide row."""
        statement = f"SELECT field, value FROM fields WHERE key = ? AND key IN (SELECT key FROM wide WHERE key = ? AND {_ALIVE})"
        with self._database.reading() as connection:
            return dict(connection.execute(statement, (key, key, self._now_ms())).fetchall())

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of n fields of a wide row."""
        found: dict[str, bytes] = {}
        with self._database.reading() as connection:
            for some in _chunks(fields):
                statement = (
                    f"SELECT field, value FROM fields WHERE key = ? AND field IN ({_marks(some)}) "
                    f"AND EXISTS (SELECT 1 FROM wide WHERE key = ? AND {_ALIVE})"
                )
                found.update(
                    connection.execute(statement, [key, *some, key, self._now_ms()]).fetchall()
                )
        return [found.get(field) for field in fields]

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        """Writes fields of a wide row."""
        if not values:
            return
        with self._database.writing() as connection:
            self._purge(connection)
            self._bury(connection, key)
            connection.execute(_PROLONG, (key, self._expiry(ttl_ms)))
            connection.executemany(
                "INSERT OR REPLACE INTO fields (key, field, value) VALUES (?, ?, ?)",
                [(key, field, value) for field, value in values.items()],
            )

    def keys(self, pattern: str) -> Iterator[str]:
        """Keys that match a glob."""
        statement = f"SELECT key FROM {{}} WHERE key GLOB ? AND {_ALIVE}"
        with self._database.reading() as connection:
            found = [
                key
                for table in ("rows", "wide")
                for (key,) in connection.execute(
                    statement.format(table), (pattern.replace("[", "[[]"), self._now_ms())
                )
            ]
        return iter(found)

    def delete(self, keys: Sequence[str]) -> int:
        """Removes rows of either kind."""
        removed = 0
        with self._database.writing() as connection:
            for key in keys:
                connection.execute("DELETE FROM fields WHERE key = ?", (key,))
                for table in ("rows", "wide"):
                    removed += connection.execute(
                        f"DELETE FROM {table} WHERE key = ?", (key,)
                    ).rowcount
        return removed

    def delete_prefix(self, prefix: str) -> int:
        """Removes all rows whose key begins so."""
        removed = 0
        with self._database.writing() as connection:
            for table in ("fields", "wide", "rows"):
                done = connection.execute(
                    f"DELETE FROM {table} WHERE substr(key, 1, ?) = ?", (len(prefix), prefix)
                )
                removed += done.rowcount if table != "fields" else 0
        return removed

    def ping(self) -> None:
        """Reads the file's schema."""
        with self._database.reading() as connection:
            connection.execute("SELECT 1 FROM rows LIMIT 1").fetchall()

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

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

    def _bury(self, connection: sqlite3.Connection, key: str) -> None:
        """Removes a wide row that has expired, so that a new one does not inherit its fields."""
        dead = connection.execute(
            "DELETE FROM wide WHERE key = ? AND expires_ms <= ?", (key, self._now_ms())
        )
        if dead.rowcount:
            connection.execute("DELETE FROM fields WHERE key = ?", (key,))

    def _purge(self, connection: sqlite3.Connection) -> None:
        now = self._clock()
        if now < self._purge_at:
            return
        self._purge_at = now + PURGE_SECONDS
        dead = (self._now_ms(),)
        connection.execute("DELETE FROM rows WHERE expires_ms <= ?", dead)
        connection.execute(
            "DELETE FROM fields WHERE key IN (SELECT key FROM wide WHERE expires_ms <= ?)", dead
        )
        connection.execute("DELETE FROM wide WHERE expires_ms <= ?", dead)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _expiry(self, ttl_ms: int | None) -> int | None:
        return None if ttl_ms is None else self._now_ms() + ttl_ms


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise DeadlineExceeded(f"store {path} is busy: {error}; try again") from error
        raise NotReady(f"store {path} does not answer: {error}; check the file and its folder") from error
    except (sqlite3.Error, OSError) as error:
        raise NotReady(f"store {path} does not answer: {error}; check the file and its folder") from error


def _new_version() -> int:
    return secrets.randbits(62) + 1


def _chunks(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    return (keys[first : first + CHUNK] for first in range(0, len(keys), CHUNK))


def _marks(keys: Sequence[str]) -> str:
    return ",".join("?" * len(keys))
