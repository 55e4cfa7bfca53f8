from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from gem.router.v1.router_service_pb2 import DegradedInput
from gem.solaris.v1.task_pb2 import SpeculationTask
from prometheus_client import CollectorRegistry

from feature_store.batch import FIELDS
from feature_store.errors import (
    DeadlineExceeded,
    GemError,
    InvalidInput,
    NotReady,
    ResourceExhausted,
    UnknownSurface,
)
from feature_store.ids import ABSENT, key_of
from feature_store.streams import open_stream
from feature_store.wire import unpack_tensor
from services.router.assembly import build
from services.router.settings import RouterSettings, targets_by_model
from services.runtime import client
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, running
from tests.services.faulty_peers import (
    DIM,
    LOOPFM_DIM,
    ROUTES,
    USER,
    FaultyPeers,
    shapes_sent,
    tensor_sent,
    until,
    write_spec,
)

SEQUENCE, SOLARIS, LOOPFM, VERTICAL = (
    DegradedInput.DEGRADED_INPUT_SEQUENCE,
    DegradedInput.DEGRADED_INPUT_SOLARIS,
    DegradedInput.DEGRADED_INPUT_LOOPFM,
    DegradedInput.DEGRADED_INPUT_VERTICAL,
)


@dataclass
class Router:
    """A real router on loopback, with peers that can be told to fail."""

    peers: FaultyPeers
    stub: router_service_pb2_grpc.RankingServiceStub
    registry: CollectorRegistry
    routes: Path
    store: str
    closing: ExitStack

    def rank(self, ads: list[str], *, user: str = "", timeout: float = 5.0, **fields: Any) -> Any:
        request = wire.RankRequest(
            surface=fields.pop("surface", "feed"),
            user_id=user or USER["A3"],
            candidates=[wire.Candidate(ad_id=ad) for ad in ads],
            **fields,
        )
        return client.call(self.stub.Rank, request, timeout=timeout)

    def figure(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def write_routes(self, *, version: int, top: int = 0, text: str = "") -> None:
        fresh = self.routes.with_suffix(".new")
        fresh.write_text(text or ROUTES.format(version=version, top=top))
        fresh.rename(self.routes)

    def logged(self, stream: str, message: type[Any]) -> list[Any]:
        with open_stream(self.store, stream) as opened:
            claimed = opened.claim("test", "reader", limit=1000, block_ms=0)
        return [message.FromString(item.data) for item in claimed]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    spec = write_spec(tmp_path)
    (tmp_path / "routes.yaml").write_text(ROUTES.format(version=1, top=2))
    registry, resources = CollectorRegistry(), ExitStack()
    peers = FaultyPeers(spec)
    settings = RouterSettings(
        server=ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0),
        spec=tmp_path / "spec.yaml",
        routes=tmp_path / "routes.yaml",
        store=f"sqlite:///{tmp_path}/gem.db",
        sequence=peers.address,
        solaris=peers.address,
        verticals=(peers.address,),
        routes_poll_seconds=0.02,
    )
    figures = CallMetrics(registry)
    services = build(settings, registry, figures, resources)
    with running(services, settings.server, call_metrics=figures) as server:
        server.health.ready()
        with client.connect(f"127.0.0.1:{server.port}", limits=Limits()) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            yield Router(peers, stub, registry, settings.routes, settings.store, resources)
    resources.close()
    peers.stop()


# The answer


def test_ads_come_best_first_with_probabilities_levels_and_where_they_came_from(
    router: Router,
) -> None:
    response = router.rank(["1", "3", "2"], request_id="r1")
    assert [ad.ad_id for ad in response.ads] == ["3", "2", "1"]
    best = response.ads[0]
    assert best.value == pytest.approx(0.003 * (1.0 + 10.0 * 0.5), rel=1e-6)
    assert dict(best.probabilities) == {"click": pytest.approx(0.003), "buy": 0.5}
    assert [(ad.candidate_index, ad.level) for ad in response.ads] == [(1, 2), (2, 3), (0, 1)]
    assert (response.request_id, response.arm, response.route_version) == ("r1", "A3", 1)
    assert (response.model_version, list(response.degraded)) == ("full/v1", [])


def test_a_bid_multiplies_and_top_count_cuts(router: Router) -> None:
    request = wire.RankRequest(surface="feed", user_id="u", top_count=1)
    request.candidates.add(ad_id="1", bid=100.0)
    request.candidates.add(ad_id="3")
    response = client.call(router.stub.Rank, request, timeout=5.0)
    assert [ad.ad_id for ad in response.ads] == ["1"]
    assert response.request_id


