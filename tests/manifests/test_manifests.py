"""What a cluster owns once is valid, and denies by default."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def documents() -> list[dict[str, Any]]:
    files = sorted((ROOT / "manifests" / "base").glob("*.yaml"))
    return [d for f in files if f.name != "kustomization.yaml" for d in yaml.safe_load_all(f.read_text())]


def test_core_documents_are_strictly_valid() -> None:
    core = [d for d in documents() if "kueue" not in d["apiVersion"]]
    assert {d["kind"] for d in core} == {"Namespace", "NetworkPolicy", "PriorityClass"}
    for document in core:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_queues_are_valid_where_the_schemas_are_to_be_had() -> None:
    folder = Path(os.environ.get("GEM_CRDS", ROOT.parent / "shared" / "schemas" / "crds"))
    if not folder.exists():
        pytest.skip(f"no CRD schemas at {folder}; set GEM_CRDS to validate custom resources")
    for document in (d for d in documents() if "kueue" in d["apiVersion"]):
        plural = document["kind"].lower() + "s"
        crd = yaml.load((folder / f"kueue.x-k8s.io_{plural}.yaml").read_text(), Loader=yaml.CSafeLoader)
        version = document["apiVersion"].split("/")[1]
        (schema,) = (v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == version)
        jsonschema.validate(document, schema)


def test_everything_is_denied_that_no_chart_allows() -> None:
    (policy,) = (d for d in documents() if d["kind"] == "NetworkPolicy")
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("overlay", ["local", "production"])
def test_an_overlay_builds(overlay: str) -> None:
    kubectl = shutil.which("kubectl", path=f"{os.environ.get('PATH', '')}{os.pathsep}{ROOT / '.cache' / 'tools'}")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", ROOT / "manifests" / "overlays" / overlay]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {d["kind"] for d in yaml.safe_load_all(done.stdout)} >= {"Namespace", "ClusterQueue", "NetworkPolicy"}


def test_the_image_runs_as_nobody_and_installs_what_the_lock_says() -> None:
    text = (ROOT / "services" / "Dockerfile").read_text()
    assert "USER 65532:65532" in text
    assert "-c requirements.lock" in text
    copied = {part for line in text.splitlines() if line.startswith("COPY") for part in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied if not name.startswith(("--", "/")))
