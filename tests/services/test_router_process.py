from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.errors import GemError
from feature_store.streams import open_stream
from services.runtime import client
from services.runtime.limits import Limits
from tests.integration.processes import Process, Processes, free_port, processes
from tests.services.faulty_peers import ROUTES, USER, FaultyPeers, write_spec

Spans = list[dict[str, Any]]


@dataclass
class Platform:
    """A router process and peers that can be told to fail."""

    router: Process
    started: Processes
    peers: FaultyPeers
    store: str
    traces: Path
    page: int

    def spans(self) -> Spans:
        found: Spans = []
        for line in self.traces.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                found += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
        return found


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    peers = FaultyPeers(write_spec(tmp_path))
    (tmp_path / "routes.yaml").write_text(ROUTES.format(version=1, top=2))
    traces, page, store = tmp_path / "traces.jsonl", free_port(), f"sqlite:///{tmp_path}/gem.db"
    env = {
        "GEM_SPEC": str(tmp_path / "spec.yaml"),
        "GEM_ROUTES": str(tmp_path / "routes.yaml"),
        "GEM_STORE": store,
        "GEM_SEQUENCE": peers.address,
        "GEM_SOLARIS": peers.address,
        "GEM_VERTICALS": peers.address,
        "GEM_TRACE_FILE": str(traces),
        "GEM_METRICS_LISTEN": f"127.0.0.1:{page}",
        "GEM_DRAIN_SECONDS": "0.3",
    }
    with processes(tmp_path) as started:
        router = started.start("services.router", env, name="router")
        router.wait_ready()
        yield Platform(router, started, peers, store, traces, page)
    peers.stop()


def ask(stub: Any, ad: str, user: str, metadata: list[tuple[str, str]] | None = None) -> Any:
    request = wire.RankRequest(
        surface="feed", user_id=user, candidates=[wire.Candidate(ad_id=ad)], request_id=f"r{ad}"
    )
    return stub.Rank(request, timeout=10.0, metadata=metadata)


def test_a_hundred_requests_at_once_are_a_hundred_traces_from_the_client_to_every_peer(
    platform: Platform,
) -> None:
    parents = {f"{n + 1:032x}": f"{n + 1:016x}" for n in range(100)}
    with grpc.insecure_channel(platform.router.address) as channel, ThreadPoolExecutor(16) as pool:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)

        def one(trace: str) -> Any:
            header = [("traceparent", f"00-{trace}-{parents[trace]}-01")]
            return ask(stub, str(int(trace, 16)), USER["A3"], header)

        answers = list(pool.map(one, parents))
    assert [answer.trace_id for answer in answers] == list(parents)
    assert platform.router.terminate() == 0

    peer_headers = defaultdict(list)
    for headers in platform.peers.headers:
        _, trace, span, _ = headers["traceparent"].split("-")
        assert (headers["x-b3-traceid"], headers["x-b3-spanid"]) == (trace, span)
        peer_headers[trace].append(span)
    by_trace: dict[str, Spans] = defaultdict(list)
    for span in platform.spans():
        by_trace[span["traceId"]].append(span)
    for trace, parent in parents.items():
        above = {span["spanId"]: span.get("parentSpanId") for span in by_trace[trace]}
        name = {span["spanId"]: span["name"].rsplit("/", 1)[-1] for span in by_trace[trace]}
        path = {name[span]: name.get(above[span] or "", above[span]) for span in above}
        shadow = {span for span in peer_headers[trace] if span not in above}
        assert shadow == set()
        assert path == {
            "Rank": parent,
            "router.read": "Rank",
            "GetUserState": "router.read",
            "ReadPairs": "router.read",
            "router.score": "Rank",
            "ModelInfer": "router.score",
        }
        clients = {
            span for span in above if name[span] in ("GetUserState", "ReadPairs", "ModelInfer")
        }
        assert clients == set(peer_headers[trace])


