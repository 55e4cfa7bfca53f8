"""Counters: their values, their order, and that rows kept as bytes say the same bits as rows kept in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store import aggregates
from feature_store.aggregates import AggregateSet, Fact, Rows, Slots, pack_user, unpack_user
from feature_store.ids import ABSENT
from feature_store.layout import Layout
from feature_store.mixing import mix
from feature_store.spec import Spec, load_spec, parse_yaml

DATA = Path(os.environ.get("GEM_DATA", "../shared/data"))
KUAIRAND = Path(aggregates.__file__).parent / "datasets" / "kuairand.yaml"
HEAD = """
name: small
surfaces: [{ name: feed }, { name: reels }]
objectives:
  - { name: click, attribution_window_seconds: 60 }
  - { name: buy, attribution_window_seconds: 60, parent: click }
entities: { user: { id_type: int64 }, ad: { id_type: int64 }, ad_group: { id_type: int64 } }
features:
  - { name: ad, owner: ad, id: { rows: 64 } }
  - { name: ad_group, owner: ad, id: { rows: 64 } }
event_sources:
  - { name: impression, features: [ad], max_length: 4 }
  - { name: search, features: [ad], max_length: 4, priority: 1 }
aggregates:
"""
ALL = HEAD + "\n".join(
    f"  - {{ name: {'_'.join(by) or 'all'}_{name}, by: [{', '.join(by)}], {rest} }}"
    for by in ([], ["user"], ["ad"], ["user", "ad_group"], ["ad", "surface"], ["user", "surface"])
    for name, rest in (
        ("shown", "source: impression, statistic: count"),
        ("searched", "source: search, statistic: count, half_life_seconds: 2"),
        ("bought", "objective: buy, statistic: count"),
        ("ctr", "objective: click, statistic: rate, prior_strength: 20"),
        ("fresh", "objective: click, statistic: rate, half_life_seconds: 1, prior_strength: 2"),
        ("last", "source: impression, statistic: recency"),
    )
)
IMPRESSION, SEARCH = 0, 1
CLICK, BUY = 0, 1


def spec_of(lines: str) -> Spec:
    return Spec(parse_yaml(lines, pb.DatasetSpec))


def shown(event_ms: int, *, user: int = 7, ad: int = 1, group: int = 5, surface: int = 0) -> Fact:
    return Fact(IMPRESSION, -1, user, surface, (ad, group), event_ms)


def outcome(event_ms: int, objective: int = CLICK, **of: int) -> Fact:
    return shown(event_ms, **of)._replace(source=-1, objective=objective)


def said(
    lines: str, facts: list[Fact], *, now_ms: int, user: int = 7, ad: int = 1, group: int = 5
) -> list[float]:
    """What the spec's aggregates say, user-side ones first."""
    counters = AggregateSet(spec_of(HEAD + lines))
    rows = Rows(len(counters.groups))
    for fact in facts:
        counters.apply(fact, rows.of(fact.user_key), rows.shared)
    slots: list[float] = []
    counters.snapshot(0, (ad, group), rows.users.get(user), rows.shared, slots)
    matrix, now = np.array([slots]), np.array([now_ms])
    values = [*counters.user_statistics(matrix, now)[0], *counters.ad_statistics(matrix, now)[0]]
    return [float(value) for value in values]


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def test_a_count_is_the_logarithm_of_one_more_than_the_events_of_its_source() -> None:
    line = "  - { name: a, by: [ad], source: search, statistic: count }"
    facts = [shown(1), shown(2)._replace(source=SEARCH), shown(3, ad=9)._replace(source=SEARCH)]
    assert said(line, facts, now_ms=9) == [near(math.log1p(1))]
    assert said(line, [], now_ms=9) == [0.0]


def test_a_count_of_an_objective_counts_outcomes_and_not_impressions() -> None:
    line = "  - { name: a, by: [user], objective: buy, statistic: count }"
    assert said(line, [shown(1), outcome(1), outcome(1, BUY), outcome(2, BUY)], now_ms=9) == [
        near(math.log1p(2))
    ]


