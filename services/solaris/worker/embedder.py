"""Runs the foundation model for pairs: one forward, the compressor's vector of every candidate.

Knows the artefact. Does not know tasks, stores or time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from feature_store.batch import FeatureBatch
from feature_store.spec import Spec
from model.training import artefact
from model.training.published import LoadedFoundation, load_foundation


class FoundationEmbedder:
    """A foundation model that has reproduced its golden request."""

    def __init__(self, loaded: LoadedFoundation) -> None:
        self._loaded = loaded

    @property
    def space_id(self) -> bytes:
        """Coordinate system it writes, 8 bytes."""
        return self._loaded.manifest.solaris_space_id

    @property
    def version(self) -> str:
        """Name and version of the artefact."""
        return self._loaded.model_version

    @property
    def dim(self) -> int:
        """Width of an embedding."""
        return self._loaded.teacher.config.compressor.dim

    def embed(self, batch: FeatureBatch) -> npt.NDArray[np.float32]:
        """Pair embeddings [N, D]; one forward for all requests of the batch, a history encoded once a request."""
        return self._loaded.teacher.annotate(batch).z_ND


def load_embedder(folder: Path, spec: Spec) -> FoundationEmbedder:
    """An embedder from the folder of a version, or of the current one.

    Raises:
        NotFound: there is no artefact.
        FailedPrecondition: it is of another kind or spec.
        CorruptArtefact: a file is not what was published, or the golden request comes out differently.
    """
    loaded = load_foundation(folder, spec)
    artefact.prove(artefact.resolve(folder), loaded.teacher.score)
    return FoundationEmbedder(loaded)
