"""Counts what the annotator does.

Knows names and labels. Does not know models.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

ANNOTATION, LOOPFM = "annotation", "loopfm"
"""Purposes of a forward of the foundation model; the second stays 0: the representation comes from the first one's."""


class LoopFmMetrics:
    """Counters of a process; labels are purposes and reasons only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.forwards = Counter(
            "gem_loopfm_fm_forward", "Forwards of the foundation model", ("purpose",), registry=registry
        )
        for purpose in (ANNOTATION, LOOPFM):
            self.forwards.labels(purpose)
        self.rows = Counter("gem_loopfm_rows", "Impressions annotated", registry=registry)
        self.skipped = Counter("gem_loopfm_skipped", "Impressions that were not annotated", ("reason",), registry=registry)
        self.memory_rows = Counter("gem_loopfm_memory_rows", "Users whose memory was written", registry=registry)
        self.lag = Gauge(
            "gem_loopfm_lag", "Served requests that wait; at the stream's length the oldest are lost", registry=registry
        )
