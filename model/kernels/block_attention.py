"""Softmax self-attention between blocks that lie within a radius of each other, over jagged sequences.

Knows blocks counted from each sequence's start. Does not know time, heads' meaning or layers.

On a CPU: one dense product for all blocks. On an NVIDIA GPU: a program a block, which forward reads a window of keys
with a running softmax and backward writes dQ of its queries and dK, dV of its keys, so that gradients need no
atomics.

Token i attends token j of its sequence iff |⌊i/b⌋ − ⌊j/b⌋| ≤ r: a window of (2r+1)·b, always whole blocks. Cost is
linear in Σ lengths. T tokens packed over R sequences, H heads, d width of a head, b block, r radius, B blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from model.kernels.gpu import (
    alike,
    columns,
    jit,
    key_step,
    load_tile,
    on_gpu,
    precision,
    query_step,
    row_dots,
    scales,
    softmax_step,
    store_tile,
    tl,
)
from model.nn.jagged import Jagged, collect, inverse, spread

WIDEST_BLOCK = 64
"""Tokens of a block of which a program holds queries, keys, values and gradients; of longer ones none does."""


class Blocks(NamedTuple):
    """The index maps of a batch's blocks, computed once a batch."""

    block: int
    radius: int
    total: int
    """B, of all sequences, one sequence after the other."""
    visible: Tensor
    """[B, (2r+1) · b] whether a place of the blocks in reach holds a token of the same sequence."""
    own: tuple[Tensor, Tensor, Tensor]
    """(place of each token, token of each place, vacant places) among the blocks."""
    reach: tuple[Tensor, Tensor, Tensor]
    """The same with `radius` empty blocks before and after."""
    spans: Tensor
    """[B, 3] first token of the block, first of its sequence, first after its sequence."""


def blocks(layout: Jagged, *, block: int, radius: int) -> Blocks:
    """Index maps for blocks of `block` tokens and their neighbours within `radius` blocks."""
    lengths = layout.lengths
    counts = (lengths + block - 1) // block
    total, device = int(counts.sum()), lengths.device
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    first = counts.cumsum(0) - counts
    number = torch.arange(total, device=device) - first[sequence]
    near = torch.arange(-radius * block, (radius + 1) * block, device=device)
    position = (number * block)[:, None] + near
    visible = (position >= 0) & (position < lengths[sequence][:, None])
    place, margin = first[layout.sequence] * block + layout.position, radius * block
    own = (place, *inverse(place, total * block))
    reach = (place + margin, *inverse(place + margin, total * block + 2 * margin))
    begin = layout.offsets[:-1][sequence]
    spans = torch.stack([begin + number * block, begin, layout.offsets[1:][sequence]], dim=1)
    return Blocks(block, radius, total, visible, own, reach, spans)


def block_attention(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, maps: Blocks) -> Tensor:
    """[T, H, d]; one dense product a block with the blocks in its reach."""
    if not len(q_THd):
        return q_THd
    if on_gpu(q_THd, k_THd, v_THd) and maps.block <= WIDEST_BLOCK:
        out: Tensor = torch.ops.gem.block_attention(*alike(q_THd, k_THd, v_THd), maps.spans, maps.block, maps.radius)[0]
        return out
    q = spread(q_THd, *maps.own).unflatten(0, (maps.total, maps.block))
    k, v = _in_reach(k_THd, maps), _in_reach(v_THd, maps)
    mask = maps.visible[:, None, None, :]
    read = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
    return collect(read.transpose(1, 2).flatten(0, 1), *maps.own)


def _in_reach(x_THd: Tensor, maps: Blocks) -> Tensor:
    """[B, H, (2r+1) · b, d]: neighbouring blocks lie side by side, so reaches overlap and nothing is copied."""
    out: Tensor = _Reach.apply(spread(x_THd, *maps.reach), maps.block, maps.radius)
    return out


