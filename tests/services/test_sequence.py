"""The sequence service, over real sockets and a real store, says what replay says of the same log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from gem.common.v1.event_pb2 import Event, Outcome
from gem.sequence.v1 import sequence_service_pb2 as messages
from gem.sequence.v1 import sequence_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.asof import Caps
from feature_store.batch import FIELDS
from feature_store.history import History, memory_shape
from feature_store.ids import example_id
from feature_store.layout import Layout
from feature_store.online import OnlineStore, open_store, with_version
from feature_store.replay import Replay
from feature_store.spec import Spec, load_spec
from feature_store.tables import Tables
from feature_store.wire import unpack_tensor
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from services.loopfm.memory import MemoryWriter
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, Service, running
from services.sequence.appender import Appender
from services.sequence.erasure import erase
from services.sequence.materialize import materialize
from services.sequence.metrics import SequenceMetrics
from services.sequence.reader import Question, StateReader
from services.sequence.servicer import SequenceServicer

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"
SPLIT_MS = START_MS + 3 * DAY_MS
SPACE = b"space-01"


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
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def stub(
    store: OnlineStore, spec: Spec, registry: CollectorRegistry
) -> Iterator[sequence_service_pb2_grpc.SequenceServiceStub]:
    metrics = SequenceMetrics(registry)
    servicer = SequenceServicer(StateReader(store, spec), Appender(store, spec), spec, metrics=metrics)
    service = Service(
        messages.DESCRIPTOR.services_by_name["SequenceService"],
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server,
        servicer,
    )
    settings = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0)
    with (
        running([service], settings, call_metrics=CallMetrics(CollectorRegistry())) as live,
        grpc.insecure_channel(f"127.0.0.1:{live.port}") as channel,
    ):
        yield sequence_service_pb2_grpc.SequenceServiceStub(channel)


def ask(stub: sequence_service_pb2_grpc.SequenceServiceStub, **fields: object) -> dict[str, np.ndarray]:
    request = messages.GetUserStateRequest(**fields)  # type: ignore[arg-type]
    answer = stub.GetUserState(request, timeout=5)
    return {name: unpack_tensor(tensor) for name, tensor in answer.tensors.items()}


class Feed:
    """The facts of a log in the order in which replay counts them, sent as they become known."""

    def __init__(self, replay: Replay, since_ms: int) -> None:
        self._facts = sorted(
            [*self._impressions(replay), *self._events(replay), *self._outcomes(replay)], key=lambda each: each[0]
        )
        self._at = next(
            (at for at, (order, _) in enumerate(self._facts) if not (order[0] <= since_ms and order[1] < since_ms)),
            len(self._facts),
        )

    def send(self, stub: sequence_service_pb2_grpc.SequenceServiceStub, until_ms: int, *, singly: bool = False) -> int:
        """Sends what is known at an instant and was not sent before; how many facts."""
        start = self._at
        while self._at < len(self._facts):
            available, event_ms, *_ = self._facts[self._at][0]
            if available > until_ms or event_ms >= until_ms:
                break
            self._at += 1
        sent = [fact for _, fact in self._facts[start : self._at]]
        for part in [[fact] for fact in sent] if singly else [sent]:
            append(stub, *part)
        return len(sent)

    @staticmethod
    def _impressions(replay: Replay) -> Iterator[tuple[tuple[int, int, int, bytes], Event | Outcome]]:
        log = replay.impressions
        for i in range(len(log)):
            name = log.example_id[i].tobytes()
            event = Event(
                event_id=name.hex(), source="impression", user_id=str(log.user_key[i]), ad_id=str(log.ad_key[i]),
                surface=replay.spec.surfaces[log.surface[i]], request_id=str(log.request_ids[log.request[i]]),
                event_ms=int(log.event_ms[i]), available_ms=int(log.available_ms[i]),
            )  # fmt: skip
            yield (event.available_ms, event.event_ms, 0, name), event

    @staticmethod
    def _events(replay: Replay) -> Iterator[tuple[tuple[int, int, int, bytes], Event | Outcome]]:
        log, sources = replay.events, replay.spec.message.event_sources
        for i in range(len(log.event_ms)):
            name, source = log.event_id[i].tobytes(), sources[int(log.source[i])]
            event = Event(
                event_id=name.hex(), source=source.name, user_id=str(log.user_key[i]), ad_id=str(log.ad_key[i]),
                surface=replay.spec.surfaces[log.surface[i]] if log.surface[i] >= 0 else "",
                event_ms=int(log.event_ms[i]), available_ms=int(log.available_ms[i]),
            )  # fmt: skip
            yield (event.available_ms, event.event_ms, source.priority, name), event

    @staticmethod
    def _outcomes(replay: Replay) -> Iterator[tuple[tuple[int, int, int, bytes], Event | Outcome]]:
        log = replay.impressions
        shown = {log.example_id[i].tobytes(): i for i in range(len(log))}
        for row in replay.tables.read("outcomes").to_pylist():
            i, k = shown[row["example_id"]], replay.spec.objectives.index(row["objective"])
            outcome = Outcome(
                example_id=row["example_id"], user_id=str(log.user_key[i]), objective=row["objective"],
                occurred_ms=row["occurred_ms"], available_ms=row["available_ms"], value=row["value"],
            )  # fmt: skip
            yield (row["available_ms"], int(log.event_ms[i]), 2 + k, row["example_id"]), outcome


def append(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, *facts: Event | Outcome
) -> messages.AppendEventsResponse:
    request = messages.AppendEventsRequest(
        events=[fact for fact in facts if isinstance(fact, Event)],
        outcomes=[fact for fact in facts if isinstance(fact, Outcome)],
    )
    return stub.AppendEvents(request, timeout=20)


@pytest.mark.parametrize("singly", [False, True], ids=["in batches", "fact by fact"])
def test_every_request_of_a_day_reads_online_what_replay_reads_to_the_bit(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay, spec: Spec, singly: bool
) -> None:
    feed = Feed(replay, SPLIT_MS)
    examples = replay.examples(SPLIT_MS, SPLIT_MS + DAY_MS)
    order = np.argsort(examples.request_ms, kind="stable")
    sent = 0
    for row in order:
        batch, _ = replay.batch(examples, np.array([row]))
        sent += feed.send(stub, int(batch.request_ms[0]), singly=singly)
        shown = examples.impression[examples.offsets[row]]
        got = ask(
            stub,
            user_id=str(batch.user_key[0]),
            surface=spec.surfaces[batch.surface[0]],
            request_id=str(replay.impressions.request_ids[replay.impressions.request[shown]]),
            as_of_ms=int(batch.request_ms[0]),
            ad_ids=[str(ad) for ad in batch.ad_ids[:, 0]],
        )
        for name in FIELDS:
            if not name.startswith("pair_"):
                np.testing.assert_array_equal(got[name], getattr(batch, name), err_msg=f"{name} of request {row}")
    assert len(order) > 20
    assert sent > 200


def test_rows_from_the_log_are_the_rows_that_appending_makes(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay, tmp_path: Path
) -> None:
    later = SPLIT_MS + 12 * 3_600_000
    Feed(replay, SPLIT_MS).send(stub, later)
    with open_store(f"sqlite:///{tmp_path / 'other.sqlite'}") as other:
        materialize(replay, other, until_ms=later)
        for kind, least in (("c/*", 100), ("u/*/past", 30), ("u/*/ledger", 20)):
            names = sorted(other.find(kind))
            assert len(names) > least
            assert sorted(store.find(kind)) == names
            want = dict(zip(names, [row.value for row in other.read_versioned(names)], strict=True))
            got = dict(zip(names, [row.value for row in store.read_versioned(names)], strict=True))
            assert [name for name in names if got[name] != want[name]] == []


def impression(number: int, *, user: str = "77", ad: str = "2", at: int = SPLIT_MS + 1000) -> Event:
    return Event(source="impression", user_id=user, ad_id=ad, surface="feed", request_id=f"r{number}", event_ms=at + number)


def click(event: Event, *, after: int = 10, objective: str = "click", value: float = 1.0) -> Outcome:
    name = example_id(event.request_id, int(event.ad_id), event.surface, event.event_ms)
    return Outcome(
        example_id=name, user_id=event.user_id, objective=objective, occurred_ms=event.event_ms + after, value=value
    )


def test_an_outcome_finds_its_impression_though_hundreds_came_after_it(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, spec: Spec
) -> None:
    first = impression(0)
    append(stub, first, *(impression(number) for number in range(1, 300)))
    at = Layout(spec).user_dense
    column = [each.name for each in at].index("user_click_rate")
    before = ask(stub, user_id="77", surface="feed", as_of_ms=SPLIT_MS + 100_000)["user_dense"][0, column]
    assert append(stub, click(first)).appended_outcome_count == 1
    after = ask(stub, user_id="77", surface="feed", as_of_ms=SPLIT_MS + 100_000)["user_dense"][0, column]
    assert after > before
    assert append(stub, click(first)).duplicate_count == 1


def test_what_is_no_outcome_of_a_known_impression_is_neither_added_nor_called_a_repeat(
    stub: sequence_service_pb2_grpc.SequenceServiceStub,
) -> None:
    shown = impression(0)
    append(stub, shown)
    strange = [click(impression(9)), click(shown, after=3_600_001), click(shown, value=0.0)]
    answer = append(stub, *strange)
    assert (answer.appended_outcome_count, answer.duplicate_count) == (0, 0)
    assert append(stub, click(shown, after=3_600_000)).appended_outcome_count == 1


def test_an_old_event_sent_again_after_it_left_the_history_is_not_counted_again(
    stub: sequence_service_pb2_grpc.SequenceServiceStub,
) -> None:
    events = [impression(number) for number in range(300)]
    append(stub, *events)
    again = append(stub, *events)
    assert (again.appended_event_count, again.duplicate_count) == (0, 300)


def test_two_processes_that_are_sent_the_same_facts_count_each_once(store_url: str, spec: Spec) -> None:
    events = [impression(number, user=str(number % 3), ad=str(number % 5)) for number in range(60)]
    outcomes = [click(event) for event in events[::2]]

    def send(results: list[tuple[int, int]]) -> None:
        with open_store(store_url, timeout_seconds=20) as own:
            appender = Appender(own, spec)
            for at in range(0, 60, 6):
                added = appender.append(events[at : at + 6], outcomes[at // 2 : at // 2 + 3])
                results.append((added.events, added.outcomes))

    results: list[tuple[int, int]] = []
    threads = [threading.Thread(target=send, args=(results,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(events for events, _ in results), sum(came for _, came in results)) == (60, 30)
    with open_store(store_url) as store:
        (name,) = [name for name in store.find("c/*/all/*")]
        (row,) = store.read_versioned([name])
        trials_and_successes = np.frombuffer(row.value).reshape(-1, 3)[:, :2].tolist()
    assert trials_and_successes[0] == [60.0, 30.0]


def test_an_event_is_read_at_once_by_every_server(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub, spec: Spec
) -> None:
    other = StateReader(store, spec)
    for number in range(5):
        append(stub, impression(number))
        question = Question(77, 0, "", SPLIT_MS + 5_000, np.zeros(0, dtype=np.int64), {}, b"")
        answer = other.read(question)
        assert len(answer.tensors["event_ms"]) == number + 1
        assert answer.user_version == number + 1


def test_an_ad_is_read_in_the_version_that_was_in_force(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, replay: Replay
) -> None:
    versions = replay.ads.versions
    start, stop = versions.spans
    checked = 0
    for key, first, end in zip(versions.keys.tolist(), start.tolist(), stop.tolist(), strict=True):
        for since in versions.since_ms[first:end].tolist():
            for at in (since - 1, since):
                if at < SPLIT_MS:
                    continue
                got = ask(stub, user_id="1", surface="feed", as_of_ms=at, ad_ids=[str(key)])["ad_ids"]
                want = replay.ads.gather_ids(versions.at(np.array([key]), np.array([at])), np.array([key]))
                assert got.tolist() == want.tolist()
                checked += 1
    assert checked > 0, "the world has ads that come later"


def test_a_damaged_row_of_a_user_is_named_and_costs_no_other_user(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub
) -> None:
    append(stub, impression(0))
    (held,) = store.read_versioned(["u/77/past"])
    store.put_many({"u/77/past": with_version(held.value[:-1] + b"\x77", 9)})
    with pytest.raises(grpc.RpcError, match="u/77/past") as caught:
        ask(stub, user_id="77", surface="feed", as_of_ms=SPLIT_MS)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert ask(stub, user_id="78", surface="feed", as_of_ms=SPLIT_MS)["event_ms"].tolist() == []


def remember(store: OnlineStore, spec: Spec, event: Event) -> None:
    """What the LoopFM writer leaves in the store for one impression."""
    shape = memory_shape(len(spec.objectives), num_bytes=4, caps=Caps())
    name = example_id(event.request_id, int(event.ad_id), event.surface, event.event_ms)
    entries = shape.entries(
        [name], requests=[event.request_id], event_ms=event.event_ms, available_ms=event.event_ms, source=0, surface=0, q=7
    )
    memory = History(shape)
    memory.append(entries)
    store.hset_many("lf-spaces", {SPACE.hex(): b"4"})
    store.put_many({f"lf/{SPACE.hex()}/77": with_version(memory.to_bytes(), 1)})


def test_a_memory_is_read_labelled_by_appended_outcomes_and_a_damaged_one_is_only_missing(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub, spec: Spec
) -> None:
    event = impression(0)
    append(stub, event)
    remember(store, spec, event)
    at = SPLIT_MS + 100_000
    asked = {"user_id": "77", "surface": "feed", "as_of_ms": at, "loopfm_space_id": SPACE}
    assert ask(stub, **asked)["memory_labels"].tolist() == [0]
    append(stub, click(event))
    got = ask(stub, **asked)
    assert got["memory_labels"].tolist() == [1]
    assert got["memory_q"].tolist() == [[7, 7, 7, 7]]
    assert ask(stub, **{**asked, "as_of_ms": event.event_ms + 5})["memory_labels"].tolist() == [0]
    store.put_many({f"lf/{SPACE.hex()}/77": b"12345678damaged"})
    answer = stub.GetUserState(messages.GetUserStateRequest(**asked), timeout=5)  # type: ignore[arg-type]
    assert list(answer.missing) == ["loopfm"]
    assert answer.tensors["memory_q"].shape == [0, 4]
    assert answer.tensors["event_ms"].shape == [1]


def test_an_outcome_that_comes_before_the_memory_of_its_impression_is_found_in_it_later(
    store: OnlineStore,
    stub: sequence_service_pb2_grpc.SequenceServiceStub,
    spec: Spec,
    registry: CollectorRegistry,
) -> None:
    event = impression(0)
    shape = memory_shape(len(spec.objectives), num_bytes=4, caps=Caps())
    writer = MemoryWriter(store, space_id=SPACE, num_objectives=len(spec.objectives), num_bytes=4)
    append(stub, event)
    append(stub, click(event))
    assert registry.get_sample_value("gem_sequence_appended_total", {"what": "waiting"}) == 1
    name = example_id(event.request_id, int(event.ad_id), event.surface, event.event_ms)
    at = event.event_ms
    entry = shape.entries([name], requests=[event.request_id], event_ms=at, available_ms=at, source=0, surface=0, q=7)
    writer.append(np.array([77]), entry)
    asked = {"user_id": "77", "surface": "feed", "as_of_ms": SPLIT_MS + 100_000, "loopfm_space_id": SPACE}
    assert ask(stub, **asked)["memory_labels"].tolist() == [1]
    assert ask(stub, **{**asked, "as_of_ms": at + 5})["memory_labels"].tolist() == [0]


def test_a_damaged_memory_costs_no_outcome(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub, spec: Spec
) -> None:
    event = impression(0)
    append(stub, event)
    remember(store, spec, event)
    store.put_many({f"lf/{SPACE.hex()}/77": with_version(b"damaged", 9)})
    append(stub, click(event))
    got = ask(stub, user_id="77", surface="feed", as_of_ms=SPLIT_MS + 100_000)
    assert got["event_labels"].tolist() == [1]


def test_an_outcome_of_nothing_that_is_known_is_counted_as_such(
    stub: sequence_service_pb2_grpc.SequenceServiceStub, registry: CollectorRegistry
) -> None:
    request = messages.AppendEventsRequest(outcomes=[click(impression(0))])
    answer = stub.AppendEvents(request, timeout=5)
    assert (answer.appended_outcome_count, answer.unknown_outcome_count) == (0, 1)
    assert registry.get_sample_value("gem_sequence_appended_total", {"what": "unknown"}) == 1


def test_erasing_a_user_leaves_nothing_of_them_and_everything_of_others(
    store: OnlineStore, stub: sequence_service_pb2_grpc.SequenceServiceStub, spec: Spec
) -> None:
    append(stub, impression(0), impression(1, user="7"), impression(2, user="777"))
    remember(store, spec, impression(0))
    store.hset_many(f"sol/{SPACE.hex()}/p/77", {"u": b"x"})
    store.hset_many(f"sol/{SPACE.hex()}/p/7", {"u": b"x"})
    others = {name for name in store.find("*") if not name.startswith("u/77/") and not name.endswith("/77")}
    assert erase(store, 77) == 4
    assert set(store.find("*")) == others
    assert ask(stub, user_id="77", surface="feed", as_of_ms=SPLIT_MS + 9_000)["event_ms"].tolist() == []
    assert erase(store, 77) == 0


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
