"""Puts a router together from its settings, in the order the parts need each other.

Knows every part by its constructor. Does not know what any of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import grpc
from gem.router.v1 import router_service_pb2, router_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.layout import Layout
from feature_store.spec import Spec, load_spec
from feature_store.streams import open_stream
from services.router import policy, reading
from services.router.absent import Absent
from services.router.afterwards import SERVED, SPECULATION, Afterwards
from services.router.inference import MODEL_INFER
from services.router.metrics import RouterMetrics
from services.router.reading import connect_reader
from services.router.routes import Routes
from services.router.scoring import connect_scorer
from services.router.servicer import Ranker, RankingServicer
from services.router.settings import RouterSettings, targets_by_model
from services.runtime import client
from services.runtime.metrics import CallMetrics
from services.runtime.server import Service


def build(
    settings: RouterSettings,
    registry: CollectorRegistry,
    call_metrics: CallMetrics,
    resources: ExitStack,
) -> Sequence[Service]:
    """The router's service; what it opens is closed with `resources`, the queue of answered requests first."""
    spec = load_spec(settings.spec)
    metrics = RouterMetrics(registry)
    routes = Routes(
        settings.routes, spec, metrics=metrics, poll_seconds=settings.routes_poll_seconds
    )
    resources.callback(routes.close)
    ranker = _ranker(settings, spec, call_metrics, resources)
    served = resources.enter_context(open_stream(settings.store, SERVED))
    speculation = resources.enter_context(open_stream(settings.store, SPECULATION))
    afterwards = Afterwards(
        served=served,
        speculation=speculation,
        score_shadow=ranker.shadow,
        metrics=metrics,
        max_waiting=settings.max_waiting,
    )
    resources.callback(afterwards.close)
    servicer = RankingServicer(
        ranker, routes=routes, afterwards=afterwards, metrics=metrics, settings=settings
    )
    return [
        Service(
            descriptor=router_service_pb2.DESCRIPTOR.services_by_name["RankingService"],
            register=router_service_pb2_grpc.add_RankingServiceServicer_to_server,
            servicer=servicer,
        )
    ]


def _ranker(
    settings: RouterSettings, spec: Spec, call_metrics: CallMetrics, resources: ExitStack
) -> Ranker:
    def channel(target: str, *idempotent: str) -> grpc.Channel:
        opened = client.connect(
            target,
            limits=settings.server.limits,
            tls=settings.server.tls,
            call_metrics=call_metrics,
            idempotent=idempotent,
        )
        resources.callback(opened.close)
        return opened

    verticals = {
        model: channel(target, MODEL_INFER)
        for model, target in targets_by_model(settings.verticals).items()
    }
    return Ranker(
        spec=spec,
        chains=policy.chains({each.name: each.parent for each in spec.message.objectives}),
        reader=connect_reader(
            channel(settings.sequence, *reading.IDEMPOTENT),
            channel(settings.solaris, *reading.IDEMPOTENT),
            absent=Absent(Layout(spec), spec.surfaces),
            spec_hash=spec.hash,
        ),
        scorer=connect_scorer(verticals),
    )
