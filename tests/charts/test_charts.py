"""The charts render what Kubernetes takes, hardened, and refuse what is wrong."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gem.router.v1.route_table_pb2 import RouteTable

from feature_store.spec import parse_yaml
from services.loopfm.settings import LoopFmSettings
from services.router.settings import RouterSettings
from services.router.sink.settings import SinkSettings
from services.runtime.settings import variable
from services.sequence.settings import SequenceSettings
from services.solaris.settings import SolarisSettings, WorkerProcessSettings
from services.trainer.settings import TrainerSettings
from services.vertical.settings import VerticalSettings

SERVICES = ("sequence", "solaris", "vertical", "router", "loopfm", "trainer")
Render = Callable[..., list[dict[str, Any]]]
Documents = list[dict[str, Any]]
SETTINGS = {
    "services.sequence": SequenceSettings,
    "services.solaris": SolarisSettings,
    "services.solaris.worker": WorkerProcessSettings,
    "services.router": RouterSettings,
    "services.router.sink": SinkSettings,
    "services.loopfm": LoopFmSettings,
    "services.vertical": VerticalSettings,
    "services.trainer": TrainerSettings,
}
GIVEN_BY_OTHERS = {"RANK", "WORLD_SIZE", "HOSTNAME"}


def pods(documents: Documents) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod spec) of everything that runs."""
    for document in documents:
        spec, name = document.get("spec", {}), document["metadata"]["name"]
        if document["kind"] in ("Deployment", "Job"):
            yield name, spec["template"]["spec"]
        elif document["kind"] == "PyTorchJob":
            for role, replica in spec["pytorchReplicaSpecs"].items():
                yield f"{name}/{role}", replica["template"]["spec"]
        elif document["kind"] == "InferenceService":
            yield name, spec["predictor"]


def module(container: dict[str, Any]) -> str:
    command = container["command"]
    return str(command[command.index("-m") + 1])


