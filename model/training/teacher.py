"""The foundation model and its compressor as one thing: one forward gives logits and the representation.

Knows how the two fit together. Does not know training, tables or stores.

N candidates, K objectives, D width of the representation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.foundation import FoundationModel
from model.loopfm.compressor import Compressor, space_id
from model.loopfm.config import CompressorConfig
from model.training.loss import Sums, masked_bce


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """Everything needed to build the two."""

    foundation: GemConfig
    compressor: CompressorConfig = field(default_factory=CompressorConfig)


class Annotation(NamedTuple):
    """What one forward says of N candidates."""

    logits_NK: npt.NDArray[np.float32]
    z_ND: npt.NDArray[np.float32]
    """In −1 … 1."""


class Teacher(nn.Module):
    """Foundation model and compressor."""

    def __init__(self, config: TeacherConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.foundation = FoundationModel(config.foundation, layout)
        self.compressor = Compressor(config.compressor, self.foundation.tap_widths)

    def annotate(self, batch: FeatureBatch) -> Annotation:
        """Logits and representation from ONE forward, in evaluation mode."""
        self.eval()
        if not batch.num_candidates:
            num_objectives = len(self.foundation.shape.objectives)
            return Annotation(np.zeros((0, num_objectives), np.float32), np.zeros((0, self.config.compressor.dim), np.float32))
        with torch.inference_mode():
            logits_NK, taps = self.foundation(Batch.from_numpy(batch))
            return Annotation(logits_NK.numpy(), self.compressor(taps).numpy())

    def score(self, batch: FeatureBatch) -> npt.NDArray[np.float32]:
        """Logits [N, K], in evaluation mode."""
        return self.annotate(batch).logits_NK

    @torch.no_grad()
    def represent(self, batch: FeatureBatch) -> Tensor:
        """Pre-activations [N, D] of the representation, in evaluation mode."""
        self.eval()
        return self.compressor.preactivation(self.foundation(Batch.from_numpy(batch)).taps)

    @torch.no_grad()
    def realign(self, probe: FeatureBatch, wanted_ND: Tensor) -> float:
        """Lets the probe rows keep the representation that they had; returns the mean cosine of then and now."""
        self.eval()
        return self.compressor.realign(self.foundation(Batch.from_numpy(probe)).taps, wanted_ND)

    def space_id(self, family: str) -> bytes:
        """8 bytes that name the coordinate system of z.

        Foundation weights may move inside one space; the compressor only to follow them (`realign`).
        """
        return space_id(self.compressor, family)


class TeacherCriterion:
    """Task loss of the foundation model, and the compressor's reconstruction, which never reaches the foundation model."""

    def __init__(self, teacher: Teacher, *, objective_weights: tuple[float, ...], reconstruct: bool = True) -> None:
        self._teacher, self._reconstruct = teacher, reconstruct
        self.weights: Mapping[str, tuple[float, ...]] = {
            "task": objective_weights, **({"reconstruction": (1.0,)} if reconstruct else {})
        }  # fmt: skip

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        """Terms of a batch."""
        output = self._teacher.foundation(Batch.from_numpy(batch))
        labels, mask = torch.from_numpy(targets.labels), torch.from_numpy(targets.label_mask)
        terms = {"task": masked_bce(output.logits_NK, labels, mask)}
        if self._reconstruct:
            terms["reconstruction"] = _summed(self._teacher.compressor.reconstruction_loss(output.taps), len(labels))
        return terms


def _summed(mean: Tensor, rows: int) -> Sums:
    """A mean over rows as sums, so that processes add up."""
    return Sums((mean * rows)[None], torch.full((1,), float(rows)))


def drift(before_ND: Tensor, after_ND: Tensor) -> float:
    """Distance of the mean representation of the same probe rows, before and after; both as pre-activations."""
    return float((torch.tanh(before_ND).mean(dim=0) - torch.tanh(after_ND).mean(dim=0)).norm())
