"""Softmax attention of dense queries over jagged keys by Triton.

Knows tiles. Does not know what queries stand for: `model.kernels.jagged_attention` has the definition.

Tiles of queries and keys with a running softmax in float32 (FlashAttention-2, arXiv:2307.08691), no padding, sequences with
most keys first; two kernels backward, each of which writes what it owns, so that gradients need no atomics and do not depend
on the order of programs.

R sequences, Q queries a sequence (or once for all: broadcast), T keys packed, H heads, d width of a head, D the
power of two that holds it; BM queries and BN keys a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from model.kernels.gpu import (
    Tiles,
    capability,
    columns,
    jit,
    key_step,
    load_tile,
    longest_first,
    precision,
    query_step,
    row_dots,
    scales,
    softmax_step,
    store_tile,
    tiles_of,
    tl,
)

PARTS = 64
"""Sums of shared queries' gradients kept apart until the end: enough programs for a GPU, the same on every one."""


def forward_tiles(queries: int, width: int) -> Tiles:
    """Tiles of the forward kernel."""
    rows, D = min(128, columns(queries)), columns(width)
    return Tiles(rows, 64, D, 8 if rows * D >= 128 * 128 else 4, 3)


def query_tiles(queries: int, width: int, capability: int, *, biased: bool = False) -> Tiles:
    """Tiles of the kernel of the queries' gradient; more queries or biased keys spill, sooner from capability 10 on."""
    rows, D = min(128 if capability < 100 else 64, columns(queries)), columns(width)
    return Tiles(rows, 32 if biased else 64, D, 8 if rows * D >= 64 * 64 else 4, 2)


def key_tiles(queries: int, width: int) -> Tiles:
    """Tiles of the kernel of the keys' and values' gradients."""
    return Tiles(min(32, columns(queries)), 128, columns(width), 8, 2)


