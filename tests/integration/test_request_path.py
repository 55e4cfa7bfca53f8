"""The whole request path as processes: client → router → sequence, solaris, vertical → stream → sink → table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from gem.router.v1.router_service_pb2 import DegradedInput

from feature_store.batch import from_tensors
from feature_store.errors import GemError
from feature_store.ids import key_of
from feature_store.tables import Tables
from feature_store.wire import unpack_tensor
from services.router import policy
from services.runtime import client
from services.runtime.limits import Limits
from tests.integration.processes import Process, Processes, processes
from tests.services import small_models
from tests.services.faulty_peers import until

SEQUENCE, SOLARIS, LOOPFM, VERTICAL = (
    DegradedInput.DEGRADED_INPUT_SEQUENCE,
    DegradedInput.DEGRADED_INPUT_SOLARIS,
    DegradedInput.DEGRADED_INPUT_LOOPFM,
    DegradedInput.DEGRADED_INPUT_VERTICAL,
)
ROUTES = f"""
version: 1
surfaces:
  feed:
    salt: feed
    value_weights: {{click: 1.0}}
    arms:
      - {{name: A0, model: feed-a0, weight: 5000}}
      - name: A3
        model: feed-a3
        weight: 5000
        loopfm: true
        loopfm_space_id: "{small_models.LOOPFM_SPACE.hex()}"
        loopfm_dim: {small_models.DIM}
        solaris: true
        solaris_space_id: "{small_models.SOLARIS_SPACE.hex()}"
        solaris_dim: {small_models.DIM}
