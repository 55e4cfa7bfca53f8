"""Trains a foundation model or a baseline for its task alone, by the trainer's own loop; reads it; sets runs against each other.

Knows both kinds of model. Does not know data, nor what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from model.baselines.frame import Baseline
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.training.base_rates import base_logits
from model.training.evaluate import Predictions, Score, compare, concatenate
from model.training.learner import Learner
from model.training.loss import Sums, masked_bce
from model.training.metrics import Interval
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes

Scored = FoundationModel | Baseline
Make = Callable[[Layout], Scored]
M = TypeVar("M", FoundationModel, Baseline, Scored)


class TaskCriterion:
    """Masked cross entropy of all objectives alike."""

    def __init__(self, model: Scored) -> None:
        self._model = model
        self.weights: Mapping[str, tuple[float, ...]] = {"task": (1.0,) * len(model.shape.objectives)}

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        """The one term of a batch."""
        mask = torch.from_numpy(targets.label_mask)
        return {"task": masked_bce(logits(self._model, batch), torch.from_numpy(targets.labels), mask)}


def logits(model: Scored, batch: FeatureBatch) -> torch.Tensor:
    """[N, K] of either kind of model."""
    out = model(Batch.from_numpy(batch))
    made: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits_NK
    return made


def begun(
    make: Callable[[Layout], M], layout: Layout, samples: Sequence[tuple[FeatureBatch, Targets]], seed: int
) -> M:
    """A model with the statistics of training rows, at their base rates."""
    torch.manual_seed(seed)
    model = make(layout)
    model.fit_statistics(batch for batch, _ in samples)
    model.start_at(base_logits(samples, len(layout.spec.surfaces)))
    return model


def learner_of(model: Scored, seed: int, optimizer: OptimizerConfig | None = None) -> Learner:
    """The model in training, alone."""
    return Learner(model, TaskCriterion(model), optimizer or OptimizerConfig(), Processes(), seed=seed)


def scorer(model: Scored) -> Score:
    """What `predict` asks, in evaluation mode."""
    model.eval()

    def score(batch: FeatureBatch) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            made: npt.NDArray[np.float32] = logits(model, batch).numpy()
            return made

    return score


def against(
    runs: Sequence[Predictions],
    rivals: Sequence[Predictions],
    surfaces: Sequence[str],
    objectives: Sequence[str],
    *,
    num_draws: int = 1000,
) -> Mapping[tuple[str, str], Interval]:
    """Intervals of the mean NE of some runs minus that of their rivals: rows of all seeds side by side, a user drawn with all of theirs."""
    count = math.lcm(len(runs), len(rivals))
    ours, theirs = (concatenate(list(made) * (count // len(made))) for made in (runs, rivals))
    return compare(ours, theirs, surfaces, objectives, num_draws=num_draws)
