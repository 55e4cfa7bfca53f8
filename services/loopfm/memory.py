"""Keeps each user's LoopFM memory in the online store: entries as they are annotated, outcomes as they arrive.

Knows keys, packed rows and compare-and-set. Does not know models or tables.

A memory lies under `lf/<space>/<user key>`: vectors of two coordinate systems can never share a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feature_store.asof import Caps
from feature_store.errors import Aborted
from feature_store.history import Entries, History, memory_shape
from feature_store.online import OnlineStore, Versioned
from feature_store.packing import MEMORY_SPACES_KEY, memory_key

SOURCE = 0
"""A memory has one source of entries."""
_TRIES = 16
_CHUNK = 256


class Label(NamedTuple):
    """A positive outcome of an annotated impression."""

    user_key: int
    example_id: bytes
    objective: int
    available_ms: int


Edit = Callable[[History], None]


class MemoryWriter:
    """Memories of one coordinate system."""

    def __init__(
        self, store: OnlineStore, *, space_id: bytes, num_objectives: int, num_bytes: int, caps: Caps | None = None
    ) -> None:
        caps = caps or Caps()
        self.shape = memory_shape(num_objectives, num_bytes=num_bytes, caps=caps)
        self.space_id = space_id
        self._store, self._ttl_ms = store, caps.retention_ms
        # Whoever appends outcomes learns from this row which spaces have memories to mark.
        store.hset_many(MEMORY_SPACES_KEY, {space_id.hex(): str(num_bytes).encode()})

    def append(self, user_key: npt.NDArray[np.int64], entries: Entries) -> int:
        """Adds entries [n] to the memories of their users [n]; returns how many memories were written.

        Raises:
            Aborted: others kept writing the same memory.
            FailedPrecondition: a memory was packed for another spec.
        """
        order = np.argsort(user_key, kind="stable")
        users, starts = np.unique(user_key[order], return_index=True)
        own = np.split(order, starts[1:]) if len(users) else []
        edits: dict[int, Edit] = {
            user: _Append(entries[rows]) for user, rows in zip(users.tolist(), own, strict=True)
        }
        self._change(edits)
        return len(edits)

    def label(self, labels: Sequence[Label]) -> int:
        """Marks outcomes; returns how many found no entry, because it had left or never was there.

        Raises:
            Aborted: others kept writing the same memory.
        """
        by_user: dict[int, list[Label]] = defaultdict(list)
        for label in labels:
            by_user[label.user_key].append(label)
        marks = {user: _Mark(own) for user, own in by_user.items()}
        self._change(marks)
        return sum(mark.missed for mark in marks.values())

    def read(self, user_key: int) -> History:
        """A user's memory."""
        (held,) = self._store.read_versioned([memory_key(self.space_id, user_key)])
        return History.from_bytes(self.shape, held.value)

    def _change(self, edits: Mapping[int, Edit]) -> None:
        users = list(edits)
        for start in range(0, len(users), _CHUNK):
            pending = users[start : start + _CHUNK]
            for _ in range(_TRIES):
                pending = self._try(pending, edits)
                if not pending:
                    break
            else:
                raise Aborted(
                    f"{len(pending)} memories changed {_TRIES} times while they were being written; try again"
                )

    def _try(self, users: Sequence[int], edits: Mapping[int, Edit]) -> list[int]:
        """Reads, edits and writes memories; returns the users whose memory changed in between."""
        keys = [memory_key(self.space_id, user) for user in users]
        changes: dict[str, Versioned] = {}
        for user, key, held in zip(users, keys, self._store.read_versioned(keys), strict=True):
            history = History.from_bytes(self.shape, held.value)
            edits[user](history)
            changes[key] = Versioned(history.to_bytes(), held.version)
        # All in one transaction, as a rule nobody comes between; if somebody does, only those rows are lost.
        if self._store.compare_and_set_many(changes, ttl_ms=self._ttl_ms):
            return []
        return [
            user
            for user, (key, new) in zip(users, changes.items(), strict=True)
            if not self._store.compare_and_set(key, new.version, new.value, ttl_ms=self._ttl_ms)
        ]


class _Append:
    """Adds entries."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __call__(self, history: History) -> None:
        history.append(self._entries)


class _Mark:
    """Marks outcomes and counts those without an entry, afresh at every attempt."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self.missed = 0

    def __call__(self, history: History) -> None:
        found = [
            history.label(label.example_id, source=SOURCE, objective=label.objective, available_ms=label.available_ms)
            for label in self._labels
        ]
        self.missed = len(found) - sum(found)
