"""Attention without softmax over jagged keys: act(α · Q Kᵀ ⊙ W) · β · V.

Knows heads, places and lengths. Does not know what queries stand for. Queries are the tokens themselves, each of which
reads those within a window of it (HSTU's attention where the window takes all in), or dense ones, a few a sequence or the
same for all (what pools a sequence). A pair outside the window scores 0, and since act(0) = 0 it adds nothing, as a
place without a token does: no path masks anything else. A sequence without keys gives zeros.

On a CPU dense products: blocks of tokens against the blocks that their window reaches, where these are fewer pairs than all of
a sequence's, or buckets of similar length.
On an NVIDIA GPU: `model.kernels.jagged_gdpa_tiles`. α is as `gdpa` has it; HSTU's β is 1/(longest sequence), one number
for all lengths. Candidates that share a request's keys are rows of dense queries, as `candidate_attention` lays them.

R sequences, T tokens packed, Q dense queries a sequence, H heads, d width of a head, B blocks of b tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from model.kernels import (
    jagged_gdpa_tiles as jagged_gdpa_tiles,  # registers torch.ops.gem.jagged_gdpa
)
from model.kernels.activations import activated, inner_scale, per_head
from model.kernels.block_attention import blocks
from model.kernels.gpu import alike, on_gpu
from model.nn.jagged import Jagged, collect, pad, scatter, spread, unpad

CACHED = 2**18
"""Scores that are computed, bent and summed before others take their place in a core's cache."""
BLOCKS = 16, 64
"""Fewest and most tokens of a block on a CPU; between them a block is as long as the window reaches."""