class _Reach(torch.autograd.Function):
    """Overlapping windows of (2r+1) · b rows, one a block; the gradient adds what overlaps."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, block: int, radius: int) -> Tensor:
        ctx.block, ctx.radius = block, radius
        return places.unfold(0, (2 * radius + 1) * block, block).permute(0, 1, 3, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        count, reach = len(gradient), 2 * ctx.radius + 1
        parts = gradient.transpose(1, 2).unflatten(1, (reach, ctx.block))
        out = gradient.new_zeros(count + reach - 1, *parts.shape[2:])
        for shift in range(reach):
            out[shift : shift + count] += parts[:, shift]
        return out.flatten(0, 1), None, None


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


class Tiles(NamedTuple):
    """How a kernel cuts its work: one tile of BM places holds a block."""

    BM: int
    D: int
    num_warps: int
    num_stages: int


def tiles(block: int, width: int) -> Tiles:
    """Tiles of both kernels."""
    rows, D = columns(block), columns(width)
    return Tiles(rows, D, 4 if rows * D <= 64 * 64 else 8, 2)


@torch.library.custom_op("gem::block_attention", mutates_args=())
def attend(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, spans: Tensor, block: int, radius: int
) -> tuple[Tensor, Tensor]:
    """(read [T, H, d], base-2 logarithm of the softmax's denominator [H, T]) by Triton."""
    (total, heads, width), cut = q_THd.shape, tiles(block, q_THd.shape[-1])
    out, lse = q_THd.new_empty(q_THd.shape), q_THd.new_empty((heads, total), dtype=torch.float32)
    if out.numel():
        with torch.cuda.device_of(q_THd):
            _forward_kernel[(len(spans), heads)](
                q_THd, k_THd, v_THd, out, lse, spans, scales(width**-0.5)[1], *_strides(q_THd, k_THd, v_THd), total,
                BLOCK=block, RADIUS=radius, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("gem::block_attention_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    block: int,
    radius: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by Triton."""
    (total, heads, width), cut = q_THd.shape, tiles(block, q_THd.shape[-1])
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_THd, k_THd, v_THd))
    if out.numel():
        with torch.cuda.device_of(q_THd):
            _backward_kernel[(len(spans), heads)](
                q_THd, k_THd, v_THd, out, dout, lse, dq, dk, dv, spans, *scales(width**-0.5),
                *_strides(q_THd, k_THd, v_THd), total,
                BLOCK=block, RADIUS=radius, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return dq, dk, dv


@attend.register_fake
def _(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, spans: Tensor, block: int, radius: int) -> tuple[Tensor, Tensor]:
    lse = q_THd.new_empty((q_THd.shape[1], q_THd.shape[0]), dtype=torch.float32)
    return q_THd.new_empty(q_THd.shape), lse


@attend_backward.register_fake
def _(
    dout: Tensor,
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    block: int,
    radius: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THd.new_empty(q_THd.shape), k_THd.new_empty(k_THd.shape), v_THd.new_empty(v_THd.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block, ctx.radius = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, spans, out, lse = ctx.saved_tensors
    gradients = torch.ops.gem.block_attention_backward(
        dout.contiguous(), q, k, v, out, lse, spans, ctx.block, ctx.radius
    )
    return *gradients, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.block_attention, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, block: int, radius: int, *_: Any, **__: Any
) -> int:
    return 4 * _reached(spans, block, radius) * block * block * q.shape[1] * q.shape[2]


@register_flop_formula(torch.ops.gem.block_attention_backward, get_raw=True)
def _backward_flops(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **_: Any
) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(q, k, v, *args)


def _reached(spans: Tensor, block: int, radius: int) -> int:
    """Blocks in reach of all blocks; as many as there can be where a trace has no numbers."""
    if not radius or isinstance(spans, FakeTensor):
        return len(spans) * (2 * radius + 1)
    first, begin, end = spans.unbind(1)
    number, last = (first - begin) // block, (end - begin - 1) // block
    return int((torch.minimum(last, number + radius) - (number - radius).clamp(min=0) + 1).sum())


def _strides(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> tuple[int, ...]:
    """Numbers between tokens and between heads of each."""
    return (*q_THd.stride()[:2], *k_THd.stride()[:2], *v_THd.stride()[:2])


@jit
def _forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, spans: tl.tensor, power: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor,
    v_head: tl.tensor, total: tl.tensor,
    BLOCK: tl.constexpr, RADIUS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr,
) -> None:  # fmt: skip
    """One block of queries over the keys in its reach, for one head."""
    head, heads, span = tl.program_id(1), tl.num_programs(1), spans + 3 * tl.program_id(0)
    first, begin, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    count = tl.minimum(end - first, BLOCK).to(tl.int32)
    low, high = tl.maximum(begin, first - RADIUS * BLOCK), tl.minimum(end, first + (RADIUS + 1) * BLOCK)
    q_tile = load_tile(q + first * q_token + head * q_head, q_token, count, BM, WIDTH, D, True)
    k += low * k_token + head * k_head
    v += low * v_token + head * v_head
    acc = tl.zeros((BM, D), tl.float32)
    top, sums = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for left in range((high - low).to(tl.int32), 0, -BM):
        acc, top, sums = softmax_step(
            acc, top, sums, q_tile, k, k_token, v, v_token, left, power, BM, WIDTH, D, True, PRECISION
        )
        k += BM * k_token
        v += BM * v_token
    here = (first * heads + head) * WIDTH
    store_tile(out + here, heads * WIDTH, count, acc / sums[:, None], BM, WIDTH, D)
    number = tl.arange(0, BM)
    tl.store(lse + head.to(tl.int64) * total + first + number, top + tl.log2(sums), mask=number < count)


@jit
def _backward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, dout: tl.tensor, lse: tl.tensor, dq: tl.tensor,
    dk: tl.tensor, dv: tl.tensor, spans: tl.tensor, scale: tl.tensor, power: tl.tensor, q_token: tl.tensor,
    q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, total: tl.tensor,
    BLOCK: tl.constexpr, RADIUS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr,
) -> None:  # fmt: skip
    """dQ, dK and dV of one block, for one head; queries that reach its keys are those that its queries reach."""
    head, heads, span = tl.program_id(1), tl.num_programs(1), spans + 3 * tl.program_id(0)
    first, begin, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    count = tl.minimum(end - first, BLOCK).to(tl.int32)
    low, high = tl.maximum(begin, first - RADIUS * BLOCK), tl.minimum(end, first + (RADIUS + 1) * BLOCK)
    number, token = tl.arange(0, BM), heads * WIDTH
    q += head * q_head
    k += head * k_head
    v += head * v_head
    out += head * WIDTH
    dout += head * WIDTH
    lse += head.to(tl.int64) * total
    here = first * token + head * WIDTH
    k_tile = load_tile(k + first * k_token, k_token, count, BM, WIDTH, D, True)
    v_tile = load_tile(v + first * v_token, v_token, count, BM, WIDTH, D, True)
    q_tile = load_tile(q + first * q_token, q_token, count, BM, WIDTH, D, True)
    do_tile = load_tile(dout + first * token, token, count, BM, WIDTH, D, True)
    norm = tl.load(lse + first + number, mask=number < count, other=float("inf"))
    dq_tile = tl.zeros((BM, D), tl.float32)
    dk_tile, dv_tile = tl.zeros((BM, D), tl.float32), tl.zeros((BM, D), tl.float32)
    if RADIUS == 0:  # all of it in one tile: scores once, and Δ from them
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * power
        p = tl.exp2(tl.where(number[None, :] < count, scores, float("-inf")) - norm[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q_tile.dtype)
        dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv_tile, input_precision=PRECISION)
        dk_tile = tl.dot(tl.trans(ds), q_tile, dk_tile, input_precision=PRECISION)
        dq_tile = tl.dot(ds, k_tile, dq_tile, input_precision=PRECISION)
        store_tile(dq + here, token, count, dq_tile * scale, BM, WIDTH, D)
    else:
        delta = row_dots(dout + first * token, out + first * token, token, count, BM, WIDTH, D)
        k_near, v_near = k + low * k_token, v + low * v_token
        for left in range((high - low).to(tl.int32), 0, -BM):
            dq_tile = query_step(
                dq_tile, q_tile, do_tile, norm, delta, k_near, k_token, v_near, v_token, left, power,
                BM, WIDTH, D, True, PRECISION,
            )  # fmt: skip
            k_near += BM * k_token
            v_near += BM * v_token
        store_tile(dq + here, token, count, dq_tile * scale, BM, WIDTH, D)
        for left in range((high - low).to(tl.int32), 0, -BM):
            near = high - left
            q_near = load_tile(q + near * q_token, q_token, left, BM, WIDTH, D, True)
            do_near = load_tile(dout + near * token, token, left, BM, WIDTH, D, True)
            delta_near = row_dots(dout + near * token, out + near * token, token, left, BM, WIDTH, D)
            norm_near = tl.load(lse + near + number, mask=number < left, other=float("inf"))
            dk_tile, dv_tile = key_step(
                dk_tile, dv_tile, k_tile, v_tile, q_near, do_near, norm_near, delta_near, power, PRECISION
            )
    store_tile(dk + here, token, count, dk_tile * scale, BM, WIDTH, D)
    store_tile(dv + here, token, count, dv_tile, BM, WIDTH, D)
