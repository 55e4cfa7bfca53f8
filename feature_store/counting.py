"""Replays a log through the counters, and keeps what they said at each read.

Knows the order of facts and reads. Does not know what is read besides counters, nor by whom.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feature_store.aggregates import AggregateSet, Fact, Rows
from feature_store.asof import NEVER
from feature_store.log import Events, Impressions
from feature_store.spec import IMPRESSION, Spec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_CHUNK = 32_768


@dataclass(frozen=True, slots=True)
class Counted:
    """What the counters said, a row an impression."""

    user: Floats
    """[n, user-side aggregates]"""
    ad: Floats
    """[n, candidate-side aggregates]"""


@dataclass(frozen=True, slots=True)
class Facts:
    """Columns [n] of what is counted, in the order in which it counts; `feature_store.aggregates.Fact` has the meanings."""

    source: Ints
    objective: Ints
    user_key: Ints
    surface: Ints
    ad_ids: Ints
    event_ms: Ints
    available_ms: Ints

    def __len__(self) -> int:
        return len(self.event_ms)

    def take(self, rows: slice | npt.NDArray[np.generic]) -> Facts:
        """Some of them."""
        return Facts(*(getattr(self, name)[rows] for name in self.__slots__))

    def each(self) -> Iterator[Fact]:
        """One by one."""
        columns = (self.source, self.objective, self.user_key, self.surface, self.ad_ids, self.event_ms)
        return (Fact(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def count(
    spec: Spec,
    impressions: Impressions,
    events: Events,
    at_ms: Ints,
    ad_ids: Ints,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Counted:
    """Counters of every impression as they were known at its read time `at_ms` [n], for the ad as it then was [n, A]."""
    aggregates = AggregateSet(spec)
    facts, rows = facts_of(spec, impressions, events), Rows(len(aggregates.groups))
    feed = _Feed(aggregates, facts, rows)
    user = np.empty((len(impressions), aggregates.num_user_columns), dtype=np.float32)
    ad = np.empty((len(impressions), aggregates.num_ad_columns), dtype=np.float32)
    order = np.argsort(at_ms, kind="stable")
    with _uncollected():
        for first in range(0, len(order), _CHUNK):
            chunk = order[first : first + _CHUNK]
            slots = _read(aggregates, rows, feed, impressions, chunk, at_ms, ad_ids)
            user[chunk] = aggregates.user_statistics(slots, at_ms[chunk])
            ad[chunk] = aggregates.ad_statistics(slots, at_ms[chunk])
            progress(first + len(chunk), len(order))
    return Counted(user, ad)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cycle collector: it would walk millions of live rows again and again, half the time of a replay."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read(
    aggregates: AggregateSet,
    rows: Rows,
    feed: _Feed,
    impressions: Impressions,
    chunk: Ints,
    at_ms: Ints,
    ad_ids_NA: Ints,
) -> npt.NDArray[np.float64]:
    flat: list[float] = []
    for when, user, surface, ad_ids in zip(
        at_ms[chunk].tolist(),
        impressions.user_key[chunk].tolist(),
        impressions.surface[chunk].tolist(),
        ad_ids_NA[chunk].tolist(),
        strict=True,
    ):
        feed.advance(when)
        aggregates.snapshot(surface, ad_ids, rows.users.get(user), rows.shared, flat)
    return np.array(flat, dtype=np.float64).reshape(len(chunk), aggregates.num_slots)


class _Feed:
    """Facts in their order, applied up to an instant that only grows."""

    def __init__(self, aggregates: AggregateSet, facts: Facts, rows: Rows) -> None:
        self._aggregates, self._facts, self._rows = aggregates, facts, rows
        self._at = self._loaded = 0
        self._buffer: list[tuple[Fact, int]] = []

    def advance(self, until_ms: int) -> None:
        """Applies every fact known at `until_ms`: a prefix of the order."""
        while self._at < len(self._facts):
            if self._at == self._loaded:
                self._load()
            fact, available = self._buffer[self._at - self._loaded + len(self._buffer)]
            if available > until_ms or fact.event_ms >= until_ms:
                return
            self._aggregates.apply(fact, self._rows.of(fact.user_key), self._rows.shared)
            self._at += 1

    def _load(self) -> None:
        part = slice(self._loaded, self._loaded + _CHUNK)
        made = list(self._facts.take(part).each())
        self._buffer = list(zip(made, self._facts.available_ms[part].tolist(), strict=True))
        self._loaded += len(made)


def facts_of(spec: Spec, impressions: Impressions, events: Events) -> Facts:
    """Events, impressions and positive outcomes by (available_ms, event_ms, priority, id).

    An outcome comes after every event of the same instant; ids order what is left, and both inputs are sorted by them.
    """
    priority = np.array(
        [source.priority for source in spec.message.event_sources] or [0], dtype=np.int64
    )
    row, objective = np.nonzero(impressions.label_ms != NEVER)
    shown = spec.event_sources.index(IMPRESSION) if IMPRESSION in spec.event_sources else None
    parts = [
        _of_events(events, priority),
        _of_outcomes(impressions, row, objective, int(priority.max()) + 1),
    ]
    if shown is not None:
        parts.append(_of_impressions(impressions, shown, int(priority[shown])))
    facts = [np.concatenate(column) for column in zip(*(part[:-1] for part in parts), strict=True)]
    ranks = np.concatenate([part[-1] for part in parts])
    source, _, _, _, _, event_ms, available = facts
    order = np.lexsort((np.arange(len(source)), ranks, event_ms, available))
    return Facts(*(column[order] for column in facts))


def _of_events(events: Events, priority: Ints) -> tuple[Ints, ...]:
    none = np.full(len(events.event_ms), -1, dtype=np.int64)
    return (
        events.source,
        none,
        events.user_key,
        events.surface.astype(np.int64),
        events.ad_ids,
        events.event_ms,
        events.available_ms,
        priority[events.source],
    )


def _of_impressions(impressions: Impressions, source: int, priority: int) -> tuple[Ints, ...]:
    n = len(impressions)
    return (
        np.full(n, source, dtype=np.int64),
        np.full(n, -1, dtype=np.int64),
        impressions.user_key,
        impressions.surface.astype(np.int64),
        impressions.ad_ids,
        impressions.event_ms,
        impressions.available_ms,
        np.full(n, priority, dtype=np.int64),
    )


def _of_outcomes(
    impressions: Impressions, row: Ints, objective: Ints, priority: int
) -> tuple[Ints, ...]:
    return (
        np.full(len(row), -1, dtype=np.int64),
        objective.astype(np.int64),
        impressions.user_key[row],
        impressions.surface[row].astype(np.int64),
        impressions.ad_ids[row],
        impressions.event_ms[row],
        impressions.label_ms[row, objective],
        priority + objective.astype(np.int64),
    )
