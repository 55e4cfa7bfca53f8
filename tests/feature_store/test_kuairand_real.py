"""KuaiRand as it was published: every row is counted, and nothing that comes after the outcome is taken."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from feature_store.importing.kuairand import import_kuairand
from feature_store.spec import load_spec
from feature_store.tables import Tables

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "feature_store" / "datasets" / "kuairand.yaml")
REAL = Path(os.environ.get("GEM_DATA", ROOT / "../shared/data")) / "kuairand"
AFTERWARDS = ("play_time_ms", "profile_stay_time", "comment_stay_time", "duration_ms", "is_hate")
"""Columns of the log that are known after the impression, or that no objective reads."""
TABLES = ("impressions", "outcomes", "events", "users", "catalogue")

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"KuaiRand is not at {REAL}; set GEM_DATA")


@pytest.mark.timeout(300)
def test_all_rows_of_the_log_arrive_and_none_is_refused(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    report = import_kuairand(REAL, tables, SPEC, max_reject_share=0.0)
    expected = {"impressions": 193_554, "catalogue": 7_583, "users": 27_285, "events": 1_230_650, "outcomes": 217_175}
    assert (report.rows, report.rejects) == (expected, {})
    assert {name: tables.read(name, [tables.columns(name)[0]]).num_rows for name in TABLES} == expected
    assert not tables.exists("rejects")
    (path,) = REAL.glob("log_*.parquet")
    log = pq.read_table(path)
    objectives = Counter(tables.read("outcomes", ["objective"])["objective"].to_pylist())
    for objective, column in (("click", "is_click"), ("long_view", "long_view"), ("like", "is_like"), ("follow", "is_follow")):
        assert objectives[objective] == pc.sum(log[column]).as_py(), objective
    times = tables.read("impressions", ["event_ms"])["event_ms"].combine_chunks()
    assert pc.min_max(times) == pc.min_max(log["time_ms"].combine_chunks())


def test_what_is_known_afterwards_reaches_no_table(tmp_path: Path) -> None:
    read: list[Tables] = []
    for turn in (0, 1):
        folder = tmp_path / str(turn)
        folder.mkdir()
        for path in REAL.glob("*.parquet"):
            rows = pq.read_table(path).slice(0, 2_000)
            if path.name.startswith("log_"):
                rows = _changed(rows) if turn else rows
            pq.write_table(rows, folder / path.name)
        import_kuairand(folder, Tables(folder / "tables"), SPEC)
        read.append(Tables(folder / "tables"))
    for name in TABLES:
        assert read[0].read(name).num_rows > 0
        assert read[0].read(name) == read[1].read(name), name
        assert not set(AFTERWARDS) & set(read[0].columns(name)), name


def _changed(log: pa.Table) -> pa.Table:
    """The log with other values in every column that comes afterwards."""
    for column in AFTERWARDS:
        values = pc.add(log[column].cast(pa.int64()), 123_457)
        log = log.set_column(log.column_names.index(column), column, values)
    return log