@torch.library.custom_op("gem::jagged_attention", mutates_args=())
def attend(
    q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, bias_TH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(read [R, Q, H, d], base-2 logarithm of the softmax's denominator [R, H, Q]) by Triton; a bias is float32, rows packed."""
    (queries, heads, width), rows = q_RQHd.shape[1:], len(offsets) - 1
    out = q_RQHd.new_empty(rows, queries, heads, width)
    lse = q_RQHd.new_empty((rows, heads, queries), dtype=torch.float32)
    if out.numel():
        cut = forward_tiles(queries, width)
        grid = (rows * -(-queries // cut.BM), heads)
        with torch.cuda.device_of(q_RQHd):
            _forward_kernel[grid](
                q_RQHd, k_THd, v_THd, lse if bias_TH is None else bias_TH, out, lse, offsets, longest_first(offsets),
                scales(width**-0.5)[1], *_strides(q_RQHd, k_THd, v_THd), queries,
                BIASED=bias_TH is not None, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("gem::jagged_attention_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q_RQHd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    bias_TH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and the bias by Triton; shared queries' are summed in float32, in fixed order."""
    (queries, heads, width), rows, shared = q_RQHd.shape[1:], len(offsets) - 1, len(q_RQHd) == 1
    dk, dv = k_THd.new_empty(k_THd.shape), v_THd.new_empty(v_THd.shape)
    dbias = _like_bias(lse, bias_TH)
    if not out.numel():
        return torch.zeros_like(q_RQHd), dk.zero_(), dv.zero_(), dbias.zero_()
    parts = min(rows, PARTS) if shared else rows
    dq = q_RQHd.new_empty((parts, queries, heads, width), dtype=torch.float32 if shared else q_RQHd.dtype)
    delta, order = torch.empty_like(lse), longest_first(offsets)
    strides, biased, bias = _strides(q_RQHd, k_THd, v_THd), bias_TH is not None, lse if bias_TH is None else bias_TH
    with torch.cuda.device_of(q_RQHd):
        cut = query_tiles(queries, width, capability(q_RQHd.device), biased=biased)
        _query_kernel[(parts * -(-queries // cut.BM), heads)](
            q_RQHd, k_THd, v_THd, bias, out, dout, lse, delta, dq, offsets, order, *scales(width**-0.5),
            *strides, queries, rows, parts,
            BIASED=biased, SHARED=shared, WIDTH=width, PRECISION=precision(), **cut._asdict(),
        )  # fmt: skip
        cut = key_tiles(queries, width)
        owner, first = tiles_of(offsets, len(k_THd), cut.BN)
        _key_kernel[(len(owner), heads)](
            q_RQHd, k_THd, v_THd, bias, dout, lse, delta, dk, dv, dbias, offsets, owner, first, *scales(width**-0.5),
            *strides, queries, rows,
            BIASED=biased, WIDTH=width, PRECISION=precision(), **cut._asdict(),
        )  # fmt: skip
    return dq.sum(0, keepdim=True).to(q_RQHd.dtype) if shared else dq, dk, dv, dbias


def _like_bias(lse: Tensor, bias_TH: Tensor | None) -> Tensor:
    """Room for its gradient; nothing if there is none."""
    return lse.new_empty(0 if bias_TH is None else bias_TH.shape)


@attend.register_fake
def _(
    q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, bias_TH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (queries, heads, width), rows = q_RQHd.shape[1:], len(offsets) - 1
    lse = q_RQHd.new_empty((rows, heads, queries), dtype=torch.float32)
    return q_RQHd.new_empty(rows, queries, heads, width), lse


@attend_backward.register_fake
def _(
    dout: Tensor,
    q_RQHd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    bias_TH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_RQHd, k_THd, v_THd))
    return dq, dk, dv, _like_bias(lse, bias_TH)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    q, k, v, offsets, bias, out, lse = ctx.saved_tensors
    dq, dk, dv, dbias = torch.ops.gem.jagged_attention_backward(dout.contiguous(), q, k, v, out, lse, offsets, bias)
    return dq, dk, dv, None, None if bias is None else dbias


attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.jagged_attention)
def _forward_flops(q_shape: tuple[int, ...], k_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 4 * k_shape[0] * q_shape[1] * q_shape[2] * q_shape[3]


@register_flop_formula(torch.ops.gem.jagged_attention_backward)
def _backward_flops(_: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...], *__: Any, **___: Any) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(q_shape, k_shape)


def _strides(q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor) -> tuple[int, ...]:
    """Numbers between sequences, queries and heads, tokens and heads, tokens and heads."""
    return (q_RQHd.stride(0) if len(q_RQHd) > 1 else 0, *q_RQHd.stride()[1:3], *k_THd.stride()[:2], *v_THd.stride()[:2])


@jit
def _bias_tile(
    bias: tl.tensor, first: tl.tensor, left: tl.tensor, head: tl.tensor, heads: tl.tensor,
    BIASED: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BN] of keys from `first` on, times log2(e), as scores are in base 2; nothing reads the zeros that stand for none."""
    number = tl.arange(0, BN)
    if BIASED:
        there = tl.load(bias + (first + number) * heads + head, mask=number < left, other=0.0)
        return there * 1.4426950408889634
    return tl.zeros((BN,), tl.float32)


@jit
def _forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, bias: tl.tensor, out: tl.tensor, lse: tl.tensor, offsets: tl.tensor,
    order: tl.tensor, power: tl.tensor, q_row: tl.tensor, q_query: tl.tensor, q_head: tl.tensor, k_token: tl.tensor,
    k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, queries: tl.tensor,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of a sequence's queries over all its keys, for one head."""
    tiles = tl.cdiv(queries, BM)
    row, tile = tl.load(order + tl.program_id(0) // tiles), tl.program_id(0) % tiles
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    left, number = queries - tile * BM, tl.arange(0, BM)
    q_tile = load_tile(q + row * q_row + tile * BM * q_query + head * q_head, q_query, left, BM, WIDTH, D, True)
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    acc = tl.zeros((BM, D), tl.float32)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    whole = length // BN * BN
    for key in range(0, whole, BN):
        k_tile = load_tile(k, k_token, BN, BN, WIDTH, D, False)
        v_tile = load_tile(v, v_token, BN, BN, WIDTH, D, False)
        more = _bias_tile(bias, start + key, BN, head, heads, BIASED, BN)
        acc, top, total = softmax_step(
            acc, top, total, q_tile, k_tile, v_tile, BN, power, BN, False, PRECISION, more, BIASED
        )
        k += BN * k_token
        v += BN * v_token
    if whole < length:
        rest = length - whole
        k_rest = load_tile(k, k_token, rest, BN, WIDTH, D, True)
        v_rest = load_tile(v, v_token, rest, BN, WIDTH, D, True)
        more = _bias_tile(bias, start + whole, rest, head, heads, BIASED, BN)
        acc, top, total = softmax_step(
            acc, top, total, q_tile, k_rest, v_rest, rest, power, BN, True, PRECISION, more, BIASED
        )
    total = tl.where(length > 0, total, 1.0)
    here = ((row * queries + tile * BM) * heads + head) * WIDTH
    store_tile(out + here, heads * WIDTH, left, acc / total[:, None], BM, WIDTH, D)
    statistics = (row * heads + head) * queries + tile * BM + number
    tl.store(lse + statistics, top + tl.log2(total), mask=number < left)


@jit
def _query_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, bias: tl.tensor, out: tl.tensor, dout: tl.tensor, lse: tl.tensor,
    delta: tl.tensor, dq: tl.tensor, offsets: tl.tensor, order: tl.tensor, scale: tl.tensor, power: tl.tensor,
    q_row: tl.tensor, q_query: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor,
    v_head: tl.tensor, queries: tl.tensor, rows: tl.tensor, parts: tl.tensor,
    BIASED: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """dQ of one tile of queries over the keys of every `parts`-th sequence, and Δ = Σ dO · O of each, for one head."""
    tiles = tl.cdiv(queries, BM)
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, heads = tl.program_id(1), tl.num_programs(1)
    number, left = tl.arange(0, BM), queries - tile * BM
    acc = tl.zeros((BM, D), tl.float32)
    for turn in range(part, rows, parts):
        row = tl.load(order + turn)
        start = tl.load(offsets + row)
        length = (tl.load(offsets + row + 1) - start).to(tl.int32)
        here = ((row * queries + tile * BM) * heads + head) * WIDTH
        statistics = (row * heads + head) * queries + tile * BM + number
        q_tile = load_tile(q + row * q_row + tile * BM * q_query + head * q_head, q_query, left, BM, WIDTH, D, True)
        do_tile = load_tile(dout + here, heads * WIDTH, left, BM, WIDTH, D, True)
        along = row_dots(dout + here, out + here, heads * WIDTH, left, BM, WIDTH, D)
        tl.store(delta + statistics, along, mask=number < left)
        norm = tl.load(lse + statistics, mask=number < left, other=float("inf"))
        k_row, v_row = k + start * k_token + head * k_head, v + start * v_token + head * v_head
        whole = length // BN * BN
        for key in range(0, whole, BN):
            k_tile = load_tile(k_row, k_token, BN, BN, WIDTH, D, False)
            v_tile = load_tile(v_row, v_token, BN, BN, WIDTH, D, False)
            more = _bias_tile(bias, start + key, BN, head, heads, BIASED, BN)
            acc = query_step(
                acc, q_tile, do_tile, norm, along, k_tile, v_tile, BN, power, BN, False, PRECISION, more, BIASED
            )
            k_row += BN * k_token
            v_row += BN * v_token
        if whole < length:
            rest = length - whole
            k_rest = load_tile(k_row, k_token, rest, BN, WIDTH, D, True)
            v_rest = load_tile(v_row, v_token, rest, BN, WIDTH, D, True)
            more = _bias_tile(bias, start + whole, rest, head, heads, BIASED, BN)
            acc = query_step(
                acc, q_tile, do_tile, norm, along, k_rest, v_rest, rest, power, BN, True, PRECISION, more, BIASED
            )
    owner = part.to(tl.int64) if SHARED else tl.load(order + part)
    there = ((owner * queries + tile * BM) * heads + head) * WIDTH
    store_tile(dq + there, heads * WIDTH, left, acc * scale, BM, WIDTH, D)


@jit
def _key_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, bias: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dk: tl.tensor, dv: tl.tensor, dbias: tl.tensor, offsets: tl.tensor, owner: tl.tensor, firsts: tl.tensor,
    scale: tl.tensor, power: tl.tensor, q_row: tl.tensor, q_query: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_token: tl.tensor, v_head: tl.tensor, queries: tl.tensor, rows: tl.tensor,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
) -> None:  # fmt: skip
    """dK, dV and the bias's gradient of one tile of keys over all queries of its sequence, for one head."""
    row = tl.load(owner + tl.program_id(0))
    if row >= rows:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.load(offsets + row) + tl.load(firsts + tl.program_id(0))
    left = (tl.load(offsets + row + 1) - start).to(tl.int32)
    k_tile = load_tile(k + start * k_token + head * k_head, k_token, left, BN, WIDTH, D, True)
    v_tile = load_tile(v + start * v_token + head * v_head, v_token, left, BN, WIDTH, D, True)
    q += row * q_row + head * q_head
    dout += (row * queries * heads + head) * WIDTH
    statistics = (row * heads + head) * queries + tl.arange(0, BM)
    dk_tile, dv_tile = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    more, total = _bias_tile(bias, start, left, head, heads, BIASED, BN), tl.zeros((BN,), tl.float32)
    for first in range(0, queries, BM):
        here = tl.arange(0, BM) < queries - first
        q_tile = load_tile(q + first * q_query, q_query, queries - first, BM, WIDTH, D, True)
        do_tile = load_tile(dout + first * heads * WIDTH, heads * WIDTH, queries - first, BM, WIDTH, D, True)
        norm = tl.load(lse + statistics + first, mask=here, other=float("inf"))
        along = tl.load(delta + statistics + first, mask=here, other=0.0)
        if BIASED:
            dk_tile, dv_tile, change = key_step(
                dk_tile, dv_tile, k_tile, v_tile, q_tile, do_tile, norm, along, power, PRECISION, more, True
            )
            total += change
        else:
            dk_tile, dv_tile = key_step(
                dk_tile, dv_tile, k_tile, v_tile, q_tile, do_tile, norm, along, power, PRECISION
            )
    if BIASED:
        number = tl.arange(0, BN)
        tl.store(dbias + (start + number) * heads + head, total, mask=number < left)
    there = (start * heads + head) * WIDTH
    store_tile(dk + there, heads * WIDTH, left, dk_tile * scale, BN, WIDTH, D)
    store_tile(dv + there, heads * WIDTH, left, dv_tile, BN, WIDTH, D)
