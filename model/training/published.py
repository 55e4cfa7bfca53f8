"""Foundation and vertical models as artefacts: what their manifests say, and how they are built again.

Knows manifests and configurations of both kinds. Does not know how they were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gem.training.v1.model_manifest_pb2 import ModelManifest

from feature_store.batch import FeatureBatch
from feature_store.errors import FailedPrecondition
from feature_store.layout import Layout
from feature_store.spec import Spec
from model.gem.batch import Batch
from model.solaris.pair import pair_space_id
from model.training import artefact
from model.training.artefact import Golden, Score
from model.training.configuration import dump, parse
from model.training.teacher import Teacher, TeacherConfig
from model.vertical.config import VerticalConfig
from model.vertical.tower import VerticalTower

FOUNDATION, VERTICAL = "foundation", "vertical"


class Version(NamedTuple):
    """How a model is called."""

    name: str
    version: str
    created_ms: int


class LoadedFoundation(NamedTuple):
    """A foundation model with its compressor, and its manifest."""

    teacher: Teacher
    manifest: ModelManifest

    @property
    def model_version(self) -> str:
        """`name/version`, as annotations and pair rows name it."""
        return f"{self.manifest.name}/{self.manifest.version}"


class LoadedVertical(NamedTuple):
    """A vertical model and its manifest."""

    tower: VerticalTower
    manifest: ModelManifest


def publish_foundation(
    root: Path,
    version: Version,
    teacher: Teacher,
    spec: Spec,
    golden_batch: FeatureBatch,
    *,
    watermark_ms: int,
    metrics: Mapping[str, float],
    make_current: bool = True,
) -> Path:
    """Publishes a foundation model; returns the folder of the version.

    Raises:
        InvalidInput: the version exists.
        CorruptArtefact: it does not come back as it was written.
    """
    space_id = teacher.space_id(version.name)
    manifest = ModelManifest(
        **_common(version, FOUNDATION, spec, metrics),
        config_json=dump(teacher.config),
        train_watermark_ms=watermark_ms,
        loopfm_space_id=space_id,
        solaris_space_id=pair_space_id(space_id),
    )
    golden = Golden(golden_batch, teacher.score(golden_batch))
    return artefact.publish(
        root, manifest, teacher, golden, load=lambda folder: load_foundation(folder, spec).teacher.score,
        make_current=make_current,
    )  # fmt: skip


def publish_vertical(
    root: Path,
    version: Version,
    tower: VerticalTower,
    spec: Spec,
    golden_batch: FeatureBatch,
    *,
    watermark_ms: int,
    metrics: Mapping[str, float],
    loopfm_space_id: bytes = b"",
    solaris_space_id: bytes = b"",
    make_current: bool = True,
) -> Path:
    """Publishes a vertical model; the spaces it reads are named iff their channels are on.

    Raises:
        InvalidInput: the version exists.
        FailedPrecondition: a channel is on and its space is not given.
        CorruptArtefact: it does not come back as it was written.
    """
    config = tower.config
    for on, space_id, channel in ((config.loopfm, loopfm_space_id, "loopfm"), (config.solaris, solaris_space_id, "solaris")):
        if on and not space_id:
            raise FailedPrecondition(f"model {version.name!r} reads {channel}, but no space is given; name the teacher's")
    manifest = ModelManifest(
        **_common(version, VERTICAL, spec, metrics),
        config_json=dump(config),
        train_watermark_ms=watermark_ms,
        loopfm_space_id=loopfm_space_id if config.loopfm else b"",
        solaris_space_id=solaris_space_id if config.solaris else b"",
        surface=config.surface,
    )
    golden = Golden(golden_batch, score_of(tower)(golden_batch))
    return artefact.publish(
        root, manifest, tower, golden, load=lambda folder: score_of(load_vertical(folder, spec).tower),
        make_current=make_current,
    )  # fmt: skip


def load_foundation(folder: Path, spec: Spec) -> LoadedFoundation:
    """A foundation model from the folder of a version, or of the current one.

    Raises:
        NotFound: there is no artefact.
        FailedPrecondition: it is of another kind or spec.
        CorruptArtefact: a file is not what was published.
    """
    at = artefact.resolve(folder)
    manifest = artefact.read_manifest(at)
    artefact.require(manifest, kind=FOUNDATION, spec_hash=spec.hash)
    teacher = Teacher(parse(TeacherConfig, manifest.config_json), Layout(spec))
    artefact.load_weights(at, manifest, teacher)
    return LoadedFoundation(teacher, manifest)


def load_vertical(folder: Path, spec: Spec) -> LoadedVertical:
    """A vertical model from the folder of a version, or of the current one.

    Raises:
        NotFound: there is no artefact.
        FailedPrecondition: it is of another kind or spec.
        CorruptArtefact: a file is not what was published.
    """
    at = artefact.resolve(folder)
    manifest = artefact.read_manifest(at)
    artefact.require(manifest, kind=VERTICAL, spec_hash=spec.hash)
    tower = VerticalTower(parse(VerticalConfig, manifest.config_json), Layout(spec))
    artefact.load_weights(at, manifest, tower)
    return LoadedVertical(tower, manifest)


def score_of(tower: VerticalTower) -> Score:
    """What a tower serves, as a function from batches to logits [N, K]."""

    def score(batch: FeatureBatch) -> npt.NDArray[np.float32]:
        tower.eval()
        if not batch.num_candidates:
            return np.zeros((0, tower.num_objectives), dtype=np.float32)
        with torch.inference_mode():
            return np.asarray(tower(Batch.from_numpy(batch)).logits_NK.numpy(), dtype=np.float32)

    return score


def _common(version: Version, kind: str, spec: Spec, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": version.name,
        "version": version.version,
        "kind": kind,
        "spec_hash": spec.hash,
        "metrics": dict(metrics),
        "objectives": spec.objectives,
        "created_ms": version.created_ms,
    }
