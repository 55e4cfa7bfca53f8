"""The worker over a real stream, store and table; only the model is a formula."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gem.schema.v1.dataset_spec_pb2 import ID_TYPE_INT64
from gem.solaris.v1.task_pb2 import SpeculationTask
from prometheus_client import CollectorRegistry

from feature_store.batch import FIELDS, Array, FeatureBatch, from_tensors
from feature_store.errors import GemError, InvalidInput, NotReady
from feature_store.online import OnlineStore, open_store
from feature_store.streams import Stream, open_stream
from feature_store.tables import Tables
from services.solaris.keys import Keys
from services.solaris.ledger import DROPPED, WORKED, Ledger
from services.solaris.lifetimes import HOUR_MS, Level, Lifetimes
from services.solaris.reader import PairRead, PairReader
from services.solaris.worker.batching import concatenate
from services.solaris.worker.changes import DeltaChangeLog
from services.solaris.worker.clock import Clock, RequestClock, WallClock
from services.solaris.worker.loop import State, Worker, WorkerSettings
from services.solaris.writer import NewPair, PairWriter

SPACE = b"space-01"
T0 = 1_700_000_000_000
DIM = 4
LAG_MS = 1_000
KEYS = Keys(user_type=ID_TYPE_INT64, ad_type=ID_TYPE_INT64)


def state_batch(
    user_key: int, ad_keys: Sequence[int], as_of_ms: int, events: int = 2
) -> FeatureBatch:
    sizes = {"request": 1, "candidate": len(ad_keys), "event": events, "memory": 0}
    tensors: dict[str, Array] = {
        name: np.zeros((sizes[f.axis], 1) if f.ndim == 2 else sizes[f.axis], dtype=f.dtype)
        for name, f in FIELDS.items()
    }
    tensors["user_key"][:] = user_key
    tensors["request_ms"][:] = as_of_ms
    tensors["ad_ids"][:, 0] = ad_keys
    return from_tensors(tensors)


@dataclass
class StatesByRule:
    """User 404 is unknown for ever, user 503 for now."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    down: bool = False

    def read(self, tasks: Sequence[tuple[SpeculationTask, int]]) -> list[State | GemError]:
        return [self._one(task, as_of_ms) for task, as_of_ms in tasks]

    def _one(self, task: SpeculationTask, as_of_ms: int) -> State | GemError:
        self.asked.append((task.user_id, as_of_ms))
        if self.down or task.user_id == "503":
            return NotReady("the sequence service is away")
        if task.user_id == "404":
            return InvalidInput("no such user")
        ads = [int(ad) for ad in task.ad_ids]
        return State(state_batch(int(task.user_id), ads, as_of_ms), [ad // 10 for ad in ads])


@dataclass
class EmbedderByRule:
    """The vector of (u, a) is (u, a, a, a); ad 13's is not finite."""

    space_id: bytes = SPACE
    version: str = "v1"
    forwards: int = 0

    def embed(self, batch: FeatureBatch) -> npt.NDArray[np.float32]:
        self.forwards += 1
        users = np.repeat(batch.user_key, np.diff(batch.candidate_offsets))
        ads = batch.ad_ids[:, 0]
        vectors = np.stack([users, ads, ads, ads], axis=1).astype(np.float32)
        vectors[ads == 13] = np.nan
        return vectors


@dataclass
class Bench:
    store: OnlineStore
    stream: Stream
    tables: Tables
    states: StatesByRule = field(default_factory=StatesByRule)
    embedder: EmbedderByRule = field(default_factory=EmbedderByRule)
    ledger: Ledger = field(default_factory=lambda: Ledger(CollectorRegistry()))

    def pair_writer(self) -> PairWriter:
        return PairWriter(self.store, Lifetimes(), space_id=SPACE, dim=DIM)

    def worker(
        self,
        name: str = "w1",
        *,
        clock: Clock | None = None,
        batch: int = 4,
        backlog: int = 8,
        reclaim_idle_ms: int = 60_000,
        writer: PairWriter | None = None,
    ) -> Worker:
        return Worker(
            self.stream, self.states, self.embedder,
            writer or self.pair_writer(),
            DeltaChangeLog(self.tables), self.ledger,
            settings=WorkerSettings(
                consumer=name, batch_tasks=batch, max_backlog_tasks=backlog, block_ms=0,
                reclaim_idle_ms=reclaim_idle_ms,
            ),
            clock=clock or RequestClock(lag_ms=LAG_MS), keys=KEYS, surfaces=("feed", "reels"),
        )  # fmt: skip

    def offer(self, user: str, ads: Sequence[int], at_ms: int = T0, **fields: int) -> None:
        task = SpeculationTask(
            user_id=user, surface="feed", request_ms=at_ms, ad_ids=[str(ad) for ad in ads], **fields
        )
        self.stream.append([task.SerializeToString()])

    def read(self, user: int, ads: Sequence[int], as_of_ms: int) -> PairRead:
        return PairReader(self.store, Lifetimes()).read(
            user, ads, [ad // 10 for ad in ads], as_of_ms=as_of_ms, space_id=SPACE, dim=DIM
        )

    def dropped(self) -> dict[str, int]:
        return {kind: n for (name, kind), n in self.ledger.totals().items() if name == DROPPED}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    url = f"sqlite:///{tmp_path / 'online.sqlite'}"
    store, stream = open_store(url), open_stream(url, "speculation")
    yield Bench(store, stream, Tables(tmp_path / "tables"))
    stream.close()
    store.close()


def test_offered_pairs_are_computed_in_one_forward_written_logged_and_acknowledged(
    bench: Bench,
) -> None:
    bench.offer("1", [20, 21])
    bench.offer("2", [30], at_ms=T0 + 5)
    assert bench.worker().turn() == 2
    assert bench.embedder.forwards == 1
    got = bench.read(1, [20, 21, 22, 99], T0 + LAG_MS)
    assert got.levels_N.tolist() == [Level.EXACT, Level.EXACT, Level.AD_GROUP, Level.USER]
    np.testing.assert_allclose(
        got.vectors_ND[:2] * got.scales_N[:2, None], [[1, 20, 20, 20], [1, 21, 21, 21]], atol=0.1
    )
    assert bench.read(2, [30], T0 + LAG_MS + 5).levels_N.tolist() == [Level.EXACT]
    log = bench.tables.read("pairs").to_pylist()
    assert sorted((r["user_key"], r["ad_key"], r["ad_group_key"]) for r in log) == [
        (1, 20, 2), (1, 21, 2), (2, 30, 3),
    ]  # fmt: skip
    assert {r["available_ms"] for r in log} == {T0 + LAG_MS, T0 + LAG_MS + 5}
    assert bench.stream.lag("solaris") == 0


def test_a_replay_reads_states_as_of_the_request_and_nothing_is_seen_earlier(bench: Bench) -> None:
    bench.offer("1", [20])
    bench.worker().turn()
    assert bench.states.asked == [("1", T0 + LAG_MS)]
    assert bench.read(1, [20], T0 + LAG_MS - 1).levels_N.tolist() == [Level.DEFAULT]
    assert bench.read(1, [20], T0 + LAG_MS).levels_N.tolist() == [Level.EXACT]


def test_live_a_pair_is_computed_now_whatever_the_request_time(bench: Bench) -> None:
    bench.offer("1", [20])
    bench.worker(clock=WallClock(read_ms=lambda: T0 + HOUR_MS)).turn()
    assert bench.states.asked == [("1", T0 + HOUR_MS)]
    assert bench.read(1, [20], T0 + HOUR_MS).levels_N.tolist() == [Level.EXACT]


@dataclass
class DiesAfterWriting(PairWriter):
    """A kill between the write and the acknowledgement."""

    inner: PairWriter

    def fresh(self, *args: Any, **kwargs: Any) -> list[bool]:
        return self.inner.fresh(*args, **kwargs)

    def write(self, pairs: Any) -> list[NewPair]:
        self.inner.write(pairs)
        raise KeyboardInterrupt


def test_a_worker_killed_between_write_and_acknowledgement_loses_nothing_and_doubles_nothing(
    bench: Bench,
) -> None:
    bench.offer("1", [20, 21])
    dying = bench.worker("dies", writer=DiesAfterWriting(bench.pair_writer()))
    with pytest.raises(KeyboardInterrupt):
        dying.turn()
    once = bench.read(1, [20, 22], T0 + LAG_MS)
    assert bench.stream.lag("solaris") == 1
    heir = bench.worker("takes over", reclaim_idle_ms=0)
    assert heir.turn() == 1
    assert bench.stream.lag("solaris") == 0
    twice = bench.read(1, [20, 22], T0 + LAG_MS)
    assert all((a == b).all() for a, b in zip(once[:4], twice[:4], strict=True))


def test_a_task_that_a_dead_worker_had_claimed_is_taken_over(bench: Bench) -> None:
    bench.offer("1", [20])
    assert len(bench.stream.claim("solaris", "dead", 8, 0)) == 1
    assert bench.worker("too early").turn() == 0
    assert bench.worker("heir", reclaim_idle_ms=0).turn() == 1
    assert bench.read(1, [20], T0 + LAG_MS).levels_N.tolist() == [Level.EXACT]


def test_doing_a_task_twice_leaves_the_store_as_doing_it_once(bench: Bench) -> None:
    bench.offer("1", [20, 21])
    bench.worker().turn()
    once = bench.read(1, [20, 22], T0 + LAG_MS)
    bench.offer("1", [20, 21])
    bench.worker().turn()
    twice = bench.read(1, [20, 22], T0 + LAG_MS)
    assert all((a == b).all() for a, b in zip(once[:4], twice[:4], strict=True))
    assert bench.embedder.forwards == 1
    assert bench.dropped() == {"fresh": 2}


def test_a_pair_of_another_model_version_or_past_its_soft_age_is_computed_anew(
    bench: Bench,
) -> None:
    bench.offer("1", [20])
    bench.worker().turn()
    bench.embedder.version = "v2"
    bench.offer("1", [20], at_ms=T0 + 1)
    bench.worker().turn()
    bench.offer("1", [20], at_ms=T0 + 1 + Lifetimes().pair.soft_ms)
    bench.worker().turn()
    assert bench.embedder.forwards == 3


def test_a_burst_is_served_newest_first_and_what_is_dropped_is_counted(bench: Bench) -> None:
    for i in range(80):
        bench.offer(str(i), [20], at_ms=T0 + i)
    worker = bench.worker()
    while bench.stream.lag("solaris"):
        worker.turn()
    served = {user for user, _ in bench.states.asked}
    assert {str(i) for i in range(72, 80)} <= served
    totals = bench.ledger.totals()
    assert totals[WORKED, "pairs"] + totals[DROPPED, "overflowed"] == 80
    assert totals[DROPPED, "overflowed"] > 0


def test_a_task_that_can_never_be_done_is_dropped_and_does_not_block_the_others(
    bench: Bench,
) -> None:
    bench.stream.append([b"\xff not a task"])
    bench.offer("404", [20])
    bench.offer("not a number", [20])
    bench.offer("1", [20])
    worker = bench.worker()
    while bench.stream.lag("solaris"):
        worker.turn()
    assert bench.read(1, [20], T0 + LAG_MS).levels_N.tolist() == [Level.EXACT]
    assert bench.dropped() == {"malformed": 3}


def test_a_user_whose_state_is_away_for_now_stays_claimed(bench: Bench) -> None:
    bench.offer("503", [20])
    bench.offer("1", [20])
    worker = bench.worker()
    worker.turn()
    assert bench.stream.lag("solaris") == 1
    with pytest.raises(NotReady):
        worker.turn()
    assert bench.stream.lag("solaris") == 1


def test_an_expired_task_is_not_computed(bench: Bench) -> None:
    bench.offer("1", [20], expires_ms=T0 + LAG_MS)
    bench.offer("1", [21], expires_ms=T0 + LAG_MS + 1)
    bench.worker().turn()
    assert bench.dropped() == {"expired": 1}
    assert bench.read(1, [21], T0 + LAG_MS).levels_N.tolist() == [Level.EXACT]


def test_a_vector_that_is_not_finite_is_never_stored(bench: Bench) -> None:
    bench.offer("1", [13, 20])
    bench.worker().turn()
    assert bench.read(1, [13, 20], T0 + LAG_MS).levels_N.tolist() == [Level.USER, Level.EXACT]
    assert bench.dropped() == {"not_finite": 1}


def test_a_worker_runs_until_it_is_told_to_stop(bench: Bench) -> None:
    stopping = threading.Event()
    worker = bench.worker()
    thread = threading.Thread(target=lambda: worker.run(stopping, store=bench.store))
    thread.start()
    bench.offer("1", [20])
    for _ in range(500):
        if bench.read(1, [20], T0 + LAG_MS).levels_N.tolist() == [Level.EXACT]:
            break
        stopping.wait(0.01)
    stopping.set()
    thread.join(5)
    assert bench.stream.lag("solaris") == 0


def test_batches_join_with_their_offsets() -> None:
    parts = [
        state_batch(1, [5, 6], T0, events=3),
        state_batch(2, [], T0, events=0),
        state_batch(3, [7], T0, events=1),
    ]
    joined = concatenate(parts)
    assert joined.user_key.tolist() == [1, 2, 3]
    assert joined.candidate_offsets.tolist() == [0, 2, 2, 3]
    assert joined.event_offsets.tolist() == [0, 3, 3, 4]
    assert joined.ad_ids[:, 0].tolist() == [5, 6, 7]
