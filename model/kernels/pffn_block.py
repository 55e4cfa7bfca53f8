"""The block around a personalized feed-forward network as one function: LN → GDPA → + LN → RMSNorm → + S.

Knows the order of norms and residuals. Does not know what makes keys and values. On a CPU one backward for the whole block
saves what no step can recover: one tensor of tokens before the products, one after them, the products' own, and a number a row
of each norm. On an NVIDIA GPU: `model.kernels.pffn_tiles`.

S [T, D] packed over R sequences, M keys a sequence, H heads, D = H · d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.kernels import pffn_tiles  # registers torch.ops.gem.pffn_block
from model.kernels.activations import inner_scale, per_head
from model.kernels.gdpa import Kept, gdpa, gdpa_reference, products, products_backward
from model.kernels.gpu import alike, autocasts, on_gpu
from model.nn.jagged import Jagged
from model.nn.norm import EPS, inverse_rms, layer_norm, rms_norm, rms_norm_backward


def pffn_block(
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
    normalize: bool = True,
) -> Tensor:
    """[T, D]: ln = LayerNorm(S); u = GDPA(RMSNorm_heads(ln), K, V) + ln; S' = RMSNorm(u) + S (Kunlun §PFFN; Meta's norm fusion).

    No norm has parameters; the last is over all heads together. Where autocast is on, on a GPU heads of several activations,
    and sizes beyond those of `pffn_tiles`, the block is composed of its parts.

    Args:
        s_TD: tokens of all sequences, packed.
        k_RMHd: keys of each sequence, normalized if queries are to be.
        v_RMHd: values of each sequence.
        layout: index maps of the tokens.
        activation: one of ACTIVATIONS, or one a head.
        alpha: scale inside the activation; 1/√d if None.
        beta: scale after it.
        normalize: whether queries are RMSNorm(ln) of each head, or ln as it is.

    Raises:
        ValueError: an activation is unknown, or there are neither one nor H of them.
    """
    names = per_head(activation, k_RMHd.shape[2])
    if not len(s_TD):
        return s_TD
    scale = inner_scale(alpha, k_RMHd.shape[-1])
    if _fits(s_TD, k_RMHd, v_RMHd, names):
        given = (s_TD if s_TD.stride(1) == 1 else s_TD.contiguous(), *alike(k_RMHd, v_RMHd))
        fused: Tensor = torch.ops.gem.pffn_block(*given, layout.offsets, names[0], scale, beta, normalize)[0]
        return fused
    if s_TD.is_cuda or autocasts(s_TD.device):
        attend = partial(gdpa, activation=names, alpha=scale, beta=beta)
        return _composed(s_TD, k_RMHd, v_RMHd, layout, attend, normalize)
    out: Tensor = _PffnBlock.apply(s_TD, k_RMHd, v_RMHd, layout, names, scale, beta, normalize)
    return out


def _fits(s: Tensor, k: Tensor, v: Tensor, names: tuple[str, ...]) -> bool:
    """Whether the Triton kernels take the block: tokens and keys may differ in dtype, products are in the keys'."""
    small = s.shape[1] <= pffn_tiles.WIDEST_TOKEN and k.shape[1] <= pffn_tiles.MOST_KEYS
    known = s.is_cuda and s.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and small and len(set(names)) == 1 and on_gpu(*alike(k, v))


class _PffnBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Jagged,
        names: tuple[str, ...],
        alpha: float,
        beta: float,
        normalize: bool,
    ) -> Tensor:
        normal, mean, rstd = torch.native_layer_norm(s, s.shape[-1:], None, None, EPS)
        q, turns = normal.unflatten(-1, k.shape[2:]), []
        if normalize:
            turns = [inverse_rms(q)]
            q = q * turns[0]
        ctx.layout, ctx.options = layout, {"names": names, "alpha": alpha, "beta": beta}
        read, kept = products(q, k, v, layout, **ctx.options)
        y = read.flatten(1).add_(normal)
        scale = inverse_rms(y)
        y.mul_(scale)
        ctx.turned = len(turns)
        ctx.save_for_backward(s, mean, rstd, y, scale, *([q, *turns] if turns else []), *kept.tensors)
        return y + s

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        s, mean, rstd, y, scale, *rest = ctx.saved_tensors
        turned, kept = rest[: 2 * ctx.turned], Kept.of(rest[2 * ctx.turned :])
        du = rms_norm_backward(gradient, y, scale)
        by_head = du.unflatten(-1, (-1, kept.keys[0].shape[-1]))
        dq, dk, dv = products_backward(by_head, kept, ctx.layout, **ctx.options)
        du += (rms_norm_backward(dq, *turned) if turned else dq).flatten(1)
        ds, _, _ = torch.ops.aten.native_layer_norm_backward(
            du, s, s.shape[-1:], mean, rstd, None, None, [True, False, False]
        )
        return ds.add_(gradient), dk, dv, None, None, None, None, None


def pffn_block_reference(
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
    normalize: bool = True,
) -> Tensor:
    """The definition, of plain parts."""
    attend = partial(gdpa_reference, activation=activation, alpha=alpha, beta=beta)
    return _composed(s_TD, k_RMHd, v_RMHd, layout, attend, normalize)


def _composed(
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    attend: Callable[[Tensor, Tensor, Tensor, Jagged], Tensor],
    normalize: bool,
) -> Tensor:
    normal = layer_norm(s_TD)
    q = normal.unflatten(-1, k_RMHd.shape[2:])
    q = rms_norm(q) if normalize else q
    return rms_norm(attend(q, k_RMHd, v_RMHd, layout).flatten(1) + normal) + s_TD
