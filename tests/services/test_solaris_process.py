"""Sequence, read server and worker as processes: from an offer to a vector, through a kill."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gem.solaris.v1 import solaris_service_pb2 as messages
from gem.solaris.v1.solaris_service_pb2_grpc import SolarisServiceStub
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.online import open_store
from feature_store.streams import open_stream
from feature_store.tables import Tables
from feature_store.wire import unpack_tensor
from model.training import artefact
from services.runtime import client
from services.runtime.limits import Limits
from services.solaris.lifetimes import SPECULATION, Level
from services.solaris.status import read_status
from tests.integration.processes import Process, Processes, processes
from tests.services.small_models import DIM, SPEC_PATH, T0, foundation, world_spec

LAG_MS = 2_000
TRACE, PARENT = "ab" * 16, "cd" * 8


class House(NamedTuple):
    group: Processes
    worker_env: dict[str, str]
    solaris: Process
    stub: SolarisServiceStub
    space_id: bytes
    folder: Path

    def offer(self, user: int, ads: list[int]) -> None:
        task = SpeculationTask(
            user_id=str(user), surface="feed", request_ms=T0, ad_ids=[str(ad) for ad in ads],
            traceparent=f"00-{TRACE}-{PARENT}-01",
        )  # fmt: skip
        client.call(self.stub.Speculate, messages.SpeculateRequest(tasks=[task]), timeout=5.0)

    def read(self, user: int, ads: list[int], as_of_ms: int) -> messages.ReadPairsResponse:
        request = messages.ReadPairsRequest(
            user_id=str(user), ad_ids=[str(ad) for ad in ads], as_of_ms=as_of_ms,
            space_id=self.space_id, dim=DIM,
        )  # fmt: skip
        return client.call(self.stub.ReadPairs, request, timeout=5.0)

    def levels(self, user: int, ads: list[int], as_of_ms: int = T0 + LAG_MS) -> list[int]:
        tensors = self.read(user, ads, as_of_ms).tensors
        return [int(level) for level in unpack_tensor(tensors["pair_level"])]

    def wait_exact(self, user: int, ads: list[int]) -> None:
        for _ in range(1_000):
            if self.levels(user, ads) == [Level.EXACT] * len(ads):
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"pairs of user {user} never came")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("solaris")
    model = foundation(folder / "models", world_spec())
    shared = {
        "GEM_SPEC": str(SPEC_PATH),
        "GEM_STORE": f"sqlite:///{folder / 'online.sqlite'}",
        "GEM_DRAIN_SECONDS": "0",
        "GEM_READ_MS": "2000",
        "HOSTNAME": "one",
    }
    with processes(folder) as group:
        sequence = group.start("services.sequence", shared, name="sequence")
        solaris = group.start("services.solaris", shared, name="solaris")
        worker_env = {
            **shared,
            "GEM_SEQUENCE": sequence.address,
            "GEM_TABLES": str(folder / "tables"),
            "GEM_FOUNDATION": str(model),
            "GEM_CLOCK": "request",
            "GEM_LAG_MS": str(LAG_MS),
            "GEM_TRACE_FILE": str(folder / "traces.jsonl"),
        }
        sequence.wait_ready()
        solaris.wait_ready()
        space = artefact.read_manifest(model).solaris_space_id
        with client.connect(solaris.address, limits=Limits()) as channel:
            yield House(group, worker_env, solaris, SolarisServiceStub(channel), space, folder)


def test_an_offered_pair_is_computed_as_of_its_request_and_read_back(house: House) -> None:
    assert house.levels(1, [20, 21]) == [Level.DEFAULT] * 2
    worker = house.group.start("services.solaris.worker", house.worker_env, name="worker")
    house.offer(1, [20, 21])
    house.wait_exact(1, [20, 21])
    response = house.read(1, [20], T0 + LAG_MS)
    vector = unpack_tensor(response.tensors["pair_q"])
    assert vector.shape == (1, DIM)
    assert np.abs(vector.astype(int)).max() == 127
    assert (response.model_version, response.degraded) == ("gem/1", False)
    assert house.levels(1, [20], as_of_ms=T0 + LAG_MS - 1) == [Level.DEFAULT]
    log = Tables(house.folder / "tables").read("pairs")
    assert set(log["available_ms"].to_pylist()) == {T0 + LAG_MS}
    worker.kill()
    house.offer(2, [30])
    again = house.group.start("services.solaris.worker", house.worker_env, name="worker")
    house.wait_exact(2, [30])
    assert again.terminate() == 0


def test_a_turn_is_a_trace_of_its_own_linked_to_the_requests_trace(house: House) -> None:
    spans = spans_of(house.folder / "traces.jsonl")
    turns = [span for span in spans if span["name"] == "solaris.turn"]
    assert turns
    assert all(turn["links"][0]["traceId"] == TRACE for turn in turns)
    assert all(turn["traceId"] != TRACE for turn in turns)
    children = {s["name"] for s in spans if s.get("parentSpanId") == turns[-1]["spanId"]}
    assert {"solaris.forward", "solaris.write"} <= children
    assert any(name.endswith("GetUserState") for name in children)


def test_status_is_read_from_the_store_once_all_have_stopped(house: House) -> None:
    """Runs last: it ends the read server."""
    assert house.solaris.terminate() == 0
    url = house.worker_env["GEM_STORE"]
    with open_store(url) as store, open_stream(url, SPECULATION) as stream:
        status = read_status(store, stream, space_id=house.space_id, now_ms=T0)
    assert status.backlog_tasks == 0
    assert status.candidates["exact"] >= 3
    assert sum(status.coverage.values()) == pytest.approx(1.0)
    assert status.worked["written"] >= 1


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
