"""Replay against serving: the same log, the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.ids import ABSENT
from feature_store.online import open_store
from feature_store.tables import Tables
from services.solaris.lifetimes import HOUR_MS, Level, Lifetimes
from services.solaris.reader import PairReader
from services.solaris.replay import PairReplay
from services.solaris.rows import Pair
from services.solaris.worker.changes import DeltaChangeLog
from services.solaris.writer import NewPair, PairWriter

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


WRITES = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 5), st.integers(0, 8 * HOUR_MS), st.integers(-127, 127)),
    max_size=12,
)  # fmt: skip
READS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 40 * HOUR_MS)), min_size=1, max_size=8
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(writes=WRITES, reads=READS)
def test_a_replay_gives_the_bytes_that_were_served(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[int, int, int, int]],
    reads: list[tuple[int, int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    pairs = [new_pair(*write) for write in writes]
    pairs.sort(key=lambda new: (new.pair.available_ms, new.ad_key))
    store = open_store(f"sqlite:///{folder / 'online.sqlite'}")
    writer = PairWriter(store, LIVES, space_id=SPACE, dim=DIM)
    reader = PairReader(store, LIVES)
    got = replayed(folder, pairs or [new_pair(9, 9, 0, 1)]).read(*asked(reads))
    waiting = list(pairs)
    for row in sorted(range(len(reads)), key=lambda i: reads[i][2]):
        user, ad, at = reads[row]
        while waiting and waiting[0].pair.available_ms <= T0 + at:
            writer.write([waiting.pop(0)])
        served = reader.read(
            user, [ad], [ad // 2 if ad else None], as_of_ms=T0 + at, space_id=SPACE, dim=DIM
        )
        for replayed_values, (name, values) in zip(got, served.tensors().items(), strict=True):
            assert replayed_values[row].tobytes() == values[0].tobytes(), name
    store.close()


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
