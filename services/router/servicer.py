"""Ranks a request: check → route → read → score → order → answer, and leave the rest for afterwards.

Knows the order of the steps and how much of the caller's time each may take. Does not know how any step is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from gem.router.v1.route_table_pb2 import Arm, RouteTable, SurfaceRoutes
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.ids import key_of
from feature_store.spec import Spec
from feature_store.wire import pack_tensor
from services.router import asked as edge
from services.router import policy
from services.router.afterwards import Aftermath, Afterwards
from services.router.asked import Asked
from services.router.metrics import RouterMetrics
from services.router.policy import Chains, Ranking, Route
from services.router.reading import Inputs, Reader
from services.router.routes import Routes
from services.router.scoring import Scored, Scorer
from services.router.settings import RouterSettings
from services.runtime import telemetry
from services.runtime.deadline import Deadlined, budget

SHADOW_SECONDS = 2.0
"""Each of a shadow arm's two steps may take this long: nobody waits for it."""
LEVELS = ("exact", "ad_group", "similar_users", "user", "default")


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranker:
    """What it takes to turn a checked request into values; shared by served and shadow arms."""

    spec: Spec
    chains: Chains
    reader: Reader
    scorer: Scorer

    def rank(self, asked: Asked, routes: SurfaceRoutes, scored: Scored) -> Ranking:
        """Candidates in order of value; those whose score the model replaced are flagged."""
        ranking = policy.rank(
            scored.answer.probabilities,
            ad_ids=asked.ad_ids,
            bids=asked.bids,
            weights=routes.value_weights,
            chains=self.chains,
        )
        return ranking._replace(fallback=ranking.fallback | scored.answer.fallback)

    def needed(self, routes: SurfaceRoutes) -> list[str]:
        """Objectives without which no value can be computed."""
        return sorted({link for name in routes.value_weights for link in self.chains[name]})

    def shadow(self, asked: Asked, arm: Arm, table: RouteTable) -> wire.ServedRequest:
        """What a shadow arm would have served.

        Raises:
            GemError: its model cannot answer.
        """
        routes = table.surfaces[asked.surface]
        inputs = self.reader.read(asked, arm, timeout=SHADOW_SECONDS)
        answer = self.scorer.score(
            arm,
            inputs,
            request_id=asked.request_id,
            needed=self.needed(routes),
            timeout=SHADOW_SECONDS,
        )
        scored = Scored(arm, inputs, answer)
        ranking = self.rank(asked, routes, scored)
        return served_request(asked, scored, ranking, table.version, self.spec, shadow=True)


