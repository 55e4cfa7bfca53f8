"""Follows one request through every process: traces, and the context that ties them together.

Knows spans, propagation and where spans go. Does not know what any service does.

A process starts telemetry once, after any fork. W3C and B3 headers are both understood, and both sent on, so that a
service mesh of either kind joins the trace. Spans go to the collector named by OTEL_EXPORTER_OTLP_ENDPOINT, else to the
file named by GEM_TRACE_FILE, else nowhere (ids are still made and passed on).
"""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from opentelemetry import propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.b3 import B3MultiFormat
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

from feature_store.errors import GemError
from services.runtime.spans import BoundedSpanProcessor, FileSpanExporter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Attribute = str | int | float | bool | Sequence[str] | Sequence[int]

EXPORT_SECONDS = 2.0
"""A collector that takes longer loses the batch; it only ever delays the exporting thread."""
SHUTDOWN_SECONDS = 2.5

_PROPAGATOR = CompositePropagator(
    # Later ones win where headers disagree: W3C is the platform's own.
    [W3CBaggagePropagator(), B3MultiFormat(), TraceContextTextMapPropagator()]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetrySettings:
    """Where spans go and how many."""

    service_name: str = field(default="gem", metadata={"env": "OTEL_SERVICE_NAME"})
    otlp_endpoint: str | None = field(default=None, metadata={"env": "OTEL_EXPORTER_OTLP_ENDPOINT"})
    """gRPC endpoint of a collector, such as http://collector:4317."""
    trace_file: Path | None = None
    """File of OTLP/JSON lines, used when there is no collector."""
    sample_ratio: float = field(default=1.0, metadata={"env": "OTEL_TRACES_SAMPLER_ARG"})
    """Share of traces begun here that is recorded; a trace begun elsewhere keeps its own decision."""
    max_queue_spans: int = field(default=4_096, metadata={"env": "OTEL_BSP_MAX_QUEUE_SIZE"})
    """Spans waiting for the exporter; more are dropped and counted."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio is {self.sample_ratio}; it must lie in [0, 1]")
        if self.max_queue_spans < 1:
            raise ValueError(f"max_queue_spans is {self.max_queue_spans}; it must be at least 1")


@contextmanager
def started(settings: TelemetrySettings, registry: CollectorRegistry) -> Iterator[TracerProvider]:
    """Tracing for the life of a process; on leaving, what is queued is delivered within 3 s or dropped."""
    provider = start(settings, registry)
    try:
        yield provider
    finally:
        provider.shutdown()


def start(settings: TelemetrySettings, registry: CollectorRegistry) -> TracerProvider:
    """Make this process a part of traces; once per process, after any fork."""
    provider = build_provider(settings, registry)
    propagate.set_global_textmap(_PROPAGATOR)
    trace.set_tracer_provider(provider)
    return provider


def build_provider(settings: TelemetrySettings, registry: CollectorRegistry) -> TracerProvider:
    """The provider that settings describe, installed nowhere."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": settings.service_name}),
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        shutdown_on_exit=False,
    )
    dropped = Counter(
        "gem_spans_dropped", "Spans that reached neither collector nor file", registry=registry
    )
    exporter = _exporter(settings)
    if exporter is not None:
        provider.add_span_processor(
            BoundedSpanProcessor(
                exporter,
                on_drop=dropped.inc,
                max_queue_spans=settings.max_queue_spans,
                shutdown_seconds=SHUTDOWN_SECONDS,
            )
        )
    return provider


def _exporter(settings: TelemetrySettings) -> SpanExporter | None:
    if settings.otlp_endpoint:
        return OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=EXPORT_SECONDS)
    if settings.trace_file:
        return FileSpanExporter(settings.trace_file)
    return None


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] = (),
    root: bool = False,
    **attributes: Attribute,
) -> Iterator[Span]:
    """A step of the current trace, or with `root` the first of a new one.

    An attribute `surface` is written as `gem.surface`; a name with a dot is written as it is.
    An error of the domain is written to the span by its reason, any other by its type; both go on.
    """
    tracer = trace.get_tracer("gem")
    context = trace.set_span_in_context(trace.INVALID_SPAN) if root else None
    with tracer.start_as_current_span(
        name,
        context=context,
        kind=kind,
        links=links,
        attributes=_named(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            mark_failed(current, error)
            raise


def describe(**attributes: Attribute) -> None:
    """Write attributes on the current span, named as `span` names them."""
    trace.get_current_span().set_attributes(_named(attributes))


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {name if "." in name else f"gem.{name}": value for name, value in attributes.items()}


def mark_failed(current: Span, error: BaseException) -> None:
    """Write what went wrong on a span: a stable reason, never a message that may hold an id."""
    reason = error.reason if isinstance(error, GemError) else type(error).__name__
    current.set_attribute("error.type", reason)
    current.set_status(Status(StatusCode.ERROR, reason))


def in_context(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, bound to the trace that is current now, for a pool's thread to run."""
    context = contextvars.copy_context()

    def carried(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return context.copy().run(function, *args, **kwargs)

    return carried


def traceparent() -> str:
    """The current span as a W3C header, for a message that outlives the request; empty outside a trace."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def link_to(traceparent_header: str, **attributes: Attribute) -> tuple[Link, ...]:
    """A link to the span that a message came from; none if the header is empty or malformed."""
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent_header})
    origin = trace.get_current_span(context).get_span_context()
    return (Link(origin, _named(attributes)),) if origin.is_valid else ()


def trace_id() -> str:
    """The current trace's id in hex; empty outside a trace."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def hashed(user_id: str) -> str:
    """A user id as spans may show it: stable, so that one user's requests can be found, but not the id."""
    return hashlib.blake2b(user_id.encode(), digest_size=8, person=b"gem.user").hexdigest()