@pytest.mark.parametrize("count", [1, 200, 10_000])
def test_any_number_of_candidates_up_to_the_limit_is_ranked(router: Router, count: int) -> None:
    response = router.rank([str(n) for n in range(count)], timeout=20.0)
    assert sorted(int(ad.ad_id) for ad in response.ads) == list(range(count))
    values = [ad.value for ad in response.ads]
    assert values == sorted(values, reverse=True)


def test_no_candidates_are_an_empty_answer_that_asks_nobody(router: Router) -> None:
    response = router.rank([])
    assert (list(response.ads), response.arm, list(response.degraded)) == ([], "A3", [])
    assert router.peers.infer_requests == []


def test_the_control_arm_reads_neither_memory_nor_pairs(router: Router) -> None:
    router.peers.faults["solaris"] = "bug"
    response = router.rank(["1", "2"], user=USER["A0"])
    assert (response.arm, list(response.degraded)) == ("A0", [])
    assert {ad.level for ad in response.ads} == {5}
    assert router.peers.state_requests[0].loopfm_space_id == b""
    sent = shapes_sent(router.peers.infer_requests[0])
    assert (sent["memory_q"], sent["pair_q"]) == ([0, 0], [2, 0])


def test_a_model_is_sent_every_tensor_of_the_batch_with_its_rows(router: Router) -> None:
    router.rank(["1", "2"])
    sent = shapes_sent(router.peers.infer_requests[0])
    assert set(sent) == set(FIELDS)
    assert sent["user_ids"] == [1, 2]
    assert (sent["ad_ids"], sent["ad_dense"]) == ([2, 2], [2, 5])
    assert (sent["memory_q"], sent["pair_q"], sent["pair_meta"]) == ([3, 16], [2, DIM], [2, 3])


def test_explain_says_how_a_user_is_routed_without_asking_anybody(router: Router) -> None:
    for arm, user in USER.items():
        request = wire.ExplainRequest(surface="feed", user_id=user)
        response = client.call(router.stub.Explain, request, timeout=5.0)
        assert response.arm.name == arm
        assert (response.bucket < 5000) == (arm == "A0")
        assert [shadow.name for shadow in response.shadows] == ["next"]
        assert dict(response.value_weights) == {"click": 1.0, "buy": 10.0}
    assert router.peers.state_requests == []


# Refusals


def test_a_malformed_request_is_refused_by_what_is_wrong_with_it(router: Router) -> None:
    with pytest.raises(InvalidInput, match="'7' is a candidate more than once"):
        router.rank(["7", "8", "7"])
    with pytest.raises(InvalidInput, match="two spellings"):
        router.rank(["7", "07"])
    with pytest.raises(InvalidInput, match="'seven' is not a decimal integer"):
        router.rank(["seven"])
    with pytest.raises(ResourceExhausted, match="10001 candidates exceed the limit of 10000"):
        router.rank([str(n) for n in range(10_001)])
    with pytest.raises(InvalidInput, match="user id is empty"):
        client.call(router.stub.Rank, wire.RankRequest(surface="feed"), timeout=5.0)
    with pytest.raises(InvalidInput, match="request_ms is -1"):
        router.rank(["1"], request_ms=-1)
    request = wire.RankRequest(surface="feed", user_id="u")
    request.candidates.add(ad_id="1", bid=-2)
    with pytest.raises(InvalidInput, match="bid of ad '1' is -2"):
        client.call(router.stub.Rank, request, timeout=5.0)
    assert router.peers.state_requests == []


def test_an_unknown_surface_and_one_without_routes_are_refused_naming_what_there_is(
    router: Router,
) -> None:
    with pytest.raises(
        UnknownSurface, match="'shop' is unknown; use one of: feed, reels"
    ) as caught:
        router.rank(["1"], surface="shop")
    assert caught.value.metadata == {"surface": "shop", "known": "feed, reels"}
    with pytest.raises(UnknownSurface, match="'reels' is not routed; use one of: feed"):
        router.rank(["1"], surface="reels")
    with pytest.raises(UnknownSurface):
        client.call(router.stub.Explain, wire.ExplainRequest(surface="shop"), timeout=5.0)


def test_a_request_without_a_deadline_is_refused(router: Router) -> None:
    with pytest.raises(grpc.RpcError, match="deadline"):
        router.stub.Rank(wire.RankRequest(surface="feed", user_id="u"))


# Degradation