class RankingServicer(router_service_pb2_grpc.RankingServiceServicer):
    """gem.router.v1.RankingService."""

    def __init__(
        self,
        ranker: Ranker,
        *,
        routes: Routes,
        afterwards: Afterwards,
        metrics: RouterMetrics,
        settings: RouterSettings,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._ranker = ranker
        self._routes = routes
        self._afterwards = afterwards
        self._metrics = metrics
        self._settings = settings
        self._clock_ms = clock_ms

    def Rank(self, request: wire.RankRequest, context: grpc.ServicerContext) -> wire.RankResponse:
        """Scores candidates and orders them by value."""
        limits = self._settings.server.limits
        asked = edge.checked(
            request, spec=self._ranker.spec, limits=limits, clock_ms=self._clock_ms
        )
        table = self._routes.table
        routes = self._routes.of(table, asked.surface)
        route = policy.choose(routes, asked.user_key)
        _describe(asked, route)
        if not asked.ad_ids:
            return wire.RankResponse(
                request_id=asked.request_id,
                arm=route.arm.name,
                route_version=table.version,
                trace_id=telemetry.trace_id(),
            )
        inputs = self._read(asked, route, context)
        scored = self._score(asked, routes, route, inputs, context)
        ranking = self._ranker.rank(asked, routes, scored)
        self._count(asked, scored, ranking)
        self._leave(asked, routes, route, scored, ranking, table)
        return _response(asked, scored, ranking, table.version)

    def Explain(
        self, request: wire.ExplainRequest, context: grpc.ServicerContext
    ) -> wire.ExplainResponse:
        """Says how a user would be routed, without scoring."""
        spec, table = self._ranker.spec, self._routes.table
        if request.surface not in spec.surfaces:
            raise edge.unknown_surface(request.surface, spec)
        self._settings.server.limits.check_id(request.user_id, what="user id")
        routes = self._routes.of(table, request.surface)
        route = policy.choose(routes, key_of(request.user_id, spec.id_type("user")))
        return wire.ExplainResponse(
            bucket=route.bucket,
            arm=route.arm,
            shadows=route.shadows,
            route_version=table.version,
            value_weights=routes.value_weights,
        )

    def _read(self, asked: Asked, route: Route, context: Deadlined) -> Inputs:
        seconds = budget(context, reserve=self._settings.reserve_seconds)
        with telemetry.span("router.read"):
            return self._ranker.reader.read(
                asked, route.arm, timeout=seconds * self._settings.read_share
            )

    def _score(
        self,
        asked: Asked,
        routes: SurfaceRoutes,
        route: Route,
        inputs: Inputs,
        context: Deadlined,
    ) -> Scored:
        def choices() -> Iterator[tuple[Arm, Inputs]]:
            yield route.arm, inputs
            if route.fallback is not None:
                yield (
                    route.fallback,
                    self._ranker.reader.for_other_arm(
                        inputs, asked, read_for=route.arm, arm=route.fallback
                    ),
                )

        def timeout(arm: Arm) -> float:
            seconds = budget(context, reserve=self._settings.reserve_seconds)
            first_of_two = route.fallback is not None and arm is route.arm
            return seconds * (self._settings.first_score_share if first_of_two else 1.0)

        with telemetry.span("router.score"):
            return self._ranker.scorer.score_first(
                choices(),
                request_id=asked.request_id,
                needed=self._ranker.needed(routes),
                timeout=timeout,
            )

    def _count(self, asked: Asked, scored: Scored, ranking: Ranking) -> None:
        self._metrics.served.labels(asked.surface, scored.arm.name).inc()
        for each in scored.inputs.degraded:
            name = wire.DegradedInput.Name(each).removeprefix("DEGRADED_INPUT_").lower()
            self._metrics.degraded.labels(name).inc()
        for level, count in enumerate(np.bincount(scored.inputs.levels, minlength=len(LEVELS))):
            if count:
                self._metrics.candidates.labels(asked.surface, LEVELS[level]).inc(int(count))
        if ranking.fallback.any():
            model = scored.arm.model
            self._metrics.fallback_scores.labels(model).inc(int(ranking.fallback.sum()))

    def _leave(
        self,
        asked: Asked,
        routes: SurfaceRoutes,
        route: Route,
        scored: Scored,
        ranking: Ranking,
        table: RouteTable,
    ) -> None:
        traceparent = telemetry.traceparent()
        task = None
        if route.arm.solaris:
            expires_ms = asked.request_ms + round(1000 * self._settings.speculation_seconds)
            task = speculation_task(asked, routes, ranking, traceparent, expires_ms=expires_ms)
        served = served_request(asked, scored, ranking, table.version, self._ranker.spec)
        self._afterwards.offer(Aftermath(asked, served, task, route.shadows, table, traceparent))


def served_request(
    asked: Asked,
    scored: Scored,
    ranking: Ranking,
    route_version: int,
    spec: Spec,
    *,
    shadow: bool = False,
) -> wire.ServedRequest:
    """What was served, with the bytes it was served from."""
    return wire.ServedRequest(
        request_id=asked.request_id,
        surface=asked.surface,
        user_id=asked.user_id,
        request_ms=asked.request_ms,
        ad_ids=asked.ad_ids,
        tensors=scored.inputs.tensors,
        probabilities={k: pack_tensor(v) for k, v in scored.answer.probabilities.items()},
        values=ranking.values.tolist(),
        arm=scored.arm.name,
        model_version=scored.answer.model_version,
        route_version=route_version,
        degraded=sorted(scored.inputs.degraded),
        spec_hash=spec.hash,
        shadow=shadow,
    )


def speculation_task(
    asked: Asked, routes: SurfaceRoutes, ranking: Ranking, traceparent: str, *, expires_ms: int
) -> SpeculationTask:
    """The best candidates, for computing ahead of the user's next request."""
    best = ranking.order[: routes.speculation_top or policy.DEFAULT_SPECULATION_TOP]
    return SpeculationTask(
        request_id=asked.request_id,
        user_id=asked.user_id,
        surface=asked.surface,
        request_ms=asked.request_ms,
        ad_ids=[asked.ad_ids[index] for index in best],
        scores=ranking.values[best].tolist(),
        context=asked.context,
        traceparent=traceparent,
        expires_ms=expires_ms,
    )


def _describe(asked: Asked, route: Route) -> None:
    telemetry.describe(
        request_id=asked.request_id,
        surface=asked.surface,
        arm=route.arm.name,
        candidates=len(asked.ad_ids),
        user=telemetry.hashed(asked.user_id),
    )


def _response(
    asked: Asked, scored: Scored, ranking: Ranking, route_version: int
) -> wire.RankResponse:
    response = wire.RankResponse(
        request_id=asked.request_id,
        degraded=sorted(scored.inputs.degraded),
        arm=scored.arm.name,
        model_version=scored.answer.model_version,
        route_version=route_version,
        trace_id=telemetry.trace_id(),
    )
    _add_ads(response, asked, scored, ranking)
    return response


def _add_ads(response: wire.RankResponse, asked: Asked, scored: Scored, ranking: Ranking) -> None:
    """The best candidates in order; probabilities that are no numbers are left out, for JSON has none for them.

    Fields are set one by one: a thousand ads made from keywords and dictionaries took four times as long.
    """
    chances = {name: column.tolist() for name, column in scored.answer.probabilities.items()}
    values, fallback = ranking.values.tolist(), ranking.fallback.tolist()
    levels = (scored.inputs.levels + 1).tolist()
    for index in ranking.order[: asked.top_count].tolist():
        ad = response.ads.add()
        ad.ad_id, ad.value, ad.level = asked.ad_ids[index], values[index], levels[index]
        ad.fallback, ad.candidate_index = fallback[index], index
        probabilities = ad.probabilities
        for name, column in chances.items():
            if math.isfinite(column[index]):
                probabilities[name] = column[index]
