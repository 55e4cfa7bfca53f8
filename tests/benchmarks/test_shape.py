"""Benchmarks run at their quick size and write what a reader needs to repeat them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.baselines.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("GEM_DATA", ROOT.parent / "shared" / "data")) / "kuairand"


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
    assert {cell["op"] for cell in cells} == {"gdpa", "block attention", "seed pooling"}
    assert all(cell["ratio"] > 0 for cell in cells)


@pytest.mark.timeout(300)
def test_the_quality_benchmark_puts_every_model_on_the_same_rows(tmp_path: Path) -> None:
    if not DATA.exists():
        pytest.skip(f"real logs are not at {DATA}; set GEM_DATA to run this")
    models = {"rate", "lightgbm", "foundation", *PRESETS}
    chosen = ["--preset", "model.gem.presets:tiny", "--models", ",".join(sorted(models))]
    result = _run("quality", tmp_path / "out.json", "--source", str(DATA), *chosen)
    cells = result["cells"]
    assert isinstance(cells, list)
    pooled = {c["model"]: c for c in cells if c["surface"] == "all" and c["objective"] == "click"}
    assert set(pooled) == models
    assert len({c["rows"] for c in pooled.values()}) == 1
    assert all(0.5 < c["ne"] < 1.5 for c in pooled.values())


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