@pytest.mark.parametrize("chart", [*SERVICES, "gem"])
def test_a_chart_lints_strictly(helm: Path, charts: Path, chart: str) -> None:
    command: list[str | Path] = [helm, "lint", "--strict", "-f", "environment.yaml", chart]
    done = subprocess.run(command, cwd=charts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_umbrella_packages(helm: Path, charts: Path, tmp_path: Path) -> None:
    subprocess.run([helm, "package", "gem", "-d", tmp_path], cwd=charts, check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["gem-0.1.0.tgz"]


@pytest.mark.parametrize(
    ("chart", "bad", "part"),
    [
        ("sequence", "workload.replica=3", "replica"),
        ("sequence", "workload.image.tag=latest", "tag"),
        ("sequence", "workload.autoscaling.by=magic", "by"),
        ("solaris", "worker2.module=x", "worker2"),
        ("vertical", "surfaces.feed.arms.a0.storageUri=pvc://m/feed/current", "storageUri"),
        ("vertical", "surfaces.feed.arms.a0.canaryTrafficPercent=101", "canaryTrafficPercent"),
        ("trainer", "run.kind=Cron", "kind"),
        ("router", "gateway.on=true", "gateway"),
        ("sequence", "workload.nodePool=moon", "moon"),
    ],
)
def test_a_wrong_value_is_refused_by_name(render: Render, chart: str, bad: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        render(chart, sets=(bad,))


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_core_documents_are_strictly_valid(full: Documents, version: str) -> None:
    core = [d for d in full if "." not in d["apiVersion"].split("/")[0] or d["apiVersion"].split("/")[0].endswith(".k8s.io")]
    core = [d for d in core if not d["apiVersion"].startswith("gateway.")]
    assert {d["kind"] for d in core} >= {"Deployment", "Service", "ServiceAccount", "NetworkPolicy", "HorizontalPodAutoscaler", "Job"}
    for document in core:
        kubernetes_validate.validate(document, version, strict=True)


def test_custom_documents_are_strictly_valid(full: Documents, crds: dict[tuple[str, str], dict[str, Any]]) -> None:
    custom = [d for d in full if "." in d["apiVersion"] and not d["apiVersion"].split("/")[0].endswith(".k8s.io")]
    custom += [d for d in full if d["apiVersion"].startswith("gateway.")]
    assert {d["kind"] for d in custom} >= {"InferenceService", "PyTorchJob", "ScaledObject", "PodMonitor", "GRPCRoute"}
    for document in custom:
        jsonschema.validate(document, crds[(document["apiVersion"], document["kind"])])


def test_a_trainjob_is_one_value_away(render: Render, crds: dict[tuple[str, str], dict[str, Any]]) -> None:
    (job,) = (d for d in render("trainer", sets=("run.kind=TrainJob",)) if d["kind"] != "NetworkPolicy")
    jsonschema.validate(job, crds[(job["apiVersion"], job["kind"])])


def test_everything_that_runs_is_hardened(full: Documents) -> None:
    seen = 0
    for name, pod in pods(full):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name
            assert not container["image"].endswith(":latest"), name
            assert all(port["protocol"] == "TCP" and port["name"] for port in container["ports"]), name
            seen += 1
    assert seen >= 10


def test_no_secret_is_written_out(full: Documents) -> None:
    for name, pod in pods(full):
        for variable_ in (v for container in pod["containers"] for v in container["env"]):
            if "STORE" in variable_["name"]:
                assert "secretKeyRef" in variable_["valueFrom"], name


def test_callers_and_callees_agree(charts: Path) -> None:
    values = {name: yaml.safe_load((charts / name / "values.yaml").read_text()) for name in SERVICES}
    calls = {(name, callee) for name in SERVICES for callee in values[name]["workload"].get("callees", [])}
    calls |= {("solaris", callee) for callee in values["solaris"]["worker"]["callees"]}
    called = {(caller, name) for name in SERVICES for caller in values[name]["workload"].get("callers", [])}
    assert calls == {(caller, name) for caller, name in called if caller != "gateway"}


def test_what_runs_is_covered_by_a_policy_that_lets_its_callers_in(full: Documents) -> None:
    policies = {d["metadata"]["name"]: d["spec"] for d in full if d["kind"] == "NetworkPolicy"}
    assert set(policies) == {f"rel-{name}" for name in (*SERVICES, "solaris-worker", "router-sink")}

    def callers(name: str) -> set[str]:
        sources = [s for rule in policies[name]["ingress"] for s in rule["from"] if "podSelector" in s]
        return {source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for source in sources}

    assert callers("rel-sequence") == {"router", "solaris"}
    assert callers("rel-vertical") == {"router"}
    assert callers("rel-solaris-worker") == set()


def test_processes_get_the_environment_that_they_read_and_nothing_else(full: Documents) -> None:
    for name, pod in pods(full):
        for container in pod["containers"]:
            settings = SETTINGS[module(container)]
            given = {each["name"] for each in container["env"] if each["name"].startswith("GEM_")}
            known, needed = set(names(settings)), set(names(settings, required=True))
            assert given - known == set(), f"{name} is given what {settings.__name__} does not read"
            assert needed - given - GIVEN_BY_OTHERS == set(), f"{name} lacks what {settings.__name__} needs"


def names(settings: type[Any], *, required: bool = False) -> Iterator[str]:
    """Variables that a settings dataclass reads, nested ones too."""
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from names(hints[field.name], required=required)
        elif not required or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING):
            yield variable(field)


def test_commands_name_modules_that_exist(full: Documents) -> None:
    for _, pod in pods(full):
        for container in pod["containers"]:
            name = module(container)
            assert importlib.util.find_spec(f"{name}.__main__") is not None


def test_replicas_are_left_to_the_autoscaler_and_one_pod_has_no_budget(full: Documents) -> None:
    scaled = {d["spec"]["scaleTargetRef"]["name"] for d in full if d["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")}
    for document in full:
        if document["kind"] == "Deployment":
            assert ("replicas" in document["spec"]) == (document["metadata"]["name"] not in scaled)
    budgets = {d["metadata"]["name"] for d in full if d["kind"] == "PodDisruptionBudget"}
    assert budgets == {"rel-sequence", "rel-solaris", "rel-router"}


def test_the_workers_sleep_when_nobody_offers_pairs(full: Documents) -> None:
    (scaled,) = (d for d in full if d["kind"] == "ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    assert scaled["spec"]["triggers"][0]["metadata"]["stream"] == "stream/speculation"


def test_monitors_are_rendered_only_where_their_kind_exists(render: Render) -> None:
    assert not [d for d in render("sequence") if d["kind"] == "PodMonitor"]
    assert [d for d in render("sequence", apis=("monitoring.coreos.com/v1",)) if d["kind"] == "PodMonitor"]


def test_the_route_table_of_the_values_is_the_one_the_router_takes(full: Documents) -> None:
    (config,) = (d for d in full if d["kind"] == "ConfigMap")
    table = parse_yaml(config["data"]["routes.yaml"], RouteTable)
    assert [arm.model for arm in table.surfaces["feed"].arms] == ["feed-a0", "feed-a3"]