def test_a_rate_leans_on_the_running_global_rate_as_strongly_as_its_prior_says() -> None:
    line = "  - { name: a, by: [ad], objective: click, statistic: rate, prior_strength: 20 }"
    others = [shown(n, ad=2) for n in range(8)] + [outcome(n, ad=2) for n in range(6)]
    mine = [shown(8), shown(9), outcome(8)]
    prior = (6 + 1 + 1) / (8 + 2 + 2)
    assert said(line, others + mine, now_ms=99) == [near((1 + 20 * prior) / (2 + 20))]
    assert said(line, others, now_ms=99) == [near(7 / 10)], (
        "of an unknown ad the prior is all there is"
    )
    assert said(line, [], now_ms=99) == [0.5]


def test_a_rate_without_a_prior_is_the_plain_rate() -> None:
    line = "  - { name: a, by: [ad], objective: click, statistic: rate }"
    assert said(line, [shown(1), shown(2), shown(3), outcome(1)], now_ms=99) == [near(1 / 3)]


def test_recency_is_the_logarithm_of_the_seconds_since_the_newest_and_absent_without_one() -> None:
    line = "  - { name: a, by: [user], source: impression, statistic: recency }"
    assert said(line, [shown(5_000), shown(2_000)], now_ms=12_000) == [near(math.log1p(7))]
    assert math.isnan(said(line, [], now_ms=12_000)[0])


def test_weights_halve_every_half_life_in_whatever_order_events_come() -> None:
    line = "  - { name: a, by: [ad], source: impression, statistic: count, half_life_seconds: 10 }"
    expected = math.log1p(0.5 + 0.25 + 1.0)
    in_order = [shown(100_000), shown(110_000), shown(120_000)]
    assert said(line, in_order, now_ms=120_000) == [near(expected)]
    assert said(line, in_order[::-1], now_ms=120_000) == [near(expected)]
    assert said(line, in_order, now_ms=130_000) == [near(math.log1p((0.5 + 0.25 + 1.0) / 2))]


def test_a_fading_rate_forgets_trials_and_successes_alike_and_returns_to_the_prior() -> None:
    line = "  - { name: a, by: [ad], objective: click, statistic: rate, half_life_seconds: 10, prior_strength: 1 }"
    facts = [shown(100_000), outcome(100_000)]
    prior = 2 / 3
    assert said(line, facts, now_ms=110_000) == [near((0.5 + prior) / 1.5)]
    assert said(line, facts, now_ms=10_000_000) == [near(prior)]


def test_statistics_by_surface_keep_surfaces_apart_and_ignore_events_without_one() -> None:
    line = "  - { name: a, by: [user, surface], source: impression, statistic: count }"
    facts = [shown(1), shown(2, surface=1), shown(3, surface=-1)]
    assert said(line, facts, now_ms=9) == [near(math.log1p(1))]


def test_a_key_without_a_value_is_never_counted_nor_read() -> None:
    line = "  - { name: a, by: [user, ad_group], source: impression, statistic: count }"
    facts = [shown(1, group=ABSENT), shown(2, group=ABSENT)]
    assert said(line, facts, now_ms=9, group=ABSENT) == [0.0]


def test_columns_come_in_the_order_of_the_layout() -> None:
    spec = spec_of(ALL)
    counters, layout = AggregateSet(spec), Layout(spec)
    assert counters.num_user_columns == len(layout.user_aggregates) == 18
    assert counters.num_ad_columns == len(layout.ad_aggregates) == 18
    lines = "\n".join(
        f"  - {{ name: {name}, by: [{by}], source: {source}, statistic: count }}"
        for name, by, source in (
            ("a", "ad", "search"),
            ("b", "user", "impression"),
            ("c", "ad_group", "impression"),
        )
    )
    facts = [shown(1), shown(2), shown(3, ad=8), shown(4)._replace(source=SEARCH)]
    assert said(lines, facts, now_ms=9) == [
        near(math.log1p(3)),
        near(math.log1p(1)),
        near(math.log1p(3)),
    ]


