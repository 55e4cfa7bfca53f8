"""Answers the stock gRPC health protocol under the names "", "readiness" and "liveness".

Knows whether the process is ready. Does not know what made it so.
"""

from __future__ import annotations

from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse

OVERALL, READINESS, LIVENESS = "", "readiness", "liveness"


class Health:
    """State of one process: alive from the start, ready when told, never ready again once draining."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()
        self._draining = False
        self.servicer.set(LIVENESS, HealthCheckResponse.SERVING)
        self._set_ready(HealthCheckResponse.NOT_SERVING)

    def ready(self) -> None:
        """Traffic is welcome, unless the process is draining."""
        if not self._draining:
            self._set_ready(HealthCheckResponse.SERVING)

    def unready(self) -> None:
        """Traffic should go elsewhere for now."""
        self._set_ready(HealthCheckResponse.NOT_SERVING)

    def drain(self) -> None:
        """Traffic should go elsewhere for good; the process stays alive until it has answered what it took."""
        self._draining = True
        self.unready()

    def _set_ready(self, status: int) -> None:
        for name in (OVERALL, READINESS):
            self.servicer.set(name, status)
