"""A user's history and counters as one versioned row: they change together or not at all.

Knows the row's two parts. Does not know the store.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from feature_store.aggregates import AggregateSet, Slots, pack_user, unpack_user
from feature_store.errors import CorruptArtefact, FailedPrecondition
from feature_store.history import History, Shape
from feature_store.packing import counters_digest

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"past"


@dataclass(slots=True)
class Past:
    """What a user did, and what was counted of it."""

    history: History
    counters: list[dict[int, Slots]]


def decode(data: bytes, shape: Shape, aggregates: AggregateSet, *, key: str = "") -> Past:
    """The parts of row `key`; empty bytes are a user without a past.

    Raises:
        CorruptArtefact: the bytes are damaged.
        FailedPrecondition: the row follows another spec.
    """
    if not data:
        return Past(History(shape), [{} for _ in aggregates.groups])
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise CorruptArtefact(f"row {key} is not a user's past; rebuild it from the log")
    _, digest, size, checksum = _HEADER.unpack_from(data)
    history = data[_HEADER.size : _HEADER.size + size]
    counters = data[_HEADER.size + size :]
    if zlib.crc32(counters) != checksum:
        raise CorruptArtefact(f"row {key} is damaged; rebuild it from the log")
    if digest != counters_digest(aggregates):
        raise FailedPrecondition(f"row {key} counts by another spec; rebuild it from the log")
    try:
        return Past(History.from_bytes(shape, history), unpack_user(counters, aggregates.groups))
    except (CorruptArtefact, FailedPrecondition) as error:
        raise type(error)(f"row {key}: {error}") from error


def encode(past: Past, aggregates: AggregateSet) -> bytes:
    """The row's bytes."""
    return joined(past.history, pack_user(past.counters, aggregates.groups), counters_digest(aggregates))


def joined(past: History, counters: bytes, digest: int) -> bytes:
    """A row's bytes from packed counters: header (magic, their digest, length of the history, checksum), history, counters."""
    history = past.to_bytes()
    head = _HEADER.pack(_MAGIC, digest, len(history), zlib.crc32(counters))
    return head + history + counters
