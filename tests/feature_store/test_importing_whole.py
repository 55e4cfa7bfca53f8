"""An import that is killed at whatever moment and run again leaves the tables of one clean import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from feature_store.importing.rows import Importer
from feature_store.importing.staging import FOLDER
from feature_store.spec import Spec, load_spec
from feature_store.tables import Tables

SPEC = """
name: shop
surfaces: [{ name: feed }]
objectives: [{ name: click, attribution_window_seconds: 60 }]
entities: { user: { id_type: int64 }, ad: { id_type: int64 } }
features:
  - { name: user, owner: user, id: { rows: 30 } }
  - { name: ad, owner: ad, id: { rows: 30 } }
event_sources: [{ name: impression, features: [ad], max_length: 5 }]
tables:
  catalogue: { path: ads.csv, time_unit: ms, columns: { ad_id: what, valid_from_ms: since } }
  impressions:
    path: log.csv
    time_unit: ms
    columns: { user_id: who, ad_id: what, surface: where, event_ms: when, outcome.click: clicked }
"""
NAMES = ("catalogue", "impressions", "outcomes", "rejects")
PROGRAM = """
import os, signal, sys
from pathlib import Path

import deltalake

folder, moment, steps = Path(sys.argv[1]), 0, 0


def step():
    global steps
    steps += 1
    if steps == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def write_deltalake(*arguments, written=deltalake.write_deltalake, **options):
    step()
    written(*arguments, **options)
    step()


deltalake.write_deltalake = write_deltalake
sys.addaudithook(lambda event, _: step() if event in ("os.rename", "shutil.rmtree") else None)
from feature_store.importing.mapped import import_mapped
from feature_store.spec import load_spec
from feature_store.tables import Tables


def import_in_a_child(tables, killed_at):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    global moment, steps
    moment, steps = killed_at, 0
    report = import_mapped(folder, Tables(tables), load_spec(folder / "spec.yaml"), max_reject_share=0.5)
    tables.with_suffix(".txt").write_text(repr(report))
    os._exit(0)


ended, killed_at = -signal.SIGKILL, 0
while ended == -signal.SIGKILL:
    killed_at += 1
    tables = folder / f"killed-{killed_at}"
    ended = import_in_a_child(tables, killed_at)
    if ended:
        assert import_in_a_child(tables, 0) == 0
assert ended == 0, ended
print(killed_at)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "ads.csv").write_text("what,since\n1,0\n2,0\n")
    rows = [f"{user},{1 + user % 2},feed,{1000 + user},{user % 2}" for user in range(9)]
    (tmp_path / "log.csv").write_text("\n".join(["who,what,where,when,clicked", *rows, "x,1,feed,5,0", rows[0], ""]))
    return tmp_path


def _content(tables: Tables) -> dict[str, list[str]]:
    return {name: sorted(map(str, tables.read(name).to_pylist())) for name in NAMES}


def test_an_import_that_is_killed_at_any_step_and_run_again_is_one_clean_import(source: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout)
    assert last > 12, "steps of four tables written aside, four published, one rename"
    clean = source / f"killed-{last}"
    expected = _content(Tables(clean))
    assert {name: len(rows) for name, rows in expected.items()} == {"catalogue": 2, "impressions": 9, "outcomes": 4, "rejects": 2}
    for number in range(1, last):
        folder = source / f"killed-{number}"
        assert _content(Tables(folder)) == expected, number
        assert folder.with_suffix(".txt").read_text() == clean.with_suffix(".txt").read_text()
        assert not (folder / FOLDER).exists()


def _spec(source: Path) -> Spec:
    return load_spec(source / "spec.yaml")


def test_outcomes_whose_impressions_were_cut_off_are_not_written_twice(source: Path) -> None:
    tables, row = Tables(source / "tables"), {"user_id": 1, "ad_id": 1, "surface": "feed", "event_ms": 5, "outcome.click": 1}
    Importer(tables, _spec(source)).take("impressions", "log", [row])
    written: list[dict[str, Any]] = tables.read("outcomes").to_pylist()
    rows = tables.read("impressions").slice(0, 0)
    tables.overwrite("impressions", rows)
    Importer(tables, _spec(source)).take("impressions", "log", [row])
    assert tables.read("outcomes").to_pylist() == written
    assert tables.read("impressions").num_rows == 1
