"""A user's history and counters as one versioned row: they change together or not at all.

Knows the row's two parts. Does not know the store.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from feature_store.aggregates import AggregateSet, Slots, pack_user, unpack_user
from feature_store.history import History, Shape

_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Past:
    """What a user did, and what was counted of it."""

    history: History
    counters: list[dict[int, Slots]]


def decode(data: bytes, shape: Shape, aggregates: AggregateSet) -> Past:
    """The row's parts; empty bytes are a user without a past.

    Raises:
        CorruptArtefact: the bytes are damaged.
        FailedPrecondition: the row follows another spec.
    """
    if not data:
        return Past(History(shape), [{} for _ in aggregates.groups])
    (size,) = _LENGTH.unpack_from(data)
    body = data[_LENGTH.size :]
    return Past(History.from_bytes(shape, body[:size]), unpack_user(body[size:], aggregates.groups))


def encode(past: Past, aggregates: AggregateSet) -> bytes:
    """The row's bytes."""
    history = past.history.to_bytes()
    return _LENGTH.pack(len(history)) + history + pack_user(past.counters, aggregates.groups)
