"""Carries finished spans to a file or a collector without ever making a request wait.

Knows queues and encodings. Does not know what a span is about.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.context import Context, attach, detach, set_value
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

SUPPRESS_INSTRUMENTATION = "suppress_instrumentation"
"""Context key by which the instrumentation library leaves the exporter's own calls untraced."""


class BoundedSpanProcessor(SpanProcessor):
    """Hands spans to an exporter from one background thread, through a queue that never blocks and never grows.

    The SDK's own batch processor waits up to 30 s for a dead collector at shutdown and counts nothing it drops; this
    one stops within `shutdown_seconds` and reports every span it could not deliver to `on_drop`.
    A forked child starts with an empty queue and a thread of its own.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        on_drop: Callable[[int], None],
        max_queue_spans: int = 4_096,
        max_batch_spans: int = 256,
        delay_seconds: float = 0.2,
        shutdown_seconds: float = 3.0,
    ) -> None:
        self._exporter = exporter
        self._on_drop = on_drop
        self._max_queue_spans = max_queue_spans
        self._max_batch_spans = max_batch_spans
        self._delay_seconds = delay_seconds
        self._shutdown_seconds = shutdown_seconds
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._queue: queue.Queue[ReadableSpan] = queue.Queue(self._max_queue_spans)
        self._stopping = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._worker = threading.Thread(target=self._work, name="spans", daemon=True)
        self._worker.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing happens until a span ends."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, or count it as dropped; never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._stopping.is_set():
            self._on_drop(1)
            return
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._on_drop(1)

    def force_flush(self, timeout_millis: int = 3_000) -> bool:
        """Wait until all that was queued has been handed over; False if that took too long."""
        deadline = time.monotonic() + timeout_millis / 1000
        while not (self._queue.empty() and self._idle.is_set()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def shutdown(self) -> None:
        """Hand over what is queued, within the time allowed; drop and count the rest."""
        self._stopping.set()
        self._worker.join(self._shutdown_seconds)
        self._exporter.shutdown()
        left = 0
        while not self._queue.empty():
            self._queue.get_nowait()
            left += 1
        if left:
            self._on_drop(left)

    def _work(self) -> None:
        token = attach(set_value(SUPPRESS_INSTRUMENTATION, True))
        give_up = float("inf")
        while time.monotonic() < give_up:
            if self._stopping.is_set() and give_up == float("inf"):
                give_up = time.monotonic() + self._shutdown_seconds
            batch = self._next_batch()
            if batch:
                self._export(batch)
            elif self._stopping.is_set():
                break
        detach(token)

    def _next_batch(self) -> list[ReadableSpan]:
        self._stopping.wait(self._delay_seconds)
        self._idle.clear()
        batch: list[ReadableSpan] = []
        while len(batch) < self._max_batch_spans and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        if not batch:
            self._idle.set()
        return batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            result = self._exporter.export(batch)
        except Exception:  # an exporter's bug must not end the thread that serves it
            log.warning("spans were not exported", exc_info=True)
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._on_drop(len(batch))


class FileSpanExporter(SpanExporter):
    """Appends OTLP/JSON lines to a file: one ExportTraceServiceRequest a line, as a collector's file exporter writes.

    A line is one write to a file opened for appending, so several processes may share the file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line; a full disk or a lost folder fails the batch, not the process."""
        line = json.dumps(as_otlp_json(spans), separators=(",", ":")) + "\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            log.warning("spans were not written to %s: %s", self._path, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open between writes."""


def as_otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans in OTLP's JSON form, where ids are hex and enums are numbers."""
    message = json_format.MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                _hexadecimal(span)
                for link in span.get("links", ()):
                    _hexadecimal(link)
    return message


def _hexadecimal(fields: dict[str, Any]) -> None:
    for name in ("traceId", "spanId", "parentSpanId"):
        if name in fields:
            fields[name] = base64.b64decode(fields[name]).hex()
