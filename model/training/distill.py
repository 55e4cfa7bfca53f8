"""What a vertical model is trained to make small: its task's loss, and the teacher's soft labels on an auxiliary head.

Knows the two heads and their terms. Does not know where soft labels come from.

The serving head never sees a soft label. Without teacher rows the auxiliary term is exactly 0 with weight 0, so that an
outage of the feed leaves the serving head's training as if the channel were off.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from feature_store.batch import FeatureBatch, Targets
from model.gem.batch import Batch
from model.training.loss import DistillConfig, Sums, distillation, masked_bce
from model.vertical.tower import VerticalTower


class VerticalCriterion:
    """Σ_t w_t·BCE(ŷ_t, y_t) + λ·Σ_t BCE(ŷᵈ_t, clip(α σ(z_t), 0, 1))."""

    def __init__(
        self, tower: VerticalTower, *, objective_weights: tuple[float, ...], distill: DistillConfig
    ) -> None:
        self._tower, self._distill = tower, distill
        soft = {"distillation": tuple(distill.weight * w for w in objective_weights)} if tower.config.kd else {}
        self.weights: Mapping[str, tuple[float, ...]] = {"task": objective_weights, **soft}

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        """Terms of a batch."""
        output = self._tower(Batch.from_numpy(batch))
        terms = {
            "task": masked_bce(output.logits_NK, torch.from_numpy(targets.labels), torch.from_numpy(targets.label_mask))
        }
        if output.kd_logits_NK is not None:
            teacher = torch.from_numpy(targets.teacher_logits), torch.from_numpy(targets.teacher_mask)
            terms["distillation"] = distillation(output.kd_logits_NK, *teacher, self._distill)
        return terms
