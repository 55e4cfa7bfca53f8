"""The sequence service, over real sockets and a real store, says what replay says of the same log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from gem.common.v1.event_pb2 import Event, Outcome
from gem.sequence.v1 import sequence_service_pb2 as messages
from gem.sequence.v1 import sequence_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.batch import FIELDS
from feature_store.online import OnlineStore, open_store
from feature_store.replay import Replay
from feature_store.spec import Spec, load_spec
from feature_store.tables import Tables
from feature_store.wire import unpack_tensor
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, Service, running
from services.sequence.appender import Appender
from services.sequence.materialize import materialize
from services.sequence.reader import StateReader
from services.sequence.servicer import SequenceServicer

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"
SPLIT_MS = START_MS + 3 * DAY_MS


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(WORLD)


@pytest.fixture(scope="module")
def replay(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    tables = Tables(tmp_path_factory.mktemp("tables"))
    generate(WorldConfig(users=40, ads=60, days=4, requests_per_user=8), tables)
    return Replay(spec, tables)


@pytest.fixture
def store(tmp_path: Path, replay: Replay) -> Iterator[OnlineStore]:
    with open_store(f"sqlite:///{tmp_path / 'online.sqlite'}", timeout_seconds=5.0) as opened:
        materialize(replay, opened, until_ms=SPLIT_MS)
        yield opened


@pytest.fixture
def stub(store: OnlineStore, spec: Spec) -> Iterator[sequence_service_pb2_grpc.SequenceServiceStub]:
    servicer = SequenceServicer(StateReader(store, spec), Appender(store, spec), spec)
    service = Service(
        messages.DESCRIPTOR.services_by_name["SequenceService"],
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server,
        servicer,
    )
    settings = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0)
    with running([service], settings, call_metrics=CallMetrics(CollectorRegistry())) as live:
        with grpc.insecure_channel(f"127.0.0.1:{live.port}") as channel:
            yield sequence_service_pb2_grpc.SequenceServiceStub(channel)


def ask(stub: sequence_service_pb2_grpc.SequenceServiceStub, **fields: object) -> dict[str, np.ndarray]:
    request = messages.GetUserStateRequest(**fields)  # type: ignore[arg-type]
    answer = stub.GetUserState(request, timeout=5)
    return {name: unpack_tensor(tensor) for name, tensor in answer.tensors.items()}


def feed(stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay, from_ms: int, to_ms: int) -> None:
    """Appends what happened in a stretch of time, fact by fact in the order it became known."""
    log, events = replay.impressions, replay.events
    facts: list[tuple[tuple[int, int, int, bytes], Event | Outcome]] = []
    for i in range(len(log)):
        name = bytes(log.example_id[i])
        event = Event(
            event_id=name.hex(),
            source="impression",
            user_id=str(log.user_key[i]),
            ad_id=str(log.ad_key[i]),
            surface=replay.spec.surfaces[log.surface[i]],
            request_id=str(log.request_ids[log.request[i]]),
            event_ms=int(log.event_ms[i]),
        )
        facts.append(((int(log.available_ms[i]), int(log.event_ms[i]), 0, name), event))
        for k, objective in enumerate(replay.spec.objectives):
            known = int(log.label_ms[i, k])
            if known < to_ms:
                outcome = Outcome(
                    example_id=name, user_id=str(log.user_key[i]), objective=objective, occurred_ms=known, value=1.0
                )
                facts.append(((known, int(log.event_ms[i]), 2 + k, name), outcome))
    for i in range(len(events.event_ms)):
        event = Event(
            event_id=bytes(events.event_id[i]).hex(),
            source=replay.spec.event_sources[events.source[i]],
            user_id=str(events.user_key[i]),
            ad_id=str(events.ad_key[i]),
            event_ms=int(events.event_ms[i]),
        )
        facts.append(((int(events.available_ms[i]), int(events.event_ms[i]), 1, bytes(events.event_id[i])), event))
    for (available, _, _, _), fact in sorted(facts, key=lambda f: f[0]):
        if from_ms < available < to_ms:
            request = messages.AppendEventsRequest()
            (request.events if isinstance(fact, Event) else request.outcomes).append(fact)  # type: ignore[arg-type]
            stub.AppendEvents(request, timeout=5)


def test_materialized_rows_answer_as_replay_does_to_the_bit(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay, spec: Spec
) -> None:
    examples = replay.examples(SPLIT_MS, SPLIT_MS + DAY_MS)
    checked = 0
    for row in range(len(examples)):
        batch, _ = replay.batch(examples, np.array([row]))
        if batch.request_ms[0] > SPLIT_MS + 30 * 60_000:
            break
        got = ask(
            stub,
            user_id=str(batch.user_key[0]),
            surface=spec.surfaces[batch.surface[0]],
            as_of_ms=int(batch.request_ms[0]),
            ad_ids=[str(ad) for ad in batch.ad_ids[:, 0]],
        )
        if (batch.event_ms >= SPLIT_MS).any():
            continue
        checked += 1
        for name in FIELDS:
            if not name.startswith("pair_") and not name.endswith("_dense"):
                np.testing.assert_array_equal(got[name], getattr(batch, name), err_msg=name)
    assert checked > 0


def test_appended_events_answer_as_replay_does_to_the_bit(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay, spec: Spec
) -> None:
    until = SPLIT_MS + 6 * 3_600_000
    feed(stub, replay, SPLIT_MS, until)
    examples = replay.examples(until, until + 3 * 3_600_000)
    row = int(np.argmin(examples.request_ms))
    batch, _ = replay.batch(examples, np.array([row]))
    got = ask(
        stub,
        user_id=str(batch.user_key[0]),
        surface=spec.surfaces[batch.surface[0]],
        as_of_ms=int(batch.request_ms[0]),
        ad_ids=[str(ad) for ad in batch.ad_ids[:, 0]],
    )
    between = (replay.impressions.event_ms > until) & (replay.impressions.event_ms < batch.request_ms[0])
    assert not between.any(), "the first request after the feed sees exactly what was fed"
    for name in FIELDS:
        if not name.startswith("pair_"):
            np.testing.assert_array_equal(got[name], getattr(batch, name), err_msg=name)


def test_an_event_sent_twice_counts_once(stub: sequence_service_pb2_grpc.SequenceServiceStub) -> None:
    event = Event(
        source="impression", user_id="1", ad_id="2", surface="feed", request_id="r", event_ms=SPLIT_MS + 1000
    )
    request = messages.AppendEventsRequest(events=[event, event])
    first, second = stub.AppendEvents(request, timeout=5), stub.AppendEvents(request, timeout=5)
    assert (first.appended_event_count, first.duplicate_count) == (1, 1)
    assert (second.appended_event_count, second.duplicate_count) == (0, 2)


def test_a_requests_own_impressions_are_not_its_past(stub: sequence_service_pb2_grpc.SequenceServiceStub) -> None:
    event = Event(source="impression", user_id="77", ad_id="2", surface="feed", request_id="r9", event_ms=SPLIT_MS + 5)
    stub.AppendEvents(messages.AppendEventsRequest(events=[event]), timeout=5)
    at = SPLIT_MS + 10
    mine = ask(stub, user_id="77", surface="feed", as_of_ms=at, request_id="r9")
    later = ask(stub, user_id="77", surface="feed", as_of_ms=at, request_id="r10")
    assert len(mine["event_ms"]) + 1 == len(later["event_ms"])


@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_any_number_of_ads_is_answered(stub: sequence_service_pb2_grpc.SequenceServiceStub, count: int) -> None:
    ads = [str(10**12 - i) for i in range(count)]
    got = ask(stub, user_id="-9223372036854775807", surface="feed", as_of_ms=SPLIT_MS, ad_ids=ads)
    assert got["ad_ids"].shape[0] == got["ad_dense"].shape[0] == count
    assert got["user_key"].tolist() == [-9223372036854775807]
    assert got["ad_ids"][:, 0].tolist() == [int(ad) for ad in ads]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"user_id": "", "surface": "feed", "as_of_ms": 1}, "user id is empty"),
        ({"user_id": "é", "surface": "feed", "as_of_ms": 1}, "not a decimal integer"),
        ({"user_id": "-9223372036854775808", "surface": "feed", "as_of_ms": 1}, "reserved"),
        ({"user_id": "1", "surface": "nowhere", "as_of_ms": 1}, "nowhere"),
        ({"user_id": "1", "surface": "feed", "as_of_ms": 0}, "as_of_ms"),
        ({"user_id": "1", "surface": "feed", "as_of_ms": 1, "ad_ids": ["2", "2"]}, "more than once"),
        ({"user_id": "1", "surface": "feed", "as_of_ms": 1, "loopfm_space_id": b"x"}, "loopfm_space_id"),
    ],
)
def test_a_malformed_question_names_what_is_wrong(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, fields: dict[str, object], part: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, **fields)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert part in caught.value.details()


def test_a_malformed_event_adds_nothing(stub: sequence_service_pb2_grpc.SequenceServiceStub) -> None:
    good = Event(source="impression", user_id="1", ad_id="2", surface="feed", request_id="r", event_ms=SPLIT_MS + 1)
    bad = Event(source="smell", user_id="1", ad_id="2", event_ms=1)
    with pytest.raises(grpc.RpcError, match="smell"):
        stub.AppendEvents(messages.AppendEventsRequest(events=[good, bad]), timeout=5)
    assert stub.AppendEvents(messages.AppendEventsRequest(events=[good]), timeout=5).appended_event_count == 1


def test_a_store_that_is_gone_is_unavailable_and_the_service_lives(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, store: OnlineStore
) -> None:
    store.close()
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, user_id="1", surface="feed", as_of_ms=SPLIT_MS)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