@pytest.mark.parametrize("fault", ["hang", "unavailable", "bug", "other_spec"])
def test_without_user_state_the_answer_says_so_and_scores_ads_by_their_ids(
    router: Router, fault: str
) -> None:
    router.peers.faults["sequence"] = fault
    response = router.rank(["1", "2"], timeout=1.0)
    assert list(response.degraded) == [SEQUENCE, LOOPFM]
    assert [ad.ad_id for ad in response.ads] == ["2", "1"]
    sent = router.peers.infer_requests[0]
    assert tensor_sent(sent, "ad_ids", np.int64).tolist() == [[1, ABSENT], [2, ABSENT]]
    assert tensor_sent(sent, "user_ids", np.int64).tolist() == [[key_of(USER["A3"], 2), ABSENT]]
    assert np.isnan(tensor_sent(sent, "ad_dense", np.float32)).all()
    assert shapes_sent(sent)["memory_q"] == [0, LOOPFM_DIM // 2]
    assert router.figure("gem_degraded_total", input="sequence") == 1
    router.peers.faults.clear()
    assert list(router.rank(["1", "2"]).degraded) == []


def test_a_memory_that_was_not_read_in_time_is_said_to_be_missing(router: Router) -> None:
    router.peers.faults["sequence"] = "no_memory"
    assert list(router.rank(["1"]).degraded) == [LOOPFM]
    assert shapes_sent(router.peers.infer_requests[0])["memory_q"] == [0, LOOPFM_DIM // 2]


@pytest.mark.parametrize("fault", ["hang", "unavailable", "bug"])
def test_without_pair_embeddings_every_level_is_default(router: Router, fault: str) -> None:
    router.peers.faults["solaris"] = fault
    response = router.rank(["1", "2"], timeout=1.0)
    assert list(response.degraded) == [SOLARIS]
    assert {ad.level for ad in response.ads} == {5}
    assert shapes_sent(router.peers.infer_requests[0])["pair_q"] == [2, DIM]
    assert router.figure("gem_candidates_total", surface="feed", level="default") == 2


def test_hanging_reads_together_cost_no_more_than_their_share_of_the_time(router: Router) -> None:
    router.peers.faults |= {"sequence": "hang", "solaris": "hang"}
    begun = time.perf_counter()
    response = router.rank(["1"], timeout=1.0)
    assert time.perf_counter() - begun < 0.8
    assert list(response.degraded) == [SEQUENCE, SOLARIS, LOOPFM]


@pytest.mark.parametrize("fault", ["hang", "unavailable", "bug", "short", "no_buy"])
def test_when_an_arms_model_cannot_answer_the_first_arms_does_without_foreign_coordinates(
    router: Router, fault: str
) -> None:
    router.peers.faults["full"] = fault
    response = router.rank(["1", "2"], timeout=1.5)
    assert (response.arm, response.model_version) == ("A0", "plain/v1")
    assert list(response.degraded) == [VERTICAL]
    assert [ad.ad_id for ad in response.ads] == ["2", "1"]
    assert {ad.level for ad in response.ads} == {5}
    sent = shapes_sent(router.peers.infer_requests[-1])
    assert (sent["memory_q"], sent["pair_q"]) == ([0, 0], [2, 0])


def test_without_any_model_the_request_fails_with_its_own_reason(router: Router) -> None:
    router.peers.faults |= {"full": "unavailable", "plain": "unavailable"}
    with pytest.raises(NotReady, match="no vertical model answered") as caught:
        router.rank(["1"])
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "VERTICAL_UNAVAILABLE")
    router.peers.faults |= {"full": "hang", "plain": "hang"}
    with pytest.raises((NotReady, DeadlineExceeded)):
        router.rank(["1"], timeout=0.5)


def test_a_score_that_is_not_a_number_costs_its_candidate_only(router: Router) -> None:
    router.peers.faults["full"] = "nan"
    response = router.rank(["1", "3", "2"])
    assert [(ad.ad_id, ad.fallback) for ad in response.ads] == [
        ("2", False),
        ("1", False),
        ("3", True),
    ]
    assert dict(response.ads[2].probabilities) == {"buy": 0.5}
    assert np.isfinite([ad.value for ad in response.ads]).all()
    assert router.figure("gem_fallback_scores_total", model="full") == 1


def test_a_peer_that_disappears_and_returns_is_found_again(router: Router) -> None:
    assert list(router.rank(["1"]).degraded) == []
    port, spec = router.peers.port, router.peers.spec
    router.peers.stop()
    with pytest.raises(GemError):
        router.rank(["1"], timeout=1.0)
    router.peers = FaultyPeers(spec, port=port)

    def answers() -> bool:
        try:
            return not router.rank(["1"], timeout=1.0).degraded
        except GemError:
            return False

    until(answers)


# Afterwards


def test_what_was_served_is_logged_with_the_bytes_it_was_served_from(router: Router) -> None:
    response = router.rank(["1", "3"], request_id="r1", request_ms=1_700_000_000_000)
    sent = router.peers.infer_requests[0]
    router.closing.close()
    served = [each for each in router.logged("served", wire.ServedRequest) if not each.shadow]
    (served,) = served
    assert (served.request_id, served.arm, served.model_version) == ("r1", "A3", "full/v1")
    assert (served.request_ms, list(served.ad_ids)) == (1_700_000_000_000, ["1", "3"])
    assert served.spec_hash == router.peers.spec.hash
    raw = {i.name: data for i, data in zip(sent.inputs, sent.raw_input_contents, strict=True)}
    assert {name: tensor.data for name, tensor in served.tensors.items()} == raw
    assert unpack_tensor(served.probabilities["click"]).tolist() == pytest.approx([0.001, 0.003])
    by_index = sorted(response.ads, key=lambda ad: ad.candidate_index)
    assert list(served.values) == [ad.value for ad in by_index]


def test_the_best_candidates_are_offered_for_speculation_and_the_control_arm_offers_none(
    router: Router,
) -> None:
    router.rank(
        ["1", "3", "2"], request_id="r3", request_ms=1_700_000_000_000, context={"country": "pt"}
    )
    router.rank(["1", "3", "2"], user=USER["A0"])
    router.closing.close()
    (task,) = router.logged("speculation", SpeculationTask)
    assert (task.request_id, task.user_id, task.surface) == ("r3", USER["A3"], "feed")
    assert (list(task.ad_ids), dict(task.context)) == (["3", "2"], {"country": "pt"})
    assert list(task.scores) == pytest.approx([0.018, 0.012])
    assert task.expires_ms == 1_700_000_000_000 + 900_000


def test_a_shadow_arm_is_scored_after_the_answer_and_logged_as_not_shown(router: Router) -> None:
    router.peers.faults["next"] = "nan"
    router.rank(["1", "3"], request_id="r1")
    router.closing.close()
    (shadow,) = [each for each in router.logged("served", wire.ServedRequest) if each.shadow]
    assert (shadow.request_id, shadow.arm, shadow.model_version) == ("r1", "next", "next/v1")


def test_a_hanging_shadow_arm_delays_no_answer(router: Router) -> None:
    router.peers.faults["next"] = "hang"
    begun = time.perf_counter()
    for _ in range(10):
        router.rank(["1"])
    assert time.perf_counter() - begun < 1.5
    router.peers.faults.clear()


# Route tables


def test_a_new_table_is_taken_up_under_load_without_a_failed_request(router: Router) -> None:
    failures: list[GemError] = []
    versions: list[int] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                versions.append(router.rank(["1", "2"]).route_version)
            except GemError as error:
                failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 6):
        router.write_routes(version=version)
        until(lambda version=version: versions[-1:] == [version])
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(versions) == {1, 2, 3, 4, 5} or set(versions) == {2, 3, 4, 5}


@pytest.mark.parametrize("text", ["surfaces: {feed: {slat: x}}", "version: [", "version: 9"])
def test_a_bad_table_is_counted_and_the_last_good_one_stays(router: Router, text: str) -> None:
    router.write_routes(version=0, text=text)
    until(lambda: router.figure("gem_bad_route_tables_total") == 1)
    assert router.rank(["1"]).route_version == 1
    assert router.figure("gem_route_version") == 1
    router.routes.unlink()
    until(lambda: router.figure("gem_bad_route_tables_total") == 2)
    assert router.rank(["1"]).route_version == 1
    router.write_routes(version=2)
    until(lambda: router.rank(["1"]).route_version == 2)


# Settings


def test_verticals_are_named_by_model_or_are_one_for_all() -> None:
    assert targets_by_model(("h:1",)) == {"": "h:1"}
    assert targets_by_model(("a=h:1", "b=h:2", "h:3")) == {"a": "h:1", "b": "h:2", "": "h:3"}
    for bad in ((), ("a=",), ("=h:1",), ("a=h:1", "a=h:2")):
        with pytest.raises(ValueError, match="verticals"):
            targets_by_model(bad)
