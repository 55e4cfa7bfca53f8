"""Counts what was appended, by labels with few values: never a user or an ad.

Knows counters. Does not know rows.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from services.sequence.appender import Appended


class SequenceMetrics:
    """Figures of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._appended = Counter("gem_sequence_appended", "Events and outcomes that came", ("what",), registry=registry)
        for what in Appended._fields:
            self._appended.labels(what)  # a series that never counted reads 0, not absent

    def count(self, added: Appended) -> None:
        """Adds up one call."""
        for what, number in added._asdict().items():
            self._appended.labels(what).inc(number)
