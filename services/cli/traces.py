"""Reads spans that services wrote as OTLP/JSON lines and draws one request as a waterfall.

Knows the OTLP JSON encoding. Does not know what the spans mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feature_store.errors import NotFound


@dataclass(frozen=True, slots=True)
class Span:
    """One timed step of a request. Times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    failed: bool

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the waterfall: a span, how deep it lies, and when it began after the root."""

    span: Span
    depth: int
    offset_ms: float


def read_spans(folder: Path) -> Iterator[Span]:
    """Every span below a folder; a torn last line (a killed process) is skipped."""
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                exported = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield from _spans(exported)


def find_trace(folder: Path, trace_id: str) -> list[Span]:
    """Spans of one trace, by its id or the beginning of it.

    Raises:
        NotFound: no span has it, or it begins more than one trace.
    """
    spans = [span for span in read_spans(folder) if span.trace_id.startswith(trace_id.lower())]
    ids = sorted({span.trace_id for span in spans})
    if len(ids) != 1:
        found = "no trace begins" if not ids else f"{len(ids)} traces, such as {ids[:3]}, begin"
        raise NotFound(f"{found} with {trace_id!r} in {folder}; copy the id that `gemctl rank` prints")
    return spans


def waterfall(spans: list[Span]) -> list[Row]:
    """Spans as a tree, parents first, siblings by time; a span whose parent is unknown is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    origin = min(span.start_ns for span in spans)
    rows: list[Row] = []
    pending = [(span, 0) for span in reversed(children.get("", []))]
    while pending:
        span, depth = pending.pop()
        rows.append(Row(span, depth, (span.start_ns - origin) / 1e6))
        pending.extend((child, depth + 1) for child in reversed(children.get(span.span_id, [])))
    return rows


def draw(rows: list[Row], width: int = 48) -> list[str]:
    """The waterfall as lines of text, one a span."""
    total = max(row.offset_ms + row.span.milliseconds for row in rows) or 1.0
    lines = []
    for row in rows:
        start = round(row.offset_ms / total * width)
        size = max(1, round(row.span.milliseconds / total * width))
        bar = (" " * start + ("▒" if row.span.failed else "█") * size)[: width + 1]
        label = f"{'  ' * row.depth}{row.span.service} · {row.span.name}"
        lines.append(f"{label:<58.58} {bar:<{width + 1}} {row.span.milliseconds:9.2f} ms")
    return lines


def _spans(exported: dict[str, Any]) -> Iterator[Span]:
    for resource in exported.get("resourceSpans", []):
        service = _attributes(resource.get("resource", {})).get("service.name", "unknown")
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                yield _span(span, str(service))


def _span(span: dict[str, Any], service: str) -> Span:
    return Span(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        service=service,
        name=span["name"],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span),
        links=tuple(link["traceId"] for link in span.get("links", [])),
        failed=span.get("status", {}).get("code") in (2, "STATUS_CODE_ERROR"),
    )


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values()), None) for item in holder.get("attributes", [])}
