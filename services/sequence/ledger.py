"""What happened to one user lately, as one packed row: by it a repeat is told from news, and an outcome finds its impression.

Knows names, times and ads of recent facts. Does not know histories or counters.

A fact stays while an outcome may still follow: the longest attribution window and a day of lateness, by the user's newest
fact. What is older than that cannot be told from a repeat and is not counted. So the row is bounded however long a user
lives; a user with more than MAX_FACTS in that time loses the oldest.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feature_store.errors import CorruptArtefact, FailedPrecondition

LATENESS_MS = 86_400_000
"""How late a fact may come beyond the longest attribution window."""
MAX_FACTS = 4_096
_HEADER = struct.Struct("<4sIII")
_MAGIC = b"led1"


@dataclass(slots=True)
class Happening:
    """A counted event."""

    event_ms: int
    surface: int
    ad_ids: Sequence[int]
    labels: int = 0
    """Bit k: objective k's outcome was counted."""


def fact_dtype(num_ad_ids: int) -> np.dtype[np.void]:
    """Of one packed fact."""
    return np.dtype(
        [
            ("name", "V16"),
            ("event_ms", "<i8"),
            ("labels", "<u8"),
            ("source", "<i4"),
            ("surface", "<i4"),
            ("ad_ids", "<i8", (num_ad_ids,)),
        ]
    )


def pack(rows: npt.NDArray[np.void]) -> bytes:
    """A ledger's bytes from packed facts, oldest first: header (magic, width of a fact, number, checksum), then the newest."""
    kept = rows[-MAX_FACTS:]
    body = kept.tobytes()
    return _HEADER.pack(_MAGIC, kept.dtype.itemsize, len(kept), zlib.crc32(body)) + body


class Ledger:
    """One user's recent facts by (source, name)."""

    def __init__(self, num_ad_ids: int, *, horizon_ms: int) -> None:
        self._horizon_ms = horizon_ms
        self._dtype = fact_dtype(num_ad_ids)
        self.facts: dict[tuple[int, bytes], Happening] = {}
        self._newest_ms = 0

    def add(self, source: int, name: bytes, fact: Happening) -> bool:
        """Whether the fact is news; if so it is remembered."""
        if (source, name) in self.facts or fact.event_ms < self._newest_ms - self._horizon_ms:
            return False
        self.facts[source, name] = fact
        self._newest_ms = max(self._newest_ms, fact.event_ms)
        return True

    def to_bytes(self) -> bytes:
        """The facts that are still needed, oldest first, packed."""
        kept = sorted(
            (
                (name, fact.event_ms, fact.labels, source, fact.surface, fact.ad_ids)
                for (source, name), fact in self.facts.items()
                if fact.event_ms >= self._newest_ms - self._horizon_ms
            ),
            key=lambda row: (row[1], row[3], row[0]),
        )
        rows = np.zeros(len(kept), dtype=self._dtype)
        for column, values in zip(self._dtype.names or (), zip(*kept, strict=True), strict=bool(kept)):
            rows[column] = [np.void(value) for value in values] if column == "name" else values
        return pack(rows)

    @classmethod
    def from_bytes(cls, data: bytes, num_ad_ids: int, *, horizon_ms: int, key: str = "") -> Ledger:
        """The row that `to_bytes` wrote; empty bytes are a user without a past.

        Raises:
            CorruptArtefact: the bytes of row `key` are damaged.
            FailedPrecondition: the row follows a spec with other ad features.
        """
        ledger = cls(num_ad_ids, horizon_ms=horizon_ms)
        if not data:
            return ledger
        if len(data) < _HEADER.size or data[:4] != _MAGIC:
            raise CorruptArtefact(f"row {key} is not a ledger; rebuild it from the log")
        _, width, count, checksum = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if len(body) != count * width or zlib.crc32(body) != checksum:
            raise CorruptArtefact(f"row {key} is damaged; rebuild it from the log")
        if width != ledger._dtype.itemsize:
            raise FailedPrecondition(f"row {key} follows another spec; rebuild it from the log")
        rows = np.frombuffer(body, dtype=ledger._dtype)
        columns = ("event_ms", "surface", "ad_ids", "labels")
        facts = zip(*(rows[column].tolist() for column in columns), strict=True)
        names = [body[at : at + 16] for at in range(0, len(body), width)]
        ledger.facts = {
            key: Happening(*fact)
            for key, fact in zip(zip(rows["source"].tolist(), names, strict=True), facts, strict=True)
        }
        ledger._newest_ms = int(rows["event_ms"].max(initial=0))
        return ledger
