"""The serving loop of a demo: the last day's requests in time order through the running services.

Knows clients' calls. Does not know how services answer.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt
from gem.common.v1.event_pb2 import Event, Outcome
from gem.router.v1 import router_service_pb2 as messages
from gem.router.v1 import router_service_pb2_grpc
from gem.sequence.v1 import sequence_service_pb2, sequence_service_pb2_grpc
from gem.solaris.v1.solaris_service_pb2 import KnowledgeLevel
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from feature_store.asof import NEVER
from feature_store.replay import Replay
from feature_store.streams import Stream, open_stream
from services.cli.console import Console
from services.cli.processes import Ports
from services.demo.config import Days

Rows = npt.NDArray[np.int64]

LEVELS = {
    KnowledgeLevel.KNOWLEDGE_LEVEL_EXACT: "exact",
    KnowledgeLevel.KNOWLEDGE_LEVEL_AD_GROUP: "ad_group",
    KnowledgeLevel.KNOWLEDGE_LEVEL_SIMILAR_USERS: "similar_users",
    KnowledgeLevel.KNOWLEDGE_LEVEL_USER: "user",
    KnowledgeLevel.KNOWLEDGE_LEVEL_DEFAULT: "default",
}
_CALL_SECONDS = 5.0
_WINDOWS = 20
_MAX_BACKLOG = 64
"""Offered tasks that may wait before the replay does: the log's day passes in a minute here, its workers' does not."""


@dataclass(slots=True)
class Served:
    """What a replay saw."""

    requests: int = 0
    candidates: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    arms: Counter[str] = field(default_factory=Counter)
    levels: list[Counter[str]] = field(default_factory=list)
    """Candidates by level, a counter a window of requests; arms that read pair embeddings only."""
    latency_ms: list[float] = field(default_factory=list)
    """Of Rank, as the client saw it."""
    trace_ids: list[str] = field(default_factory=list)

    def coverage(self) -> dict[str, float]:
        """Share of candidates at each level."""
        return _shares(sum(self.levels, Counter()))

    def coverage_over_time(self) -> list[dict[str, float]]:
        """The same, a window at a time."""
        return [_shares(window) for window in self.levels if window]


def replay_day(
    replay: Replay, days: Days, ports: Ports, store_url: str, *, requests: int, tracer: Tracer, console: Console
) -> Served:
    """Ranks each request of the last day when it happened, then tells the sequence service what came of it."""
    examples = replay.examples(days.test_ms, days.end_ms)
    chosen = np.arange(min(requests, len(examples)))
    served = Served()
    with (
        grpc.insecure_channel(ports.router) as router,
        grpc.insecure_channel(ports.sequence) as sequence,
        open_stream(store_url, "speculation") as offered,
        console.progress("requests of the last day") as advance,
    ):
        rank = router_service_pb2_grpc.RankingServiceStub(router)
        append = sequence_service_pb2_grpc.SequenceServiceStub(sequence)
        outcomes = _Outcomes(replay)
        for done, row in enumerate(chosen):
            shown = examples.impression[examples.offsets[row] : examples.offsets[row + 1]]
            now = int(examples.request_ms[row])
            outcomes.tell(append, now)
            _rank(rank, replay, shown, now, served, tracer, window=done * _WINDOWS // len(chosen))
            append.AppendEvents(
                sequence_service_pb2.AppendEventsRequest(events=list(_events(replay, shown))), timeout=_CALL_SECONDS
            )
            outcomes.expect(shown)
            if done % 16 == 0:
                _wait_for_workers(offered)
                advance(done, len(chosen))
        advance(len(chosen), len(chosen))
    return served


def _rank(
    stub: router_service_pb2_grpc.RankingServiceStub,
    replay: Replay,
    shown: Rows,
    now: int,
    served: Served,
    tracer: Tracer,
    *,
    window: int,
) -> None:
    log = replay.impressions
    first = shown[0]
    request = messages.RankRequest(
        request_id=str(log.request_ids[log.request[first]]),
        surface=replay.spec.surfaces[log.surface[first]],
        user_id=str(log.user_key[first]),
        request_ms=now,
        candidates=[messages.Candidate(ad_id=str(ad), bid=1.0) for ad in dict.fromkeys(log.ad_key[shown].tolist())],
    )
    start = time.perf_counter()
    with tracer.start_as_current_span("request", context=Context(), kind=SpanKind.CLIENT):
        headers: dict[str, str] = {}
        propagate.inject(headers)
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        try:
            answer = stub.Rank(request, timeout=_CALL_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            served.errors[error.code().name] += 1
            return
    served.latency_ms.append((time.perf_counter() - start) * 1000)
    served.requests += 1
    served.candidates += len(answer.ads)
    served.arms[answer.arm] += 1
    served.degraded.update(messages.DegradedInput.Name(each) for each in answer.degraded)
    served.trace_ids.append(answer.trace_id)
    while len(served.levels) <= window:
        served.levels.append(Counter())
    if answer.arm == "A3":
        served.levels[window].update(LEVELS[ad.level] for ad in answer.ads)


def _events(replay: Replay, shown: Rows) -> Iterator[Event]:
    log = replay.impressions
    for i in shown.tolist():
        yield Event(
            event_id=bytes(log.example_id[i]).hex(),
            source="impression",
            user_id=str(log.user_key[i]),
            ad_id=str(log.ad_key[i]),
            surface=replay.spec.surfaces[log.surface[i]],
            request_id=str(log.request_ids[log.request[i]]),
            event_ms=int(log.event_ms[i]),
        )


class _Outcomes:
    """Outcomes of served requests, told when they become known."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._waiting: list[tuple[int, int, int]] = []

    def expect(self, shown: Rows) -> None:
        """Outcomes that these impressions will have."""
        known = self._replay.impressions.label_ms[shown]
        for at, k in zip(*np.nonzero(known != NEVER), strict=True):
            heapq.heappush(self._waiting, (int(known[at, k]), int(shown[at]), int(k)))

    def tell(self, stub: sequence_service_pb2_grpc.SequenceServiceStub, now: int) -> None:
        """Those known by now."""
        log, spec, due = self._replay.impressions, self._replay.spec, []
        while self._waiting and self._waiting[0][0] <= now:
            known, i, k = heapq.heappop(self._waiting)
            due.append(
                Outcome(
                    example_id=bytes(log.example_id[i]),
                    user_id=str(log.user_key[i]),
                    objective=spec.objectives[k],
                    occurred_ms=known,
                    value=1.0,
                )
            )
        if due:
            stub.AppendEvents(sequence_service_pb2.AppendEventsRequest(outcomes=due), timeout=_CALL_SECONDS)


def _wait_for_workers(offered: Stream, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while offered.lag("solaris") > _MAX_BACKLOG and time.monotonic() < deadline:
        time.sleep(0.02)


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = sum(counts.values()) or 1
    return {level: counts[level] / total for level in LEVELS.values()}

