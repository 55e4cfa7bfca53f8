"""Writes a training run as a PyTorchJob: an object and its YAML. No cluster is asked.

Knows Kubeflow's and Kubernetes' types. Does not know training.

Every process of the job counts the others at its start and stops if they are not as many as were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from kubeflow.training import models
from kubernetes import client as kubernetes

from feature_store.errors import InvalidInput

kubeflow: Any = models
"""Kubeflow's generated types, which say nothing to a type checker."""
CONTAINER = "pytorch"
"""The operator looks for a container of this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A run's place in a cluster."""

    name: str
    namespace: str = "default"
    image: str
    arguments: tuple[str, ...]
    """Of `services.trainer`: preset, stretch, version."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """GEM_… settings."""
    pods: int = 1
    processes_per_pod: int = 1
    gpus_per_pod: int = 0
    """Each process drives one; 0 trains on CPU."""
    cpu: str = "4"
    memory: str = "16Gi"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    claim: str = ""
    """Persistent volume claim mounted at /data; empty mounts none."""
    retries: int = 3
    """Times that a failure which may pass is tried again."""

    def __post_init__(self) -> None:
        for name in ("pods", "processes_per_pod"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.gpus_per_pod not in (0, self.processes_per_pod):
            raise InvalidInput(
                f"{self.processes_per_pod} processes cannot drive {self.gpus_per_pod} GPUs of a pod one each; "
                f"set processes_per_pod to {max(1, self.gpus_per_pod)}"
            )
        if not self.arguments:
            raise InvalidInput("arguments are empty; give at least a preset and a stretch")


def pytorch_job(config: JobConfig) -> Any:
    """The job: one master, the other pods workers, each pod a torchrun of `processes_per_pod` processes."""
    replicas = {"Master": _replicas(config, 1)}
    if config.pods > 1:
        replicas["Worker"] = _replicas(config, config.pods - 1)
    return kubeflow.KubeflowOrgV1PyTorchJob(
        api_version="kubeflow.org/v1",
        kind="PyTorchJob",
        metadata=kubernetes.V1ObjectMeta(
            name=config.name, namespace=config.namespace, labels={"app.kubernetes.io/name": "trainer"}
        ),
        spec=kubeflow.KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(config.processes_per_pod),
            run_policy=kubeflow.KubeflowOrgV1RunPolicy(backoff_limit=config.retries, clean_pod_policy="None"),
            pytorch_replica_specs=replicas,
        ),
    )


def to_yaml(job: Any) -> str:
    """The job as `kubectl apply` takes it."""
    plain = kubernetes.ApiClient().sanitize_for_serialization(job)
    return str(yaml.safe_dump(plain, sort_keys=False))


def _replicas(config: JobConfig, count: int) -> Any:
    return kubeflow.KubeflowOrgV1ReplicaSpec(
        replicas=count,
        # Exit codes from 128 on are tried again, lower ones are not: a wrong setting must not restart for ever.
        restart_policy="ExitCode",
        template=kubernetes.V1PodTemplateSpec(
            metadata=kubernetes.V1ObjectMeta(
                labels={"app.kubernetes.io/name": "trainer"},
                # A proxy that outlives the trainer would keep the job from ever completing.
                annotations={"sidecar.istio.io/inject": "false"},
            ),
            spec=_pod(config),
        ),
    )


def _pod(config: JobConfig) -> kubernetes.V1PodSpec:
    volumes = [kubernetes.V1Volume(name="tmp", empty_dir=kubernetes.V1EmptyDirVolumeSource())]
    if config.claim:
        source = kubernetes.V1PersistentVolumeClaimVolumeSource(claim_name=config.claim)
        volumes.append(kubernetes.V1Volume(name="data", persistent_volume_claim=source))
    return kubernetes.V1PodSpec(
        automount_service_account_token=False,
        node_selector=dict(config.node_selector) or None,
        security_context=kubernetes.V1PodSecurityContext(
            run_as_non_root=True, run_as_user=65532, fs_group=65532,
            seccomp_profile=kubernetes.V1SeccompProfile(type="RuntimeDefault"),
        ),
        containers=[_container(config)],
        volumes=volumes,
    )  # fmt: skip


def _container(config: JobConfig) -> kubernetes.V1Container:
    processes = config.pods * config.processes_per_pod
    environment = {**config.environment, "GEM_PROCESSES": str(processes)}
    resources = {"cpu": config.cpu, "memory": config.memory}
    if config.gpus_per_pod:
        resources["nvidia.com/gpu"] = str(config.gpus_per_pod)
    mounts = [kubernetes.V1VolumeMount(name="tmp", mount_path="/tmp")]
    if config.claim:
        mounts.append(kubernetes.V1VolumeMount(name="data", mount_path="/data"))
    return kubernetes.V1Container(
        name=CONTAINER,
        image=config.image,
        # torchrun takes hosts, processes a host and the meeting point from the operator's PET_ variables.
        command=["torchrun", "-m", "services.trainer"],
        args=list(config.arguments),
        env=[kubernetes.V1EnvVar(name=name, value=value) for name, value in sorted(environment.items())],
        resources=kubernetes.V1ResourceRequirements(requests=resources, limits=resources),
        security_context=kubernetes.V1SecurityContext(
            allow_privilege_escalation=False, read_only_root_filesystem=True,
            capabilities=kubernetes.V1Capabilities(drop=["ALL"]),
        ),
        volume_mounts=mounts,
    )  # fmt: skip