def test_keys_of_several_parts_depend_on_their_order_and_fit_into_64_bits() -> None:
    counters = AggregateSet(
        spec_of(HEAD + "  - { name: a, by: [ad, ad_group], source: search, statistic: count }")
    )
    group = counters.groups[1]
    pairs = [(1, 2), (2, 1), (0, 0), (-1, 5), (2**63 - 1, 2**63 - 1), (ABSENT + 1, 3)]
    keys = [counters.key(group, 0, pair) for pair in pairs]
    assert len(set(keys)) == len(pairs)
    assert all(key is not None and -(2**63) <= key < 2**63 for key in keys)
    assert keys[0] == counters.key(group, 1, (1, 2)) == mix(1, 2)
    assert aggregates.keys_of_all(group, 0, np.array(pairs)).tolist() == keys
    assert aggregates.keys_of_all(group, 0, np.array([(1, ABSENT)])).tolist() == [ABSENT]


def test_a_user_keeps_the_latest_keys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "MAX_USER_KEYS", 3)
    line = "  - { name: a, by: [user, ad], source: impression, statistic: count }"
    facts = [shown(n, ad=n) for n in range(1, 5)]
    assert [said(line, facts, now_ms=9, ad=n)[0] > 0 for n in range(1, 5)] == [
        False,
        True,
        True,
        True,
    ]


class Bytes:
    """States as an online store keeps them: a packed row a user, and one a shared key."""

    def __init__(self, counters: AggregateSet) -> None:
        self.counters = counters
        self.users: dict[int, bytes] = {}
        self.shared: dict[tuple[int, int], bytes] = {}

    def fetch(
        self, user: int, asked: list[tuple[int, int]]
    ) -> tuple[list[dict[int, Slots]], list[dict[int, Slots]]]:
        groups = self.counters.groups
        shared: list[dict[int, Slots]] = [{} for _ in groups]
        for index, key in asked:
            if (index, key) in self.shared:
                shared[index][key] = np.frombuffer(self.shared[index, key]).tolist()
        return unpack_user(self.users.get(user, b""), groups), shared

    def apply(self, fact: Fact) -> None:
        asked = self.counters.shared_keys(fact.surface, fact.ad_ids)
        rows, shared = self.fetch(fact.user_key, asked)
        self.counters.apply(fact, rows, shared)
        self.users[fact.user_key] = pack_user(rows, self.counters.groups)
        for index, states in enumerate(shared):
            for key, slots in states.items():
                self.shared[index, key] = np.array(slots).tobytes()

    def slots(self, user: int, surface: int, candidates: list[tuple[int, ...]]) -> np.ndarray:
        asked = self.counters.shared_keys_of_all(surface, np.array(candidates))
        one_by_one = {key for ids in candidates for key in self.counters.shared_keys(surface, ids)}
        assert set(asked) == one_by_one
        assert len(asked) == len(one_by_one)
        rows, shared = self.fetch(user, asked)
        return self.counters.snapshots(surface, np.array(candidates), rows, shared)


keys = st.sampled_from([1, 2, 3, ABSENT])
facts = st.builds(
    lambda what, user, surface, ad_ids, event_ms: Fact(*what, user, surface, ad_ids, event_ms),
    st.sampled_from([(0, -1), (1, -1), (-1, 0), (-1, 1)]),
    st.integers(1, 2),
    st.integers(-1, 1),
    st.tuples(keys, keys),
    st.integers(1, 9_000),
)


@settings(max_examples=50)
@given(st.lists(facts, max_size=30))
def test_rows_as_bytes_and_rows_in_memory_agree_to_the_bit_on_any_order(log: list[Fact]) -> None:
    counters = AggregateSet(spec_of(ALL))
    memory, online = Rows(len(counters.groups)), Bytes(counters)
    candidates = [(1, 2), (3, 3), (2, ABSENT)]
    now = np.full(len(candidates), 9_500)
    for fact in log:
        counters.apply(fact, memory.of(fact.user_key), memory.shared)
        online.apply(fact)
    for user in (1, 2, 3):
        one_by_one: list[float] = []
        for ad_ids in candidates:
            counters.snapshot(1, ad_ids, memory.users.get(user), memory.shared, one_by_one)
        expected = np.array(one_by_one).reshape(len(candidates), -1)
        at_once = online.slots(user, 1, candidates)
        assert at_once.tobytes() == expected.tobytes()
        for read in (counters.user_statistics, counters.ad_statistics):
            alone = [read(expected[n : n + 1], now[:1]) for n in range(len(candidates))]
            assert read(at_once, now).tobytes() == np.concatenate(alone).tobytes()


