"""Puts the parts of an annotator together: a backfill that ends, or a follower that does not.

Knows which parts there are. Does not know what they do.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import torch
from prometheus_client import CollectorRegistry

from feature_store.online import open_store
from feature_store.replay import Replay, Requests
from feature_store.spec import Spec, load_spec
from feature_store.streams import open_stream
from feature_store.tables import Tables
from model.training.published import load_foundation
from services.loopfm.follow import Follower
from services.loopfm.memory import MemoryWriter
from services.loopfm.metrics import LoopFmMetrics
from services.loopfm.records import Delay, Pinned
from services.loopfm.settings import WALL, LoopFmSettings
from services.loopfm.writer import Annotated, Annotator, Sink
from services.runtime import metrics, telemetry

log = logging.getLogger(__name__)
SERVED = "served"


class _Parts(NamedTuple):
    spec: Spec
    tables: Tables
    pinned: Pinned
    memory: MemoryWriter
    metrics: LoopFmMetrics
    delay: Delay
    space: bytes
    """Coordinate system that must be written; empty for any."""


def backfill(settings: LoopFmSettings, from_ms: int, to_ms: int) -> Annotated:
    """Annotates a stretch of the log with the artefact, and ends.

    Raises:
        GemError: the artefact does not fit, or another snapshot has annotated a part of the stretch.
    """
    with _parts(settings) as parts:
        annotator = Annotator(
            Replay(parts.spec, parts.tables),
            parts.pinned,
            parts.metrics,
            memory=parts.memory,
            requests=cast(Requests, settings.requests),
            delay=parts.delay,
            batch_requests=settings.batch_requests,
            expected_space=parts.space,
        )
        done = annotator.annotate(from_ms, to_ms)
        log.info("annotated %s", done)
        return done


def follow(settings: LoopFmSettings) -> None:
    """Annotates served requests until SIGTERM or SIGINT; the turn that was begun is ended.

    Raises:
        GemError: the artefact does not fit, or store or tables cannot be written.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with _parts(settings) as parts, open_stream(settings.store, SERVED) as stream:
        sink = Sink(
            parts.tables, parts.pinned, parts.metrics, surfaces=parts.spec.surfaces, memory=parts.memory,
            delay=parts.delay, expected_space=parts.space,
        )  # fmt: skip
        follower = Follower(
            stream, parts.spec, parts.pinned, sink, parts.metrics, consumer=settings.consumer,
            now_ms=_wall_ms if settings.clock == WALL else None, delay=parts.delay,
            batch_requests=settings.batch_requests,
        )  # fmt: skip
        log.info("following")
        follower.run(stopping, pause_seconds=settings.pause_ms / 1000.0)


@contextmanager
def _parts(settings: LoopFmSettings) -> Iterator[_Parts]:
    torch.set_num_threads(settings.torch_threads)
    spec = load_spec(settings.spec)
    pinned = Pinned.of(load_foundation(settings.foundation, spec))
    registry = CollectorRegistry()
    with ExitStack() as resources:
        resources.enter_context(telemetry.started(settings.telemetry, registry))
        resources.enter_context(metrics.exposed(registry, settings.metrics_listen))
        store = resources.enter_context(open_store(settings.store))
        width = pinned.teacher.config.compressor.dim // 2
        memory = MemoryWriter(
            store, space_id=pinned.space_id, num_objectives=len(spec.objectives), num_bytes=width
        )
        delay = Delay(median_ms=settings.delay_ms, pair_ms=settings.pair_delay_ms)
        space = bytes.fromhex(settings.loopfm_space)
        yield _Parts(spec, Tables(settings.tables), pinned, memory, LoopFmMetrics(registry), delay, space)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
