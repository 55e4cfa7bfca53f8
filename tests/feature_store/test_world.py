"""The generated world keeps its promises: known truth, honest times, equal seeds, bounded memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from feature_store.errors import FailedPrecondition, InvalidInput
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate

CONFIG = WorldConfig(users=400, ads=80, days=6, requests_per_user=8)
STARVED = WorldConfig(users=60, ads=40, days=30, shown=20, requests_per_user=20)
"""Every ad is needed on every day."""
TABLES = ("catalogue", "users", "events", "impressions", "outcomes")


def _made(folder: Path, config: WorldConfig) -> Tables:
    tables = Tables(folder)
    counts = generate(config, tables)
    assert counts == {name: tables.read(name).num_rows for name in TABLES}
    return tables


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return _made(tmp_path_factory.mktemp("world"), CONFIG)


def _ordered(tables: Tables, name: str) -> pa.Table:
    table = tables.read(name)
    return table.sort_by([(field.name, "ascending") for field in table.schema])


def _labels(tables: Tables, objective: str) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    impressions, outcomes = tables.read("impressions"), tables.read("outcomes")
    hits = outcomes.filter(pc.equal(outcomes["objective"], objective))["example_id"]
    return impressions, pc.is_in(impressions["example_id"], value_set=hits.combine_chunks()).to_numpy()


def _entropy(p: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> float:
    return float(-np.where(y, np.log(p), np.log1p(-p)).mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 0}, "users is 0; it must be a whole number of at least 1"),
        ({"users": -5}, "users is -5"),
        ({"users": 2.5}, r"users is 2\.5"),
        ({"users": True}, "users is True"),
        ({"ads": 0}, "ads is 0"),
        ({"ads": 15}, "15 ads cannot fill requests of 8; take at least 16"),
        ({"days": 0}, "days is 0"),
        ({"days": -1}, "days is -1"),
        ({"shown": 0}, "shown is 0"),
        ({"dim": 0}, "dim is 0"),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": math.nan}, "seed is nan"),
        ({"requests_per_user": 0.0}, r"requests_per_user is 0\.0; it must be above 0, and at most 40 a day: 240 in 6 days"),
        ({"requests_per_user": -3.0}, r"requests_per_user is -3\.0"),
        ({"requests_per_user": 241.0}, r"requests_per_user is 241\.0"),
        ({"requests_per_user": math.nan}, "requests_per_user is nan"),
        ({"requests_per_user": math.inf}, "requests_per_user is inf"),
        ({"sequence_strength": math.nan}, "sequence_strength is nan; it must lie between 0 and 100"),
        ({"sequence_strength": math.inf}, "sequence_strength is inf"),
        ({"sequence_strength": -1.0}, r"sequence_strength is -1\.0"),
        ({"feature_gap": 1.1}, r"feature_gap is 1\.1; it must lie between 0 and 1"),
        ({"cross_surface": math.nan}, "cross_surface is nan"),
        ({"returning": -0.1}, r"returning is -0\.1"),
        ({"intent_half_life_days": 0.0}, r"intent_half_life_days is 0\.0; it must be positive and finite"),
        ({"intent_half_life_days": math.nan}, "intent_half_life_days is nan"),
    ],
)
def test_a_world_that_cannot_be_is_refused_by_name_and_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(CONFIG, **change)


def test_equal_configurations_give_equal_tables_and_other_seeds_others(world: Tables, tmp_path: Path) -> None:
    same, other = _made(tmp_path / "same", CONFIG), _made(tmp_path / "other", replace(CONFIG, seed=8))
    for name in TABLES:
        assert _ordered(same, name) == _ordered(world, name)
        assert _ordered(other, name) != _ordered(world, name)


def test_a_law_that_could_not_be_chosen_once_changes_no_name_of_a_world_and_a_choice_changes_its_tables(tmp_path: Path) -> None:
    assert "intent" not in repr(CONFIG), "kept worlds and runs are found by this name"
    slow = replace(CONFIG, users=20, intent_half_life_days=30.0)
    assert "intent_half_life_days=30.0" in repr(slow)
    own, usual = _made(tmp_path / "own", slow), _made(tmp_path / "usual", replace(CONFIG, users=20))
    assert _ordered(own, "impressions") != _ordered(usual, "impressions")


def test_a_world_is_not_added_to_another(world: Tables) -> None:
    before = {name: world.version(name) for name in TABLES}
    for config in (CONFIG, replace(CONFIG, seed=9)):
        with pytest.raises(FailedPrecondition, match=r"holds .*impressions.* already; give another folder"):
            generate(config, world)
    assert {name: world.version(name) for name in TABLES} == before


@pytest.mark.parametrize("config", [CONFIG, STARVED, WorldConfig(users=50, ads=16, days=12)])
def test_no_ad_is_shown_or_found_before_it_is_valid_or_after_it_is_retired(config: WorldConfig, tmp_path: Path) -> None:
    tables = _made(tmp_path, config)
    catalogue = tables.read("catalogue").sort_by("ad_key")
    begins, ends = (catalogue[name].to_numpy() for name in ("valid_from_ms", "truth_until_ms"))
    for name in ("impressions", "events"):
        rows = tables.read(name)
        ad, at = rows["ad_key"].to_numpy(), rows["event_ms"].to_numpy()
        assert (begins[ad] <= at).all()
        assert (at < ends[ad]).all()
    day = START_MS + np.arange(config.days)[:, None] * DAY_MS
    assert ((begins <= day) & (day < ends)).sum(1).min() >= 2 * config.shown
    shown = tables.read("impressions").group_by("request_id").aggregate([("ad_key", "count_distinct"), ("ad_key", "count")])
    assert shown["ad_key_count_distinct"] == shown["ad_key_count"]


def test_some_ads_begin_later_and_some_retire_before_the_end(world: Tables) -> None:
    catalogue = world.read("catalogue")
    assert (catalogue["valid_from_ms"].to_numpy() > START_MS).any()
    assert (catalogue["truth_until_ms"].to_numpy() < CONFIG.end_ms).any()


@pytest.mark.parametrize("objective", ["click", "conversion", "purchase"])
def test_the_truth_beats_the_base_rate_and_is_calibrated(world: Tables, objective: str) -> None:
    impressions, label = _labels(world, objective)
    truth = impressions[f"truth_{objective}"].to_numpy()
    if objective != "click":  # it is the probability given a click
        clicked = _labels(world, "click")[1]
        assert not (label & ~clicked).any()
        truth, label = truth[clicked], label[clicked]
    rate = np.full(len(label), label.mean())
    assert _entropy(truth, label) < 0.97 * _entropy(rate, label)
    order = np.argsort(truth)
    for part in np.array_split(order, 5):
        deviation = np.sqrt((truth[part] * (1 - truth[part])).sum())
        assert abs(label[part].sum() - truth[part].sum()) < 4 * deviation


def test_outcomes_come_after_their_impression_and_late_ones_after_the_world(world: Tables) -> None:
    outcomes = world.read("outcomes").join(world.read("impressions", ["example_id", "event_ms"]), "example_id")
    assert (outcomes["available_ms"].to_numpy() > outcomes["event_ms"].to_numpy()).all()
    hours = pc.divide(pc.subtract(outcomes["available_ms"], outcomes["event_ms"]).cast(pa.float64()), 3_600_000.0)
    medians = {
        name: float(np.median(hours.filter(pc.equal(outcomes["objective"], name)).to_numpy()))
        for name in ("click", "conversion", "purchase")
    }
    assert medians == pytest.approx({"click": 0.01, "conversion": 3.0, "purchase": 10.0}, rel=0.25)
    conversions = outcomes.filter(pc.equal(outcomes["objective"], "conversion"))
    next_day = (conversions["available_ms"].to_numpy() // DAY_MS) > (conversions["event_ms"].to_numpy() // DAY_MS)
    assert 0.1 < next_day.mean() < 0.7
    assert (outcomes["available_ms"].to_numpy() >= CONFIG.end_ms).any()


def test_impressions_lie_within_the_days_of_the_world(world: Tables) -> None:
    at = world.read("impressions")["event_ms"].to_numpy()
    assert at.min() >= START_MS
    assert at.max() < CONFIG.end_ms
    assert set(((at - START_MS) // DAY_MS).tolist()) == set(range(CONFIG.days))


def test_ids_and_times_are_int64_and_example_ids_are_unique(world: Tables) -> None:
    for name in TABLES:
        for field in world.read(name).schema:
            if field.name.endswith(("_key", "_ms")) or field.name in ("user", "ad", "ad_group", "campaign", "account", "tag"):
                assert field.type == pa.int64(), (name, field.name)
    for name, column in (("impressions", "example_id"), ("events", "event_id")):
        ids = world.read(name, [column])[column]
        assert len(pc.unique(ids)) == len(ids)


def test_memory_follows_a_chunk_of_users_and_not_the_world(tmp_path: Path) -> None:
    program = (
        "import json, resource, sys\nfrom pathlib import Path\nfrom feature_store.tables import Tables\n"
        "from feature_store.world import WorldConfig, generate\nseen = []\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "config = WorldConfig(users=6 * 1024, ads=40, days=3, requests_per_user=2, shown=4)\n"
        "generate(config, Tables(Path(sys.argv[1])), lambda done, total: seen.append(peak()))\n"
        "print(json.dumps([*seen, peak()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    megabytes = json.loads(done.stdout)
    assert len(megabytes) == 7
    assert megabytes[-1] - megabytes[1] < 60, megabytes
