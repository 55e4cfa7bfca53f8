"""The block around a personalized feed-forward network as one function: LN → GDPA → + LN → RMSNorm → + S.

Knows the order of norms and residuals. Does not know what makes keys and values. One backward for the whole block saves what
no step can recover: one tensor of tokens before the products, one after them, the products' own, and a number a row of each norm.

S [T, D] packed over R sequences, M keys a sequence, H heads, d width of a head, D = H · d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.kernels.gdpa import Kept, gdpa, gdpa_reference, products, products_backward
from model.kernels.gpu import autocasts
from model.nn.jagged import Jagged
from model.nn.norm import EPS, inverse_rms, layer_norm, rms_norm, rms_norm_backward


def pffn_block(s_TD: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, layout: Jagged) -> Tensor:
    """[T, D]: ln = LayerNorm(S); u = GDPA(RMSNorm_heads(ln), K, V) + ln; S' = RMSNorm(u) + S (Kunlun §PFFN; Meta's norm fusion).

    No norm has parameters; the last is over all heads together. On a GPU, and where autocast is on, the block is composed of
    its parts, of which GDPA is one kernel.
    """
    if not len(s_TD):
        return s_TD
    if s_TD.is_cuda or autocasts(s_TD.device):
        return _composed(s_TD, k_RMHd, v_RMHd, layout, gdpa)
    out: Tensor = _PffnBlock.apply(s_TD, k_RMHd, v_RMHd, layout)
    return out


class _PffnBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, k: Tensor, v: Tensor, layout: Jagged) -> Tensor:
        normal, mean, rstd = torch.native_layer_norm(s, s.shape[-1:], None, None, EPS)
        heads = normal.unflatten(-1, k.shape[2:])
        turn = inverse_rms(heads)
        q = heads * turn
        ctx.layout, ctx.options = layout, {"names": ("gelu",), "alpha": k.shape[-1] ** -0.5, "beta": 1.0}
        read, kept = products(q, k, v, layout, **ctx.options)
        y = read.flatten(1).add_(normal)
        scale = inverse_rms(y)
        y.mul_(scale)
        ctx.save_for_backward(s, mean, rstd, q, turn, y, scale, *kept.tensors)
        return y + s

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        s, mean, rstd, q, turn, y, scale, *kept = ctx.saved_tensors
        du = rms_norm_backward(gradient, y, scale)
        dq, dk, dv = products_backward(du.view(q.shape), Kept.of(kept), ctx.layout, **ctx.options)
        du += rms_norm_backward(dq, q, turn).flatten(1)
        ds, _, _ = torch.ops.aten.native_layer_norm_backward(
            du, s, s.shape[-1:], mean, rstd, None, None, [True, False, False]
        )
        return ds.add_(gradient), dk, dv, None


def pffn_block_reference(s_TD: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, layout: Jagged) -> Tensor:
    """The definition, of plain parts."""
    return _composed(s_TD, k_RMHd, v_RMHd, layout, gdpa_reference)


def _composed(
    s_TD: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, layout: Jagged, attend: Callable[[Tensor, Tensor, Tensor, Jagged], Tensor]
) -> Tensor:
    normal = layer_norm(s_TD)
    q = rms_norm(normal.unflatten(-1, k_RMHd.shape[2:]))
    return rms_norm(attend(q, k_RMHd, v_RMHd, layout).flatten(1) + normal) + s_TD
