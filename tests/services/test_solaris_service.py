"""The read service over a socket, with a store that is well, late or gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem.schema.v1.dataset_spec_pb2 import ID_TYPE_INT64
from gem.solaris.v1 import solaris_service_pb2 as messages
from gem.solaris.v1 import solaris_service_pb2_grpc
from gem.solaris.v1.task_pb2 import SpeculationTask
from prometheus_client import CollectorRegistry

from feature_store.errors import InvalidInput, NotReady, ResourceExhausted
from feature_store.online import OnlineStore, open_store
from feature_store.streams import Stream, open_stream
from feature_store.wire import unpack_tensor
from services.runtime import client
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, Service, running
from services.solaris.aftermath import Aftermath
from services.solaris.keys import Keys
from services.solaris.ledger import AFTERMATH, CANDIDATES, READS, USED_OF, Ledger
from services.solaris.lifetimes import HOUR_MS, Level, Lifetimes, status_key
from services.solaris.reader import PairReader
from services.solaris.rows import Pair
from services.solaris.servicer import ReadPolicy, SolarisServicer
from services.solaris.writer import NewPair, PairWriter

SPACE = b"space-01"
T0 = 1_700_000_000_000
DIM = 4
LIVES = Lifetimes()
SURFACES = ("feed", "reels")


@dataclass
class Weather:
    """The store, through weather: `gate` closed makes it late, `gone` makes it fail."""

    store: OnlineStore
    gate: threading.Event = field(default_factory=threading.Event)
    gone: bool = False

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        assert self.gate.wait(20)
        if self.gone:
            raise NotReady("the store is away")
        return self.store.hget_many(key, fields)

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        self.store.hset_many(key, values, ttl_ms=ttl_ms)


@dataclass
class House:
    weather: Weather
    stream: Stream
    ledger: Ledger
    aftermath: Aftermath
    stub: solaris_service_pb2_grpc.SolarisServiceStub

    def read(
        self, ads: Sequence[int], *, timeout: float = 5.0, **changes: Any
    ) -> messages.ReadPairsResponse:
        request = messages.ReadPairsRequest(
            user_id="1", ad_ids=[str(ad) for ad in ads], as_of_ms=T0, space_id=SPACE, dim=DIM
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return client.call(self.stub.ReadPairs, request, timeout=timeout)

    def total(self, name: str, kind: str) -> int:
        return self.ledger.totals()[name, kind]

    def tasks(self) -> list[SpeculationTask]:
        claimed = self.stream.claim("test", "test", 100, 0)
        self.stream.ack("test", [entry for entry, _ in claimed])
        return [SpeculationTask.FromString(payload) for _, payload in claimed]


@contextmanager
def housed(folder: Path, policy: ReadPolicy) -> Iterator[House]:
    url = f"sqlite:///{folder / 'online.sqlite'}"
    store, stream = open_store(url), open_stream(url, "speculation")
    registry = CollectorRegistry()
    ledger = Ledger(registry)
    weather = Weather(store)
    weather.gate.set()
    aftermath = Aftermath(weather, stream, ledger, LIVES, surfaces=SURFACES, instance="a")
    aftermath.start()
    with ThreadPoolExecutor(2) as pool:
        servicer = SolarisServicer(
            PairReader(weather, LIVES), lambda ads: [ad // 10 for ad in ads], stream, aftermath,
            ledger, keys=Keys(user_type=ID_TYPE_INT64, ad_type=ID_TYPE_INT64), surfaces=SURFACES, pool=pool, policy=policy,
        )  # fmt: skip
        service = Service(
            messages.DESCRIPTOR.services_by_name["SolarisService"],
            solaris_service_pb2_grpc.add_SolarisServiceServicer_to_server,
            servicer,
        )
        settings = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0)
        with (
            running([service], settings, call_metrics=CallMetrics(registry)) as live,
            client.connect(f"127.0.0.1:{live.port}", limits=Limits(), health=False) as channel,
        ):
            stub = solaris_service_pb2_grpc.SolarisServiceStub(channel)
            yield House(weather, stream, ledger, aftermath, stub)
        weather.gate.set()
        aftermath.close()
    stream.close()
    store.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with housed(tmp_path, ReadPolicy(read_seconds=2.0)) as built:
        yield built


def store_pair(house: House, ad: int, *, age_ms: int = 0, surface: int = 1) -> None:
    pair = Pair(
        space_id=SPACE, model_version="v1", surface=surface, computed_ms=T0 - age_ms,
        available_ms=T0 - age_ms, scale=0.5, vector=np.full(DIM, 8, dtype=np.int8),
    )  # fmt: skip
    writer = PairWriter(house.weather.store, LIVES, space_id=SPACE, dim=DIM)
    writer.write([NewPair(1, ad, ad // 10, pair)])


def levels(response: messages.ReadPairsResponse) -> list[int]:
    return [int(level) for level in unpack_tensor(response.tensors["pair_level"])]


def test_a_read_carries_the_four_tensors_and_counts_every_candidate_once(house: House) -> None:
    store_pair(house, 20)
    response = house.read([20, 21, 30])
    arrays = {name: unpack_tensor(tensor) for name, tensor in response.tensors.items()}
    assert {name: (a.dtype.name, a.shape) for name, a in arrays.items()} == {
        "pair_q": ("int8", (3, DIM)), "pair_scale": ("float32", (3,)),
        "pair_level": ("int32", (3,)), "pair_meta": ("float32", (3, 3)),
    }  # fmt: skip
    assert levels(response) == [Level.EXACT, Level.AD_GROUP, Level.USER]
    assert (response.degraded, response.model_version) == (False, "v1")
    counted = [house.total(CANDIDATES, level.name.lower()) for level in Level]
    assert counted == [1, 1, 0, 1, 0]


@pytest.mark.parametrize("n", [0, 1, 1_000])
def test_n_ads_get_n_rows(house: House, n: int) -> None:
    assert levels(house.read(range(1, n + 1))) == [Level.DEFAULT] * n


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user_id": ""}, "user id"),
        ({"as_of_ms": 0}, "as_of_ms"),
        ({"space_id": b"abc"}, "8"),
        ({"dim": 0}, "dim"),
        ({"dim": 1 << 20}, "dim"),
    ],
)
def test_a_malformed_read_is_refused_with_what_to_change(
    house: House, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        house.read([20], **changes)


def test_too_many_ads_are_refused(house: House) -> None:
    with pytest.raises(ResourceExhausted, match="10000"):
        house.read(range(1, 10_002))


def test_a_store_that_is_gone_means_default_levels_and_a_flag_not_an_error(house: House) -> None:
    store_pair(house, 20)
    house.weather.gone = True
    response = house.read([20, 21])
    assert (response.degraded, levels(response)) == (True, [Level.DEFAULT] * 2)
    house.weather.gone = False
    assert levels(house.read([20])) == [Level.EXACT]
    assert (house.total(READS, "degraded"), house.total(READS, "answered")) == (1, 1)


def test_a_store_that_is_late_costs_no_more_than_the_time_allowed(tmp_path: Path) -> None:
    with housed(tmp_path, ReadPolicy(read_seconds=0.02)) as house:
        house.weather.gate.clear()
        responses = [house.read([20, 21], timeout=2.0) for _ in range(5)]
        house.weather.gate.set()
        assert all(response.degraded for response in responses)
        assert house.total(CANDIDATES, "default") == 10


def test_a_caller_in_a_hurry_gets_the_default_within_its_own_deadline(tmp_path: Path) -> None:
    with housed(tmp_path, ReadPolicy(read_seconds=10.0, reserve_seconds=0.3)) as house:
        house.weather.gate.clear()
        assert house.read([20], timeout=0.6).degraded
        house.weather.gate.set()


def test_a_stale_pair_is_used_and_asked_for_anew_once(house: House) -> None:
    store_pair(house, 20, age_ms=LIVES.pair.soft_ms)
    store_pair(house, 21)
    assert levels(house.read([20, 21])) == [Level.EXACT] * 2
    assert levels(house.read([20, 21])) == [Level.EXACT] * 2
    house.aftermath.settle()
    (task,) = house.tasks()
    assert (task.user_id, list(task.ad_ids), task.surface) == ("1", ["20"], "reels")
    assert task.request_ms == T0
    assert house.total(AFTERMATH, "refreshes") == 1


def test_a_pair_counts_as_used_once_however_often_it_is_read(house: House) -> None:
    store_pair(house, 20)
    store_pair(house, 21)
    for _ in range(3):
        house.read([20])
    house.aftermath.settle()
    assert house.total(USED_OF, str(T0 // HOUR_MS)) == 1


def test_offers_reach_the_stream_and_a_malformed_one_is_refused(house: House) -> None:
    task = SpeculationTask(user_id="1", surface="feed", request_ms=T0, ad_ids=["20"])
    request = messages.SpeculateRequest(tasks=[task, task])
    assert client.call(house.stub.Speculate, request, timeout=5.0).accepted_count == 2
    assert house.tasks() == [task, task]
    wrong = SpeculationTask(user_id="1", surface="moon", request_ms=T0, ad_ids=["20"])
    with pytest.raises(InvalidInput, match="moon"):
        client.call(house.stub.Speculate, messages.SpeculateRequest(tasks=[wrong]), timeout=5.0)


def test_totals_are_in_the_store_after_a_stop(tmp_path: Path) -> None:
    with housed(tmp_path, ReadPolicy(read_seconds=2.0)) as house:
        house.read([20])
    store = open_store(f"sqlite:///{tmp_path / 'online.sqlite'}")
    (value,) = store.hget_many(status_key(SPACE), ["server:a"])
    store.close()
    assert value is not None
    assert b'"default": 1' in value


def test_the_read_server_cannot_run_a_model_it_has_none() -> None:
    code = "import sys, services.solaris.__main__; sys.exit('torch' in sys.modules or 'model' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
