"""Base rates of the training rows: what a model should say before it has learned anything.

Knows labels and masks. Does not know models.

A model that starts from logit 0 spends its first steps on learning that most outcomes are rare, which a small surface
does not have rows for (Lin et al. 2017, Focal loss, section 3.3, on rare classes).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feature_store.batch import FeatureBatch, Targets

_PRIOR_ROWS = 50.0
"""A surface's own rate counts as much as the rate over all surfaces once it has this many settled rows."""


def base_logits(samples: Iterable[tuple[FeatureBatch, Targets]], num_surfaces: int) -> Tensor:
    """Logits [S, K] of each surface's rate of each objective, shrunk towards the rate over all surfaces.

    An objective without a settled row gets 0: nothing is known of it.
    """
    settled_SK, positive_SK = np.sum([_counts(batch, targets, num_surfaces) for batch, targets in samples], axis=0)
    everywhere_K = (positive_SK.sum(0) + 0.5) / (settled_SK.sum(0) + 1.0)
    rate_SK = (positive_SK + _PRIOR_ROWS * everywhere_K) / (settled_SK + _PRIOR_ROWS)
    return torch.from_numpy(np.log(rate_SK / (1.0 - rate_SK)).astype(np.float32))


def _counts(batch: FeatureBatch, targets: Targets, num_surfaces: int) -> npt.NDArray[np.float64]:
    """Settled and positive rows [2, S, K]."""
    surface_N = np.repeat(batch.surface, np.diff(batch.candidate_offsets))
    one_hot_SN = (np.arange(num_surfaces)[:, None] == surface_N).astype(np.float64)
    return np.stack([one_hot_SN @ targets.label_mask, one_hot_SN @ np.where(targets.label_mask, targets.labels, 0.0)])
