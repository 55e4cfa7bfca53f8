"""A demo's home: begun anew each time, and never somebody's platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_store.errors import FailedPrecondition, InvalidInput
from services.cli.console import Console
from services.cli.home import DATASETS, Home
from services.demo.config import SIZES
from services.demo.loop import run_demo


def test_a_demo_starts_over_in_the_home_of_another_data_set_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.start_over()
    home.adopt(DATASETS / "world.yaml")
    home.tables_root.mkdir()
    (home.tables_root / "part").touch()
    for name in ("online.sqlite", "online.sqlite-wal", "report.json", "report.html", "notes.txt"):
        (home.root / name).touch()
    home.start_over()
    home.adopt(DATASETS / "kuairand.yaml")
    assert {path.name for path in home.root.iterdir()} == {"made-by-demo", "notes.txt", "spec.yaml"}


def test_a_demo_does_not_write_over_a_platform(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.adopt(DATASETS / "world.yaml")
    home.tables_root.mkdir()
    with pytest.raises(FailedPrecondition, match="another --home"):
        home.start_over()
    assert home.tables_root.is_dir()


def test_a_demo_on_a_folder_that_nothing_describes_says_what_is_missing_and_removes_nothing(tmp_path: Path) -> None:
    home, data = Home(tmp_path / "home"), tmp_path / "data"
    home.start_over()
    (home.root / "report.json").touch()
    data.mkdir()
    with pytest.raises(InvalidInput, match=r"data holds neither KuaiRand's files nor a spec\.yaml; put a spec\.yaml there"):
        run_demo(SIZES["small"], home, Console(as_json=True), data=data)
    assert (home.root / "report.json").exists()