@settings(max_examples=50)
@given(st.lists(facts, max_size=20), st.randoms())
def test_arrival_order_changes_no_more_than_rounding(log: list[Fact], random) -> None:
    counters = AggregateSet(spec_of(ALL))
    shuffled = log.copy()
    random.shuffle(shuffled)
    said_by = []
    for order in (log, shuffled):
        rows = Rows(len(counters.groups))
        for fact in order:
            counters.apply(fact, rows.of(fact.user_key), rows.shared)
        slots = counters.snapshots(0, np.array([(1, 2)]), rows.users.get(1), rows.shared)
        said_by.append(counters.ad_statistics(slots, np.array([9_500])))
    np.testing.assert_allclose(*said_by, rtol=1e-5)


def test_no_candidates_and_a_new_user_are_fine() -> None:
    counters = AggregateSet(spec_of(ALL))
    rows, none = Rows(len(counters.groups)), np.zeros((0, 2), dtype=np.int64)
    assert counters.snapshots(0, none, None, rows.shared).shape == (0, counters.num_slots)
    assert unpack_user(b"", counters.groups) == [{} for _ in counters.groups]
    counters.apply(shown(5), rows.of(7), rows.shared)
    assert counters.snapshots(0, none, rows.users[7], rows.shared).shape == (0, counters.num_slots)


def kuairand_facts(num_rows: int) -> Iterator[tuple[Fact, list[Fact]]]:
    """Each impression of the log's beginning, and its outcomes."""
    folder = DATA / "kuairand"
    if not folder.is_dir():
        pytest.skip(f"KuaiRand is not at {folder}; set GEM_DATA to the folder that holds it")
    spec = load_spec(KUAIRAND)
    columns = [column.name for column in Layout(spec).ad_ids]
    objectives = {"click": "is_click", "long_view": "long_view", "like": "is_like"}
    videos = pq.read_table(
        folder / "video_features_basic_pure.parquet", columns=["video_id", "author_id", "tag"]
    )
    known = {row["video_id"]: row for row in videos.to_pylist()}
    (path,) = folder.glob("log_*.parquet")
    log = pq.read_table(
        path, columns=["user_id", "video_id", "time_ms", "tab", *objectives.values()]
    )
    for row in log.sort_by("time_ms").slice(0, num_rows).to_pylist():
        video = known.get(row["video_id"], {})
        tag = str(video.get("tag") or "").split(",")[0]
        values = {
            "ad": row["video_id"],
            "ad_group": video.get("author_id") or ABSENT,
            "campaign": int(float(tag)) if tag and tag != "nan" else ABSENT,
        }
        ad_ids = tuple(values.get(name, ABSENT) for name in columns)
        fact = Fact(0, -1, row["user_id"], min(row["tab"], 5), ad_ids, row["time_ms"])
        positives = [
            spec.objectives.index(name) for name, column in objectives.items() if row[column]
        ]
        yield fact, [fact._replace(source=-1, objective=index) for index in positives]


def test_kuairand_replayed_in_memory_and_through_bytes_agrees_to_the_bit() -> None:
    counters = AggregateSet(load_spec(KUAIRAND))
    memory, online = Rows(len(counters.groups)), Bytes(counters)
    replayed: list[float] = []
    served, now = [], []
    for fact, outcomes in kuairand_facts(3_000):
        counters.snapshot(
            fact.surface, fact.ad_ids, memory.users.get(fact.user_key), memory.shared, replayed
        )
        served.append(online.slots(fact.user_key, fact.surface, [tuple(fact.ad_ids)]))
        now.append(fact.event_ms)
        for happened in (fact, *outcomes):
            counters.apply(happened, memory.of(fact.user_key), memory.shared)
            online.apply(happened)
    assert len(now) > 1_000
    slots = np.array(replayed).reshape(len(now), -1)
    assert slots.tobytes() == np.concatenate(served).tobytes()
    at_ms = np.array(now)
    for read in (counters.user_statistics, counters.ad_statistics):
        values = read(slots, at_ms)
        one_by_one = [read(row, at_ms[n : n + 1]) for n, row in enumerate(served)]
        assert values.tobytes() == np.concatenate(one_by_one).tobytes()
        assert len(np.unique(values[:, 0])) > 10
