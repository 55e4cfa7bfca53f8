"""What training minimizes: masked cross entropy of several objectives, and the teacher's soft labels.

Knows logits, labels and masks. Does not know models, batches or optimizers.

N rows, K objectives. A cell that is not settled adds exactly nothing, whatever number lies in it; an objective without
a settled row has loss 0 and weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from feature_store.errors import InvalidInput


class Sums(NamedTuple):
    """Sums over rows; those of several processes add up."""

    loss_K: Tensor
    """Σδℓ, in nats."""
    weight_K: Tensor
    """Σδ; carries no gradient."""

    def means(self) -> Tensor:
        """[K] Σδℓ / Σδ of each objective, 0 where the weight is 0."""
        return self.loss_K / self.weight_K.clamp(min=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """How a student learns from soft labels (an auxiliary head; the serving head never sees them)."""

    weight: float = 1.0
    """Of the distillation loss beside the task's; 0 switches the channel off."""
    scale: float = 1.0
    """α: the teacher's probability is multiplied by it and kept within [0, 1]."""

    def __post_init__(self) -> None:
        for name in ("weight", "scale"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be finite and not negative")


def masked_bce(logits_NK: Tensor, labels_NK: Tensor, mask_NK: Tensor) -> Sums:
    """Binary cross entropy of settled cells, summed over rows for each objective.

    Labels may be soft. What lies in a cell outside the mask, NaN included, reaches neither value nor gradient.
    """
    labels = torch.where(mask_NK, labels_NK, 0.0).to(logits_NK.dtype)
    logits = torch.where(mask_NK, logits_NK, 0.0)
    cells_NK = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    loss_K = torch.where(mask_NK, cells_NK, 0.0).sum(dim=0)
    return Sums(loss_K, mask_NK.sum(dim=0).to(logits_NK.dtype))


def soft_labels(teacher_logits_NK: Tensor, *, scale: float = 1.0) -> Tensor:
    """clip(α·σ(z), 0, 1): the target of the auxiliary head."""
    return (scale * torch.sigmoid(teacher_logits_NK)).clamp(0.0, 1.0).detach()


def distillation(
    student_logits_NK: Tensor, teacher_logits_NK: Tensor, teacher_N: Tensor, config: DistillConfig
) -> Sums:
    """Cross entropy of the auxiliary head against the teacher, over the rows that have one."""
    mask_NK = (teacher_N[:, None] & torch.isfinite(teacher_logits_NK)).expand_as(student_logits_NK)
    return masked_bce(student_logits_NK, soft_labels(teacher_logits_NK, scale=config.scale), mask_NK)


def total(sums: Sums, global_weight_K: Tensor, objective_weights: Sequence[float] | None = None) -> Tensor:
    """Σ_k w_k Σδℓ_k / Σδ_k with Σδ over all processes: gradients of the processes then simply add up."""
    means_K = sums.loss_K / global_weight_K.clamp(min=1.0)
    if objective_weights is None:
        return means_K.sum()
    return (means_K * means_K.new_tensor(objective_weights)).sum()


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` itself on the way forward; its gradient times `factor` on the way back."""
    if factor == 1.0:
        return x
    scaled: Tensor = _ScaledGradient.apply(x, factor)
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None  # type: ignore[attr-defined]  # set in forward
