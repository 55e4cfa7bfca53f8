from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from feature_store.errors import CorruptArtefact, InvalidInput, NotReady
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.training import artefact
from model.training.published import load_foundation
from services.runtime.settings import SettingsError, load
from services.trainer.process import PERMANENT, RETRYABLE, Asked, exit_code, main
from services.trainer.settings import TrainerSettings
from services.trainer.submit import JobConfig, pytorch_job, to_yaml

SPEC = Path(__file__).resolve().parents[2] / "feature_store" / "datasets" / "world.yaml"
ASKED = ["model.gem.presets:tiny", "--from", str(START_MS), "--to", str(START_MS + 2 * DAY_MS)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    generate(WorldConfig(users=20, ads=60, days=3, requests_per_user=6.0), Tables(root))
    return root


def environment(tables: Path, root: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ, "GEM_SPEC": str(SPEC), "GEM_TABLES": str(tables), "GEM_MODELS": str(root / "models"),
        "GEM_CHECKPOINTS": str(root / "checkpoints"), "GEM_CHECKPOINT_STEPS": "2", "GEM_BATCH_REQUESTS": "16",
        "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


def test_two_processes_under_torchrun_train_and_publish_one_version(tables: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "services.trainer", *ASKED]
    done = subprocess.run(
        [*command, "--version", "1", "--valid-to", str(START_MS + 3 * DAY_MS)],
        env=environment(tables, tmp_path, GEM_PROCESSES="2", GEM_TABLE_PROCESSES="2"),
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = load_foundation(tmp_path / "models" / "gem", load_spec(SPEC))
    assert artefact.versions(tmp_path / "models", "gem") == ["1"]
    figures = loaded.manifest.metrics
    assert figures["all/click/ne"] > 0
    assert 0 < figures["run/mfu_of_measured_ceiling"] < 1
    assert START_MS < loaded.manifest.train_watermark_ms < START_MS + 2 * DAY_MS
    assert (tmp_path / "checkpoints" / "latest").exists()
    assert "rows/s" in done.stderr


def test_a_run_that_cannot_succeed_ends_with_a_permanent_code_and_says_why(
    tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load(TrainerSettings, environment(tables, tmp_path))
    asked = Asked("nowhere:tiny", "gem", "1", START_MS, START_MS + DAY_MS, 0)
    assert main(settings, asked) == PERMANENT
    assert "try model.gem.presets:tiny" in caplog.text
    assert not (tmp_path / "models").exists()


def test_exit_codes_tell_what_may_be_tried_again() -> None:
    assert exit_code(NotReady("later")) == RETRYABLE >= 128
    assert exit_code(CorruptArtefact("never")) == exit_code(InvalidInput("never")) == PERMANENT < 128


def test_processes_that_are_missing_are_noticed_before_anything_else() -> None:
    given = {"GEM_SPEC": "s", "GEM_TABLES": "t", "GEM_MODELS": "m", "GEM_PROCESSES": "16", "WORLD_SIZE": "2"}
    with pytest.raises(SettingsError, match=r"2 processes started, 16 were expected.*nprocPerNode"):
        load(TrainerSettings, given)
    assert load(TrainerSettings, {**given, "WORLD_SIZE": "16", "RANK": "3"}).rank == 3


@pytest.mark.parametrize("size", ["0", "3"])
@pytest.mark.parametrize("name", ["expert_processes", "table_processes"])
def test_processes_that_cannot_share_a_model_out_evenly_are_refused(name: str, size: str) -> None:
    given = {"GEM_SPEC": "s", "GEM_TABLES": "t", "GEM_MODELS": "m", "WORLD_SIZE": "4"}
    with pytest.raises(SettingsError, match=f"{name} is {size}; it must divide WORLD_SIZE, which is 4"):
        load(TrainerSettings, {**given, f"GEM_{name.upper()}": size})
    assert getattr(load(TrainerSettings, {**given, f"GEM_{name.upper()}": "2"}), name) == 2


def job(**changes: object) -> dict[str, object]:
    config = JobConfig(**{"name": "run", "image": "gem/trainer:1", "arguments": tuple(ASKED), **changes})  # type: ignore[arg-type]
    loaded: dict[str, object] = yaml.safe_load(to_yaml(pytorch_job(config)))
    return loaded


def test_two_pods_of_eight_devices_are_sixteen_processes() -> None:
    made = job(pods=2, processes_per_pod=8, gpus_per_pod=8, claim="logs", node_selector={"pool": "gpu"})
    spec = made["spec"]
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert spec["nprocPerNode"] == "8"  # type: ignore[index]
    replicas = spec["pytorchReplicaSpecs"]  # type: ignore[index]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    for each in replicas.values():
        assert each["restartPolicy"] == "ExitCode"
        assert each["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["torchrun", "-m", "services.trainer"]
        assert {e["name"]: e["value"] for e in container["env"]} == {"GEM_PROCESSES": "16"}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_one_pod_has_no_worker() -> None:
    assert set(job()["spec"]["pytorchReplicaSpecs"]) == {"Master"}  # type: ignore[index]


def test_devices_without_a_process_each_are_refused() -> None:
    with pytest.raises(InvalidInput, match="set processes_per_pod to 8"):
        job(gpus_per_pod=8)


def test_importing_the_entry_points_has_no_effect() -> None:
    for module in ("services.trainer.__main__", "services.loopfm.__main__"):
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == (b"", b"")