def test_what_is_done_afterwards_is_a_trace_of_its_own_linked_to_the_request(
    platform: Platform,
) -> None:
    trace = "ab" * 16
    with grpc.insecure_channel(platform.router.address) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        ask(stub, "5", USER["A3"], [("traceparent", f"00-{trace}-{'cd' * 8}-01")])
    assert platform.router.terminate() == 0
    afterwards = [s for s in platform.spans() if s["name"] in ("router.log", "router.shadow")]
    assert {span["name"] for span in afterwards} == {"router.log", "router.shadow"}
    for span in afterwards:
        assert span["traceId"] != trace
        assert "parentSpanId" not in span
        assert {link["traceId"] for link in span["links"]} == {trace}
    with open_stream(platform.store, "speculation") as stream:
        (item,) = stream.claim("test", "reader", limit=10, block_ms=0)
    assert SpeculationTask.FromString(item.data).traceparent.split("-")[1] == trace
    with open_stream(platform.store, "served") as stream:
        served = [
            wire.ServedRequest.FromString(i.data)
            for i in stream.claim("t", "r", limit=9, block_ms=0)
        ]
    assert sorted((each.request_id, each.shadow) for each in served) == [
        ("r5", False),
        ("r5", True),
    ]


def test_neither_traces_nor_metrics_nor_the_log_name_a_user(platform: Platform) -> None:
    with grpc.insecure_channel(platform.router.address) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        ask(stub, "5", USER["A3"])
        with pytest.raises(grpc.RpcError):
            ask(stub, "", USER["A3"])
    page = (
        urllib.request.urlopen(f"http://127.0.0.1:{platform.page}/metrics", timeout=5)
        .read()
        .decode()
    )
    assert 'gem_served_total{arm="A3",surface="feed"} 1.0' in page
    assert 'gem_candidates_total{level="exact",surface="feed"} 1.0' in page
    assert 'gem_hop_seconds_count{code="OK",method="ModelInfer"}' in page
    assert platform.router.terminate() == 0
    for text in (page, platform.traces.read_text(), platform.router.log.read_text()):
        assert USER["A3"] not in text
    assert "gem.user" in platform.traces.read_text()


def test_a_router_that_stops_under_load_answers_all_it_took_and_logs_all_it_answered(
    platform: Platform,
) -> None:
    env = {**platform.router.env, "GEM_METRICS_LISTEN": "", "GEM_LISTEN": ""}
    other = platform.started.start("services.router", env, name="other")
    other.wait_ready()
    answered: list[str] = []
    failures: list[GemError] = []
    stop, numbers, lock = threading.Event(), iter(range(1, 100_000)), threading.Lock()
    target = f"ipv4:{platform.router.address},{other.address}"
    with client.connect(target, limits=Limits()) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)

        def load() -> None:
            while not stop.is_set():
                with lock:
                    number = str(next(numbers))
                request = wire.RankRequest(surface="feed", user_id="u", request_id=f"q{number}")
                request.candidates.add(ad_id=number)
                try:
                    answered.append(client.call(stub.Rank, request, timeout=10.0).request_id)
                except GemError as error:
                    failures.append(error)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answered) < 100 and not failures:
            stop.wait(0.01)
        assert platform.router.terminate() == 0
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert other.terminate() == 0
    with open_stream(platform.store, "served") as stream:
        items = stream.claim("test", "reader", limit=100_000, block_ms=0)
    served = [wire.ServedRequest.FromString(item.data) for item in items]
    shown = [each.request_id for each in served if not each.shadow]
    assert sorted(shown) == sorted(answered)


def test_importing_the_router_needs_neither_torch_nor_the_whole_of_kserve() -> None:
    code = (
        "import sys, services.router.__main__, services.router.sink.__main__\n"
        "bad = {'torch', 'kserve', 'fastapi', 'kubernetes', 'model', 'feast'} & set(sys.modules)\n"
        "sys.exit(f'imports {bad}' if bad else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_router_without_settings_names_all_that_it_lacks(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        router = started.start("services.router", {})
        assert router.popen.wait(30) != 0
        log = router.log.read_text()
    for name in (
        "GEM_SPEC",
        "GEM_ROUTES",
        "GEM_STORE",
        "GEM_SEQUENCE",
        "GEM_SOLARIS",
        "GEM_VERTICALS",
    ):
        assert f"{name} is missing" in log
