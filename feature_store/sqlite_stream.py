"""A stream in a SQLite file: items, how far each group has read, and who holds what.

Knows SQL. Does not know what an item says.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from feature_store.sqlite import Database
from feature_store.streams import RECLAIM_IDLE_MS, Item

POLL_SECONDS = 0.02
"""How often a waiting consumer looks: SQLite wakes nobody."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY AUTOINCREMENT, stream TEXT NOT NULL, payload BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS items_of_stream ON items (stream, id);
CREATE TABLE IF NOT EXISTS readers (stream TEXT, name TEXT, last_id INTEGER NOT NULL, PRIMARY KEY (stream, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (stream TEXT, name TEXT, id INTEGER, consumer TEXT NOT NULL, claimed_ms INTEGER NOT NULL,
  PRIMARY KEY (stream, name, id)) WITHOUT ROWID;
"""
_IDLE = """
SELECT claims.id, payload FROM claims JOIN items ON items.id = claims.id
WHERE claims.stream = ? AND claims.name = ? AND claimed_ms <= ? ORDER BY claims.id LIMIT ?
"""


class SqliteStream:
    """The `Stream` of one machine."""

    def __init__(
        self,
        path: str,
        name: str,
        *,
        max_length: int,
        timeout_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(path, _SCHEMA, timeout_seconds=timeout_seconds)
        self._name, self._max_length, self._clock = name, max_length, clock
        self._closing = threading.Event()

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items in one transaction."""
        with self._database.writing() as connection:
            ids = [
                connection.execute(
                    "INSERT INTO items (stream, payload) VALUES (?, ?)", (self._name, item)
                ).lastrowid
                for item in items
            ]
            self._trim(connection)
        return [str(number) for number in ids]

    def claim(
        self,
        group: str,
        consumer: str,
        limit: int,
        block_ms: int,
        *,
        reclaim_idle_ms: int = RECLAIM_IDLE_MS,
    ) -> list[Item]:
        """Takes items; looks again every POLL_SECONDS while there are none."""
        until = time.monotonic() + block_ms / 1000
        while True:
            if self._has_work(group, reclaim_idle_ms):
                taken = self._take(group, consumer, limit, reclaim_idle_ms)
                if taken:
                    return taken
            left = until - time.monotonic()
            if left <= 0 or self._closing.wait(min(left, POLL_SECONDS)):
                return []

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Forgets claims."""
        with self._database.writing() as connection:
            connection.executemany(
                "DELETE FROM claims WHERE stream = ? AND name = ? AND id = ?",
                [(self._name, group, int(number)) for number in ids],
            )

    def lag(self, group: str) -> int:
        """Items after the group's last one, and those it holds."""
        with self._database.reading() as connection:
            ((unread,),) = connection.execute(
                "SELECT count(*) FROM items WHERE stream = ? AND id > ?",
                (self._name, self._last(connection, group)),
            )
            ((held,),) = connection.execute(
                "SELECT count(*) FROM claims WHERE stream = ? AND name = ?", (self._name, group)
            )
        return int(unread) + int(held)

    def close(self) -> None:
        """Ends waiting claims and closes the file."""
        self._closing.set()
        self._database.close()

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

    def _has_work(self, group: str, reclaim_idle_ms: int) -> bool:
        """Whether there is something to take; a look that does not hold up writers."""
        with self._database.reading() as connection:
            new = connection.execute(
                "SELECT 1 FROM items WHERE stream = ? AND id > ? LIMIT 1",
                (self._name, self._last(connection, group)),
            ).fetchone()
            idle = connection.execute(_IDLE, (*self._idle(group, reclaim_idle_ms), 1)).fetchone()
        return new is not None or idle is not None

    def _take(self, group: str, consumer: str, limit: int, reclaim_idle_ms: int) -> list[Item]:
        with self._database.writing() as connection:
            idle = self._idle(group, reclaim_idle_ms)
            taken = connection.execute(_IDLE, (*idle, limit)).fetchall()
            last = self._last(connection, group)
            taken += connection.execute(
                "SELECT id, payload FROM items WHERE stream = ? AND id > ? ORDER BY id LIMIT ?",
                (self._name, last, limit - len(taken)),
            ).fetchall()
            newest = max([last, *(number for number, _ in taken)])
            connection.execute(
                "INSERT OR REPLACE INTO readers (stream, name, last_id) VALUES (?, ?, ?)",
                (self._name, group, newest),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO claims (stream, name, id, consumer, claimed_ms) VALUES (?, ?, ?, ?, ?)",
                [(self._name, group, number, consumer, self._now_ms()) for number, _ in taken],
            )
        return [Item(str(number), payload) for number, payload in taken]

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Drops all but the newest items, and claims of what was dropped."""
        newest_dropped = connection.execute(
            "SELECT id FROM items WHERE stream = ? ORDER BY id DESC LIMIT 1 OFFSET ?",
            (self._name, self._max_length),
        ).fetchone()
        if newest_dropped is not None:
            bound = (self._name, newest_dropped[0])
            connection.execute("DELETE FROM items WHERE stream = ? AND id <= ?", bound)
            connection.execute("DELETE FROM claims WHERE stream = ? AND id <= ?", bound)

    def _last(self, connection: sqlite3.Connection, group: str) -> int:
        row = connection.execute(
            "SELECT last_id FROM readers WHERE stream = ? AND name = ?", (self._name, group)
        ).fetchone()
        return 0 if row is None else int(row[0])

    def _idle(self, group: str, reclaim_idle_ms: int) -> tuple[str, str, int]:
        return self._name, group, self._now_ms() - reclaim_idle_ms

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
