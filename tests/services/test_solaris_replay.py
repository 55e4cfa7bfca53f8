"""Replay against serving: the same log, the same bytes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.batch import Array
from feature_store.errors import InvalidInput
from feature_store.ids import ABSENT
from feature_store.layout import column_index
from feature_store.online import open_store
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from services.solaris.lifetimes import (
    HOUR_MS,
    USER_FIELD,
    Level,
    Lifetime,
    Lifetimes,
    ad_field,
    group_field,
    row_key,
)
from services.solaris.reader import PairReader
from services.solaris.replay import PairReplay, replayed_pairs
from services.solaris.rows import NO_SURFACE, Pair
from services.solaris.worker.changes import DeltaChangeLog
from services.solaris.writer import NewPair, PairWriter

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"
SPACE, OTHER = b"space-01", b"space-02"
T0 = 1_700_000_000_000
DIM = 4
LIVES = Lifetimes()


def new_pair(user: int, ad: int, at_ms: int, value: int, *, space: bytes = SPACE) -> NewPair:
    pair = Pair(
        space_id=space, model_version="v1", surface=0, computed_ms=T0 + at_ms,
        available_ms=T0 + at_ms + 10, scale=0.5,
        vector=np.array([value, -value, 1, 0], dtype=np.int8),
    )  # fmt: skip
    return NewPair(user, ad, ad // 2 if ad else None, pair)


def replayed(folder: Path, pairs: list[NewPair]) -> PairReplay:
    tables = Tables(folder / "tables")
    DeltaChangeLog(tables).append(pairs)
    return PairReplay(tables.read("pairs"), space_id=SPACE, dim=DIM)


def asked(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, ...]:
    users, ads, times = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    groups = np.array([ad // 2 if ad else ABSENT for ad in ads], dtype=np.int64)
    return users, ads, groups, T0 + times


def test_no_row_is_read_before_it_was_available(tmp_path: Path) -> None:
    replay = replayed(tmp_path, [new_pair(1, 2, 0, 8)])
    got = replay.read(*asked([(1, 2, 9), (1, 2, 10), (1, 3, 10), (2, 2, 10)]))
    assert got.level.tolist() == [
        Level.DEFAULT, Level.EXACT, Level.AD_GROUP, Level.DEFAULT,
    ]  # fmt: skip


def test_other_spaces_are_left_out_and_repeated_rows_count_once(tmp_path: Path) -> None:
    pairs = [new_pair(1, 2, 0, 8), new_pair(1, 2, 0, 8), new_pair(1, 4, 0, 9, space=OTHER)]
    got = replayed(tmp_path, pairs).read(*asked([(1, 3, 10), (1, 4, 10)]))
    assert got.level.tolist() == [Level.AD_GROUP, Level.USER]
    assert got.meta[:, 1].tolist() == [1, 1]


def test_nothing_asked_is_nothing_read(tmp_path: Path) -> None:
    none = np.zeros(0, dtype=np.int64)
    got = replayed(tmp_path, [new_pair(1, 2, 0, 8)]).read(none, none, none, none)
    assert got.q.shape == (0, DIM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    user: int
    ad: int
    group: int | None
    computed: int
    delay: int
    """Steps until it is available: a later one may be available sooner."""
    value: int
    version: str

    @property
    def new(self) -> NewPair:
        random = np.random.default_rng(self.value)
        at_ms = T0 + self.computed * STEP_MS
        pair = Pair(
            space_id=SPACE, model_version=self.version, surface=NO_SURFACE, computed_ms=at_ms,
            available_ms=at_ms + self.delay * STEP_MS, scale=float(np.float32(random.uniform())),
            vector=random.integers(-127, 128, DIM).astype(np.int8),
        )  # fmt: skip
        return NewPair(self.user, self.ad, self.group, pair)


STEP_MS = HOUR_MS // 4
"""Few instants, so that many are equal."""
WRITES = st.lists(
    st.builds(
        Write, user=st.integers(-2, 4), ad=st.integers(0, 4), group=st.sampled_from([None, 0, 1, 2]),
        computed=st.integers(0, 20), delay=st.integers(0, 3), value=st.integers(0, 99), version=st.sampled_from(["v1", "v2"]),
    ),
    min_size=1, max_size=40,
)  # fmt: skip
READS = st.lists(
    st.tuples(st.integers(-2, 5), st.integers(0, 5), st.sampled_from([None, 0, 1, 2, 3]), st.integers(-1, 40)),
    min_size=1, max_size=12,
)  # fmt: skip
LIVES_OF_ALL_KINDS = st.builds(
    lambda ages, half_lives, min_count: Lifetimes(
        **{level: Lifetime(soft_ms=age * STEP_MS, hard_ms=2 * age * STEP_MS) for level, age in ages.items()},
        ad_group_half_life_ms=half_lives[0] * HOUR_MS, user_half_life_ms=half_lives[1] * HOUR_MS, min_count=min_count,
    ),
    st.fixed_dictionaries({level: st.integers(4, 30) for level in ("pair", "ad_group", "user")}),
    st.tuples(st.floats(0.1, 9.0), st.floats(0.1, 9.0)),
    st.integers(1, 3),
)  # fmt: skip
ANY_LOG = settings(max_examples=25, deadline=None)


def in_order(writes: list[Write]) -> list[tuple[int, list[NewPair]]]:
    """One write of all users' pairs for each instant of availability."""
    pairs = sorted((write.new for write in writes), key=lambda new: new.pair.available_ms)
    return [(at_ms, list(mine)) for at_ms, mine in groupby(pairs, key=lambda new: new.pair.available_ms)]


