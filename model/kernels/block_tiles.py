"""Softmax self-attention between near blocks by Triton, rotary angles of queries and keys (and values) within.

Knows tiles and blocks' spans. Does not know index maps: `model.kernels.block_attention` has the definition.

A program a block. Forward it reads a window of keys with a running softmax; backward it writes dQ of its queries and dK, dV
of its keys, so that gradients need no atomics. Tiles are turned in float32 once loaded, and gradients are turned back in
float32 before they are rounded and stored: turned queries and keys are never in memory (Meta's block attention).

T tokens packed over R sequences, H heads, d width of a head, D the power of two that holds it; BM tokens a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from model.kernels.gpu import (
    Tiles,
    columns,
    jit,
    key_step,
    like_inputs,
    load_tile,
    precision,
    query_step,
    row_dots,
    scales,
    softmax_step,
    store_tile,
    tl,
)

WIDEST_BLOCK = 64
"""Tokens of a block of which a program holds queries, keys, values and gradients; of longer ones none does."""


def forward_tiles(block: int, width: int) -> Tiles:
    """Tiles of the forward kernel: one of BM places holds a block; BN tokens near it come at a time."""
    rows, D = columns(block), columns(width)
    return Tiles(rows, rows, D, 4 if rows * D <= 64 * 64 else 8, 2)


def backward_tiles(block: int, width: int, *, turned: bool, size: int = 2) -> Tiles:
    """Tiles of the backward kernel for numbers of `size` bytes.

    64 near tokens of a wide head that are turned first spill registers on Hopper.
    """
    cut = forward_tiles(block, width)
    wide = turned and cut.D * size > 128
    return cut._replace(BN=min(cut.BM, 32), num_warps=8) if wide else cut


@torch.library.custom_op("gem::block_attention", mutates_args=())
def attend(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    turns_Td: Tensor | None,
    spans: Tensor,
    block: int,
    before: int,
    after: int,
    rotate_values: bool,
) -> tuple[Tensor, Tensor]:
    """(read [T, H, d], base-2 logarithm of the softmax's denominator [H, T]) by Triton.

    A block attends itself, `before` blocks before it and `after` behind it. `turns_Td` are cosine and sine of every pair's
    angle side by side, in float32.
    """
    (total, heads, width), cut = q_THd.shape, forward_tiles(block, q_THd.shape[-1])
    out, lse = q_THd.new_empty(q_THd.shape), q_THd.new_empty((heads, total), dtype=torch.float32)
    if out.numel():
        with torch.cuda.device_of(q_THd):
            _forward_kernel[(len(spans), heads)](
                q_THd, k_THd, v_THd, q_THd if turns_Td is None else turns_Td, out, lse, spans, scales(width**-0.5)[1],
                *_strides(q_THd, k_THd, v_THd), total, TURNED=_turned_count(turns_Td, rotate_values),
                BLOCK=block, BEFORE=before, AFTER=after, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("gem::block_attention_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    turns_Td: Tensor | None,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    block: int,
    before: int,
    after: int,
    rotate_values: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by Triton."""
    total, heads, width = q_THd.shape
    cut = backward_tiles(block, width, turned=turns_Td is not None, size=q_THd.element_size())
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_THd, k_THd, v_THd))
    if out.numel():
        with torch.cuda.device_of(q_THd):
            _backward_kernel[(len(spans), heads)](
                q_THd, k_THd, v_THd, q_THd if turns_Td is None else turns_Td, out, dout, lse, dq, dk, dv, spans,
                *scales(width**-0.5), *_strides(q_THd, k_THd, v_THd), total,
                TURNED=_turned_count(turns_Td, rotate_values),
                BLOCK=block, BEFORE=before, AFTER=after, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return dq, dk, dv


@attend.register_fake
def _(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    turns_Td: Tensor | None,
    spans: Tensor,
    block: int,
    before: int,
    after: int,
    rotate_values: bool,
) -> tuple[Tensor, Tensor]:
    lse = q_THd.new_empty((q_THd.shape[1], q_THd.shape[0]), dtype=torch.float32)
    return q_THd.new_empty(q_THd.shape), lse


attend_backward.register_fake(like_inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, spans, ctx.block, ctx.before, ctx.after, ctx.rotate_values = inputs
    ctx.save_for_backward(*tensors, *output, spans)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem.block_attention_backward(
        dout.contiguous(), *ctx.saved_tensors, ctx.block, ctx.before, ctx.after, ctx.rotate_values
    )
    return *gradients, None, None, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.block_attention, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turns: Tensor | None,
    spans: Tensor,
    block: int,
    before: int,
    after: int,
    *_: Any,
    **__: Any,
) -> int:
    """Of the two products; turning is element-wise."""
    return 4 * _reached(spans, block, before, after) * block * block * q.shape[1] * q.shape[2]


@register_flop_formula(torch.ops.gem.block_attention_backward, get_raw=True)
def _backward_flops(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None, out: Tensor, lse: Tensor, *args: Any, **_: Any
) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(q, k, v, turns, *args)


def _reached(spans: Tensor, block: int, before: int, after: int) -> int:
    """Blocks in reach of all blocks; as many as there can be where a trace has no numbers."""
    if not before + after or isinstance(spans, FakeTensor):
        return len(spans) * (before + after + 1)
    first, begin, end = spans.unbind(1)
    number, last = (first - begin) // block, (end - begin - 1) // block
    return int((torch.minimum(last, number + after) - (number - before).clamp(min=0) + 1).sum())


def _strides(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> tuple[int, ...]:
    """Numbers between tokens and between heads of each."""
    return (*q_THd.stride()[:2], *k_THd.stride()[:2], *v_THd.stride()[:2])


def _turned_count(turns_Td: Tensor | None, rotate_values: bool) -> int:
    """TURNED of the kernels: 0 nothing, 1 queries and keys, 2 values too."""
    return 0 if turns_Td is None else 1 + rotate_values


@jit
def _turn(
    tile: tl.tensor, turns: tl.tensor, limit: tl.tensor,
    BM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BM, D] with its interleaved pairs turned by `turns`, in float32; turned back if BACK."""
    cos, sin = tl.split(tl.reshape(load_tile(turns, WIDTH, limit, BM, WIDTH, D, True), (BM, D // 2, 2)))
    if BACK:
        sin = -sin
    x, y = tl.split(tl.reshape(tile.to(tl.float32), (BM, D // 2, 2)))
    return tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (BM, D))


@jit
def _load(
    x: tl.tensor, x_token: tl.tensor, turns: tl.tensor, limit: tl.tensor,
    BM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile of tokens, turned if TURN, rounded to what `x` holds."""
    tile = load_tile(x, x_token, limit, BM, WIDTH, D, True)
    if TURN:
        tile = _turn(tile, turns, limit, BM, WIDTH, D, False).to(tile.dtype)
        if tile.dtype == tl.float32:  # Triton 3.7 for Hopper fails on a product of what was only reshaped
            tile += 0.0
    return tile


@jit
def _store(
    x: tl.tensor, x_token: tl.tensor, turns: tl.tensor, limit: tl.tensor, tile: tl.tensor,
    BM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the gradient of tokens from that of turned ones."""
    if TURN:
        tile = _turn(tile, turns, limit, BM, WIDTH, D, True)
    store_tile(x, x_token, limit, tile, BM, WIDTH, D)


@jit
def _forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, turns: tl.tensor, out: tl.tensor, lse: tl.tensor, spans: tl.tensor,
    power: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_token: tl.tensor, v_head: tl.tensor, total: tl.tensor,
    TURNED: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """One block of queries over the keys in its reach, for one head."""
    head, heads, span = tl.program_id(1), tl.num_programs(1), spans + 3 * tl.program_id(0)
    first, begin, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    count = tl.minimum(end - first, BLOCK).to(tl.int32)
    low, high = tl.maximum(begin, first - BEFORE * BLOCK), tl.minimum(end, first + (AFTER + 1) * BLOCK)
    q_tile = _load(
        q + first * q_token + head * q_head, q_token, turns + first * WIDTH, count, BM, WIDTH, D, TURNED > 0
    )
    k += low * k_token + head * k_head
    v += low * v_token + head * v_head
    turns += low * WIDTH
    acc = tl.zeros((BM, D), tl.float32)
    top, sums = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for left in range((high - low).to(tl.int32), 0, -BN):
        k_tile = _load(k, k_token, turns, left, BN, WIDTH, D, TURNED > 0)
        v_tile = _load(v, v_token, turns, left, BN, WIDTH, D, TURNED > 1)
        acc, top, sums = softmax_step(acc, top, sums, q_tile, k_tile, v_tile, left, power, BN, True, PRECISION)
        k += BN * k_token
        v += BN * v_token
        turns += BN * WIDTH
    here = (first * heads + head) * WIDTH
    store_tile(out + here, heads * WIDTH, count, acc / sums[:, None], BM, WIDTH, D)
    number = tl.arange(0, BM)
    tl.store(lse + head.to(tl.int64) * total + first + number, top + tl.log2(sums), mask=number < count)


@jit
def _backward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, turns: tl.tensor, out: tl.tensor, dout: tl.tensor, lse: tl.tensor,
    dq: tl.tensor, dk: tl.tensor, dv: tl.tensor, spans: tl.tensor, scale: tl.tensor, power: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor,
    v_head: tl.tensor, total: tl.tensor,
    TURNED: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """dQ, dK and dV of one block, for one head; queries reach its keys from blocks on the side opposite to its own reach."""
    head, heads, span = tl.program_id(1), tl.num_programs(1), spans + 3 * tl.program_id(0)
    first, begin, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    count = tl.minimum(end - first, BLOCK).to(tl.int32)
    low, high = tl.maximum(begin, first - BEFORE * BLOCK), tl.minimum(end, first + (AFTER + 1) * BLOCK)
    number, step, token = tl.arange(0, BM), tl.arange(0, BN), heads * WIDTH
    q += head * q_head
    k += head * k_head
    v += head * v_head
    out += head * WIDTH
    dout += head * WIDTH
    lse += head.to(tl.int64) * total
    here, own = first * token + head * WIDTH, turns + first * WIDTH
    k_tile = _load(k + first * k_token, k_token, own, count, BM, WIDTH, D, TURNED > 0)
    v_tile = _load(v + first * v_token, v_token, own, count, BM, WIDTH, D, TURNED > 1)
    q_tile = _load(q + first * q_token, q_token, own, count, BM, WIDTH, D, TURNED > 0)
    do_tile = load_tile(dout + first * token, token, count, BM, WIDTH, D, True)
    norm = tl.load(lse + first + number, mask=number < count, other=float("inf"))
    dq_tile = tl.zeros((BM, D), tl.float32)
    dk_tile, dv_tile = tl.zeros((BM, D), tl.float32), tl.zeros((BM, D), tl.float32)
    if BEFORE + AFTER == 0:  # all of it in one tile: scores once, and Δ from them
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * power
        p = tl.exp2(tl.where(number[None, :] < count, scores, float("-inf")) - norm[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q_tile.dtype)
        dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv_tile, input_precision=PRECISION)
        dk_tile = tl.dot(tl.trans(ds), q_tile, dk_tile, input_precision=PRECISION)
        dq_tile = tl.dot(ds, k_tile, dq_tile, input_precision=PRECISION)
        _store(dq + here, token, own, count, dq_tile * scale, BM, WIDTH, D, TURNED > 0)
    else:
        delta = row_dots(dout + first * token, out + first * token, token, count, BM, WIDTH, D)
        k_near, v_near, turns_near = k + low * k_token, v + low * v_token, turns + low * WIDTH
        for left in range((high - low).to(tl.int32), 0, -BN):
            k_there = _load(k_near, k_token, turns_near, left, BN, WIDTH, D, TURNED > 0)
            v_there = _load(v_near, v_token, turns_near, left, BN, WIDTH, D, TURNED > 1)
            dq_tile = query_step(
                dq_tile, q_tile, do_tile, norm, delta, k_there, v_there, left, power, BN, True, PRECISION
            )
            k_near += BN * k_token
            v_near += BN * v_token
            turns_near += BN * WIDTH
        _store(dq + here, token, own, count, dq_tile * scale, BM, WIDTH, D, TURNED > 0)
        low, high = tl.maximum(begin, first - AFTER * BLOCK), tl.minimum(end, first + (BEFORE + 1) * BLOCK)
        for left in range((high - low).to(tl.int32), 0, -BN):
            near = high - left
            q_near = _load(q + near * q_token, q_token, turns + near * WIDTH, left, BN, WIDTH, D, TURNED > 0)
            do_near = load_tile(dout + near * token, token, left, BN, WIDTH, D, True)
            delta_near = row_dots(dout + near * token, out + near * token, token, left, BN, WIDTH, D)
            norm_near = tl.load(lse + near + step, mask=step < left, other=float("inf"))
            dk_tile, dv_tile = key_step(
                dk_tile, dv_tile, k_tile, v_tile, q_near, do_near, norm_near, delta_near, power, PRECISION
            )
    _store(dk + here, token, own, count, dk_tile * scale, BM, WIDTH, D, TURNED > 0)
    _store(dv + here, token, own, count, dv_tile, BM, WIDTH, D, TURNED > 1)
