"""The umbrella chart lives in a real API server: installed, upgraded, rolled back, removed, with no right it does not need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, Refused, Run

KINDS = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets,horizontalpodautoscalers,inferenceservices,pytorchjobs,podmonitors,grpcroutes,configmaps,jobs"
WITHOUT_KEDA = ("--set", "solaris.worker.autoscaling.by=none")
"""Its controller, and with it its resource, is not part of this cluster."""


@pytest.fixture
def namespace(kube: Run, request: pytest.FixtureRequest) -> str:
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    kube("kubectl", "create", "namespace", name)
    return name


def install(kube: Run, charts: Path, verb: str, namespace: str, *more: str, release: str = "gem") -> None:
    full = charts / "gem" / "ci" / "full.yaml"
    kube("helm", verb, release, charts / "gem", "-n", namespace, "-f", charts / "environment.yaml", "-f", full, *WITHOUT_KEDA, *more)


def objects(kube: Run, namespace: str, kinds: str = KINDS) -> set[str]:
    """kind/name of what the release made."""
    found = json.loads(kube("kubectl", "-n", namespace, "get", kinds, "-o", "json"))["items"]
    own = [item for item in found if "app.kubernetes.io/part-of" in item["metadata"].get("labels", {})]
    return {f"{item['kind']}/{item['metadata']['name']}" for item in own}


def surface(name: str) -> tuple[str, ...]:
    """Options that add a surface with one arm."""
    return ("--set", f"vertical.surfaces.{name}.arms.a0.storageUri=pvc://gem-data/models/{name}-a0/20260101-000000")


def test_a_release_is_installed_grows_by_one_surface_goes_back_and_leaves_nothing(kube: Run, charts: Path, namespace: str) -> None:
    install(kube, charts, "install", namespace)
    first = objects(kube, namespace)
    assert {"InferenceService/gem-feed-a0", "InferenceService/gem-feed-a3", "PyTorchJob/gem-trainer", "GRPCRoute/gem-router"} <= first
    assert {f"Deployment/gem-{name}" for name in ("router", "sequence", "solaris", "solaris-worker", "loopfm")} <= first
    install(kube, charts, "upgrade", namespace, *surface("reels"))
    assert objects(kube, namespace) - first == {"InferenceService/gem-reels-a0"}
    kube("helm", "rollback", "gem", "1", "-n", namespace)
    assert objects(kube, namespace) == first
    kube("helm", "uninstall", "gem", "-n", namespace)
    assert objects(kube, namespace) == set()


def test_no_service_account_may_do_anything_to_the_cluster(kube: Run, charts: Path, namespace: str) -> None:
    install(kube, charts, "install", namespace)
    accounts = [name.split("/")[1] for name in objects(kube, namespace, "serviceaccounts")]
    assert len(accounts) >= 6
    for account in accounts:
        who = f"--as=system:serviceaccount:{namespace}:{account}"
        for verb, what in (("get", "secrets"), ("list", "pods"), ("create", "pods/exec"), ("update", "deployments"), ("get", "configmaps")):
            with pytest.raises(Refused):  # `can-i` ends with 1 for no
                kube("kubectl", "auth", "can-i", verb, what, "-n", namespace, who)
    assert kube("kubectl", "auth", "can-i", "get", "secrets", "-n", namespace).strip() == "yes", "the question itself works"


def test_what_the_server_keeps_is_what_was_rendered(kube: Run, charts: Path, namespace: str) -> None:
    """A field the server does not know is dropped without a word; these are the ones a pod's safety hangs on."""
    install(kube, charts, "install", namespace)
    for name in ("router", "sequence", "solaris", "loopfm"):
        pod = deployment(kube, namespace, name)["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe") if "grpc" in ports else ():
            assert container[probe]["tcpSocket"]["port"] == ports["grpc"], "this server knows no gRPC probes"


def deployment(kube: Run, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kube("kubectl", "-n", namespace, "get", "deployment", f"gem-{name}", "-o", "json"))
    return found


def test_a_bad_value_is_refused_by_name_before_anything_is_made(kube: Run, charts: Path, namespace: str) -> None:
    with pytest.raises(Refused, match="storageUri"):
        install(kube, charts, "install", namespace, "--set", "vertical.surfaces.reels.arms.a0.minReplicas=1")
    assert objects(kube, namespace) == set()


def test_two_releases_live_beside_each_other(kube: Run, charts: Path, namespace: str) -> None:
    install(kube, charts, "install", namespace)
    first = objects(kube, namespace)
    install(kube, charts, "install", namespace, release="other")
    both = objects(kube, namespace)
    assert first < both
    assert len(both) == 2 * len(first)


@pytest.mark.parametrize("overlay", ["local", "production"])
def test_what_a_cluster_owns_once_is_accepted(kube: Run, overlay: str) -> None:
    text = kube("kubectl", "kustomize", ROOT / "manifests" / "overlays" / overlay)
    kube("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    queue = json.loads(kube("kubectl", "get", "clusterqueue", "training", "-o", "json"))
    covered = queue["spec"]["resourceGroups"][0]["coveredResources"]
    assert ("nvidia.com/gpu" in covered) == (overlay == "production")
    assert json.loads(kube("kubectl", "-n", "gem", "get", "networkpolicy", "default-deny", "-o", "json"))["spec"]["podSelector"] == {}
