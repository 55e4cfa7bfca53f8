"""A real Kubernetes API server on loopback, with the custom resources that the charts use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ("sequence", "solaris", "vertical", "router", "loopfm", "trainer", "gem")
CUSTOM = ("pytorchjobs", "inferenceservices", "grpcroutes", "podmonitors", "prometheusrules", "clusterqueues", "localqueues", "resourceflavors")
Run = Callable[..., str]


class Refused(Exception):
    """A command ended with an error; its text is what the command said."""


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs helm and kubectl against an API server of this session: `kube("kubectl", "get", "ns")`."""
    folder = Path(os.environ.get("GEM_KUBE", ROOT.parent / "shared" / "kube"))
    if not (folder / "cluster.sh").exists():
        pytest.skip(f"no API server at {folder}; set GEM_KUBE to a folder with cluster.sh to install charts into a real one")
    missing = [name for name in ("etcd", "openssl") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"an API server needs {' and '.join(missing)}; install etcd-server and openssl")
    if _answers(6443) or _answers(2379):
        pytest.skip("ports 6443 and 2379 are taken: another cluster runs on this machine")
    tools = _tools()
    state = tmp_path_factory.mktemp("cluster")
    env = {**os.environ, "B": str(ROOT / ".cache" / "kube"), "D": str(state / "d"), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
           "KUBECONFIG": str(state / "d" / "kc.yaml"), "HOME": str(state)}  # fmt: skip

    def run(*command: str | Path, stdin: str | None = None) -> str:
        done = subprocess.run(
            [str(part) for part in command], env=env, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    try:
        for step in ("unpack", "api"):
            # Servers that stay in the background would hold a pipe open for ever.
            with (state / f"{step}.log").open("w") as log:
                subprocess.run(["bash", folder / "cluster.sh", step], env=env, check=True, stdout=log, stderr=log, timeout=120)
        _custom_resources(run, folder, state / "crds")
        yield run
    finally:
        subprocess.run(["bash", folder / "cluster.sh", "api-down"], env=env, check=False, capture_output=True, timeout=60)


@pytest.fixture(scope="session")
def charts(kube: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the charts with their dependencies."""
    folder = tmp_path_factory.mktemp("charts") / "charts"
    shutil.copytree(ROOT / "charts", folder, ignore=shutil.ignore_patterns("*.tgz"))
    for chart in CHARTS:
        kube("helm", "dependency", "update", folder / chart)
    return folder


def _tools() -> Path:
    folder = ROOT / ".cache" / "tools"
    done = subprocess.run([ROOT / "charts" / "tools.sh", folder], capture_output=True, text=True, check=False)
    found = (folder / "helm").exists() or shutil.which("helm")
    if not found:
        pytest.skip(f"helm is neither on PATH nor to be had: {done.stderr[-300:]}")
    return folder


def _custom_resources(run: Run, folder: Path, made: Path) -> None:
    crds = Path(os.environ.get("GEM_CRDS", ROOT.parent / "shared" / "schemas" / "crds"))
    if not crds.exists():
        pytest.skip(f"no custom resources at {crds}; set GEM_CRDS")
    wanted = [path for path in sorted(crds.glob("*.yaml")) if any(path.stem.endswith(f"_{name}") for name in CUSTOM)]
    run(sys.executable, folder / "downconvert.py", made, *wanted)
    run("kubectl", "create", *(part for path in sorted(made.glob("*.json")) for part in ("-f", path)))
    for path in wanted:
        group, plural = path.stem.split("_", 1)
        _until_served(run, f"{plural}.{group}")


def _until_served(run: Run, resource: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            run("kubectl", "get", resource, "--all-namespaces")
            return
        except Refused:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.3)
        return probe.connect_ex(("127.0.0.1", port)) == 0
