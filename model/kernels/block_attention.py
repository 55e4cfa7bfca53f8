"""Softmax self-attention between blocks that lie within a radius of each other, over jagged sequences.

Knows blocks counted from each sequence's start. Does not know time, heads' meaning or layers.

Token i attends token j of its sequence iff |⌊i/b⌋ − ⌊j/b⌋| ≤ r: a window of (2r+1)·b, always whole blocks. Cost is linear in
Σ lengths. T tokens packed over R sequences, H heads, d width of a head, b block, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.jagged import Jagged


class Blocks(NamedTuple):
    """The index maps of a batch's blocks, computed once a batch."""

    tokens: Tensor
    """[B, b] token of each place; T where there is none."""
    neighbours: Tensor
    """[B, 2r+1] blocks within the radius; B where there is none."""
    unblock: Tensor
    """[T] place of each token."""


def blocks(layout: Jagged, *, block: int, radius: int) -> Blocks:
    """Index maps for blocks of `block` tokens and their neighbours within `radius` blocks."""
    lengths = layout.lengths
    counts = (lengths + block - 1) // block
    total, device = int(counts.sum()), lengths.device
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    first = counts.cumsum(0) - counts
    number = torch.arange(total, device=device) - first[sequence]
    place = number[:, None] * block + torch.arange(block, device=device)
    valid = place < lengths[sequence][:, None]
    tokens = torch.where(valid, layout.offsets[:-1][sequence][:, None] + place, int(layout.offsets[-1]))
    near = number[:, None] + torch.arange(-radius, radius + 1, device=device)
    inside = (near >= 0) & (near < counts[sequence][:, None])
    neighbours = torch.where(inside, first[sequence][:, None] + near, total)
    unblock = (first[layout.sequence] + layout.position // block) * block + layout.position % block
    return Blocks(tokens, neighbours, unblock)


def block_attention(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, maps: Blocks) -> Tensor:
    """[T, H, d]; one dense product a block and its neighbours."""
    total = len(q_THd)
    if not total:
        return q_THd
    heads, width = q_THd.shape[1:]
    count, block = maps.tokens.shape
    q = _padded(q_THd)[maps.tokens].transpose(1, 2)
    near = torch.cat([maps.tokens, maps.tokens.new_full((1, block), total)])[maps.neighbours].flatten(1)
    k, v = _padded(k_THd)[near].transpose(1, 2), _padded(v_THd)[near].transpose(1, 2)
    mask = (near < total)[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(count * block, heads, width)[maps.unblock]


def block_attention_reference(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, *, block: int, radius: int
) -> Tensor:
    """The definition: dense attention with the block mask, a sequence at a time."""
    out = [q_THd[:0]]
    for row in range(layout.num_sequences):
        part = slice(int(layout.offsets[row]), int(layout.offsets[row + 1]))
        q, k, v = (x[part].transpose(0, 1) for x in (q_THd, k_THd, v_THd))
        number = torch.arange(q.shape[1], device=q.device) // block
        mask = (number[:, None] - number[None, :]).abs() <= radius
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1) if q.shape[1] else q_THd[:0])
    return torch.cat(out)


def block_attention_flops(lengths: list[int], *, block: int, radius: int, width: int) -> int:
    """Forward FLOPs of the two products, every token against all places of the blocks in reach, `width` = H · d."""
    total = 0
    for length in lengths:
        count = -(-length // block)
        reach = sum(min(count - 1, i + radius) - max(0, i - radius) + 1 for i in range(count))
        total += 4 * reach * block * block * width
    return total


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
