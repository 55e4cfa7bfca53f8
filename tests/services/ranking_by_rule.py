"""A process that serves gem.router.v1.RankingService.Explain by the rule its `surface` names: a test's counterpart.

Knows only what the tests ask of it. Runs on services.runtime alone: `python -m tests.services.ranking_by_rule`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.errors import DeadlineExceeded, InvalidInput, NotReady, ResourceExhausted
from services.runtime import deadline, settings, telemetry
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, Service, serve

METHOD = "/gem.router.v1.RankingService/Explain"


class RankingByRule(router_service_pb2_grpc.RankingServiceServicer):
    """Answers, waits, refuses or breaks, as asked."""

    def __init__(self) -> None:
        self._rules: dict[str, Callable[[grpc.ServicerContext], int]] = {
            "answer": lambda context: 7,
            "budget": lambda context: round(1000 * deadline.budget(context, reserve=0.1)),
            "slow": lambda context: time.sleep(0.2) or 7,
            "stages": self._stages,
        }
        self._pool = ThreadPoolExecutor(4)

    def Explain(
        self, request: wire.ExplainRequest, context: grpc.ServicerContext
    ) -> wire.ExplainResponse:
        refusals = {
            "malformed": InvalidInput("surface 'x' is unknown; known: feed"),
            "loading": NotReady("weights are loading; try again"),
            "late": DeadlineExceeded("0.001 s are left; allow more"),
            "crowded": ResourceExhausted("too many; back off"),
            "bug": KeyError("a secret of ours"),
        }
        if request.surface in refusals:
            raise refusals[request.surface]
        context.set_trailing_metadata((("peer", context.peer()),))
        return wire.ExplainResponse(bucket=self._rules[request.surface](context))

    def _stages(self, context: grpc.ServicerContext) -> int:
        def read(name: str) -> int:
            with telemetry.span(f"read {name}"):
                return threading.get_ident() and 1

        with telemetry.span("fan out"):
            jobs = [self._pool.submit(telemetry.in_context(read), name) for name in ("a", "b")]
            return sum(job.result() for job in jobs)


def ranking(servicer: RankingByRule | None = None) -> Service:
    """The service, ready to register."""
    return Service(
        descriptor=wire.DESCRIPTOR.services_by_name["RankingService"],
        register=router_service_pb2_grpc.add_RankingServiceServicer_to_server,
        servicer=servicer or RankingByRule(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """Settings of the process."""

    server: ServerSettings


def _build(registry: CollectorRegistry, call_metrics: CallMetrics) -> Sequence[Service]:
    return [ranking()]


if __name__ == "__main__":
    serve(settings.load(RuleSettings, os.environ).server, _build)
