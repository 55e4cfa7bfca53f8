"""Generalized dot-product attention: act(α · Q Kᵀ) · β · V with no softmax, jagged queries over dense short keys.

Knows heads and activations. Does not know what conditions what. It is Kunlun's PFFN when K and V come from a context:
the keys are the hidden units of a per-example two-layer network.

T queries packed over R sequences, M keys a sequence, H heads, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.jagged import Jagged, pad, unpad

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "identity": lambda x: x,
}
"""All of them map 0 to 0, so that a padded query adds nothing."""


def gdpa(
    q_THd: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """[T, H, d]; buckets of similar length as dense products.

    Args:
        q_THd: queries of all sequences, packed.
        k_RMHd: keys of each sequence.
        v_RMHd: values of each sequence.
        layout: index maps of the queries.
        activation: one of ACTIVATIONS.
        alpha: scale inside the activation; 1/√d if None.
        beta: scale after it.
    """
    if not len(q_THd):
        return q_THd
    scale = alpha if alpha is not None else 1 / math.sqrt(q_THd.shape[-1])
    act = ACTIVATIONS[activation]
    keys, values = k_RMHd * scale, v_RMHd * beta  # few and dense: cheaper to scale than the scores and the sums
    parts = []
    for places, bucket in zip(pad(q_THd, layout), layout.buckets, strict=True):
        k, v = (x.index_select(0, bucket.rows) for x in (keys, values))
        hidden = act(places.transpose(1, 2) @ k.permute(0, 2, 3, 1))
        parts.append((hidden @ v.transpose(1, 2)).transpose(1, 2))
    return unpad(parts, layout)


def gdpa_reference(
    q_THd: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The definition, a sequence at a time."""
    scale = alpha if alpha is not None else 1 / math.sqrt(q_THd.shape[-1])
    out = [q_THd[:0]]
    for row in range(layout.num_sequences):
        q = q_THd[layout.offsets[row] : layout.offsets[row + 1]]
        scores = ACTIVATIONS[activation](scale * torch.einsum("thd,mhd->htm", q, k_RMHd[row]))
        out.append(beta * torch.einsum("htm,mhd->thd", scores, v_RMHd[row]))
    return torch.cat(out)


def gdpa_flops(num_queries: int, num_keys: int, width: int) -> int:
    """Forward FLOPs of two products over actual lengths, `width` = H · d."""
    return 4 * num_queries * num_keys * width