def windowed_gdpa(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    *,
    window: int | None = None,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """[T, H, d]: token i reads token j of its sequence where |i − j| ≤ window.

    Args:
        q_THd: queries.
        k_THd: keys.
        v_THd: values.
        layout: index maps of all three.
        window: tokens before and after that are read; all if None.
        activation: one of ACTIVATIONS, or one a head.
        alpha: scale inside the activation; 1/√d if None.
        beta: scale after it.

    Raises:
        ValueError: the window is negative, an activation unknown, or there are neither one nor H of them.
    """
    names, scale = per_head(activation, q_THd.shape[1]), inner_scale(alpha, q_THd.shape[-1])
    if window is not None and window < 0:
        raise ValueError(f"window is {window}; 0 reads a token itself, None the whole sequence")
    if not len(q_THd):
        return q_THd
    if on_gpu(q_THd, k_THd, v_THd):
        reach = -1 if window is None else window
        given = alike(q_THd, k_THd, v_THd)
        read: Tensor = torch.ops.gem.jagged_gdpa(*given, layout.offsets, reach, ",".join(names), scale, beta)
        return read
    longest = int(layout.lengths.max())
    near = longest - 1 if window is None else min(window, longest - 1)
    block = min(max(near, BLOCKS[0]), BLOCKS[1])
    radius = -(-near // block)
    whole = sum(bucket.valid.shape[1] * bucket.valid.numel() for bucket in layout.buckets)
    read_by = _by_sequences
    if int((-(-layout.lengths // block)).sum()) * block**2 * (2 * radius + 1) < whole:
        read_by = partial(_by_blocks, block=block, radius=radius)
    return read_by(q_THd * scale, k_THd, v_THd * beta, layout, near, names)


def pooled_gdpa(
    q_RQHd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """[R, Q, H, d]: dense queries read all keys of their sequence; `q_RQHd` may have one row, which all sequences share.

    Raises:
        ValueError: an activation is unknown, or there are neither one nor H of them.
    """
    names, scale = per_head(activation, q_RQHd.shape[2]), inner_scale(alpha, q_RQHd.shape[-1])
    if on_gpu(q_RQHd, k_THd, v_THd):
        given = alike(q_RQHd, k_THd, v_THd)
        read: Tensor = torch.ops.gem.jagged_gdpa(*given, layout.offsets, -1, ",".join(names), scale, beta)
        return read
    if not layout.buckets:
        return q_RQHd.new_zeros(layout.num_sequences, *q_RQHd.shape[1:])
    reads, queries = [], (q_RQHd * scale).transpose(1, 2)
    for k, v, bucket in zip(pad(k_THd, layout), pad(v_THd * beta, layout), layout.buckets, strict=True):
        q = queries if len(queries) == 1 else queries.index_select(0, bucket.rows)
        hidden = activated(q @ k.permute(0, 2, 3, 1), names, axis=1)
        reads.append((hidden @ v.transpose(1, 2)).transpose(1, 2))
    order = torch.cat([bucket.rows for bucket in layout.buckets])
    return scatter(torch.cat(reads), order, layout.num_sequences)


def _by_sequences(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, window: int, names: tuple[str, ...]
) -> Tensor:
    """Every sequence against itself: places without a token score 0 by themselves."""
    reads = []
    for parts in zip(*(pad(x, layout) for x in (q_THd, k_THd, v_THd)), strict=True):
        q, k, v = (part.transpose(1, 2) for part in parts)
        scores, place = q @ k.mT, torch.arange(q.shape[2], device=q.device)
        if window < len(place) - 1:
            scores = scores.masked_fill_((place[:, None] - place).abs() > window, 0)
        reads.append((activated(scores, names, axis=1) @ v).transpose(1, 2))
    return unpad(reads, layout)


def _by_blocks(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    window: int,
    names: tuple[str, ...],
    *,
    block: int,
    radius: int,
) -> Tensor:
    """Every block against the blocks within its window, which lie side by side."""
    maps, reach = blocks(layout, block=block, radius=radius), (2 * radius + 1) * block
    q = spread(q_THd, *maps.own).unflatten(0, (maps.total, block)).transpose(1, 2)
    k, v = (spread(x, *maps.reach).unfold(0, reach, block) for x in (k_THd, v_THd))
    apart = torch.arange(block)[:, None] - torch.arange(reach) + radius * block
    far, reads = (apart.abs() > window).to(q.device), []
    some = max(1, CACHED // (q.shape[1] * block * reach)) if q.device.type == "cpu" else maps.total
    for own, keys, values, visible in zip(*(x.split(some) for x in (q, k, v, maps.visible)), strict=True):
        scores = (own @ keys).masked_fill_(far | ~visible[:, None, None, :], 0)
        reads.append(activated(scores, names, axis=1) @ values.transpose(2, 3))
    return collect(torch.cat(reads).transpose(1, 2).flatten(0, 1), *maps.own)


def windowed_gdpa_reference(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    *,
    window: int | None = None,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The definition, a sequence at a time."""
    out, names, scale = [q_THd[:0]], per_head(activation, q_THd.shape[1]), inner_scale(alpha, q_THd.shape[-1])
    for first, last in zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True):
        q, k, v = (x[first:last] for x in (q_THd, k_THd, v_THd))
        scores = scale * torch.einsum("ihd,jhd->hij", q, k)
        if window is not None:
            place = torch.arange(last - first)
            scores = torch.where((place[:, None] - place).abs() <= window, scores, 0)
        out.append(beta * torch.einsum("hij,jhd->ihd", activated(scores, names, axis=0), v))
    return torch.cat(out)


def pooled_gdpa_reference(
    q_RQHd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The definition, a sequence at a time."""
    out, names, scale = [], per_head(activation, q_RQHd.shape[2]), inner_scale(alpha, q_RQHd.shape[-1])
    for row, (first, last) in enumerate(zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True)):
        scores = scale * torch.einsum("qhd,thd->hqt", q_RQHd[min(row, len(q_RQHd) - 1)], k_THd[first:last])
        out.append(beta * torch.einsum("hqt,thd->qhd", activated(scores, names, axis=0), v_THd[first:last]))
    return torch.stack(out) if out else q_RQHd.new_zeros(0, *q_RQHd.shape[1:])


def windowed_gdpa_flops(lengths: Sequence[int], *, window: int | None, width: int) -> int:
    """Forward FLOPs of two products over the pairs within the window, `width` = H · d."""
    total = 0
    for length in lengths:
        reach = max(0, min(length - 1, length if window is None else window))
        total += length + 2 * reach * length - reach * (reach + 1)
    return 4 * total * width
