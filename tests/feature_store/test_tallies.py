"""A whole log counted at once has the bits of the same log counted fact by fact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from feature_store import aggregates
from feature_store.aggregates import AggregateSet, Rows
from feature_store.counting import facts_of
from feature_store.replay import Replay
from feature_store.spec import Spec, load_spec
from feature_store.tables import Tables
from feature_store.tallies import Tally, tallied
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    tables = Tables(tmp_path_factory.mktemp("tables"))
    generate(WorldConfig(users=30, ads=60, days=3, requests_per_user=8), tables)
    return Replay(load_spec(WORLD), tables)


def one_by_one(replay: Replay, until_ms: int) -> Rows:
    counters = AggregateSet(replay.spec)
    rows = Rows(len(counters.groups))
    facts = facts_of(replay.spec, replay.impressions, replay.events)
    for fact, available_ms in zip(facts.each(), facts.available_ms.tolist(), strict=True):
        if available_ms > until_ms or fact.event_ms >= until_ms:
            break
        counters.apply(fact, rows.of(fact.user_key), rows.shared)
    return rows


def states(tally: Tally) -> dict[int, list[tuple[int, list[float]]]]:
    """User → keys and slots in the order in which they lie."""
    found: dict[int, list[tuple[int, list[float]]]] = {}
    for user, key, slots in zip(tally.users.tolist(), tally.keys.tolist(), tally.slots.tolist(), strict=True):
        found.setdefault(user, []).append((key, slots))
    return found


def agree(spec: Spec, tallies: list[Tally], rows: Rows) -> int:
    """Compares every state, bits and order; returns how many there are."""
    for at, (group, tally) in enumerate(zip(AggregateSet(spec).groups, tallies, strict=True)):
        own = {user: mine[at] for user, mine in rows.users.items()} if group.per_user else {0: rows.shared[at]}
        assert states(tally) == {user: list(mine.items()) for user, mine in sorted(own.items()) if mine}
        assert np.array_equal(tally.users, np.sort(tally.users))
    return sum(len(tally.keys) for tally in tallies)


@pytest.mark.parametrize("hours", [0, 1, 31, 72])
def test_every_state_has_the_bits_and_the_place_that_counting_fact_by_fact_gives_it(replay: Replay, hours: int) -> None:
    until_ms = START_MS + hours * DAY_MS // 24
    tallies = tallied(replay.spec, replay.impressions, replay.events, until_ms)
    assert agree(replay.spec, tallies, one_by_one(replay, until_ms)) > (1000 if hours > 24 else -1)


def test_users_with_more_keys_than_are_kept_lose_the_same_ones(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "MAX_USER_KEYS", 5)
    until_ms = START_MS + 3 * DAY_MS
    tallies = tallied(replay.spec, replay.impressions, replay.events, until_ms)
    assert agree(replay.spec, tallies, one_by_one(replay, until_ms)) > 300
    per_user = [t for g, t in zip(AggregateSet(replay.spec).groups, tallies, strict=True) if g.per_user]
    assert max(np.unique(tally.users, return_counts=True)[1].max() for tally in per_user) == 5
