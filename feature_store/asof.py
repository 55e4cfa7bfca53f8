"""What was known at an instant: the one definition that training, backfill, serving and replay share.

Knows times, requests and label availability. Does not know features, stores or models.

A fact is known to a request at t iff it happened before t, was available by t, and is not of the same request. An outcome
is known iff its impression is and it was available by t. Order is (time, source priority, id): total, and free of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NEVER = 2**63 - 1
"""`available_ms` of an outcome that never came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """How much of a user's past a LoopFM window holds."""

    impressions: int = 128
    """Newest entries, those that are held as positives aside."""
    positives: int = 72
    """Newest entries with a known positive outcome."""
    retention_ms: int = 30 * 86_400_000
    """Older entries are gone."""

    def __post_init__(self) -> None:
        if min(self.impressions, self.positives, self.retention_ms) < 0:
            raise ValueError(
                f"caps {self.impressions}, {self.positives}, {self.retention_ms} must not be negative"
            )


class Entry(NamedTuple):
    """One annotated impression of a user."""

    example_id: bytes
    request_id: str
    event_ms: int
    available_ms: int
    self_label_seen: bool
    label_available_ms: tuple[int, ...]
    """When each objective's positive outcome became known; NEVER if it did not."""


def asof_sequence_reference(
    entries: Sequence[Entry], *, at_ms: int, request_id: str, caps: Caps
) -> list[tuple[Entry, int]]:
    """The LoopFM window of one user at one instant, oldest first, each entry with its known label bits.

    The definition itself, one condition a line; `asof_windows` computes the same for many requests at once.
    """
    unique = {entry.example_id: entry for entry in entries}
    known = [
        entry
        for entry in unique.values()
        if entry.event_ms < at_ms
        and entry.request_id != request_id
        and entry.available_ms <= at_ms
        and not entry.self_label_seen
        and entry.event_ms >= at_ms - caps.retention_ms
    ]
    known.sort(key=lambda entry: (entry.event_ms, entry.example_id))
    bits = {entry: label_bits(entry.label_available_ms, at_ms) for entry in known}
    positives = [entry for entry in known if bits[entry]]
    positives = positives[max(0, len(positives) - caps.positives) :]
    others = [entry for entry in known if entry not in positives]
    others = others[max(0, len(others) - caps.impressions) :]
    return [(entry, bits[entry]) for entry in known if entry in positives or entry in others]


def label_bits(label_available_ms: Sequence[int], at_ms: int) -> int:
    """Bit k is set iff objective k's positive outcome was available by then."""
    return sum(1 << k for k, available in enumerate(label_available_ms) if available <= at_ms)


class Segments(NamedTuple):
    """Rows sorted by (segment, event_ms, priority, id): a segment is a user, or a (source, user)."""

    start: Ints
    """[S] first row of each segment."""
    stop: Ints
    """[S] one past its last row."""
    event_ms: Ints
    """[n]"""
    available_ms: Ints
    """[n]"""
    request: Ints
    """[n] number of the request of an impression; -1 for other rows."""


class Queries(NamedTuple):
    """Reads: of which segment, when, and for which request. A segment of -1 has no rows."""

    segment: Ints
    at_ms: Ints
    request: Ints


class Windows(NamedTuple):
    """Rows that each query sees: rows[offsets[q]:offsets[q+1]], oldest first."""

    offsets: Ints
    rows: Ints


def newest_known(segments: Segments, queries: Queries, *, limit: int) -> Windows:
    """The newest `limit` known rows of each query's segment, oldest first."""

    def choose(query: Ints, row: Ints, num_queries: int) -> _Choice:
        keep = rank_from_end(query, num_queries) < limit
        return _Choice(keep, _tally(query, num_queries) >= limit)

    query, row = _look_back(segments, queries, limit, choose)
    return _windows(query, row, len(queries.at_ms))


def most_known(segments: Segments, queries: Queries, *, limit: int) -> Ints:
    """[Q] rows that `newest_known` finds at most: all before the instant count, whether they were known by then or not."""
    earlier = before(segments, queries) - _bound(segments.start, queries.segment)
    return np.asarray(np.minimum(earlier, limit))


def asof_windows(
    segments: Segments,
    label_available_ms: Ints,
    seen: npt.NDArray[np.bool_],
    queries: Queries,
    *,
    caps: Caps,
) -> tuple[Windows, npt.NDArray[np.int32]]:
    """LoopFM windows of many requests, and the known label bits of their rows.

    Args:
        segments: annotated impressions, a segment a user, sorted by (event_ms, example_id), each example once.
        label_available_ms: [n, K] when each objective's positive outcome became known; NEVER if it did not.
        seen: [n] the snapshot that annotated the row had learned from its label.
        queries: reads.
        caps: window sizes.

    Equal to `asof_sequence_reference` for every query.
    """

    def choose(query: Ints, row: Ints, num_queries: int) -> _Choice:
        able = ~seen[row] & (segments.event_ms[row] >= queries.at_ms[query] - caps.retention_ms)
        known = able & (known_bits(label_available_ms[row], queries.at_ms[query]) != 0)
        positive = _newest(known, query, num_queries, caps.positives)
        other = _newest(able & ~positive, query, num_queries, caps.impressions)
        num_positives = _tally(query[positive], num_queries)
        num_others = _tally(query[other], num_queries)
        return _Choice(
            positive | other, (num_positives >= caps.positives) & (num_others >= caps.impressions)
        )

    query, row = _look_back(segments, queries, caps.impressions + caps.positives, choose)
    bits = known_bits(label_available_ms[row], queries.at_ms[query])
    return _windows(query, row, len(queries.at_ms)), bits