"""


@dataclass
class Platform:
    """Every process of the request path, on loopback."""

    started: Processes
    services: dict[str, Process]
    stub: router_service_pb2_grpc.RankingServiceStub
    tables: Tables
    traces: Path

    def rank(self, arm: str, ads: range = range(1, 4), *, timeout: float = 5.0, **more: Any) -> Any:
        request = wire.RankRequest(
            surface="feed",
            user_id=USERS[arm],
            candidates=[wire.Candidate(ad_id=str(ad)) for ad in ads],
            **more,
        )
        return client.call(self.stub.Rank, request, timeout=timeout)

    def until_healthy(self) -> None:
        def healthy() -> bool:
            try:
                answer = self.rank("A3")
            except GemError:
                return False
            return answer.arm == "A3" and not answer.degraded

        until(healthy, seconds=30)

    def kill_and_restart(self, name: str) -> Iterator[None]:
        """Killed for the first step, back for the second."""
        self.services[name].kill()
        yield
        self.services[name] = self.started.restart(self.services[name])
        self.services[name].wait_ready()
        self.until_healthy()
        yield


def _users() -> dict[str, str]:
    """A user of each arm."""
    id_type = small_models.world_spec().id_type("user")
    found: dict[str, str] = {}
    for number in range(1, 100):
        bucket = policy.bucket_of(key_of(str(number), id_type), salt="feed")
        found.setdefault("A0" if bucket < 5000 else "A3", str(number))
    return found


USERS = _users()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("platform")
    spec = small_models.world_spec()
    models = {name: small_models.vertical(folder / "models", spec, name) for name in ("A0", "A3")}
    (folder / "routes.yaml").write_text(ROUTES)
    traces, tables = folder / "traces.jsonl", Tables(folder / "tables")
    shared = {
        "GEM_SPEC": str(small_models.SPEC_PATH),
        "GEM_STORE": f"sqlite:///{folder}/gem.db",
        "GEM_TABLES": str(tables.root),
        "GEM_TRACE_FILE": str(traces),
        "GEM_DRAIN_SECONDS": "0",
        "GEM_SINK_PAUSE_SECONDS": "0.2",
    }
    with processes(folder) as started:
        sources = ",".join(f"feed-{arm.lower()}={path}" for arm, path in models.items())
        services = {
            "sequence": started.start("services.sequence", shared, name="sequence"),
            "solaris": started.start("services.solaris", shared, name="solaris"),
            "vertical": started.start(
                "services.vertical", {**shared, "GEM_MODELS": sources}, name="vertical"
            ),
            "sink": started.start("services.router.sink", shared, name="sink"),
        }
        peers = {
            "GEM_ROUTES": str(folder / "routes.yaml"),
            "GEM_SEQUENCE": services["sequence"].address,
            "GEM_SOLARIS": services["solaris"].address,
            "GEM_VERTICALS": services["vertical"].address,
        }
        services["router"] = started.start("services.router", {**shared, **peers}, name="router")
        for service in services.values():
            service.wait_ready(seconds=60)
        with client.connect(services["router"].address, limits=Limits()) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            yield Platform(started, services, stub, tables, traces)


def spans_of(traces: Path, trace: str) -> list[tuple[str, dict[str, Any]]]:
    """(service, span) of one trace."""
    found = []
    for line in traces.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            attributes = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
            service = attributes["service.name"]["stringValue"]
            spans = [span for scope in resource["scopeSpans"] for span in scope["spans"]]
            found += [(service, span) for span in spans if span["traceId"] == trace]
    return found


@pytest.mark.parametrize("arm", ["A0", "A3"])
def test_every_service_answers_and_nothing_is_degraded(platform: Platform, arm: str) -> None:
    platform.until_healthy()
    response = platform.rank(arm, range(1, 201))
    assert (response.arm, list(response.degraded)) == (arm, [])
    assert response.model_version == f"feed-{arm.lower()}/1"
    assert sorted(int(ad.ad_id) for ad in response.ads) == list(range(1, 201))
    assert all(0 < ad.probabilities["click"] < 1 and not ad.fallback for ad in response.ads)
    values = [ad.value for ad in response.ads]
    assert values == sorted(values, reverse=True)


def test_a_score_does_not_depend_on_the_other_candidates(platform: Platform) -> None:
    platform.until_healthy()
    moment = small_models.T0
    alone = platform.rank("A3", range(7, 8), request_ms=moment).ads[0].probabilities["click"]
    for ads in (range(1, 8), range(7, 50)):
        answer = platform.rank("A3", ads, request_ms=moment)
        among = next(ad for ad in answer.ads if ad.ad_id == "7").probabilities["click"]
        assert among == pytest.approx(alone, abs=1e-5)


def test_one_trace_leads_from_the_client_into_every_service(platform: Platform) -> None:
    platform.until_healthy()
    trace, parent = "ef" * 16, "ab" * 8
    with grpc.insecure_channel(platform.services["router"].address) as channel:
        request = wire.RankRequest(surface="feed", user_id=USERS["A3"])
        request.candidates.add(ad_id="1")
        header = [("traceparent", f"00-{trace}-{parent}-01")]
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        assert stub.Rank(request, timeout=5.0, metadata=header).trace_id == trace

    def arrived() -> bool:
        spans = spans_of(platform.traces, trace)
        services, ids = {service for service, _ in spans}, {span["spanId"] for _, span in spans}
        whole = {span["parentSpanId"] for _, span in spans} - ids == {parent}
        return whole and services == {"router", "sequence", "solaris", "vertical"}

    until(arrived)
    spans = spans_of(platform.traces, trace)
    by_id = {span["spanId"]: service for service, span in spans}
    roots = [span["name"] for _, span in spans if span["parentSpanId"] == parent]
    assert roots == ["/gem.router.v1.RankingService/Rank"]
    assert {span["parentSpanId"] for _, span in spans} - set(by_id) == {parent}
    crossings = defaultdict(set)
    for service, span in spans:
        above = by_id.get(span["parentSpanId"], "client")
        if above != service:
            crossings[above].add(service)
    assert crossings == {"client": {"router"}, "router": {"sequence", "solaris", "vertical"}}


def test_what_was_served_reaches_the_table_and_is_a_batch_to_train_on(platform: Platform) -> None:
    platform.until_healthy()
    response = platform.rank("A3", range(1, 31), request_id="to-the-table")

    def arrived() -> bool:
        return platform.tables.exists("served") and "to-the-table" in set(
            platform.tables.read("served", columns=["request_id"])["request_id"].to_pylist()
        )

    until(arrived, seconds=20)
    table = platform.tables.read("served")
    index = table["request_id"].to_pylist().index("to-the-table")
    served = wire.ServedRequest.FromString(table["served"][index].as_py())
    batch = from_tensors({name: unpack_tensor(tensor) for name, tensor in served.tensors.items()})
    assert (batch.num_requests, batch.num_candidates) == (1, 30)
    answered = {ad.ad_id: ad.probabilities["click"] for ad in response.ads}
    logged = unpack_tensor(served.probabilities["click"])
    assert np.array_equal(logged, np.array([answered[ad] for ad in served.ad_ids], np.float32))


def test_killing_sequence_degrades_and_its_return_heals(platform: Platform) -> None:
    platform.until_healthy()
    steps = platform.kill_and_restart("sequence")
    next(steps)
    assert list(platform.rank("A3").degraded) == [SEQUENCE, LOOPFM]
    assert list(platform.rank("A0").degraded) == [SEQUENCE]
    next(steps)
    assert list(platform.rank("A3").degraded) == []


def test_killing_solaris_degrades_its_arm_only_and_its_return_heals(platform: Platform) -> None:
    platform.until_healthy()
    steps = platform.kill_and_restart("solaris")
    next(steps)
    answer = platform.rank("A3")
    assert list(answer.degraded) == [SOLARIS]
    assert {ad.level for ad in answer.ads} == {5}
    assert list(platform.rank("A0").degraded) == []
    next(steps)


def test_killing_every_vertical_is_an_error_with_a_reason_and_its_return_heals(
    platform: Platform,
) -> None:
    platform.until_healthy()
    steps = platform.kill_and_restart("vertical")
    next(steps)
    with pytest.raises(GemError) as caught:
        platform.rank("A3")
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "VERTICAL_UNAVAILABLE")
    next(steps)


def test_killing_the_sink_loses_nothing_that_was_answered(platform: Platform) -> None:
    platform.until_healthy()
    steps = platform.kill_and_restart("sink")
    next(steps)
    asked = {f"while-dead-{number}" for number in range(20)}
    for request_id in asked:
        platform.rank("A0", request_id=request_id)
    next(steps)

    def all_there() -> bool:
        ids = platform.tables.read("served", columns=["request_id"])["request_id"].to_pylist()
        return asked <= set(ids) and all(ids.count(each) == 1 for each in asked)

    until(all_there, seconds=30)
