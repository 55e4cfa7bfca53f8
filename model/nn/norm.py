"""Normalizes rows; without learned scale or shift, as Kunlun does.

Knows one axis, the last. Does not know heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
CACHED = 2**17
"""Numbers of a part that a core's cache holds while several passes go over it."""


def layer_norm(x: Tensor) -> Tensor:
    """LayerNorm over the last axis, affine-free."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, affine-free: x / √(mean x² + 1e-5)."""
    if not x.requires_grad:
        return F.rms_norm(x, x.shape[-1:], eps=EPS)
    normal: Tensor = _RootMeanSquare.apply(x)
    return normal


def inverse_rms(x: Tensor) -> Tensor:
    """1 / √(mean x² + 1e-5) [..., 1]: what RMSNorm scales rows by."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(EPS).rsqrt_()


def rms_norm_backward(gradient: Tensor, normal: Tensor, scale: Tensor) -> Tensor:
    """s·(dy − y·mean(dy·y)), for y = x·s."""
    out = torch.empty_like(normal)
    rows = len(normal) if normal.is_cuda else max(1, CACHED * len(normal) // max(1, normal.numel()))
    for dy, y, s, dx in zip(*(x.split(max(1, rows)) for x in (gradient, normal, scale, out)), strict=True):
        along = (dy * y).mean(-1, keepdim=True)
        torch.addcmul(dy, y, along, value=-1, out=dx).mul_(s)
    return out


class _RootMeanSquare(torch.autograd.Function):
    """y = x·s and its gradient. Torch 2 composes it of ten recorded operations on a CPU, at more than twice the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = inverse_rms(x)
        normal = x * scale
        ctx.save_for_backward(normal, scale)
        return normal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return rms_norm_backward(gradient, *ctx.saved_tensors)