class _Choice(NamedTuple):
    keep: npt.NDArray[np.bool_]
    """[rows]"""
    full: npt.NDArray[np.bool_]
    """[queries] no older row can be kept."""


def _look_back(
    segments: Segments,
    queries: Queries,
    width: int,
    choose: Callable[[Ints, Ints, int], _Choice],
) -> tuple[Ints, Ints]:
    """Kept (query, row), by query, oldest first: looks at few rows before the instant, at more where they do not suffice.

    `choose(query, row, num_queries)` picks among known rows; `query` indexes the original queries and is ascending.
    """
    total = len(queries.at_ms)
    first, stop = _bound(segments.start, queries.segment), before(segments, queries)
    pending, chosen = np.arange(total, dtype=np.int64), []
    while len(pending):
        start = np.maximum(first[pending], stop[pending] - width)
        local, row = expand(start, stop[pending])
        query = pending[local]
        known = segments.available_ms[row] <= queries.at_ms[query]
        own = segments.request[row]
        known &= (own < 0) | (own != queries.request[query])
        query, row = query[known], row[known]
        keep, full = choose(query, row, total)
        done = full[pending] | (start <= first[pending])
        settled = np.zeros(total, dtype=bool)
        settled[pending[done]] = True
        keep &= settled[query]
        chosen.append((query[keep], row[keep]))
        pending, width = pending[~done], width * 4 + 16
    query = np.concatenate([part[0] for part in chosen] or [np.zeros(0, np.int64)])
    row = np.concatenate([part[1] for part in chosen] or [np.zeros(0, np.int64)])
    order = np.argsort(query, kind="stable") if len(chosen) > 1 else slice(None)
    return query[order], row[order]


def _newest(
    member: npt.NDArray[np.bool_], query: Ints, num_queries: int, limit: int
) -> npt.NDArray[np.bool_]:
    """The last `limit` members of each query."""
    keep = np.zeros(len(member), dtype=bool)
    rows = np.flatnonzero(member)
    keep[rows[rank_from_end(query[rows], num_queries) < limit]] = True
    return keep


def _tally(query: Ints, num_queries: int) -> Ints:
    return np.bincount(query, minlength=num_queries)


def known_bits(label_available_ms: Ints, at_ms: Ints) -> npt.NDArray[np.int32]:
    """Label bits [n] from availability [n, K] at [n]: the vectorized `label_bits`."""
    weights = (1 << np.arange(label_available_ms.shape[1], dtype=np.int64)).astype(np.int64)
    known = label_available_ms <= at_ms[:, None]
    return np.asarray((known * weights).sum(axis=1), dtype=np.int32)


def before(segments: Segments, queries: Queries) -> Ints:
    """[Q] one past the last row of the query's segment whose event_ms lies before the instant.

    A binary search in every segment at once: log2(longest segment) steps over all queries.
    """
    low, high = _bound(segments.start, queries.segment), _bound(segments.stop, queries.segment)
    while True:
        open_ = low < high
        if not open_.any():
            return low
        middle = (low + high) >> 1
        earlier = open_ & (
            segments.event_ms[np.minimum(middle, max(0, len(segments.event_ms) - 1))]
            < queries.at_ms
        )
        low = np.where(earlier, middle + 1, low)
        high = np.where(open_ & ~earlier, middle, high)


def expand(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Every (query, row) of row ranges [start, stop)."""
    lengths = np.maximum(stop - start, 0)
    query = np.repeat(np.arange(len(start), dtype=np.int64), lengths)
    first = np.cumsum(lengths) - lengths
    return query, np.arange(len(query), dtype=np.int64) - first[query] + start[query]


def rank_from_end(query: Ints, num_queries: int) -> Ints:
    """For rows grouped by query in order: 0 for the last of its query, 1 for the one before."""
    stop = np.cumsum(np.bincount(query, minlength=num_queries))
    return np.asarray(stop[query] - 1 - np.arange(len(query)), dtype=np.int64)


def _bound(bounds: Ints, segment: Ints) -> Ints:
    if not len(bounds):
        return np.zeros(len(segment), dtype=np.int64)
    return np.where(segment >= 0, bounds[np.maximum(segment, 0)], 0)


def _windows(query: Ints, row: Ints, num_queries: int) -> Windows:
    offsets = np.zeros(num_queries + 1, dtype=np.int64)
    np.cumsum(np.bincount(query, minlength=num_queries), out=offsets[1:])
    return Windows(offsets, row)
