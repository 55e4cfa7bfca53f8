"""The tree is the import path, and the house says so itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("feature_store", "model", "services", "gem")


@pytest.mark.parametrize("name", ROOMS)
def test_an_import_name_resolves_inside_the_repository_and_is_ours_alone(name: str) -> None:
    package = importlib.import_module(name)
    assert all(Path(folder).is_relative_to(ROOT) for folder in package.__path__)
    owners = set(importlib.metadata.packages_distributions().get(name, []))
    assert owners <= {"gem"}


def test_proto_is_not_a_package_and_the_root_holds_no_python() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert list(ROOT.glob("*.py")) == []


def test_no_drawer_rooms() -> None:
    drawers = {"utils.py", "common.py", "helpers.py", "misc.py", "manager.py", "model.py", "services.py"}
    ours = [path for room in ("feature_store", "model", "services") for path in (ROOT / room).rglob("*.py")]
    assert [str(path) for path in ours if path.name in drawers] == []


def test_files_stay_readable() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for room in ("feature_store", "model", "services", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
        if "kernels" not in path.parts and (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_the_readme_tree_names_every_room() -> None:
    readme = (ROOT / "README.md").read_text()
    rooms = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    kept = [name for name in rooms if name not in {"__pycache__", "build", "dist"}]
    assert [name for name in kept if not re.search(rf"\b{re.escape(name)}/", readme)] == []


def test_only_settings_and_entry_points_read_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for room in ("feature_store", "model", "services")
        for path in (ROOT / room).rglob("*.py")
        if "os.environ" in path.read_text() and path.name != "__main__.py"
    ]
    assert readers == []
