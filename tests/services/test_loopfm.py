"""The annotator over a real log, store, stream and tables, with a real (untrained or barely trained) foundation model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gem.router.v1.router_service_pb2 import DEGRADED_INPUT_SEQUENCE, ServedRequest
from prometheus_client import CollectorRegistry

from feature_store.asof import NEVER
from feature_store.batch import to_tensors
from feature_store.errors import FailedPrecondition
from feature_store.importing.rows import Importer
from feature_store.online import OnlineStore, open_store
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.streams import Stream, open_stream
from feature_store.tables import Tables
from feature_store.transfer import Annotations
from feature_store.wire import pack_tensor
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.solaris.pair import pair_space_id
from model.training.optimizers import OptimizerConfig
from model.training.published import Version, load_foundation, publish_foundation
from model.training.rows import ReplayRows
from model.training.teacher import Teacher, TeacherConfig
from model.training.trainer import RunConfig, preset, walk_forward
from services.loopfm import process
from services.loopfm.follow import Follower
from services.loopfm.memory import MemoryWriter
from services.loopfm.metrics import LoopFmMetrics
from services.loopfm.records import Delay, Pinned
from services.loopfm.settings import LoopFmSettings
from services.loopfm.writer import Annotator, Sink, labels_since

SPEC = Path(__file__).resolve().parents[2] / "feature_store" / "datasets" / "world.yaml"
DAYS = [START_MS + day * DAY_MS for day in range(5)]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Teacher(TeacherConfig(foundation=preset("model.gem.presets:tiny")), Replay(load_spec(SPEC), Tables(Path())).layout)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log")
    generate(WorldConfig(users=25, ads=60, days=4, requests_per_user=6.0), Tables(root))
    return root


@pytest.fixture
def home(log: Path, tmp_path: Path, teacher: Teacher) -> Iterator[SimpleNamespace]:
    """A log of its own, a store, and a snapshot that has seen nothing."""
    import shutil

    shutil.copytree(log, tmp_path / "tables")
    replay = Replay(load_spec(SPEC), Tables(tmp_path / "tables"))
    pinned = Pinned(teacher=teacher, family="gem", model_version="gem/1", watermark_ms=0)
    with open_store(f"sqlite:///{tmp_path / 'online.sqlite'}") as store:
        yield SimpleNamespace(
            replay=replay, store=store, pinned=pinned, metrics=LoopFmMetrics(CollectorRegistry()), root=tmp_path
        )


def memory_of(home: SimpleNamespace, store: OnlineStore | None = None) -> MemoryWriter:
    return MemoryWriter(store or home.store, space_id=home.pinned.space_id, num_objectives=3, num_bytes=32)


def annotator(home: SimpleNamespace, pinned: Pinned | None = None, **rest: object) -> Annotator:
    return Annotator(home.replay, pinned or home.pinned, home.metrics, **{"memory": memory_of(home), **rest})  # type: ignore[arg-type]


def forwards(home: SimpleNamespace, purpose: str) -> float:
    return float(home.metrics.forwards.labels(purpose)._value.get())


def test_one_forward_gives_soft_labels_memory_and_pairs_and_none_is_extra(home: SimpleNamespace) -> None:
    calls: list[int] = []
    hook = home.pinned.teacher.foundation.register_forward_hook(lambda *_: calls.append(1))
    done = annotator(home, batch_requests=32).annotate(DAYS[0], DAYS[4])
    hook.remove()
    assert len(calls) == done.forwards == forwards(home, "annotation") > 1
    assert forwards(home, "loopfm") == 0
    rows = home.replay.tables.read("annotations").to_pylist()
    assert len(rows) == done.rows == len(home.replay.impressions) == len({row["example_id"] for row in rows})
    assert len({(row["forward_id"], row["row_in_forward"]) for row in rows}) == len(rows)
    assert len({row["forward_id"] for row in rows}) == done.forwards
    assert all(len(row["logits"]) == 3 and len(row["z_q"]) == 32 for row in rows)
    assert all(row["available_ms"] > row["event_ms"] for row in rows)
    pairs = home.replay.tables.read("pairs").to_pylist()
    assert {(r["user_key"], r["ad_key"], r["computed_ms"]) for r in pairs} == {
        (r["user_key"], r["ad_key"], r["event_ms"]) for r in rows
    }
    assert {row["space_id"] for row in pairs} == {pair_space_id(home.pinned.space_id)}


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_is_written_is_what_the_forward_said(home: SimpleNamespace, at_once: int) -> None:
    annotator(home, batch_requests=4, at_once=at_once).annotate(DAYS[0], DAYS[1])
    examples = home.replay.examples(DAYS[0], DAYS[1])
    batch, targets = home.replay.batch(examples, np.arange(len(examples)))
    said = home.pinned.teacher.annotate(batch)
    place = {bytes(name): row for row, name in enumerate(targets.example_id)}
    for row in home.replay.tables.read("annotations").to_pylist():
        at = place[row["example_id"]]
        np.testing.assert_allclose(row["logits"], said.logits_NK[at], atol=1e-5)
        codes = np.frombuffer(row["z_q"], np.uint8)
        low, high = (codes & 15).astype(np.int8), (codes >> 4).astype(np.int8)
        z = np.stack([low, high], axis=1).reshape(-1)
        z = np.where(z > 7, z - 16, z) / 8
        assert np.abs(z - said.z_ND[at]).max() <= 0.125 + 1e-5


def test_annotating_again_makes_no_forward_and_no_row(home: SimpleNamespace) -> None:
    first = annotator(home).annotate(DAYS[0], DAYS[1])
    before = forwards(home, "annotation")
    again = annotator(home).annotate(DAYS[0], DAYS[1])
    assert (again.rows, again.forwards, again.skipped) == (0, 0, first.rows)
    assert forwards(home, "annotation") == before
    assert home.replay.tables.read("annotations").num_rows == first.rows
    more = annotator(home).annotate(DAYS[0], DAYS[2])
    assert more.skipped == first.rows
    assert more.rows > 0


def test_a_stretch_without_requests_writes_nothing(home: SimpleNamespace) -> None:
    done = annotator(home).annotate(0, 1)
    assert tuple(done) == (0, 0, 0, 0, 0)
    assert not home.replay.tables.exists("annotations")


def test_a_stretch_is_annotated_by_one_snapshot(home: SimpleNamespace) -> None:
    annotator(home).annotate(DAYS[0], DAYS[1])
    second = dataclasses.replace(home.pinned, model_version="gem/2")
    with pytest.raises(FailedPrecondition, match=r"holds annotations by \['gem/1'\]"):
        annotator(home, second).annotate(DAYS[0], DAYS[2])
    assert annotator(home, second).annotate(DAYS[1], DAYS[2]).rows > 0


def test_a_request_that_ends_in_the_next_stretch_belongs_to_the_one_it_began_in(home: SimpleNamespace) -> None:
    importer = Importer(home.replay.tables, home.replay.spec)
    shown = [{"user_id": 1, "surface": "feed", "request_id": "late", "ad_id": ad} for ad in (1, 2)]
    times = (DAYS[1] - 1, DAYS[1] + 1)
    importer.take("impressions", "test", [{**row, "event_ms": at} for row, at in zip(shown, times, strict=True)])
    home.replay = Replay(home.replay.spec, home.replay.tables)
    first = annotator(home).annotate(DAYS[0], DAYS[1])
    second = annotator(home, dataclasses.replace(home.pinned, model_version="gem/2")).annotate(DAYS[1], DAYS[2])
    rows = home.replay.tables.read("annotations", columns=["request_id", "model_version", "event_ms"]).to_pylist()
    late = [(row["model_version"], row["event_ms"]) for row in rows if row["request_id"] == "late"]
    assert sorted(late) == [("gem/1", DAYS[1] - 1), ("gem/1", DAYS[1] + 1)]
    assert first.rows + second.rows == len(rows)


def test_spaces_are_never_mixed(home: SimpleNamespace) -> None:
    with pytest.raises(FailedPrecondition, match="spaces are never mixed"):
        annotator(home, expected_space=b"another!")
    torch.manual_seed(9)
    other = dataclasses.replace(
        home.pinned, teacher=Teacher(home.pinned.teacher.config, home.replay.layout), model_version="gem/2"
    )
    assert other.space_id != home.pinned.space_id
    with pytest.raises(FailedPrecondition, match="spaces are never mixed"):
        annotator(home, other)


def test_a_row_whose_label_was_seen_says_so_and_enters_neither_memory_nor_student(home: SimpleNamespace) -> None:
    impressions = home.replay.impressions
    seen = np.random.default_rng(0).random(len(impressions)) < 0.3
    pinned = dataclasses.replace(home.pinned, seen=seen)
    done = annotator(home, pinned).annotate(DAYS[0], DAYS[4])
    assert done.self_label_seen == seen.sum()
    table = home.replay.tables.read("annotations").to_pylist()
    assert {r["example_id"] for r in table if r["self_label_seen"]} == {bytes(n) for n in impressions.example_id[seen]}
    annotations = Annotations(home.replay.tables, impressions, space_id=pinned.space_id)
    _, taught = annotations.teacher(np.arange(len(impressions)), 3)
    np.testing.assert_array_equal(taught, ~seen)
    memory = memory_of(home)
    held = {
        (int(row["high"]), int(row["low"])) for user in np.unique(impressions.user_key) for row in memory.read(int(user)).rows
    }
    seen_names = {(int.from_bytes(n[:8], "big"), int.from_bytes(n[8:], "big")) for n in map(bytes, impressions.example_id[seen])}
    assert held
    assert not held & seen_names


def test_without_an_offset_log_the_watermark_decides(home: SimpleNamespace) -> None:
    pinned = dataclasses.replace(home.pinned, watermark_ms=DAYS[1])
    annotator(home, pinned).annotate(DAYS[0], DAYS[2])
    for row in home.replay.tables.read("annotations").to_pylist():
        assert row["self_label_seen"] == (row["event_ms"] <= DAYS[1])


def test_the_memory_at_an_instant_is_the_window_that_replay_rebuilds(home: SimpleNamespace) -> None:
    annotator(home).annotate(DAYS[0], DAYS[4])
    home.replay.with_annotations(
        Annotations(home.replay.tables, home.replay.impressions, space_id=home.pinned.space_id)
    )
    examples, memory = home.replay.examples(DAYS[2], DAYS[4]), memory_of(home)
    batch, _ = home.replay.batch(examples, np.arange(len(examples)))
    assert len(batch.memory_ms)
    log = home.replay.impressions
    for r in range(len(examples)):
        own = slice(batch.memory_offsets[r], batch.memory_offsets[r + 1])
        request = str(log.request_ids[log.request[examples.impression[examples.offsets[r]]]])
        rows, bits = memory.read(int(batch.user_key[r])).read(int(batch.request_ms[r]), request_id=request)
        assert rows["q"].tobytes() == batch.memory_q[own].tobytes()
        assert rows["event_ms"].tolist() == batch.memory_ms[own].tolist()
        assert rows["surface"].tolist() == batch.memory_surface[own].tolist()
        assert bits.tolist() == batch.memory_labels[own].tolist()


def test_outcomes_arrive_as_updates_and_end_in_the_same_memory(home: SimpleNamespace, tmp_path: Path) -> None:
    annotator(home).annotate(DAYS[0], DAYS[4])
    blind = Replay(home.replay.spec, Tables(tmp_path / "blind"))
    for name in ("impressions", "catalogue", "users", "events"):
        blind.tables.append(name, home.replay.tables.read(name))
    assert (blind.impressions.label_ms == NEVER).all()
    with open_store(f"sqlite:///{tmp_path / 'blind.sqlite'}") as store:
        memory = memory_of(home, store)
        Annotator(blind, home.pinned, home.metrics, memory=memory).annotate(DAYS[0], DAYS[4])
        labels = labels_since(home.replay, 0)
        assert memory.label(labels[::-1]) == 0
        user = labels[0].user_key
        missing = labels[0]._replace(example_id=b"\0" * 16)
        assert memory.label([missing]) == 1
        one, two = memory.read(user).rows, memory_of(home).read(user).rows
        np.testing.assert_array_equal(one["label_ms"], two["label_ms"])
        assert (one["label_ms"] != NEVER).any()


def test_two_writers_of_one_memory_lose_nothing(home: SimpleNamespace) -> None:
    memory = memory_of(home)
    shape = memory.shape

    def write(worker: int) -> None:
        for number in range(20):
            name = bytes([worker]) * 8 + number.to_bytes(8, "big")
            entry = shape.entries(
                [name], requests=[f"r{number}"], event_ms=1000 + number, available_ms=1000 + number, source=0, surface=0,
                q=np.zeros((1, 32), np.uint8),
            )  # fmt: skip
            memory.append(np.array([7]), entry)
            memory.append(np.array([7]), entry)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory.read(7).rows) == 40


def test_delays_are_never_zero_the_same_again_and_centred(home: SimpleNamespace) -> None:
    names = home.replay.impressions.example_id
    delays = Delay().sample(names)
    assert (delays >= 1).all()
    np.testing.assert_array_equal(delays, Delay().sample(names))
    assert 40_000 < np.median(delays) < 90_000
    assert 60_000 < np.quantile(delays, 0.95) <= 400_000
    with pytest.raises(ValueError, match="at least 1 ms"):
        Delay(median_ms=0)


# ── what is being served ──


def served_requests(home: SimpleNamespace, count: int) -> list[ServedRequest]:
    replay = home.replay
    examples, log = replay.examples(DAYS[2], DAYS[3]), replay.impressions
    made = []
    for r in range(count):
        batch, _ = replay.batch(examples, np.array([r]))
        shown = examples.impression[examples.offsets[r] : examples.offsets[r + 1]]
        made.append(
            ServedRequest(
                request_id=str(log.request_ids[log.request[shown[0]]]),
                surface=replay.spec.surfaces[int(batch.surface[0])], user_id=str(log.user_key[shown[0]]),
                request_ms=int(batch.request_ms[0]), ad_ids=[str(key) for key in log.ad_key[shown]],
                tensors={name: pack_tensor(tensor) for name, tensor in to_tensors(batch).items()},
                spec_hash=replay.spec.hash,
            )
        )  # fmt: skip
    return made


def follower(home: SimpleNamespace, stream: Stream, **rest: object) -> Follower:
    sink = Sink(
        home.replay.tables, home.pinned, home.metrics,
        surfaces=home.replay.spec.surfaces, memory=memory_of(home), delay=Delay(),
    )  # fmt: skip
    return Follower(
        stream, home.replay.spec, home.pinned, sink, home.metrics, consumer="c", **{"now_ms": None, **rest}  # type: ignore[arg-type]
    )


@pytest.fixture
def stream(home: SimpleNamespace) -> Iterator[Stream]:
    with open_stream(f"sqlite:///{home.root / 'online.sqlite'}", "served") as opened:
        yield opened


def test_served_requests_are_annotated_as_the_log_will_have_them(home: SimpleNamespace, stream: Stream) -> None:
    requests = served_requests(home, 6)
    stream.append([request.SerializeToString() for request in requests])
    assert follower(home, stream).turn() == 6
    assert forwards(home, "annotation") == 1
    live = {row["example_id"]: row for row in home.replay.tables.read("annotations").to_pylist()}
    assert len(live) == sum(len(request.ad_ids) for request in requests)
    assert set(live) <= {bytes(name) for name in home.replay.impressions.example_id}
    examples = home.replay.examples(DAYS[2], DAYS[3])
    batch, targets = home.replay.batch(examples, np.arange(6))
    said = home.pinned.teacher.annotate(batch)
    for at, name in enumerate(targets.example_id):
        np.testing.assert_allclose(live[bytes(name)]["logits"], said.logits_NK[at], atol=1e-5)
    assert stream.lag("loopfm") == 0
    user = int(batch.user_key[0])
    assert len(memory_of(home).read(user).rows)


def test_a_kill_between_writing_and_acknowledging_doubles_nothing(home: SimpleNamespace, stream: Stream) -> None:
    data = [request.SerializeToString() for request in served_requests(home, 3)]
    stream.append(data)
    follower(home, stream).turn()
    rows = home.replay.tables.read("annotations").num_rows
    stream.append(data)  # what a consumer that took over would be given again
    stream.append(data[:1] * 2)
    follower(home, stream).turn()
    assert home.replay.tables.read("annotations").num_rows == rows
    assert forwards(home, "annotation") == 1


def test_what_a_backfill_wrote_to_the_table_alone_reaches_the_memory_without_a_forward(
    home: SimpleNamespace, stream: Stream
) -> None:
    annotator(home, memory=None).annotate(DAYS[2], DAYS[3])
    before, requests = forwards(home, "annotation"), served_requests(home, 4)
    stream.append([request.SerializeToString() for request in requests])
    follower(home, stream).turn()
    assert forwards(home, "annotation") == before
    table = {row["example_id"]: row for row in home.replay.tables.read("annotations").to_pylist()}
    memory, served = memory_of(home), {request.request_id for request in requests}
    held = {}
    for user in {int(request.user_id) for request in requests}:
        held |= {row["high"].tobytes()[::-1] + row["low"].tobytes()[::-1]: row for row in memory.read(user).rows}
    wanted = {name for name, row in table.items() if row["request_id"] in served}
    assert wanted <= set(held)
    assert all(held[name]["q"].tobytes() == table[name]["z_q"] for name in wanted)
    assert all(held[name]["available_ms"] == table[name]["available_ms"] for name in wanted)


def test_what_cannot_be_annotated_is_counted_and_stops_nothing(home: SimpleNamespace, stream: Stream) -> None:
    good, *bad = served_requests(home, 6)
    bad[0].shadow = True
    bad[1].spec_hash = b"x" * 16
    bad[2].degraded.append(DEGRADED_INPUT_SEQUENCE)
    del bad[3].tensors["ad_ids"]
    bad[4].ad_ids.append("5")
    stream.append([b"\xff\xff", *(request.SerializeToString() for request in bad), good.SerializeToString()])
    assert follower(home, stream, now_ms=lambda: DAYS[4]).turn() == 7
    rows = home.replay.tables.read("annotations").to_pylist()
    assert len(rows) == len(good.ad_ids)
    assert {row["available_ms"] for row in rows} == {DAYS[4]}
    counted = {reason: home.metrics.skipped.labels(reason)._value.get() for reason in ("shadow", "other_spec", "degraded")}
    assert all(value >= 1 for value in counted.values())
    assert home.metrics.skipped.labels("malformed")._value.get() == 3
    assert stream.lag("loopfm") == 0


# ── from training to annotation ──


def test_walking_forward_annotates_without_ever_having_seen_a_label(home: SimpleNamespace) -> None:
    run = RunConfig(
        preset="model.gem.presets:tiny", train_from_ms=DAYS[0], train_to_ms=DAYS[2], optimizer=OptimizerConfig(warmup_steps=2)
    )
    spaces = set()
    for number, snapshot in enumerate(walk_forward(run, home.replay, until_ms=DAYS[4])):
        pinned = Pinned(
            teacher=snapshot.teacher, family="gem", model_version=f"gem/{number}",
            watermark_ms=snapshot.watermark_ms, seen=snapshot.seen,
        )  # fmt: skip
        spaces.add(pinned.space_id)
        Annotator(home.replay, pinned, home.metrics, memory=None).annotate(
            snapshot.annotate_from_ms, snapshot.annotate_to_ms
        )
    rows = home.replay.tables.read("annotations").to_pylist()
    assert len(spaces) == 1
    assert {row["model_version"] for row in rows} == {"gem/0", "gem/1"}
    assert not any(row["self_label_seen"] for row in rows)
    late = home.replay.impressions.event_ms >= DAYS[2]
    assert len(rows) == late.sum()


def test_a_published_snapshot_annotates_as_a_process(home: SimpleNamespace) -> None:
    golden = ReplayRows(home.replay, DAYS[0], DAYS[1]).batch(np.arange(2))[0]
    publish_foundation(
        home.root / "models", Version("gem", "1", 0), home.pinned.teacher, home.replay.spec, golden,
        watermark_ms=DAYS[1], metrics={},
    )  # fmt: skip
    settings = LoopFmSettings(
        spec=SPEC, store=f"sqlite:///{home.root / 'online.sqlite'}", tables=home.root / "tables",
        foundation=home.root / "models" / "gem",
    )  # fmt: skip
    done = process.backfill(settings, DAYS[1] + 1, DAYS[3])
    assert done.rows > 0
    assert done.self_label_seen == 0
    loaded = load_foundation(home.root / "models" / "gem", home.replay.spec)
    assert {r["space_id"] for r in home.replay.tables.read("annotations").to_pylist()} == {loaded.manifest.loopfm_space_id}
