"""Normalizes rows; without learned scale or shift, as Kunlun does.

Knows one axis, the last. Does not know heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


def layer_norm(x: Tensor) -> Tensor:
    """LayerNorm over the last axis, affine-free."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, affine-free."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)
