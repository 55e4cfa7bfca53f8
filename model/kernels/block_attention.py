"""Softmax self-attention between blocks that lie within a radius of each other, over jagged sequences.

Knows blocks counted from each sequence's start, and angles that tokens are turned by. Does not know what angles stand for,
nor heads' meaning or layers.

On a CPU: one dense product for all blocks, of tokens turned before. On an NVIDIA GPU: `model.kernels.block_tiles`.

Token i attends token j of its sequence iff |⌊j/b⌋ − ⌊i/b⌋| ≤ r: a window of (2r+1)·b, always whole blocks. Causal, iff
0 ≤ ⌊j/b⌋ − ⌊i/b⌋ ≤ r: its own block and the r after it, (r+1)·b. Since events are stored newest first, blocks after it are
older: no token reads a block newer than its own; within its own block it reads newer ones. Cost is linear in Σ lengths.

T tokens packed over R sequences, H heads, d width of a head, b block, r radius, B blocks, w blocks in reach.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.block_tiles import WIDEST_BLOCK
from model.kernels.gpu import alike, on_gpu
from model.nn.jagged import Jagged, collect, inverse, spread
from model.nn.time import rotate


class Blocks(NamedTuple):
    """The index maps of a batch's blocks, computed once a batch."""

    block: int
    radius: int
    causal: bool
    """Whether blocks before a token's own are out of its reach."""
    total: int
    """B, of all sequences, one sequence after the other."""
    visible: Tensor
    """[B, w · b] whether a place of the blocks in reach holds a token of the same sequence."""
    own: tuple[Tensor, Tensor, Tensor]
    """(place of each token, token of each place, vacant places) among the blocks."""
    reach: tuple[Tensor, Tensor, Tensor]
    """The same with empty blocks at the ends, as many as blocks reach out."""
    spans: Tensor
    """[B, 3] first token of the block, first of its sequence, first after its sequence."""

    @property
    def before(self) -> int:
        """Blocks in reach before a block."""
        return 0 if self.causal else self.radius

    @property
    def reached(self) -> int:
        """w, blocks in reach with a block's own: 2r+1, or r+1 if causal."""
        return self.before + 1 + self.radius


def blocks(layout: Jagged, *, block: int, radius: int, causal: bool = False) -> Blocks:
    """Index maps for blocks of `block` tokens and their neighbours within `radius` blocks.

    `causal`: only those after a block, 0 ≤ ⌊j/b⌋ − ⌊i/b⌋ ≤ r, which hold older events where the newest come first.
    """
    lengths = layout.lengths
    counts = (lengths + block - 1) // block
    total, device = int(counts.sum()), lengths.device
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    first = counts.cumsum(0) - counts
    number = torch.arange(total, device=device) - first[sequence]
    before = 0 if causal else radius
    near = torch.arange(-before * block, (radius + 1) * block, device=device)
    position = (number * block)[:, None] + near
    visible = (position >= 0) & (position < lengths[sequence][:, None])
    place, margin = first[layout.sequence] * block + layout.position, before * block
    own = (place, *inverse(place, total * block))
    reach = (place + margin, *inverse(place + margin, (before + total + radius) * block))
    begin = layout.offsets[:-1][sequence]
    spans = torch.stack([begin + number * block, begin, layout.offsets[1:][sequence]], dim=1)
    return Blocks(block, radius, causal, total, visible, own, reach, spans)


