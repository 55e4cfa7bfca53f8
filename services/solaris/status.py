"""Says how Solaris is doing: backlog, coverage by level, what was computed and how much of it was used.

Knows totals in the store and the stream's lag. Does not know processes: one that is gone is counted with what it wrote.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.solaris import ledger
from services.solaris.ledger import (
    AFTERMATH,
    CANDIDATES,
    DROPPED,
    READS,
    REFUSED,
    USED_OF,
    WORKED,
    WRITTEN_IN,
    Totals,
)
from services.solaris.lifetimes import HOUR_MS, Level, Lifetimes, status_key

GROUP = "solaris"


class StatusRows(Protocol):
    """The part of the online store that is read here."""

    def hget_all(self, key: str) -> Mapping[str, bytes]:
        """All fields of a row."""


class Lagging(Protocol):
    """The stream of offered pairs."""

    def lag(self, group: str) -> int:
        """Items that are not acknowledged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolarisStatus:
    """One coordinate system's figures since its store began."""

    backlog_tasks: int
    """Tasks offered and not yet acknowledged."""
    reads: Mapping[str, int]
    """answered, degraded, and why: late, failed, shed."""
    candidates: Mapping[str, int]
    """Level → candidates read."""
    coverage: Mapping[str, float]
    """Level → share of candidates; they add up to 1. Empty before the first read."""
    refused: Mapping[str, int]
    """Rows that were there and not used, by reason."""
    worked: Mapping[str, int]
    """forwards, tasks, pairs, written."""
    dropped: Mapping[str, int]
    """Offered pairs that were not computed, by reason."""
    aftermath: Mapping[str, int]
    settled_pairs: int
    """Pairs computed in hours so long ago that none of them can be read any more."""
    used_pairs: int
    """Those of them that were read at least once."""
    usable_coverage: float | None
    """Share of candidates that had any embedding; None before the first read."""
    precision: float | None
    """Share of settled pairs that were read before they expired; None while none has settled."""
    waste: float | None
    """1 - precision."""


def read_status(
    store: StatusRows,
    stream: Lagging,
    *,
    space_id: bytes,
    now_ms: int | None = None,
    lifetimes: Lifetimes | None = None,
) -> SolarisStatus:
    """The figures of one coordinate system.

    Args:
        store: the online store.
        stream: the `speculation` stream.
        space_id: 8 bytes.
        now_ms: instant by which a pair counts as settled, None for this one; in a replay, the replay's.
        lifetimes: those of the servers.
    """
    totals: Totals = Counter()
    for value in store.hget_all(status_key(space_id)).values():
        totals.update(ledger.decode(value))
    candidates = {level.name.lower(): totals[CANDIDATES, level.name.lower()] for level in Level}
    asked = sum(candidates.values())
    hard_ms = (lifetimes or Lifetimes()).pair.hard_ms
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    settled = _settled(totals, WRITTEN_IN, now_ms, hard_ms)
    used = _settled(totals, USED_OF, now_ms, hard_ms)
    precision = used / settled if settled else None
    return SolarisStatus(
        backlog_tasks=stream.lag(GROUP),
        reads=_kinds(totals, READS),
        candidates=candidates,
        coverage={level: count / asked for level, count in candidates.items()} if asked else {},
        refused=_kinds(totals, REFUSED),
        worked=_kinds(totals, WORKED),
        dropped=_kinds(totals, DROPPED),
        aftermath=_kinds(totals, AFTERMATH),
        settled_pairs=settled,
        used_pairs=used,
        usable_coverage=1.0 - candidates["default"] / asked if asked else None,
        precision=precision,
        waste=None if precision is None else 1.0 - precision,
    )


def _kinds(totals: Totals, name: str) -> dict[str, int]:
    return {kind: count for (each, kind), count in sorted(totals.items()) if each == name}


def _settled(totals: Totals, name: str, now_ms: int, hard_ms: int) -> int:
    """Pairs of hours whose last instant is past its hard age."""
    return sum(
        count
        for (each, hour), count in totals.items()
        if each == name and (int(hour) + 1) * HOUR_MS + hard_ms <= now_ms
    )
