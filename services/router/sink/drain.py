"""Moves served requests from their stream into their table: at least once, and each once.

Knows claims, acknowledgements and transactions. Does not know what was served.

A batch is claimed, written in one transaction and only then acknowledged, so a sink that is killed anywhere loses nothing:
what it had claimed is claimed again. What had been written already is not written twice, because the transaction inserts
only what the table does not hold, by request, arm and time; of two sinks with the same batch, the later one's
transaction sees the earlier one's rows or fails and is tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from gem.router.v1.router_service_pb2 import ServedRequest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge

from feature_store.streams import Item, Stream
from feature_store.tables import SERVED, Tables
from services.runtime import telemetry

log = logging.getLogger(__name__)

GROUP = "sink"


class SinkMetrics:
    """Figures of one sink."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.written = Counter("gem_sink_written", "Served requests written", registry=registry)
        self.repeated = Counter(
            "gem_sink_repeated", "Served requests that the table held already", registry=registry
        )
        self.rejected = Counter(
            "gem_sink_rejected", "Messages that are no served request", registry=registry
        )
        self.failed = Counter(
            "gem_sink_failed_batches", "Batches that will be tried again", registry=registry
        )
        self.lag = Gauge(
            "gem_sink_lag", "Served requests that wait; at the stream's length the oldest are lost", registry=registry
        )


class Drain:
    """One consumer of the stream of served requests."""

    def __init__(
        self,
        stream: Stream,
        tables: Tables,
        *,
        consumer: str,
        batch: int,
        reclaim_seconds: float,
        metrics: SinkMetrics,
    ) -> None:
        self._stream = stream
        self._tables = tables
        self._consumer = consumer
        self._batch = batch
        self._reclaim_ms = round(1000 * reclaim_seconds)
        self._metrics = metrics

    def run(self, stopping: threading.Event, *, pause_seconds: float) -> None:
        """Drain until told to stop, then what is left at that moment; a failure is tried again, for ever.

        A pause after every batch that is not full lets the next one grow: a transaction and a file cost the same for
        one request as for hundreds.
        """
        while True:
            last_round = stopping.is_set()
            try:
                moved = self.once()
            except Exception:  # the store or the disk: nothing is lost, it is claimed again
                log.exception("a batch was not written")
                self._metrics.failed.inc()
                moved = 0
            if last_round and not moved:
                return
            if moved < self._batch:
                stopping.wait(pause_seconds)

    def once(self) -> int:
        """Move one batch of what is there; the number of messages that are done with.

        Raises:
            DeltaError: the transaction failed; the batch is still claimed and comes again.
        """
        claimed = self._stream.claim(
            GROUP, self._consumer, self._batch, 0, reclaim_idle_ms=self._reclaim_ms
        )
        self._metrics.lag.set(self._stream.lag(GROUP))
        if not claimed:
            return 0
        with telemetry.span("sink.write", root=True, messages=len(claimed)):
            served, rejected = self._decoded(claimed)
            inserted = insert_once(self._tables, served)
            self._stream.ack(GROUP, [item.id for item in claimed])
        self._metrics.written.inc(inserted)
        self._metrics.repeated.inc(len(served) - inserted)
        self._metrics.rejected.inc(rejected)
        return len(claimed)

    def _decoded(self, items: Sequence[Item]) -> tuple[list[ServedRequest], int]:
        served: list[ServedRequest] = []
        for item in items:
            try:
                served.append(ServedRequest.FromString(item.data))
            except DecodeError:
                log.error("message %s is no served request and is left out", item.id)
        return served, len(items) - len(served)


def insert_once(tables: Tables, served: Sequence[ServedRequest]) -> int:
    """Write in one transaction those served requests that the table lacks; their number.

    Raises:
        DeltaError: another writer was first, or the storage failed; nothing was written.
    """
    unique = {(each.request_id, each.arm, each.request_ms): each for each in served}
    if not unique:
        return 0
    table = _table(tables.path("served"))
    times = [each.request_ms for each in unique.values()]
    # Bounds as constants let the reader skip the files of other times.
    predicate = (
        f"t.event_ms >= {min(times)} AND t.event_ms <= {max(times)} AND t.event_ms = s.event_ms "
        "AND t.request_id = s.request_id AND t.arm = s.arm"
    )
    figures = (
        table.merge(_rows(list(unique.values())), predicate, source_alias="s", target_alias="t")
        .when_not_matched_insert_all()
        .execute()
    )
    return int(figures["num_target_rows_inserted"])


def _table(path: Path) -> DeltaTable:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not DeltaTable.is_deltatable(str(path)):
        try:
            DeltaTable.create(str(path), schema=SERVED, mode="ignore")
        except DeltaError as error:  # another sink made it a moment ago
            log.info("the table is there already: %s", error)
    return DeltaTable(str(path))


def _rows(served: Sequence[ServedRequest]) -> pa.Table:
    return pa.table(
        {
            "request_id": [each.request_id for each in served],
            "arm": [each.arm for each in served],
            "surface": [each.surface for each in served],
            "event_ms": [each.request_ms for each in served],
            "served": [each.SerializeToString() for each in served],
        },
        schema=SERVED,
    )
