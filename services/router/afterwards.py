"""Does what an answered request leaves to do: log what was served, offer pairs for speculation, score shadow arms.

Knows two streams and two background threads. Does not know how a request was answered. Nothing here is on the path of a
request: an answer never waits for it, and what does not fit a queue is lost and counted. Shadow arms have a queue of their
own, because a slow one must not keep what was served from being logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gem.router.v1.route_table_pb2 import Arm, RouteTable
from gem.router.v1.router_service_pb2 import ServedRequest
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.errors import GemError
from services.router.asked import Asked
from services.router.background import Background
from services.router.metrics import RouterMetrics
from services.runtime import telemetry

log = logging.getLogger(__name__)

SERVED, SPECULATION = "served", "speculation"
RETRY_SECONDS = (0.05, 0.5)
"""Pauses before a failed append is tried again."""
SHADOW_CLOSE_SECONDS, LOG_CLOSE_SECONDS = 2.0, 10.0


class Appendable(Protocol):
    """The writing side of a stream."""

    def append(self, items: Sequence[bytes]) -> object:
        """Add items at the end, durably."""


class Aftermath(NamedTuple):
    """What one answered request leaves to do."""

    asked: Asked
    served: ServedRequest
    task: SpeculationTask | None
    """None for an arm without pair embeddings: it must not fill the cache that it is compared against."""
    shadows: tuple[Arm, ...]
    table: RouteTable
    """The route table the answer followed."""
    traceparent: str


class Entry(NamedTuple):
    """What is to be written for one scored request."""

    served: ServedRequest
    task: SpeculationTask | None
    traceparent: str


class Afterwards:
    """Two background threads: one writes, one scores shadow arms."""

    def __init__(
        self,
        *,
        served: Appendable,
        speculation: Appendable,
        score_shadow: Callable[[Asked, Arm, RouteTable], ServedRequest],
        metrics: RouterMetrics,
        max_waiting: int,
    ) -> None:
        self._streams = {SERVED: served, SPECULATION: speculation}
        self._score_shadow = score_shadow
        self._metrics = metrics
        self._stopping = threading.Event()
        self._log = Background(
            "log",
            self._write,
            max_waiting=max_waiting,
            max_batch=64,
            on_lost=lambda why, count: metrics.unlogged.labels(f"log_{why}").inc(count),
        )
        self._shadows = Background(
            "shadow",
            self._shadow,
            max_waiting=max(1, max_waiting // 16),
            max_batch=1,
            on_lost=lambda why, count: metrics.unlogged.labels(f"shadow_{why}").inc(count),
        )
        metrics.waiting.set_function(lambda: self._log.waiting)

    def offer(self, aftermath: Aftermath) -> None:
        """Leave it to the threads; never waits."""
        self._log.offer(Entry(aftermath.served, aftermath.task, aftermath.traceparent))
        for arm in aftermath.shadows:
            self._shadows.offer((aftermath, arm))

    def close(self) -> None:
        """Score what shadows can in 2 s, then write all that waits; what is left after 10 s is lost and counted."""
        self._shadows.close(timeout=SHADOW_CLOSE_SECONDS)
        self._log.close(timeout=LOG_CLOSE_SECONDS)
        self._stopping.set()

    def _write(self, batch: Sequence[Entry]) -> None:
        links = [link for each in batch for link in telemetry.link_to(each.traceparent)]
        with telemetry.span("router.log", root=True, links=links, answers=len(batch)):
            tasks = [each.task.SerializeToString() for each in batch if each.task is not None]
            self._append(SERVED, [each.served.SerializeToString() for each in batch])
            self._append(SPECULATION, tasks)

    def _append(self, stream: str, items: Sequence[bytes]) -> None:
        for pause in (*RETRY_SECONDS, None) if items else ():
            try:
                self._streams[stream].append(items)
                self._metrics.logged.labels(stream).inc(len(items))
                return
            except Exception:  # whatever the store raises, the thread and the requests go on
                log.exception("%d messages were not appended to %s", len(items), stream)
            if pause is None:
                self._metrics.unlogged.labels(f"{stream}_failed").inc(len(items))
            else:
                self._stopping.wait(pause)

    def _shadow(self, batch: Sequence[tuple[Aftermath, Arm]]) -> None:
        for each, arm in batch:
            links = telemetry.link_to(each.traceparent)
            with telemetry.span("router.shadow", root=True, links=links, arm=arm.name):
                try:
                    served = self._score_shadow(each.asked, arm, each.table)
                except GemError as error:
                    log.warning("shadow arm %s did not answer: %s", arm.name, error)
                    self._metrics.unlogged.labels("shadow_failed").inc()
                    continue
            self._log.offer(Entry(served, None, each.traceparent))
