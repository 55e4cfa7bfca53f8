"""Puts the parts of a worker together.

Knows which parts there are. Does not know what they do.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import ExitStack

import torch
from gem.sequence.v1.sequence_service_pb2_grpc import SequenceServiceStub
from prometheus_client import CollectorRegistry

from feature_store.online import open_store
from feature_store.spec import Spec, load_spec
from feature_store.streams import open_stream
from feature_store.tables import Tables
from services.runtime import client, metrics, telemetry
from services.runtime.metrics import CallMetrics
from services.solaris.keys import keys_of
from services.solaris.ledger import Ledger
from services.solaris.lifetimes import SPECULATION, Lifetimes
from services.solaris.settings import REQUEST, WorkerProcessSettings
from services.solaris.worker.changes import DeltaChangeLog
from services.solaris.worker.clock import Clock, RequestClock, WallClock
from services.solaris.worker.embedder import load_embedder
from services.solaris.worker.loop import Worker, WorkerSettings
from services.solaris.worker.states import SequenceStates
from services.solaris.writer import PairWriter, WideRowStore

log = logging.getLogger(__name__)


def run(settings: WorkerProcessSettings) -> None:
    """Works until SIGTERM or SIGINT: the turn that has begun is finished, the rest is left to others.

    Raises:
        GemError: the artefact is not what was published, or is of another spec.
    """
    torch.set_num_threads(settings.torch_threads)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    registry = CollectorRegistry()
    with ExitStack() as resources:
        resources.enter_context(telemetry.started(settings.telemetry, registry))
        resources.enter_context(metrics.exposed(registry, settings.metrics_listen))
        store = resources.enter_context(open_store(settings.store))
        worker = build_worker(settings, store, registry, resources)
        log.info("working")
        worker.run(stopping, store=store)


def build_worker(
    settings: WorkerProcessSettings,
    store: WideRowStore,
    registry: CollectorRegistry,
    resources: ExitStack,
) -> Worker:
    """A worker over a store, a stream, the sequence service and an artefact."""
    spec = load_spec(settings.spec)
    embedder = load_embedder(settings.foundation, spec)
    lifetimes = Lifetimes().stretched(settings.lifetime_factor)
    return Worker(
        resources.enter_context(open_stream(settings.store, SPECULATION)),
        _states(settings, spec, CallMetrics(registry), resources),
        embedder,
        PairWriter(store, lifetimes, space_id=embedder.space_id, dim=embedder.dim),
        DeltaChangeLog(Tables(settings.tables)),
        Ledger(registry),
        settings=WorkerSettings(
            consumer=settings.consumer,
            batch_tasks=settings.batch_tasks,
            pause_ms=settings.pause_ms,
            max_backlog_tasks=settings.max_backlog_tasks,
        ),
        clock=clock_of(settings),
        keys=keys_of(spec),
        surfaces=spec.surfaces,
    )


def clock_of(settings: WorkerProcessSettings) -> Clock:
    """The clock that settings name."""
    if settings.clock == REQUEST:
        return RequestClock(lag_ms=settings.lag_ms)
    return WallClock(read_ms=lambda: time.time_ns() // 1_000_000)


def _states(
    settings: WorkerProcessSettings, spec: Spec, call_metrics: CallMetrics, resources: ExitStack
) -> SequenceStates:
    channel = client.connect(
        settings.sequence,
        limits=settings.limits,
        tls=settings.tls,
        call_metrics=call_metrics,
        idempotent=["/gem.sequence.v1.SequenceService/GetUserState"],
    )
    resources.callback(channel.close)
    return SequenceStates(SequenceServiceStub(channel), spec_hash=spec.hash)
