from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from services.runtime import client, telemetry
from services.runtime.limits import Limits
from services.runtime.spans import BoundedSpanProcessor, FileSpanExporter
from services.runtime.telemetry import TelemetrySettings
from tests.integration.processes import Process, Processes, free_port, processes

SERVER = "tests.services.ranking_by_rule"
Spans = list[dict[str, Any]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as group:
        yield group


def explain(process: Process, rule: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
    with grpc.insecure_channel(process.address) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        stub.Explain(wire.ExplainRequest(surface=rule), timeout=5.0, metadata=list(metadata))


def spans_of(path: Path) -> Spans:
    found: Spans = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            found += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
    return found


def test_a_hundred_requests_at_once_make_a_hundred_traces_with_the_right_parents(
    started: Processes, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.jsonl"
    server = started.start(SERVER, {"GEM_TRACE_FILE": str(traces), "GEM_DRAIN_SECONDS": "0"})
    server.wait_ready()
    parents = {f"{n + 1:032x}": f"{n + 1:016x}" for n in range(100)}
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(20) as pool:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)

        def ask(ids: tuple[str, str]) -> int:
            header = [("traceparent", f"00-{ids[0]}-{ids[1]}-01")]
            request = wire.ExplainRequest(surface="stages")
            return int(stub.Explain(request, timeout=10.0, metadata=header).bucket)

        assert list(pool.map(ask, parents.items())) == [2] * 100
    assert server.terminate() == 0
    by_trace: dict[str, Spans] = defaultdict(list)
    for span in spans_of(traces):
        by_trace[span["traceId"]].append(span)
    assert set(by_trace) == set(parents)
    for trace_id, spans in by_trace.items():
        ids = {span["name"]: span["spanId"] for span in spans}
        above = {span["name"]: span["parentSpanId"] for span in spans}
        assert above == {
            "/gem.router.v1.RankingService/Explain": parents[trace_id],
            "fan out": ids["/gem.router.v1.RankingService/Explain"],
            "read a": ids["fan out"],
            "read b": ids["fan out"],
        }


def test_b3_headers_join_a_trace_and_malformed_headers_begin_one(
    started: Processes, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.jsonl"
    server = started.start(SERVER, {"GEM_TRACE_FILE": str(traces), "GEM_DRAIN_SECONDS": "0"})
    server.wait_ready()
    b3 = [("x-b3-traceid", "ab" * 16), ("x-b3-spanid", "cd" * 8), ("x-b3-sampled", "1")]
    explain(server, "answer", b3)
    explain(server, "answer", [("traceparent", "00-nonsense-01"), ("b3", "-")])
    both = [*b3, ("traceparent", f"00-{'12' * 16}-{'34' * 8}-01")]
    explain(server, "answer", both)
    assert server.terminate() == 0
    joined, begun, w3c = sorted(spans_of(traces), key=lambda span: int(span["startTimeUnixNano"]))
    assert (joined["traceId"], joined["parentSpanId"]) == ("ab" * 16, "cd" * 8)
    assert "parentSpanId" not in begun
    assert (w3c["traceId"], w3c["parentSpanId"]) == ("12" * 16, "34" * 8)


def test_a_refusal_is_on_the_span_by_its_reason_without_its_message(
    started: Processes, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.jsonl"
    server = started.start(SERVER, {"GEM_TRACE_FILE": str(traces), "GEM_DRAIN_SECONDS": "0"})
    server.wait_ready()
    with pytest.raises(grpc.RpcError):
        explain(server, "loading")
    assert server.terminate() == 0
    (span,) = spans_of(traces)
    assert span["status"] == {"code": 2, "message": "NOT_READY"}
    assert "weights are loading" not in json.dumps(span)


def test_a_caller_that_gives_up_leaves_one_ended_span_and_no_error(
    started: Processes, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.jsonl"
    server = started.start(SERVER, {"GEM_TRACE_FILE": str(traces), "GEM_DRAIN_SECONDS": "0"})
    server.wait_ready()
    with grpc.insecure_channel(server.address) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        pending = stub.Explain.future(wire.ExplainRequest(surface="slow"), timeout=5.0)
        time.sleep(0.1)  # the call is in the server
        pending.cancel()
    assert server.terminate() == 0
    assert len(spans_of(traces)) == 1
    assert "ERROR" not in server.log.read_text()


# A collector that is dead, slow or absent


def test_with_a_dead_collector_calls_are_answered_spans_are_counted_and_the_stop_is_short(
    started: Processes,
) -> None:
    page = free_port()
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "OTEL_BSP_MAX_QUEUE_SIZE": "8",
        "GEM_METRICS_LISTEN": f"127.0.0.1:{page}",
        "GEM_DRAIN_SECONDS": "0",
    }
    server = started.start(SERVER, env)
    server.wait_ready()
    with client.connect(server.address, limits=Limits()) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        for _ in range(100):
            client.call(stub.Explain, wire.ExplainRequest(surface="stages"), timeout=1.0)
    figures = urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=5).read().decode()
    dropped = next(x for x in figures.splitlines() if x.startswith("gem_spans_dropped_total"))
    assert float(dropped.split()[-1]) > 0
    begun = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - begun < 5


class StuckExporter(SpanExporter):
    """A fault: a collector that takes a batch and never answers."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.release.wait(20)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """It never answers here either, but does not block."""


def test_a_stuck_collector_makes_no_span_wait_and_every_lost_span_is_counted() -> None:
    stuck, dropped = StuckExporter(), Counter[str]()
    processor = BoundedSpanProcessor(
        stuck,
        on_drop=lambda count: dropped.update({"spans": count}),
        max_queue_spans=16,
        max_batch_spans=4,
        delay_seconds=0.01,
        shutdown_seconds=0.2,
    )
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    tracer.start_span("first").end()
    assert stuck.entered.wait(5)
    for _ in range(100):  # the exporter holds the first span and will not come back for these
        tracer.start_span("more").end()
    assert dropped["spans"] == 100 - 16
    begun = time.monotonic()
    provider.shutdown()
    assert time.monotonic() - begun < 2
    assert dropped["spans"] == 100
    stuck.release.set()


def test_flushed_spans_are_in_the_file_and_a_lost_folder_is_counted(tmp_path: Path) -> None:
    dropped = Counter[str]()
    path = tmp_path / "deep" / "traces.jsonl"
    processor = BoundedSpanProcessor(
        FileSpanExporter(path), on_drop=lambda count: dropped.update({"spans": count})
    )
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("kept").end()
    assert processor.force_flush()
    assert [span["name"] for span in spans_of(path)] == ["kept"]
    path.unlink()
    path.parent.rmdir()
    provider.get_tracer("test").start_span("lost").end()
    assert processor.force_flush()
    assert dropped["spans"] == 1
    provider.shutdown()


FORKING = """
import os, sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from services.runtime import telemetry
settings = telemetry.TelemetrySettings(trace_file=Path(sys.argv[1]))
with telemetry.started(settings, CollectorRegistry()) as provider:
    child = os.fork()
    with telemetry.span("child" if child == 0 else "parent"):
        pass
    provider.force_flush()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_both_sides_of_a_fork_deliver_their_spans_once(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    run = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(traces)]
    subprocess.run(run, check=True, timeout=30)
    assert sorted(span["name"] for span in spans_of(traces)) == ["child", "parent"]


# Small things


def test_a_link_leads_back_to_the_span_a_message_came_from() -> None:
    provider = telemetry.build_provider(TelemetrySettings(), CollectorRegistry())
    with provider.get_tracer("test").start_as_current_span("request") as request:
        header, trace_id = telemetry.traceparent(), telemetry.trace_id()
    (link,) = telemetry.link_to(header, kind="speculation")
    assert link.context.span_id == request.get_span_context().span_id
    assert f"{link.context.trace_id:032x}" == trace_id
    assert telemetry.link_to("") == ()
    assert telemetry.link_to("00-nonsense") == ()
    assert (telemetry.traceparent(), telemetry.trace_id()) == ("", "")


def test_a_user_is_shown_by_a_stable_hash_only() -> None:
    assert telemetry.hashed("42") == telemetry.hashed("42") != telemetry.hashed("43")
    assert telemetry.hashed("42") != "42"
    assert len(telemetry.hashed("é")) == 16


def test_settings_of_telemetry_are_checked() -> None:
    with pytest.raises(ValueError, match="sample_ratio is 2"):
        TelemetrySettings(sample_ratio=2)
