"""The whole loop, at the smallest size that has every stage."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from feature_store.world import WorldConfig
from services.cli.console import Console
from services.cli.home import Home
from services.cli.traces import read_spans
from services.demo.config import SIZES, Days, days_of
from services.demo.loop import run_demo

CONFIG = dataclasses.replace(
    SIZES["small"],
    world=WorldConfig(users=40, ads=60, days=5, requests_per_user=6),
    requests=30,
    annotated_days=2,
)
ARMS = {"FM", "A0", "A1", "A2", "A3"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def report(home: Home) -> dict[str, Any]:
    return run_demo(CONFIG, home, Console(as_json=True))


pytestmark = pytest.mark.timeout(400)


def test_the_report_has_every_figure_under_its_stable_name(report: dict[str, Any], home: Home) -> None:
    assert json.loads((home.root / "report.json").read_text())["dataset"] == "world"
    assert "<svg" in (home.root / "report.html").read_text()
    pooled = report["evaluation"]["all"]["click"]
    assert set(pooled) == ARMS
    assert set(pooled["FM"]) == {"ne", "auc", "gauc", "calibration", "rows"}
    assert {arm["rows"] for arm in pooled.values()} == {pooled["FM"]["rows"]}
    assert report["flops_per_example"] > 0
    assert 0 < report["mfu"] < 1
    assert set(report["stage_seconds"]) == {"data", "counters", "foundation", "verticals", "materialize", "serve"}


def test_no_model_beats_the_truth_and_the_best_slot_is_the_best(report: dict[str, Any]) -> None:
    floor = report["bayes"]["all"]["click"]["ne"]
    assert all(arm["ne"] > floor for arm in report["evaluation"]["all"]["click"].values())
    worth = report["top_slot_value"]
    assert all(worth["best"] >= worth[arm] for arm in ARMS)
    assert worth["best"] > worth["random"]


def test_every_request_was_answered_and_levels_partition_candidates(report: dict[str, Any]) -> None:
    assert report["served"]["errors"] == {}
    assert report["served"]["requests"] == 30
    assert sum(report["coverage"].values()) == pytest.approx(1.0)


def test_the_teacher_never_annotated_what_it_had_seen(report: dict[str, Any]) -> None:
    assert report["annotated"]["self_label_seen"] == 0
    assert report["annotated"]["rows"] > 0


def test_one_trace_runs_from_the_client_into_the_vertical_and_the_store(report: dict[str, Any], home: Home) -> None:
    spans = report["trace"]["spans"]
    assert {"client", "router", "sequence", "vertical"} <= {span["service"] for span in spans}
    assert [span["service"] for span in spans if span["depth"] == 0] == ["client"]
    speculation = [s for s in read_spans(home.trace_path) if s.links and s.service == "solaris"]
    assert speculation, "work done ahead is a trace of its own, linked to the request's"


def test_days_are_cut_so_that_the_last_one_is_unseen() -> None:
    day = 86_400_000
    assert days_of(CONFIG, 0, 5 * day) == Days(first_ms=0, annotate_ms=2 * day, test_ms=4 * day, end_ms=5 * day)
    with pytest.raises(ValueError, match="at least three days"):
        Days(first_ms=0, annotate_ms=0, test_ms=day, end_ms=2 * day)
