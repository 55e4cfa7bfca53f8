"""Benchmarks run at their quick size and write what a reader needs to repeat them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import libraries
from benchmarks.frappe import COLUMNS, NEGATIVES, with_negatives
from benchmarks.learning import against
from benchmarks.lengths import Cell
from benchmarks.lengths import law as law_of_lengths
from benchmarks.measure import names_of
from benchmarks.scaling import law, slope_ratio
from benchmarks.trials import Trial
from model.baselines.presets import PRESETS
from model.nn.shape import input_shape
from model.training.evaluate import Predictions
from model.training.metrics import ne
from tests.model.world_batches import batch_of, layout

ROOT = Path(__file__).resolve().parents[2]
LOGS = Path(os.environ.get("GEM_DATA", ROOT.parent / "shared" / "data"))
DATA = LOGS / "kuairand"


def _run(name: str, out: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(out.read_text())
    assert {"benchmark", "command", "machine", "cells"} <= set(result)
    return result


def test_the_kernels_benchmark_times_both_sides(tmp_path: Path) -> None:
    cells = _run("kernels", tmp_path / "out.json")["cells"]
    assert isinstance(cells, list)
    pooling = {"seed pooling", "biased pooling", "pooled gdpa"}
    blocks = {"pffn block", "pffn block and back", "norm, then product", "norm, then product and back"}
    attention = {"block attention", "turned blocks", "causal blocks"}
    assert {cell["op"] for cell in cells} == {"gdpa", "windowed gdpa"} | attention | pooling | blocks
    assert all(cell["ratio"] > 0 for cell in cells)


def test_the_candidates_benchmark_times_every_model_and_its_memory(tmp_path: Path) -> None:
    result = _run("candidates", tmp_path / "out.json")
    cells, absent = result["cells"], result["absent"]
    assert isinstance(cells, list)
    assert isinstance(absent, dict)
    assert {"public_s", "tiny", "HSTU", "DIN"} <= {cell["model"] for cell in cells}
    assert len({cell["model"] for cell in cells}) == 6 - len(absent)
    assert {(cell["events"], cell["candidates"]) for cell in cells} == {(20, 1), (20, 100)}
    assert all(cell["times"]["low"] <= cell["times"]["median"] <= cell["times"]["high"] for cell in cells)
    assert all(cell["ratios"]["public_s"] == 1 for cell in cells if cell["model"] == "public_s")


def test_the_efficiency_benchmark_says_what_every_part_saves(tmp_path: Path) -> None:
    cells = _run("efficiency", tmp_path / "out.json", "--plot", str(tmp_path / "out.svg"))["cells"]
    assert isinstance(cells, list)
    assert {cell["part"] for cell in cells} == {"schedule", "attention", "padding", "training"}
    assert all(cell["value"] > 0 for cell in cells)
    (saved,) = (cell for cell in cells if cell["case"] == "published shape, layers")
    assert saved["value"] == pytest.approx(0.43, abs=0.03)
    assert (tmp_path / "out.svg").stat().st_size


@pytest.mark.timeout(300)
def test_the_precision_benchmark_sets_formats_and_arms_against_float32(tmp_path: Path) -> None:
    result = _run("precision", tmp_path / "out.json")
    cells, errors = result["cells"], result["errors"]
    assert isinstance(cells, list)
    assert isinstance(errors, list)
    for operand in ("weights", "activations", "gradients"):
        sqnr = {cell["variant"]: cell["sqnr"] for cell in errors if cell["operand"] == operand}
        finer = ("bfloat16", "E4M3, 32×32, up", "E4M3, 32×32, up, stochastic", "E5M2, 32×32, up, stochastic")
        assert sorted(finer, key=lambda name: -sqnr[name]) == list(finer)
    read = [cell for cell in cells if cell["arm"] == "float32, read as 1×32"]
    plain = [cell for cell in cells if cell["arm"] == "float32"]
    assert len(read) == len(plain) == 3
    assert all(a["ne"] == pytest.approx(b["ne"], abs=0.01) for a, b in zip(read, plain, strict=True))


@pytest.mark.timeout(300)
def test_the_quality_benchmark_puts_every_model_on_the_same_rows(tmp_path: Path) -> None:
    if not DATA.exists():
        pytest.skip(f"real logs are not at {DATA}; set GEM_DATA to run this")
    models = {"rate", "lightgbm", "foundation", *PRESETS}
    chosen = ["--preset", "model.gem.presets:tiny", "--epochs", "1", "--models", ",".join(sorted(models))]
    result = _run("quality", tmp_path / "out.json", "--source", str(DATA), *chosen)
    cells = result["cells"]
    assert isinstance(cells, list)
    pooled = {c["model"]: c for c in cells if c["surface"] == "all" and c["objective"] == "click"}
    assert set(pooled) == models
    assert len({c["rows"] for c in pooled.values()}) == 1
    assert all(0.5 < c["ne"] < 1.5 for c in pooled.values())


@pytest.mark.timeout(300)
def test_the_quality_benchmark_ranks_the_lists_of_trivago(tmp_path: Path) -> None:
    if not (LOGS / "trivago").exists():
        pytest.skip(f"real logs are not at {LOGS}; set GEM_DATA to run this")
    _few_sessions(tmp_path)
    ends = ["--train-end", "2018-11-07", "--valid-end", "2018-11-08T08:00", "--test-end", "2018-11-08T17:00Z"]
    options = ["--data", "trivago", "--source", str(tmp_path), *ends, "--models", "rate,lightgbm", "--keep", str(tmp_path / "kept")]
    result = _run("quality", tmp_path / "out.json", *options)
    cells = result["cells"]
    assert len(list((tmp_path / "kept" / "runs").glob("*.npy"))) == 2
    assert _run("quality", tmp_path / "again.json", *options)["cells"] == cells, "what was kept is what was said"
    assert isinstance(cells, list)
    rate, counters = (next(c for c in cells if c["surface"] == "all" and c["model"] == name) for name in ("rate", "lightgbm"))
    assert 0.1 < rate["mrr"] < counters["mrr"] < 1
    assert counters["ne"] < rate["ne"]


def _few_sessions(folder: Path) -> None:
    for path in (LOGS / "trivago").glob("*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, 12_000), folder / path.name)  # of a few hundred users


@pytest.mark.timeout(300)
def test_the_ablation_benchmark_takes_parts_away_on_a_real_log_too(tmp_path: Path) -> None:
    if not (LOGS / "trivago").exists():
        pytest.skip(f"real logs are not at {LOGS}; set GEM_DATA to run this")
    _few_sessions(tmp_path)
    options = ["--data", "trivago", "--source", str(tmp_path), "--variants", "sole,personalized events", "--runs", str(tmp_path / "runs")]
    cells = _run("ablation", tmp_path / "out.json", *options)["cells"]
    assert isinstance(cells, list)
    assert [cell["variant"] for cell in cells] == ["bidirectional", "sole", "personalized events"]
    assert len({tuple(cell["ne"]) for cell in cells}) == 3
    assert all(cell["low"] <= cell["high"] and 0.3 < cell["ne"][0] < 1.5 for cell in cells)


@pytest.mark.timeout(300)
def test_the_frappe_benchmark_sets_models_beside_the_published_figures(tmp_path: Path) -> None:
    if not (LOGS / "frappe").exists():
        pytest.skip(f"the published rows are not at {LOGS}; set GEM_DATA to run this")
    result = _run("frappe", tmp_path / "out.json", "--source", str(LOGS / "frappe"))
    cells = result["cells"]
    assert isinstance(cells, list)
    assert {cell["model"] for cell in cells} == {"foundation", "wukong", "dcnv2"}
    assert all(0.5 < cell["low"] <= cell["auc"] <= cell["high"] < 1 for cell in cells)


@pytest.mark.timeout(300)
def test_the_movielens_benchmark_retrieves_by_every_stack_and_goes_on_from_kept_runs(tmp_path: Path) -> None:
    if not (LOGS / "ml1m").exists():
        pytest.skip(f"the published file is not at {LOGS}; set GEM_DATA to run this")
    options = ["--source", str(LOGS / "ml1m"), "--runs", str(tmp_path / "runs")]
    cells = _run("movielens", tmp_path / "out.json", *options)["cells"]
    assert isinstance(cells, list)
    assert [cell["model"] for cell in cells] == ["kunlun", "hstu", "sasrec"]
    for cell in cells:
        assert 0 <= cell["test"]["ndcg@10"] <= cell["test"]["hr@10"] <= cell["test"]["hr@50"] < 1
        assert cell["test"]["mrr_read"] <= cell["test"]["mrr"], "fewer rivals are removed"
    assert len(list((tmp_path / "runs").glob("*.pt"))) == 3
    assert _run("movielens", tmp_path / "again.json", *options)["cells"] == cells, "seconds and all: nothing was trained twice"


def test_an_interval_is_of_the_mean_of_all_seeds() -> None:
    random = np.random.default_rng(5)
    labels = (random.random((400, 1)) < 0.4).astype(np.float64)
    blank = Predictions(
        labels, labels, np.ones((400, 1), np.bool_), np.zeros(400, np.int64), np.arange(400) // 4, np.zeros(400, "V16")
    )
    seeds = [blank._replace(probabilities_NK=0.2 + 0.3 * labels + 0.4 * random.random((400, 1))) for _ in range(3)]
    rival = blank._replace(probabilities_NK=np.full((400, 1), 0.4))
    found = against(seeds[:2], [rival], ["feed"], ["click"])["all", "click"]
    means = [float(ne(run.probabilities_NK[:, 0], labels[:, 0])) for run in (*seeds, rival)]  # type: ignore[arg-type]
    assert found.difference == pytest.approx(np.mean(means[:2]) - means[3])
    assert found.low < found.difference < found.high
    assert found.difference != pytest.approx(means[0] - means[3])


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert names_of(["one", "two"])("two,one") == ["two", "one"]
    with pytest.raises(argparse.ArgumentTypeError, match="'three' is not known; choose of one, two"):
        names_of(["one", "two"])("one,three")


def test_a_library_is_given_the_newest_events_of_every_row_and_quantiles_of_training_rows() -> None:
    train, rows = batch_of([3, 0, 70], [1, 1, 1]), batch_of([0, 2, 0], [1, 1, 1])
    table = libraries.Table(input_shape(layout()), train)
    columns = table.columns(train)
    ad = next(column for column in table.read if column.name == "ad")
    assert columns[libraries.LENGTH].tolist() == [3, 0, libraries.EVENTS]
    read = columns[libraries.HISTORY + "ad"]
    place = [column.name for column in layout().event_ids].index("ad")
    assert read[0, :3].tolist() == (train.event_ids[:3, place] % ad.rows).tolist()
    assert read[2].tolist() == (train.event_ids[3 : 3 + libraries.EVENTS, place] % ad.rows).tolist(), "newest first"
    assert not read[0, 3:].any()
    assert not read[1].any()
    low = rows._replace(user_dense=np.full_like(rows.user_dense, -1e9), ad_dense=np.full_like(rows.ad_dense, 1e9))
    said = table.columns(low)
    ends = [set(said[name].tolist()) for name in table.dense]
    assert ends == [{0.0}] * rows.user_dense.shape[1] + [{1.0}] * rows.ad_dense.shape[1]
    assert said[libraries.HISTORY + "ad"].shape == (3, libraries.EVENTS)


def test_drawn_negatives_are_apps_that_their_situation_has_not_used() -> None:
    random = np.random.default_rng(3)
    positives = random.integers(0, 4, (300, len(COLUMNS)))
    positives[:, -1] = random.integers(0, 12, 300)
    rows = with_negatives(positives, np.random.default_rng(0))
    used = set(map(tuple, positives.tolist()))
    assert sorted(map(tuple, rows.fields_NF[rows.label_N == 1].tolist())) == sorted(map(tuple, positives.tolist()))
    negatives = list(map(tuple, rows.fields_NF[rows.label_N == 0].tolist()))
    assert len(negatives) == NEGATIVES * len(positives)
    assert not used & set(negatives)


@pytest.mark.timeout(300)
def test_the_serving_benchmark_says_where_a_request_spends_its_time(tmp_path: Path) -> None:
    if "GEM_SLOW" not in os.environ:
        pytest.skip("it trains models and starts every service twice, two minutes; set GEM_SLOW to run this")
    cells = _run("serving", tmp_path / "out.json")["cells"]
    assert isinstance(cells, list)
    stores = {"sqlite", "redis"} if shutil.which("redis-server") else {"sqlite"}
    wanted = {(store, call, size) for store in stores for call in ("Rank", "GetUserState") for size in (1, 200, 1000)}
    assert {(c["store"], c["call"], c["candidates"]) for c in cells} == wanted
    assert all(c["errors"] == 0 and 0 < c["p50"] <= c["p99"] for c in cells)
    assert all(c["p50_low"] <= c["p50"] <= c["p50_high"] for c in cells)
    ranked = [c for c in cells if c["call"] == "Rank"]
    assert all(set(c["hop_p50"]) == {"router", "sequence", "solaris", "vertical"} for c in ranked)
    assert all(sum(c["cpu_share"].values()) == pytest.approx(1.0) for c in cells)


@pytest.mark.timeout(300)
def test_the_scaling_benchmark_goes_on_from_kept_runs_and_fits_a_law_of_each_model(tmp_path: Path) -> None:
    arguments = ["--runs", str(tmp_path / "runs"), "--plot", str(tmp_path / "plot.svg")]
    first = _run("scaling", tmp_path / "out.json", *arguments)
    assert {"Kunlun", "InterFormer"} == set(first["laws"])  # type: ignore[call-overload]
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    again = _run("scaling", tmp_path / "again.json", *arguments)
    assert again["cells"] == first["cells"], "seconds of training and all: nothing was trained twice"


def test_the_law_of_a_known_slope_is_found() -> None:
    random = np.random.default_rng(0)
    runs = [
        Trial(f"size {n}", seed, 0.9 - 0.02 * n + 1e-3 * random.normal(), 0.7, 10.0**n, 1.0, 1)
        for n in range(5)
        for seed in range(3)
    ]
    found = law(runs)
    assert found.slope == pytest.approx(0.02, abs=1e-3)
    assert found.low < found.slope < found.high < found.low + 0.002
    value, low, high = slope_ratio(runs, [dataclasses.replace(run, ne=0.45 + run.ne / 2) for run in runs])
    assert low < 2.0 < high
    assert value == pytest.approx(2.0)


@pytest.mark.timeout(300)
def test_the_lengths_benchmark_reads_full_histories_of_other_users_and_goes_on_from_kept_runs(tmp_path: Path) -> None:
    arguments = ["--runs", str(tmp_path / "runs"), "--plot", str(tmp_path / "plot.svg")]
    first = _run("lengths", tmp_path / "out.json", *arguments)
    cells, facts = first["cells"], first["facts"]
    assert isinstance(cells, list)
    assert isinstance(facts, dict)
    longest = max(cell["length"] for cell in cells)
    assert len(cells) == len({(cell["size"], cell["length"]) for cell in cells}) == 8
    assert min(facts["train_fewest_events"], facts["test_fewest_events"]) >= longest, "no row lacks what a model may read"
    assert facts["bayes"] < facts["surface"]
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    for kept in (tmp_path / "runs").rglob("tables"):
        shutil.rmtree(kept)  # the law is fitted anew from runs alone
    again = _run("lengths", tmp_path / "again.json", *arguments)
    assert (again["cells"], again["laws"]) == (cells, first["laws"]), "seconds of training and all: nothing was trained twice"


@pytest.mark.parametrize("c", [-0.004, 0.0, 0.004])
def test_the_joint_law_of_length_and_compute_is_found(c: float) -> None:
    random = np.random.default_rng(1)
    cells = []
    for size, x in (("small", -1.5), ("middle", 0.0), ("large", 1.5)):
        for length in (50, 200, 800, 2000, 4000):
            far = length / 50
            ne = 0.8 - 0.01 * x + 0.05 * far**-0.6 + c * x * np.log(far)
            seeds = tuple(float(ne + 5e-4 * random.normal()) for _ in range(3))
            cells.append(Cell(size=size, length=length, compute=1e12 * float(np.exp(x)), ne=seeds, speed=1.0))
    found = law_of_lengths(cells)
    assert found.c == pytest.approx(c, abs=4e-4)
    assert found.low < found.c < found.high < found.low + 1.5e-3
    assert found.resolved
    assert (found.a, found.b, found.beta) == pytest.approx((-0.01, 0.05, 0.6), abs=0.01, rel=0.25)
    means = np.array([np.mean(cell.ne) for cell in cells])
    at = found(np.array([cell.compute for cell in cells]), np.array([float(cell.length) for cell in cells]))
    assert np.abs(at - means).max() < 1.5e-3


@pytest.mark.timeout(300)
def test_the_ablation_benchmark_scores_every_variant_on_the_same_rows(tmp_path: Path) -> None:
    cells = _run("ablation", tmp_path / "out.json")["cells"]
    assert isinstance(cells, list)
    assert len({tuple(c["ne"]) for c in cells}) == len(cells) == 12, "no variant is another one"
    assert all(c["low"] <= c["high"] and 0.5 < c["ne"][0] < 1.5 for c in cells)