def of_any_log(folder: Path, writes: list[Write], lives: Lifetimes, portion: int) -> PairReplay:
    tables = Tables(folder / "tables")
    DeltaChangeLog(tables).append([write.new for write in writes])
    return PairReplay(tables.read("pairs"), space_id=SPACE, dim=DIM, lifetimes=lives, portion=portion)


@ANY_LOG
@given(writes=WRITES, reads=READS, lives=LIVES_OF_ALL_KINDS, portion=st.sampled_from([1, 5, 1000]))
def test_a_replay_gives_the_bytes_that_were_served(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[Write],
    reads: list[tuple[int, int, int | None, int]],
    lives: Lifetimes,
    portion: int,
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    users, ads, groups, steps = zip(*reads, strict=True)
    user_key, ad_key = np.array(users, dtype=np.int64), np.array(ads, dtype=np.int64)
    group_key = np.array([ABSENT if group is None else group for group in groups], dtype=np.int64)
    at_ms = T0 + np.array(steps, dtype=np.int64) * STEP_MS
    got = of_any_log(folder, writes, lives, portion).read(user_key, ad_key, group_key, at_ms)
    with closing(open_store(f"sqlite:///{folder / 'online.sqlite'}")) as store:
        writer, reader = PairWriter(store, lives, space_id=SPACE, dim=DIM), PairReader(store, lives)
        waiting = in_order(writes)
        for row in np.argsort(at_ms, kind="stable").tolist():
            while waiting and waiting[0][0] <= at_ms[row]:
                writer.write(waiting.pop(0)[1])
            served = reader.read(
                users[row], [ads[row]], [groups[row]], as_of_ms=int(at_ms[row]), space_id=SPACE, dim=DIM
            )
            mine: dict[str, Array] = {"pair_q": got.q, "pair_scale": got.scale, "pair_level": got.level, "pair_meta": got.meta}
            for name, values in served.tensors().items():
                assert mine[name][row].tobytes() == values[0].tobytes(), name


@ANY_LOG
@given(writes=WRITES, until=st.integers(0, 25), lives=LIVES_OF_ALL_KINDS, portion=st.sampled_from([1, 5, 1000]))
def test_a_store_filled_from_the_log_holds_the_bytes_of_the_one_that_lived_through_it(
    tmp_path_factory: pytest.TempPathFactory, writes: list[Write], until: int, lives: Lifetimes, portion: int
) -> None:
    folder = tmp_path_factory.mktemp("fill")
    until_ms = T0 + until * STEP_MS
    fields = [*map(ad_field, range(6)), *map(group_field, range(4)), USER_FIELD]
    with (
        closing(open_store(f"sqlite:///{folder / 'lived.sqlite'}")) as lived,
        closing(open_store(f"sqlite:///{folder / 'filled.sqlite'}")) as filled,
    ):
        writer = PairWriter(lived, lives, space_id=SPACE, dim=DIM)
        for at_ms, pairs in in_order(writes):
            if at_ms <= until_ms:
                writer.write(pairs)
        seen = {write.user for write in writes if write.new.pair.available_ms <= until_ms}
        assert of_any_log(folder, writes, lives, portion).materialize(filled, until_ms=until_ms) == len(seen)
        for user in range(-2, 5):
            key = row_key(SPACE, user)
            assert filled.hget_many(key, fields) == lived.hget_many(key, fields)


def test_a_log_of_vectors_of_another_width_is_refused(tmp_path: Path) -> None:
    tables = Tables(tmp_path / "tables")
    DeltaChangeLog(tables).append([new_pair(1, 2, 0, 8)])
    with pytest.raises(InvalidInput, match="4 values, not 64"):
        PairReplay(tables.read("pairs"), space_id=SPACE, dim=64)


def test_a_store_filled_from_the_log_serves_what_the_one_that_lived_through_it_serves(tmp_path: Path) -> None:
    pairs = [new_pair(user, ad, at, ad + at % 7) for at in range(0, 60_000, 900) for user, ad in [(1, at % 5), (2, 3)]]
    later = new_pair(1, 2, 90_000, 99)
    lived, filled = (open_store(f"sqlite:///{tmp_path / name}.sqlite") for name in ("lived", "filled"))
    writer = PairWriter(lived, LIVES, space_id=SPACE, dim=DIM)
    for at in range(0, 60_000, 900):
        writer.write([new for new in pairs if new.pair.computed_ms == T0 + at])
    assert replayed(tmp_path, [*pairs, later]).materialize(filled, until_ms=T0 + 80_000) == 2
    for user, ad in [(1, 2), (1, 9), (2, 3), (2, 2), (3, 1)]:
        one, other = (
            PairReader(store, LIVES).read(user, [ad], [ad // 2], as_of_ms=T0 + 95_000, space_id=SPACE, dim=DIM)
            for store in (lived, filled)
        )
        assert all(np.array_equal(values, same) for values, same in zip(one.tensors().values(), other.tensors().values(), strict=True))
    lived.close()
    filled.close()


def test_every_impression_of_a_log_gets_the_bytes_that_its_request_would_have_been_served(tmp_path: Path) -> None:
    generate(WorldConfig(users=8, ads=30, days=3, requests_per_user=8), Tables(tmp_path / "tables"))
    replay = Replay(load_spec(WORLD), Tables(tmp_path / "tables"))
    log, from_ms = replay.impressions, START_MS + DAY_MS
    group = replay.ads.gather_ids(replay.ads.versions.at(log.ad_key, log.event_ms), log.ad_key)[:, column_index(replay.layout.ad_ids, "ad_group")]
    writes = [of_impression(replay, row, int(group[row])) for row in range(0, len(log), 2)]
    DeltaChangeLog(replay.tables).append(writes)
    got = replayed_pairs(replay, SPACE, from_ms=from_ms, dim=DIM)
    read_ms, levels = replay.read_ms("request"), set()
    waiting = sorted(writes, key=lambda new: new.pair.available_ms)
    with closing(open_store(f"sqlite:///{tmp_path / 'online.sqlite'}")) as store:
        writer, reader = PairWriter(store, LIVES, space_id=SPACE, dim=DIM), PairReader(store, LIVES)
        for row in np.argsort(read_ms, kind="stable").tolist():
            while waiting and waiting[0].pair.available_ms <= read_ms[row]:
                writer.write([waiting.pop(0)])
            asked = (int(log.user_key[row]), [int(log.ad_key[row])], [int(group[row])])
            served = reader.read(*asked, as_of_ms=int(read_ms[row]), space_id=SPACE, dim=DIM).tensors()
            if log.event_ms[row] < from_ms:
                assert got.level[row] == Level.DEFAULT
                continue
            levels.add(int(got.level[row]))
            for name, values in served.items():
                assert getattr(got, name.removeprefix("pair_"))[row].tobytes() == values[0].tobytes(), name
    assert levels >= {Level.EXACT, Level.AD_GROUP, Level.USER}


def of_impression(replay: Replay, row: int, group: int) -> NewPair:
    """What a worker writes two seconds and a bit after an ad was shown; no two at once."""
    log, random = replay.impressions, np.random.default_rng(row)
    at_ms = int(log.event_ms[row])
    pair = Pair(
        space_id=SPACE, model_version="v1", surface=NO_SURFACE, computed_ms=at_ms, available_ms=at_ms + 2_000 + row,
        scale=0.5, vector=random.integers(-127, 128, DIM).astype(np.int8),
    )  # fmt: skip
    return NewPair(int(log.user_key[row]), int(log.ad_key[row]), group, pair)