def block_attention(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    maps: Blocks,
    *,
    turns: Tensor | None = None,
    rotate_values: bool = False,
) -> Tensor:
    """[T, H, d]; one dense product a block with the blocks in its reach.

    Args:
        q_THd: queries; like keys and values they may be views of one projection.
        k_THd: keys.
        v_THd: values.
        maps: of the batch's blocks.
        turns: [T, d/2] complex numbers of length 1 that interleaved pairs of every token's queries and keys are turned by
            (`model.nn.time.turns`); constants, which get no gradient.
        rotate_values: whether values are turned too. What is read is not turned back.
    """
    if not len(q_THd):
        return q_THd
    if on_gpu(q_THd, k_THd, v_THd) and maps.block <= WIDEST_BLOCK:
        return _by_tiles(q_THd, k_THd, v_THd, maps, turns, rotate_values)
    if turns is not None:
        turns = turns.detach()
        q_THd, k_THd = rotate(q_THd, turns), rotate(k_THd, turns)
        v_THd = rotate(v_THd, turns) if rotate_values else v_THd
    q = spread(q_THd, *maps.own).unflatten(0, (maps.total, maps.block))
    k, v = _in_reach(k_THd, maps), _in_reach(v_THd, maps)
    mask = maps.visible[:, None, None, :]
    read = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
    return collect(read.transpose(1, 2).flatten(0, 1), *maps.own)


def _by_tiles(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, maps: Blocks, turns: Tensor | None, rotate_values: bool
) -> Tensor:
    pairs = None if turns is None else torch.view_as_real(turns.to(torch.complex64)).flatten(1)
    out: Tensor = torch.ops.gem.block_attention(
        *alike(q_THd, k_THd, v_THd), pairs, maps.spans, maps.block, maps.before, maps.radius, rotate_values
    )[0]
    return out


def _in_reach(x_THd: Tensor, maps: Blocks) -> Tensor:
    """[B, H, w · b, d]: neighbouring blocks lie side by side, so reaches overlap and nothing is copied."""
    out: Tensor = _Reach.apply(spread(x_THd, *maps.reach), maps.block, maps.reached)
    return out


class _Reach(torch.autograd.Function):
    """Overlapping windows of w · b rows, one a block; the gradient adds what overlaps."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, block: int, reach: int) -> Tensor:
        ctx.block, ctx.reach = block, reach
        return places.unfold(0, reach * block, block).permute(0, 1, 3, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        count, reach = len(gradient), ctx.reach
        parts = gradient.transpose(1, 2).unflatten(1, (reach, ctx.block))
        out = gradient.new_zeros(count + reach - 1, *parts.shape[2:])
        for shift in range(reach):
            out[shift : shift + count] += parts[:, shift]
        return out.flatten(0, 1), None, None


def block_attention_reference(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    layout: Jagged,
    *,
    block: int,
    radius: int,
    causal: bool = False,
    turns: Tensor | None = None,
    rotate_values: bool = False,
) -> Tensor:
    """The definition: pairs turned one by one, then dense attention with the block mask, a sequence at a time."""
    if turns is not None:
        q_THd, k_THd = _turned_reference(q_THd, turns), _turned_reference(k_THd, turns)
        v_THd = _turned_reference(v_THd, turns) if rotate_values else v_THd
    out = [q_THd[:0]]
    for row in range(layout.num_sequences):
        part = slice(int(layout.offsets[row]), int(layout.offsets[row + 1]))
        q, k, v = (x[part].transpose(0, 1) for x in (q_THd, k_THd, v_THd))
        number = torch.arange(q.shape[1], device=q.device) // block
        ahead = number[None, :] - number[:, None]
        mask = (ahead <= radius) & (ahead >= (0 if causal else -radius))
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1) if q.shape[1] else q_THd[:0])
    return torch.cat(out)


def _turned_reference(x_THd: Tensor, turns: Tensor) -> Tensor:
    """(x, y) → (x cos φ − y sin φ, x sin φ + y cos φ) of every interleaved pair."""
    cos, sin, (x, y) = turns.real[:, None], turns.imag[:, None], x_THd.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(-2)


def block_attention_flops(lengths: list[int], *, block: int, radius: int, width: int, causal: bool = False) -> int:
    """Forward FLOPs of the two products, every token against all places of the blocks in reach, `width` = H · d."""
    total, before = 0, 0 if causal else radius
    for length in lengths:
        count = -(-length // block)
        reach = sum(min(count - 1, i + radius) - max(0, i - before) + 1 for i in range(count))
        total += 4 * reach * block * block * width
    return total
