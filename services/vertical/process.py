"""Puts the parts of a vertical process together.

Knows which parts there are. Does not know what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from prometheus_client import REGISTRY

from feature_store.spec import Spec, load_spec
from services.runtime import metrics, telemetry
from services.runtime.metrics import CallMetrics
from services.vertical.grpc_server import GrpcSettings
from services.vertical.loading import Pins, load_scorer
from services.vertical.predictor import Scorer, ScoringMetrics, Vertical, Workplace
from services.vertical.server import VerticalServer, VerticalServerSettings
from services.vertical.settings import ModelSource, VerticalSettings, sources


def run(settings: VerticalSettings) -> None:
    """Serves until SIGTERM or SIGINT; call it from the main thread.

    Raises:
        GemError: no model could be loaded.
        OSError: an address is taken.
    """
    torch.set_num_threads(settings.torch_threads)
    spec = load_spec(settings.spec)
    # KServe's REST server shows the default registry: ours is the same one.
    with (
        telemetry.started(settings.telemetry, REGISTRY),
        metrics.exposed(REGISTRY, settings.metrics_listen),
        ThreadPoolExecutor(settings.forwards, thread_name_prefix="forward") as pool,
    ):
        workplace = Workplace(
            pool=pool, metrics=ScoringMetrics(REGISTRY), max_in_flight=settings.max_in_flight
        )
        models = [
            Vertical(source.name, loader(source, spec, settings), workplace)
            for source in sources(settings.models)
        ]
        VerticalServer(_server_settings(settings)).start(models)


def loader(source: ModelSource, spec: Spec, settings: VerticalSettings) -> Callable[[], Scorer]:
    """What loads and proves one artefact."""
    pins = Pins(
        loopfm_space=bytes.fromhex(settings.loopfm_space),
        solaris_space=bytes.fromhex(settings.solaris_space),
    )
    return partial(
        load_scorer, source.folder, spec, pins, max_candidates=settings.limits.max_candidates
    )


def _server_settings(settings: VerticalSettings) -> VerticalServerSettings:
    return VerticalServerSettings(
        grpc=GrpcSettings(
            listen=settings.listen,
            limits=settings.limits,
            tls=settings.tls,
            grace_seconds=settings.grace_seconds,
        ),
        http_listen=settings.http_listen,
        drain_seconds=settings.drain_seconds,
        call_metrics=CallMetrics(REGISTRY),
    )
