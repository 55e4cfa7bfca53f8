"""Rendered charts, and strict schemas to hold them to."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("sequence", "solaris", "vertical", "router", "loopfm", "trainer")
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm binary: from PATH, else from where `make charts` puts it."""
    found = shutil.which("helm")
    if found:
        return Path(found)
    folder = ROOT / ".cache" / "tools"
    done = subprocess.run([ROOT / "charts" / "tools.sh", folder], capture_output=True, text=True, check=False)
    if not (folder / "helm").exists():
        pytest.skip(f"helm is neither on PATH nor to be had: {done.stderr[-300:]}")
    return folder / "helm"


@pytest.fixture(scope="session")
def charts(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the charts with their dependencies built."""
    folder = tmp_path_factory.mktemp("charts")
    shutil.copytree(ROOT / "charts", folder / "charts", ignore=shutil.ignore_patterns("*.tgz"))
    for chart in (*SERVICES, "gem"):
        subprocess.run([helm, "dependency", "update", chart], cwd=folder / "charts", check=True, capture_output=True)
    return folder / "charts"


@pytest.fixture(scope="session")
def render(helm: Path, charts: Path) -> Render:
    """Documents of a chart, rendered with some values files and --set options."""

    def rendered(chart: str, *values: Path, sets: tuple[str, ...] = (), apis: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        command = [str(helm), "template", "rel", chart, "-f", "environment.yaml"]
        command += [part for path in values for part in ("-f", str(path))]
        command += [part for text in sets for part in ("--set", text)]
        command += [part for text in apis for part in ("--api-versions", text)]
        done = subprocess.run(command, cwd=charts, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


@pytest.fixture(scope="session")
def full(render: Render) -> list[dict[str, Any]]:
    """Everything on."""
    return render("gem", Path("gem/ci/full.yaml"), apis=("monitoring.coreos.com/v1",))


@pytest.fixture(scope="session")
def crds() -> dict[tuple[str, str], dict[str, Any]]:
    """Strict JSON Schemas of custom resources by (apiVersion, kind)."""
    folder = Path(os.environ.get("GEM_CRDS", ROOT.parent / "shared" / "schemas" / "crds"))
    if not folder.exists():
        pytest.skip(f"no CRD schemas at {folder}; set GEM_CRDS to validate custom resources")
    schemas = {}
    wanted = ("pytorchjobs", "inferenceservices", "grpcroutes", "podmonitors", "trainjobs")
    for path in sorted(folder.glob("*.yaml")):
        if any(name in path.name for name in wanted):
            schemas.update(_schemas(yaml.load(path.read_text(), Loader=yaml.CSafeLoader)))
    catalog = folder.parent / "catalog-json" / "keda.sh_scaledobject_v1alpha1.json"
    schemas[("keda.sh/v1alpha1", "ScaledObject")] = strict(yaml.safe_load(catalog.read_text()))
    return schemas


def _schemas(crd: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    spec = crd["spec"]
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): strict(version["schema"]["openAPIV3Schema"])
        for version in spec["versions"]
    }


def strict(schema: Any, *, top: bool = True) -> Any:
    """An OpenAPI schema as JSON Schema that refuses unknown fields."""
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in made:
        made["properties"] = {name: strict(value, top=False) for name, value in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = strict(made[key], top=False)
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    if top:
        for name in ("apiVersion", "kind", "metadata"):
            made["properties"][name] = {}
    return made
