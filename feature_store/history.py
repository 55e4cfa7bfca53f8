"""A user's recent past as one packed row: entries that arrive in any order, outcomes that arrive late.

Knows order, windows and availability. Does not know where the bytes are kept, nor what an entry's features mean.

One shape serves both rows that are read per request: the event history (newest `max_length` of every source) and the
LoopFM window (newest impressions, and newest positives however old). What `read` returns at t is what
`feature_store.asof` says was known at t, as long as a window is not disordered by more than `SPARE` entries.

A row keeps, of every source, the newest impressions + positives + SPARE entries and beyond them the newest positives. An
outcome whose entry is not there waits for it, as an outcome may be known before what it is an outcome of was written. It
waits in vain if the entry was dropped; `late_positive_dropped` counts these.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from feature_store.asof import NEVER, Caps, known_bits
from feature_store.errors import CorruptArtefact, FailedPrecondition
from feature_store.layout import Layout, total_width
from feature_store.spec import Spec

Entries = npt.NDArray[np.void]
"""Structured rows of a shape's dtype: event_ms, available_ms, id (two uint64), source, surface, request, label_ms and payload."""
SPARE = 32
"""Entries kept beyond a window, so that a read of the recent past, or of a request's own impressions, still fills it."""
NO_REQUEST = -1
MAX_WAITING = 64
"""Outcomes of a row that wait for their entries; the oldest gives way."""
_HEADER = struct.Struct("<4sIIIQI")
_WAITING = struct.Struct("<iQQiq")
_MAGIC = b"gem2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What is read of one source."""

    impressions: int
    """Newest entries, those read as positives aside."""
    positives: int = 0
    """Newest entries with a known positive outcome; 0 treats all entries alike."""
    priority: int = 0
    """Breaks ties between entries of the same millisecond, lowest first."""

    def __post_init__(self) -> None:
        if min(self.impressions, self.positives) < 0:
            raise ValueError(
                f"window of {self.impressions} and {self.positives} must not be negative"
            )

    @property
    def total(self) -> int:
        """Most entries that are read."""
        return self.impressions + self.positives


@dataclass(frozen=True)
class Shape:
    """Layout of a packed row: its windows, objectives and payload columns."""

    windows: tuple[Window, ...]
    """One a source."""
    num_objectives: int
    payload: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Further columns: name, numpy dtype, shape of one value."""
    retention_ms: int = NEVER
    """Older entries are not read."""

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Of one entry."""
        fixed: list[Any] = [
            ("event_ms", "<i8"),
            ("available_ms", "<i8"),
            ("high", "<u8"),
            ("low", "<u8"),
            ("request", "<i8"),
            ("source", "<i4"),
            ("surface", "<i4"),
            ("label_ms", "<i8", (self.num_objectives,)),
        ]
        return np.dtype([*fixed, *self.payload])

    @cached_property
    def digest(self) -> int:
        """32 bits that differ between shapes; a row of another shape is refused."""
        return xxhash.xxh32_intdigest(
            repr((self.dtype.descr, self.windows, self.retention_ms)).encode()
        )

    def entries(
        self,
        names: Sequence[bytes],
        /,
        *,
        requests: Sequence[str] | None = None,
        **columns: npt.ArrayLike,
    ) -> Entries:
        """Entries [n] from 16-byte event ids, names of requests ("" for none) and columns; no outcome is known of them yet.

        Raises:
            ValueError: an id is not 16 bytes, or a column is unknown or missing.
        """
        lacking = {*(self.dtype.names or ())} - {*_MADE, *columns}
        if lacking:
            raise ValueError(f"columns {sorted(lacking)} are missing; an entry needs them all")
        high, low = words(names)
        request = [request_number(name) for name in requests or [""] * len(names)]
        rows = np.zeros(len(names), dtype=self.dtype)
        for name, values in {"label_ms": NEVER, "high": high, "low": low, "request": request, **columns}.items():
            rows[name] = values
        return rows


_NAME = ["source", "high", "low"]
"""Columns that name an entry."""
_MADE = ("high", "low", "request", "label_ms")


