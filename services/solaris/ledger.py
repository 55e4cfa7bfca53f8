"""Counts what Solaris did, for /metrics and for whoever asks the store.

Knows names of counts. Does not know what is counted by whom.

A process owns one field of the status row and writes its running totals there; the totals of a store are the sum over
fields. A process that dies keeps what it had written.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric

from services.solaris.lifetimes import HOUR_MS

CANDIDATES, REFUSED, READS, DROPPED, WORKED, AFTERMATH = (
    "candidates", "refused", "reads", "dropped", "worked", "aftermath",
)  # fmt: skip
_HELP = {
    CANDIDATES: "Candidates by the level their embedding came from",
    REFUSED: "Rows that were there and were not used, by reason",
    READS: "Reads, by outcome",
    DROPPED: "Offered pairs that were not computed, by reason",
    WORKED: "Work of the workers: tasks, forwards, pairs computed and written",
    AFTERMATH: "What followed reads: refreshes asked for, first uses noted, notes dropped",
}
WRITTEN_IN, USED_OF = "written_in", "used_of"
"""Pairs written in an hour, and how many of that hour's have been read: labels too many for a metric."""

Totals = Counter[tuple[str, str]]


class Ledger:
    """Running totals of one process, by name and kind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._totals: Totals = Counter()
        self._metrics = {
            name: Metric(f"gem_solaris_{name}", text, ("kind",), registry=registry)
            for name, text in _HELP.items()
        }

    def add(self, name: str, kind: str, count: int = 1) -> None:
        """Counts something."""
        if not count:
            return
        with self._lock:
            self._totals[name, kind] += count
        if name in self._metrics:
            self._metrics[name].labels(kind).inc(count)

    def add_all(self, name: str, counts: Mapping[str, int]) -> None:
        """Counts several kinds."""
        for kind, count in counts.items():
            self.add(name, kind, count)

    def add_in_hour(self, name: str, instants_ms: Iterable[int]) -> None:
        """Counts instants by the hour they fall in."""
        for hour, count in Counter(instant // HOUR_MS for instant in instants_ms).items():
            self.add(name, str(hour), count)

    def totals(self) -> Totals:
        """A copy of all totals."""
        with self._lock:
            return self._totals.copy()

    def encoded(self) -> bytes:
        """The totals as a field of the status row."""
        return encode(self.totals())


def encode(totals: Totals) -> bytes:
    """Totals as JSON: name → kind → count."""
    nested: dict[str, dict[str, int]] = {}
    for (name, kind), count in totals.items():
        nested.setdefault(name, {})[kind] = count
    return json.dumps(nested, sort_keys=True).encode()


def decode(value: bytes) -> Totals:
    """Totals from JSON."""
    nested: dict[str, dict[str, int]] = json.loads(value)
    return Counter(
        {(name, kind): count for name, kinds in nested.items() for kind, count in kinds.items()}
    )
