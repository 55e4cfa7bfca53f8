"""Does what an answered request leaves to do: log what was served, score shadow arms, offer pairs for speculation.

Knows two streams, a bounded queue and one thread. Does not know how a request was answered. Nothing here is on the path
of a request: what does not fit the queue is dropped and counted, and an answer never waits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gem.router.v1.route_table_pb2 import Arm, RouteTable
from gem.router.v1.router_service_pb2 import ServedRequest
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.errors import GemError
from services.router.asked import Asked
from services.router.metrics import RouterMetrics
from services.runtime import telemetry

log = logging.getLogger(__name__)

SERVED, SPECULATION = "served", "speculation"
MAX_BATCH = 64


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


class Afterwards:
    """One thread that works through aftermaths in batches."""

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
        self._queue: queue.Queue[Aftermath] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        metrics.waiting.set_function(self._queue.qsize)
        self._worker = threading.Thread(target=self._work, name="afterwards", daemon=True)
        self._worker.start()

    def offer(self, aftermath: Aftermath) -> bool:
        """Queue it, or drop and count it; never waits."""
        try:
            self._queue.put_nowait(aftermath)
        except queue.Full:
            self._metrics.unlogged.labels("queue_full").inc()
            return False
        return True

    def close(self, *, timeout: float = 10.0) -> None:
        """Work through what waits; what is left after `timeout` seconds is dropped and counted."""
        self._closing.set()
        self._worker.join(timeout)
        self._metrics.unlogged.labels("stopped").inc(self._queue.qsize())

    def _work(self) -> None:
        while batch := self._next():
            try:
                self._log(batch)
                self._run_shadows(batch)
            except Exception:  # a bug costs its batch, not the thread
                log.exception("a batch of %d answers was not worked through", len(batch))
                self._metrics.unlogged.labels("bug").inc(len(batch))

    def _next(self) -> list[Aftermath]:
        """Up to a batch of what waits; empty only when closing and nothing is left."""
        while True:
            try:
                batch = [self._queue.get(timeout=0.05)]
            except queue.Empty:
                if self._closing.is_set():
                    return []
                continue
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            return batch

    def _log(self, batch: Sequence[Aftermath]) -> None:
        tasks = [each.task.SerializeToString() for each in batch if each.task is not None]
        links = [link for each in batch for link in telemetry.link_to(each.traceparent)]
        with telemetry.span("router.log", root=True, links=links, answers=len(batch)):
            self._append(SERVED, [each.served.SerializeToString() for each in batch])
            self._append(SPECULATION, tasks)

    def _append(self, stream: str, items: Sequence[bytes]) -> None:
        if not items:
            return
        for pause in (0.05, 0.5, None):
            try:
                self._streams[stream].append(items)
                self._metrics.logged.labels(stream).inc(len(items))
                return
            except Exception:  # whatever the store raises, the thread and the requests go on
                log.exception("%d messages were not appended to %s", len(items), stream)
                if pause is None:
                    self._metrics.unlogged.labels(f"{stream}_failed").inc(len(items))
                else:
                    time.sleep(pause)

    def _run_shadows(self, batch: Sequence[Aftermath]) -> None:
        for each in batch:
            for arm in each.shadows:
                links = telemetry.link_to(each.traceparent)
                with telemetry.span("router.shadow", root=True, links=links, arm=arm.name):
                    self._shadow(each, arm)

    def _shadow(self, each: Aftermath, arm: Arm) -> None:
        try:
            served = self._score_shadow(each.asked, arm, each.table)
        except GemError as error:
            log.warning("shadow arm %s did not answer: %s", arm.name, error)
            self._metrics.unlogged.labels("shadow_failed").inc()
            return
        self._append(SERVED, [served.SerializeToString()])
