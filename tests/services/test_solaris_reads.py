"""Writing pairs and reading them back at every level, in a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.online import OnlineStore, open_store
from services.solaris import rows
from services.solaris.lifetimes import HOUR_MS, Level, Lifetimes, ad_field, row_key
from services.solaris.reader import PairRead, PairReader
from services.solaris.rows import Pair
from services.solaris.writer import NewPair, PairWriter

SPACE, OTHER = b"space-01", b"space-02"
T0 = 1_700_000_000_000
DIM = 4
LIVES = Lifetimes()
USER, AD, GROUP = 11, 22, 33


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OnlineStore]:
    opened = open_store(f"sqlite:///{tmp_path / 'online.sqlite'}")
    yield opened
    opened.close()


def pair(
    value: int, computed_ms: int = T0, *, available_ms: int | None = None, space: bytes = SPACE,
    version: str = "v1",
) -> Pair:  # fmt: skip
    return Pair(
        space_id=space, model_version=version, surface=1, computed_ms=computed_ms,
        available_ms=computed_ms if available_ms is None else available_ms, scale=0.5,
        vector=np.full(DIM, value, dtype=np.int8),
    )  # fmt: skip


def write(
    store: OnlineStore, new: Pair, *, user: int = USER, ad: int = AD, group: int | None = GROUP,
    space: bytes = SPACE,
) -> int:  # fmt: skip
    writer = PairWriter(store, LIVES, space_id=space, dim=DIM)
    return len(writer.write([NewPair(user, ad, group, new)]))


def read(
    store: OnlineStore, ads: dict[int, int | None], *, as_of_ms: int = T0 + 1, user: int = USER,
    space: bytes = SPACE, dim: int = DIM,
) -> PairRead:  # fmt: skip
    return PairReader(store, LIVES).read(
        user, list(ads), list(ads.values()), as_of_ms=as_of_ms, space_id=space, dim=dim
    )


def test_each_ad_gets_the_most_specific_level_there_is(store: OnlineStore) -> None:
    write(store, pair(8))
    got = read(store, {AD: GROUP, 1: GROUP, 2: 99, 3: None})
    assert got.levels_N.tolist() == [Level.EXACT, Level.AD_GROUP, Level.USER, Level.USER]
    values = got.vectors_ND * got.scales_N[:, None]
    np.testing.assert_allclose(values, 4.0, rtol=1e-2)
    assert got.level_counts == (1, 1, 0, 2, 0)
    assert got.model_version == "v1"
    np.testing.assert_allclose(got.meta_N3[:, 0], 0.001, rtol=1e-5)
    assert got.meta_N3[:, 1].tolist() == [1, 1, 1, 1]


def test_another_user_gets_the_default_with_zeros(store: OnlineStore) -> None:
    write(store, pair(8))
    got = read(store, {AD: GROUP, 1: None}, user=12)
    assert got.levels_N.tolist() == [Level.DEFAULT] * 2
    assert not got.vectors_ND.any()
    assert not got.scales_N.any()
    assert not got.meta_N3.any()
    assert got.model_version == ""


def test_no_ads_read_nothing(store: OnlineStore) -> None:
    got = read(store, {})
    assert (got.vectors_ND.shape, got.meta_N3.shape) == ((0, DIM), (0, 3))


@pytest.mark.parametrize(
    ("age_ms", "level", "stale"),
    [
        (LIVES.pair.soft_ms - 1, Level.EXACT, False),
        (LIVES.pair.soft_ms, Level.EXACT, True),
        (LIVES.pair.hard_ms - 1, Level.EXACT, True),
        (LIVES.pair.hard_ms, Level.AD_GROUP, False),
        (LIVES.ad_group.hard_ms - 1, Level.AD_GROUP, False),
        (LIVES.ad_group.hard_ms, Level.USER, False),
        (LIVES.user.hard_ms - 1, Level.USER, False),
        (LIVES.user.hard_ms, Level.DEFAULT, False),
    ],
)
def test_ages_at_their_boundaries(
    store: OnlineStore, age_ms: int, level: Level, stale: bool
) -> None:
    write(store, pair(8))
    got = read(store, {AD: GROUP}, as_of_ms=T0 + age_ms)
    assert got.levels_N.tolist() == [level]
    assert got.stale == (((0, 1),) if stale else ())


def test_a_row_that_became_available_later_is_not_seen(store: OnlineStore) -> None:
    write(store, pair(8, available_ms=T0 + 500))
    before = read(store, {AD: GROUP, 1: GROUP}, as_of_ms=T0 + 499)
    assert before.levels_N.tolist() == [Level.DEFAULT] * 2
    assert before.refused.future == 3
    assert read(store, {AD: GROUP}, as_of_ms=T0 + 500).levels_N.tolist() == [Level.EXACT]


def test_rows_of_another_space_are_not_seen_and_new_spaces_start_empty(store: OnlineStore) -> None:
    write(store, pair(8, space=OTHER), space=OTHER)
    assert read(store, {AD: GROUP}).levels_N.tolist() == [Level.DEFAULT]
    assert read(store, {AD: GROUP}, space=OTHER).levels_N.tolist() == [Level.EXACT]


def test_a_row_misfiled_under_this_space_is_counted_and_never_mixed(store: OnlineStore) -> None:
    (value,) = rows.values_of(rows.pair_rows([pair(8, space=OTHER)], dim=DIM))
    store.hset_many(row_key(SPACE, USER), {ad_field(AD): value})
    got = read(store, {AD: GROUP})
    assert got.levels_N.tolist() == [Level.DEFAULT]
    assert got.refused.space == 1


def test_a_row_of_another_width_is_unreadable(store: OnlineStore) -> None:
    write(store, pair(8))
    got = read(store, {AD: GROUP}, dim=DIM + 1)
    assert got.levels_N.tolist() == [Level.DEFAULT]
    assert got.refused.unreadable == 3


def test_a_newer_model_of_the_same_space_keeps_old_rows_valid(store: OnlineStore) -> None:
    write(store, pair(8, version="v1"))
    write(store, pair(6, T0 + 10, version="v2"), ad=23)
    got = read(store, {AD: GROUP, 23: GROUP}, as_of_ms=T0 + 10)
    assert got.levels_N.tolist() == [Level.EXACT] * 2
    assert got.model_version == "v2"


def test_writing_a_pair_twice_or_an_older_one_later_changes_nothing(store: OnlineStore) -> None:
    assert write(store, pair(8)) == 1
    first = store.hget_many(row_key(SPACE, USER), [ad_field(AD), f"g:{GROUP}", "u"])
    assert write(store, pair(8)) == 0
    assert write(store, pair(3, T0 - 1)) == 0
    assert store.hget_many(row_key(SPACE, USER), [ad_field(AD), f"g:{GROUP}", "u"]) == first


def test_means_weigh_a_vector_by_its_age(store: OnlineStore) -> None:
    write(store, pair(0), ad=1)
    write(store, pair(90, T0 + HOUR_MS), ad=2)
    got = read(store, {3: GROUP, 4: None}, as_of_ms=T0 + HOUR_MS)
    group, user = (got.vectors_ND * got.scales_N[:, None])[:, 0]
    assert group == pytest.approx(45.0 / (1 + 0.5), rel=0.01)
    assert user == pytest.approx(45.0 / (1 + 2 ** (-1 / 6)), rel=0.01)
    assert got.meta_N3[:, 1].tolist() == [2, 2]


def test_a_pair_counts_as_fresh_for_its_model_until_its_soft_age(store: OnlineStore) -> None:
    write(store, pair(8))
    writer = PairWriter(store, LIVES, space_id=SPACE, dim=DIM)
    soft = T0 + LIVES.pair.soft_ms
    assert writer.fresh(USER, [AD, 1], now_ms=soft - 1, model_version="v1") == [True, False]
    assert writer.fresh(USER, [AD, 1], now_ms=soft, model_version="v1") == [False, False]
    assert writer.fresh(USER, [AD], now_ms=T0, model_version="v2") == [False]


EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 30 * HOUR_MS), st.integers(-127, 127)),
    min_size=1, max_size=20,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(events=EVENTS, later_ms=st.integers(0, 80 * HOUR_MS))
def test_levels_partition_the_candidates_and_match_a_plain_resolution(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int, int, int]], later_ms: int
) -> None:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('s') / 'o.sqlite'}")
    newest: dict[int, int] = {}
    groups: dict[int, int] = {}
    for ad, group, after_ms, value in events:
        write(store, pair(value, T0 + after_ms), ad=ad, group=group)
        if newest.get(ad, -1) < after_ms:
            newest[ad] = after_ms
            groups[group] = max(groups.get(group, -1), after_ms)
    got = read(store, {ad: ad % 3 for ad in range(8)}, as_of_ms=T0 + later_ms)
    store.close()
    assert sum(got.level_counts) == 8
    if later_ms < max(newest.values()):
        return  # a store holds the latest row only: an earlier instant sees less, never more
    for ad, level in enumerate(got.levels_N.tolist()):
        assert level == plain_level(ad, newest, groups, later_ms)


def plain_level(ad: int, newest: dict[int, int], groups: dict[int, int], later_ms: int) -> Level:
    if ad in newest and later_ms - newest[ad] < LIVES.pair.hard_ms:
        return Level.EXACT
    if ad % 3 in groups and later_ms - groups[ad % 3] < LIVES.ad_group.hard_ms:
        return Level.AD_GROUP
    return Level.USER if later_ms - max(newest.values()) < LIVES.user.hard_ms else Level.DEFAULT
