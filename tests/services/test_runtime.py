from __future__ import annotations

import ast
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from feature_store.errors import (
    DeadlineExceeded,
    GemError,
    InvalidInput,
    NotReady,
    ResourceExhausted,
)
from services.runtime import client, deadline, metrics, settings
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.runtime.server import RunningServer, ServerSettings, running
from tests.integration.processes import Processes, processes
from tests.services.ranking_by_rule import ranking

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(max_message_bytes=100_000)


@dataclass
class Live:
    server: RunningServer
    metrics: CallMetrics
    channel: grpc.Channel
    stub: router_service_pb2_grpc.RankingServiceStub

    def explain(self, rule: str, *, timeout: float = 5.0) -> wire.ExplainResponse:
        return client.call(self.stub.Explain, wire.ExplainRequest(surface=rule), timeout=timeout)


@pytest.fixture
def live() -> Iterator[Live]:
    figures = CallMetrics(CollectorRegistry())
    config = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0, limits=LIMITS)
    with running([ranking()], config, call_metrics=figures) as server:
        server.health.ready()
        address = f"127.0.0.1:{server.port}"
        with client.connect(address, limits=LIMITS, call_metrics=figures) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            yield Live(server, figures, channel, stub)


def requests_counted(figures: CallMetrics, name: str, code: str) -> float:
    labels = {"method": "Explain", "code": code}
    return figures.registry.get_sample_value(f"{name}_count", labels) or 0.0


# Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    max_queue: int = 4

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise ValueError(f"max_queue is {self.max_queue}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    store: str
    spec: Path
    share: float = 0.5
    verbose: bool = False
    peers: tuple[str, ...] = ()
    endpoint: str | None = field(default=None, metadata={"env": "OTEL_EXPORTER_OTLP_ENDPOINT"})
    inner: Inner = field(default_factory=Inner)


def test_settings_are_read_with_their_types_and_defaults() -> None:
    environ = {"GEM_STORE": "s", "GEM_SPEC": "/x.yaml", "GEM_PEERS": "a:1, b:2", "GEM_VERBOSE": "yes",
               "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "GEM_MAX_QUEUE": "9", "GEM_SHARE": ""}  # fmt: skip
    assert settings.load(Outer, environ) == Outer(
        store="s",
        spec=Path("/x.yaml"),
        verbose=True,
        peers=("a:1", "b:2"),
        endpoint="http://c:4317",
        inner=Inner(max_queue=9),
    )


def test_one_error_names_every_missing_and_malformed_setting() -> None:
    environ = {"GEM_SPEC": "x", "GEM_SHARE": "half", "GEM_VERBOSE": "maybe", "GEM_MAX_QUEUE": "0"}
    with pytest.raises(settings.SettingsError) as caught:
        settings.load(Outer, environ)
    message = str(caught.value)
    assert "GEM_STORE is missing" in message
    assert "GEM_SHARE is 'half'; it must be a number" in message
    assert "GEM_VERBOSE is 'maybe'" in message
    assert "max_queue is 0" in message
    assert "GEM_SPEC" not in message


# Limits


def test_limits_name_what_exceeds_them() -> None:
    limits = Limits(max_candidates=3, max_id_bytes=8)
    limits.check_candidates([])
    limits.check_candidates(["a", "b", "c"])
    with pytest.raises(ResourceExhausted, match="4 candidates exceed the limit of 3"):
        limits.check_candidates(["a", "b", "c", "d"])
    with pytest.raises(InvalidInput, match="'b' is a candidate more than once"):
        limits.check_candidates(["a", "b", "b"])
    with pytest.raises(InvalidInput, match="is empty"):
        limits.check_candidates([""])
    with pytest.raises(InvalidInput, match="longer than 8 bytes"):
        limits.check_candidates(["ééééé"])


# Deadlines


@dataclass
class Caller:
    seconds: float | None

    def time_remaining(self) -> float | None:
        return self.seconds


@given(st.floats(0.01, 1000), st.floats(0, 1))
def test_a_budget_is_what_is_left_after_the_reserve(seconds: float, share: float) -> None:
    reserve = seconds * share * 0.9
    assert deadline.budget(Caller(seconds), reserve=reserve) == pytest.approx(seconds - reserve)


def test_nothing_left_is_refused_and_so_is_for_ever() -> None:
    with pytest.raises(DeadlineExceeded):
        deadline.budget(Caller(0.004), reserve=0.005)
    for endless in (None, float("inf"), 9e9):
        with pytest.raises(deadline.NoDeadline):
            deadline.budget(Caller(endless))


def test_a_call_without_deadline_is_refused(live: Live) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        live.stub.Explain(wire.ExplainRequest(surface="answer"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in caught.value.details()
    assert requests_counted(live.metrics, "gem_request_seconds", "INVALID_ARGUMENT") == 1


def test_a_hop_gives_on_less_than_it_was_given(live: Live) -> None:
    assert 1_500 < live.explain("budget", timeout=2.0).bucket <= 1_900


def unary_methods() -> set[str]:
    from gem.sequence.v1 import sequence_service_pb2
    from gem.solaris.v1 import solaris_service_pb2

    files = (wire.DESCRIPTOR, sequence_service_pb2.DESCRIPTOR, solaris_service_pb2.DESCRIPTOR)
    ours = {m.name for f in files for s in f.services_by_name.values() for m in s.methods}
    return ours | {"ModelInfer", "ModelReady", "ServerReady", "Check"}


def calls_without_timeout(source: str) -> list[int]:
    methods = unary_methods()
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        target = node.func
        of_future = target.attr in ("future", "with_call") and isinstance(
            target.value, ast.Attribute
        )
        named = (
            target.value.attr
            if of_future and isinstance(target.value, ast.Attribute)
            else target.attr
        )
        through_client = target.attr in ("call", "start") and ast.unparse(target.value) == "client"
        if (named in methods or through_client) and "timeout" not in {k.arg for k in node.keywords}:
            lines.append(node.lineno)
    return lines


def test_the_reader_of_source_sees_a_call_without_timeout() -> None:
    assert calls_without_timeout("a.Rank(x)\nb.Rank(x, timeout=1)\nc.ReadPairs.future(x)\n") == [
        1,
        3,
    ]
    assert calls_without_timeout("client.call(s.Rank, x)\nclient.start(s.Rank, x, timeout=2)") == [
        1
    ]


def test_every_stub_call_in_services_passes_a_timeout() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "services").rglob("*.py"))
        if (lines := calls_without_timeout(path.read_text()))
    }
    assert found == {}


# Errors


@pytest.mark.parametrize(
    ("rule", "cls", "code"),
    [
        ("malformed", InvalidInput, "INVALID_ARGUMENT"),
        ("loading", NotReady, "UNAVAILABLE"),
        ("late", DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ("crowded", ResourceExhausted, "RESOURCE_EXHAUSTED"),
    ],
)
def test_an_error_crosses_the_wire_and_comes_out_as_itself(
    live: Live, rule: str, cls: type[GemError], code: str
) -> None:
    with pytest.raises(cls) as caught:
        live.explain(rule)
    assert type(caught.value) is cls
    assert (caught.value.code, caught.value.reason) == (code, cls.reason)
    assert requests_counted(live.metrics, "gem_request_seconds", code) == 1
    assert requests_counted(live.metrics, "gem_hop_seconds", code) == 1


def test_a_refusal_carries_exactly_one_error_info_of_our_domain(live: Live) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        live.stub.Explain(wire.ExplainRequest(surface="malformed"), timeout=5)
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("gem", InvalidInput.reason)
    assert status.message == "surface 'x' is unknown; known: feed"


def test_a_bug_is_a_bare_internal_and_its_traceback_stays_in_the_log(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(GemError) as caught:
        live.explain("bug")
    assert (caught.value.code, str(caught.value)) == ("INTERNAL", "internal error")
    assert "a secret of ours" in caplog.text
    assert live.explain("answer").bucket == 7


def test_a_peer_that_is_not_there_is_unavailable_and_one_that_is_late_is_late(live: Live) -> None:
    with client.connect("127.0.0.1:1", limits=LIMITS) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        with pytest.raises(GemError) as caught:
            client.call(stub.Explain, wire.ExplainRequest(), timeout=2.0)
        assert caught.value.code == "UNAVAILABLE"
    pending = client.start(live.stub.Explain, wire.ExplainRequest(surface="slow"), timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        pending.result()


def test_a_message_over_the_limit_is_refused_by_its_size(live: Live) -> None:
    request = wire.ExplainRequest(surface="answer", user_id="u" * 200_000)
    with pytest.raises(ResourceExhausted, match="200"):
        client.call(live.stub.Explain, request, timeout=5.0)
    assert live.explain("answer").bucket == 7


def test_calls_started_together_run_together(live: Live) -> None:
    begun = time.perf_counter()
    request = wire.ExplainRequest(surface="slow")
    pending = [client.start(live.stub.Explain, request, timeout=5.0) for _ in range(8)]
    assert [each.result().bucket for each in pending] == [7] * 8
    assert time.perf_counter() - begun < 8 * 0.2


# Health, reflection, metrics


def test_health_is_watched_through_readiness_and_draining(live: Live) -> None:
    states: list[int] = []
    with grpc.insecure_channel(f"127.0.0.1:{live.server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=10)
        states.append(next(watch).status)
        live.server.health.unready()
        states.append(next(watch).status)
        live.server.health.ready()
        states.append(next(watch).status)
        live.server.health.drain()
        states.append(next(watch).status)
        live.server.health.ready()
        alive = stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5)
        overall = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        watch.cancel()
    assert states == [1, 2, 1, 2]
    assert (alive.status, overall.status) == (1, 2)


def test_reflection_names_the_services(live: Live) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([asked]), timeout=5)))
    names = {service.name for service in answer.list_services_response.service}
    assert {"gem.router.v1.RankingService", "grpc.health.v1.Health"} <= names


def test_metrics_are_shown_with_bounded_labels(live: Live) -> None:
    import urllib.request

    live.explain("answer")
    with metrics.exposed(live.metrics.registry, "127.0.0.1:0") as port:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'gem_request_seconds_count{code="OK",method="Explain"} 1.0' in page
    assert 'gem_hop_seconds_count{code="OK",method="Explain"} 1.0' in page


# Stopping


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as group:
        yield group


def test_a_graceful_stop_under_load_fails_no_request(started: Processes) -> None:
    env = {"GEM_DRAIN_SECONDS": "0.5"}
    replicas = [started.start("tests.services.ranking_by_rule", env) for _ in range(2)]
    for replica in replicas:
        replica.wait_ready()
    target = "ipv4:" + ",".join(replica.address for replica in replicas)
    failures: list[GemError] = []
    answered: list[int] = []
    stop = threading.Event()
    with client.connect(target, limits=Limits()) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)

        def load() -> None:
            while not stop.is_set():
                try:
                    request = wire.ExplainRequest(surface="answer")
                    answered.append(client.call(stub.Explain, request, timeout=5.0).bucket)
                except GemError as error:
                    failures.append(error)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answered) < 200 and not failures:
            time.sleep(0.01)
        assert replicas[0].terminate() == 0
        before = len(answered)
        while len(answered) < before + 200 and not failures:
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_call_in_flight_is_answered_before_the_server_stops(started: Processes) -> None:
    server = started.start("tests.services.ranking_by_rule", {"GEM_DRAIN_SECONDS": "0"})
    server.wait_ready()
    with client.connect(server.address, limits=Limits()) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        client.call(stub.Explain, wire.ExplainRequest(surface="answer"), timeout=5.0)
        pending = client.start(stub.Explain, wire.ExplainRequest(surface="slow"), timeout=5.0)
        time.sleep(0.1)  # the call is in the server, half answered
        assert server.terminate() == 0
        assert pending.result().bucket == 7