def event_shape(spec: Spec) -> Shape:
    """The shape of a user's event history; payload `ids` [E] and `dense` [ED] as in the batch."""
    layout = Layout(spec)
    return Shape(
        windows=tuple(
            Window(impressions=source.max_length, priority=source.priority)
            for source in spec.message.event_sources
        ),
        num_objectives=len(spec.objectives),
        payload=(
            ("ids", "<i8", (len(layout.event_ids),)),
            ("dense", "<f4", (total_width(layout.event_dense),)),
        ),
    )


def memory_shape(num_objectives: int, *, num_bytes: int, caps: Caps) -> Shape:
    """The shape of a user's LoopFM memory; payload `q` [num_bytes]. Entries whose label was seen must not be appended."""
    return Shape(
        windows=(Window(impressions=caps.impressions, positives=caps.positives),),
        num_objectives=num_objectives,
        payload=(("q", "u1", (num_bytes,)),),
        retention_ms=caps.retention_ms,
    )


class Waiting(NamedTuple):
    """A positive outcome whose entry is not there."""

    source: int
    high: int
    low: int
    objective: int
    available_ms: int


class History:
    """One user's row. Cheap to make from bytes, change and turn into bytes again."""

    def __init__(
        self, shape: Shape, rows: Entries | None = None, *, waiting: Sequence[Waiting] = (), given_up: int = 0
    ) -> None:
        self.shape = shape
        self.rows: Entries = np.zeros(0, dtype=shape.dtype) if rows is None else rows
        """Kept entries, sorted by (event_ms, priority, id)."""
        self.waiting = list(waiting)
        """At most MAX_WAITING, in the order they came."""
        self.given_up = given_up
        """Outcomes that waited until others took their place."""

    @property
    def late_positive_dropped(self) -> int:
        """Positive outcomes whose entry was not there when they came, and has not come since."""
        return self.given_up + len(self.waiting)

    def append(self, entries: Entries) -> int:
        """Adds entries in any order; one whose (source, id) is there is ignored. Returns how many were new to the row.

        An entry takes the outcomes that wait for it.
        """
        known = set(self.rows[_NAME].tolist())
        fresh = []
        for index, name in enumerate(entries[_NAME].tolist()):
            if name not in known:
                known.add(name)
                fresh.append(index)
        if fresh:
            self._keep(np.concatenate([self.rows, self._met(entries[fresh])]))
        return len(fresh)

    def _met(self, entries: Entries) -> Entries:
        """The entries with the outcomes that waited for them."""
        places = {name: place for place, name in enumerate(entries[_NAME].tolist())} if self.waiting else {}
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            place = places.get((one.source, one.high, one.low))
            if place is None:
                self.waiting.append(one)
            else:
                known = entries["label_ms"][place]
                known[one.objective] = min(int(known[one.objective]), one.available_ms)
        return entries

    def label(self, entry_id: bytes, *, source: int, objective: int, available_ms: int) -> bool:
        """Marks an appended entry's outcome as positive from `available_ms` on; the earliest time stands.

        Returns False if the row does not hold the entry; the outcome waits for it.
        """
        (high,), (low,) = words([entry_id])
        (found,) = np.nonzero(
            (self.rows["high"] == high)
            & (self.rows["low"] == low)
            & (self.rows["source"] == source)
        )
        if not len(found):
            self._wait(Waiting(source, int(high), int(low), objective, available_ms))
            return False
        rows = self.rows.copy()
        rows["label_ms"][found[0], objective] = min(
            int(rows["label_ms"][found[0], objective]), available_ms
        )
        self._keep(rows)
        return True

    def _wait(self, new: Waiting) -> None:
        for place, held in enumerate(self.waiting):
            if held[:4] == new[:4]:
                self.waiting[place] = min(held, new)
                return
        self.waiting.append(new)
        if len(self.waiting) > MAX_WAITING:
            del self.waiting[0]
            self.given_up += 1

    def read(self, at_ms: int, *, request_id: str = "") -> tuple[Entries, npt.NDArray[np.int32]]:
        """What was known at an instant, oldest first, and each entry's known label bits.

        Impressions of the request itself are not part of its past.
        """
        rows = self.rows
        known = (rows["event_ms"] < at_ms) & (rows["available_ms"] <= at_ms)
        known &= rows["event_ms"] >= at_ms - self.shape.retention_ms
        if request_id:
            known &= rows["request"] != request_number(request_id)
        rows = rows[known]
        bits = known_bits(rows["label_ms"], np.full(len(rows), at_ms, dtype=np.int64))
        keep = np.zeros(len(rows), dtype=bool)
        for source, window in enumerate(self.shape.windows):
            own = rows["source"] == source
            positive = _newest(own & (bits != 0), window.positives)
            keep |= positive | _newest(own & ~positive, window.impressions)
        return rows[keep], bits[keep]

    def _keep(self, rows: Entries) -> None:
        """Sorts entries and drops those that no read can need."""
        priorities = np.array([window.priority for window in self.shape.windows])
        order = np.lexsort(
            (rows["low"], rows["high"], priorities[rows["source"]], rows["event_ms"])
        )
        rows = rows[order]
        positive = (rows["label_ms"] != NEVER).any(axis=1)
        keep = np.zeros(len(rows), dtype=bool)
        for source, window in enumerate(self.shape.windows):
            own = rows["source"] == source
            keep |= _newest(own, window.total + SPARE) | _newest(own & positive, window.positives)
        self.rows = rows[keep]

    def to_bytes(self) -> bytes:
        """Header (magic, shape, numbers of entries, waiting and given up, checksum), the entries, the waiting outcomes."""
        body = self.rows.tobytes() + b"".join(_WAITING.pack(*one) for one in self.waiting)
        head = (
            _MAGIC,
            self.shape.digest,
            len(self.rows),
            len(self.waiting),
            self.given_up,
            zlib.crc32(body),
        )
        return _HEADER.pack(*head) + body

    @classmethod
    def from_bytes(cls, shape: Shape, data: bytes) -> History:
        """The row that `to_bytes` wrote; empty bytes are a user without a past.

        Raises:
            CorruptArtefact: the bytes are not a whole row.
            FailedPrecondition: the row has another shape, as after a change of the spec.
        """
        if not data:
            return cls(shape)
        if len(data) < _HEADER.size or data[:4] != _MAGIC:
            raise CorruptArtefact(
                f"{len(data)} bytes are not a packed history; write the row again"
            )
        _, digest, count, num_waiting, given_up, checksum = _HEADER.unpack_from(data)
        if digest != shape.digest:
            raise FailedPrecondition(
                f"a packed history has shape {digest:08x}, the spec's is {shape.digest:08x}; rebuild the rows from the log"
            )
        body, size = data[_HEADER.size :], count * shape.dtype.itemsize
        if len(body) != size + num_waiting * _WAITING.size or zlib.crc32(body) != checksum:
            raise CorruptArtefact(
                f"a packed history of {count} entries is damaged; rebuild the row from the log"
            )
        waiting = [Waiting(*one) for one in _WAITING.iter_unpack(body[size:])]
        return cls(shape, np.frombuffer(body, dtype=shape.dtype, count=count), waiting=waiting, given_up=given_up)


def request_number(request_id: str) -> int:
    """What stands for a request in an entry: xxhash64 of its name; NO_REQUEST for the empty one."""
    if not request_id:
        return NO_REQUEST
    digest = xxhash.xxh64_intdigest(request_id.encode())
    signed = digest - 2**64 if digest >= 2**63 else digest
    return signed if signed != NO_REQUEST else NO_REQUEST - 1


def words(ids: Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """High and low half of 16-byte ids: they order as the bytes do.

    Raises:
        ValueError: an id has another length.
    """
    wrong = next((name for name in ids if len(name) != 16), None)
    if wrong is not None:
        raise ValueError(f"id {wrong!r} has {len(wrong)} bytes; event and example ids have 16")
    halves = np.frombuffer(b"".join(ids), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return halves[:, 0], halves[:, 1]


def _newest(member: npt.NDArray[np.bool_], limit: int) -> npt.NDArray[np.bool_]:
    """The last `limit` set places of a mask."""
    keep = np.zeros(len(member), dtype=bool)
    keep[np.flatnonzero(member)[max(0, int(member.sum()) - limit) :]] = True
    return keep
