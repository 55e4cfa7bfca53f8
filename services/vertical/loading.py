"""Builds a scorer from an artefact and proves it: what does not fit is refused before the first request.

Knows artefacts, towers and what pins them. Does not know protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gem.training.v1.model_manifest_pb2 import ModelManifest

from feature_store.batch import DEFAULT_LEVEL, FIELDS, FeatureBatch
from feature_store.errors import FailedPrecondition
from feature_store.spec import Spec
from model.training import artefact
from model.training.artefact import Golden, Score
from model.training.published import load_vertical, score_of
from services.vertical.contract import LOOPFM_SPACE, SOLARIS_SPACE, SPEC_HASH, Contract
from services.vertical.scoring import Scores, finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """Coordinate systems that a model must read, if it reads any."""

    loopfm_space: bytes = b""
    """8 bytes, or empty to accept the space that the model names."""
    solaris_space: bytes = b""
    """8 bytes, or empty to accept the space that the model names."""


class TowerScorer:
    """A vertical tower that has reproduced its golden request."""

    def __init__(
        self,
        logits: Score,
        manifest: ModelManifest,
        contract: Contract,
        base_rates_K: npt.NDArray[np.float32],
    ) -> None:
        self._logits = logits
        self._manifest = manifest
        self._contract = contract
        self._base_rates_K = base_rates_K

    @property
    def contract(self) -> Contract:
        """Tensors it reads and writes."""
        return self._contract

    @property
    def version(self) -> str:
        """Version of its artefact."""
        return self._manifest.version

    def score(self, batch: FeatureBatch) -> Scores:
        """Probabilities of the candidates; a post-click objective's is conditional on its parent."""
        logits_NK = self._logits(batch)
        with np.errstate(
            over="ignore"
        ):  # exp(-logit) of a very unlikely candidate: the quotient is 0
            probabilities_NK = (1.0 / (1.0 + np.exp(-logits_NK))).astype(np.float32)
        return finite(self._contract.objectives, probabilities_NK, self._base_rates_K)


def load_scorer(folder: Path, spec: Spec, pins: Pins, *, max_candidates: int) -> TowerScorer:
    """A scorer from the folder of a version, or of the current one.

    Raises:
        NotFound: the folder holds no artefact.
        FailedPrecondition: the model is no vertical, or was built for another spec or space.
        CorruptArtefact: a file is not what was published, or the golden request comes out differently.
    """
    at = artefact.resolve(folder)
    tower, manifest = load_vertical(at, spec)
    _require_space(manifest, "LoopFM", manifest.loopfm_space_id, pins.loopfm_space)
    _require_space(manifest, "Solaris", manifest.solaris_space_id, pins.solaris_space)
    logits = score_of(tower)
    artefact.prove(at, logits)
    golden = artefact.load_golden(at, manifest)
    contract = contract_of(manifest, golden, spec, max_candidates=max_candidates)
    return TowerScorer(logits, manifest, contract, base_rates(golden))


def base_rates(golden: Golden) -> npt.NDArray[np.float32]:
    """What stands in for a score that is not finite [K]: the model's mean on its golden request."""
    rates: npt.NDArray[np.float32] = (1.0 / (1.0 + np.exp(-golden.logits_NK))).mean(axis=0)
    return rates.astype(np.float32)


def contract_of(
    manifest: ModelManifest, golden: Golden, spec: Spec, *, max_candidates: int
) -> Contract:
    """The contract of a model: widths are those of the golden request that it has proven to read."""
    surfaces = len(spec.surfaces)
    unread = [n for n in FIELDS if n.startswith("pair_") and not manifest.solaris_space_id]
    unread += [n for n in FIELDS if n.startswith("memory_") and not manifest.loopfm_space_id]
    stamps = {
        SPEC_HASH: manifest.spec_hash,
        LOOPFM_SPACE: manifest.loopfm_space_id,
        SOLARIS_SPACE: manifest.solaris_space_id,
    }
    return Contract(
        widths={
            name: getattr(golden.batch, name).shape[1]
            for name, field in FIELDS.items()
            if field.ndim > 1
        },
        ranges={
            "surface": (0, surfaces - 1),
            "event_source": (0, max(0, len(spec.event_sources) - 1)),
            "event_surface": (-1, surfaces - 1),
            "memory_surface": (-1, surfaces - 1),
            "pair_level": (0, DEFAULT_LEVEL),
        },
        unread=frozenset(unread),
        objectives=tuple(manifest.objectives),
        max_candidates=max_candidates,
        stamps={name: value.hex() for name, value in stamps.items() if value},
    )


def _require_space(manifest: ModelManifest, channel: str, read: bytes, pinned: bytes) -> None:
    if read and pinned and read != pinned:
        raise FailedPrecondition(
            f"model {manifest.name} {manifest.version} reads {channel} space {read.hex()}, this process is pinned to "
            f"{pinned.hex()}; serve a model of that space, or move the pin and the writers together"
        )