def test_connections_are_renewed_under_load_without_a_failed_call() -> None:
    config = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0, connection_seconds=0.1)
    peers: set[str] = set()
    with running([ranking()], config, call_metrics=CallMetrics(CollectorRegistry())) as server:
        server.health.ready()
        with client.connect(f"127.0.0.1:{server.port}", limits=LIMITS) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            begun = time.monotonic()
            while time.monotonic() - begun < 1.0:
                answer, call = stub.Explain.with_call(
                    wire.ExplainRequest(surface="answer"), timeout=5.0
                )
                assert answer.bucket == 7
                peers.add(dict(call.trailing_metadata())["peer"])
    assert len(peers) > 2


SIGNALLED = """
import signal, threading, time
from services.runtime.server import stop_signals, wait_until
stopping = stop_signals()
other = threading.Thread(target=time.sleep, args=(30,), daemon=True)
other.start()
threading.Timer(0.2, lambda: signal.pthread_kill(other.ident, signal.SIGTERM)).start()
wait_until(stopping)
"""


def test_a_signal_that_another_thread_was_given_stops_the_process() -> None:
    subprocess.run([sys.executable, "-c", SIGNALLED], check=True, timeout=20)


def test_a_missing_setting_ends_the_process_naming_it(started: Processes) -> None:
    server = started.start("tests.services.ranking_by_rule", {"GEM_LISTEN": "nowhere"})
    assert server.popen.wait(20) != 0
    assert "'nowhere' is not an address" in server.log.read_text()


def test_importing_an_entry_point_does_nothing() -> None:
    run = [sys.executable, "-W", "error", "-c", "import services.runtime.server"]
    assert subprocess.run(run, capture_output=True, check=True, timeout=60).stdout == b""
