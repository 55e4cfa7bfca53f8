"""Benchmarks run at their quick size and write what a reader needs to repeat them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    result = _run("quality", tmp_path / "out.json", "--source", str(DATA), "--preset", "model.gem.presets:tiny")
    cells = result["cells"]
    assert isinstance(cells, list)
    pooled = {c["model"]: c for c in cells if c["surface"] == "all" and c["objective"] == "click"}
    assert set(pooled) == {"rate", "lightgbm", "din", "foundation"}
    assert len({c["rows"] for c in pooled.values()}) == 1
    assert all(0.5 < c["ne"] < 1.5 for c in pooled.values())
