"""Counts what the router did, by labels with few values: never a user, an ad or a request.

Knows counters. Does not know why anything happened.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class RouterMetrics:
    """Figures of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.degraded = Counter(
            "gem_degraded", "Answers given without an input", ("input",), registry=registry
        )
        self.candidates = Counter(
            "gem_candidates",
            "Candidates ranked, by where their pair embedding came from",
            ("surface", "level"),
            registry=registry,
        )
        self.fallback_scores = Counter(
            "gem_fallback_scores",
            "Candidates without a usable score",
            ("model",),
            registry=registry,
        )
        self.served = Counter("gem_served", "Answers by arm", ("surface", "arm"), registry=registry)
        self.route_version = Gauge(
            "gem_route_version", "Version of the route table in use", registry=registry
        )
        self.bad_routes = Counter(
            "gem_bad_route_tables", "Route tables that were refused", registry=registry
        )
        self.logged = Counter(
            "gem_logged", "Messages appended to a stream", ("stream",), registry=registry
        )
        self.unlogged = Counter(
            "gem_unlogged",
            "Answers that were not logged or not offered, by reason",
            ("reason",),
            registry=registry,
        )
        self.waiting = Gauge(
            "gem_waiting_answers", "Answers whose logging waits", registry=registry
        )
