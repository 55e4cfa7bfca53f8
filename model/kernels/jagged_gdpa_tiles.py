"""Attention without softmax over jagged keys by Triton: act(α · Q Kᵀ ⊙ W) · β · V.

Knows tiles. Does not know what queries stand for: `model.kernels.jagged_gdpa` has the definition.

A program goes over the tiles of keys that its queries' window reaches, and backward once more for dQ; another owns a tile
of keys and goes over the queries that reach it, for dK and dV. Each writes what it owns: no atomics. Gradients of
queries that all sequences share are summed over these in float32.

R sequences, T keys packed, H heads, d width of a head, D the power of two that holds it; queries are jagged [T, H, d], as
the keys are, or dense [R or 1, Q, H, d]; BM queries and BN keys a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from model.kernels.activations import curve, launches
from model.kernels.gpu import (
    Tiles,
    columns,
    jit,
    like_inputs,
    load_tile,
    longest_first,
    precision,
    store_tile,
    tiles_of,
    tl,
)


def query_tiles(queries: int, width: int) -> Tiles:
    """Tiles of the kernel of reads, and of that of the queries' gradient."""
    return Tiles(min(128, columns(queries)), 64, columns(width), 8, 2)


def key_tiles(queries: int, width: int) -> Tiles:
    """Tiles of the kernel of the keys' and values' gradients."""
    return Tiles(min(32, columns(queries)), 128, columns(width), 8, 2)


@torch.library.custom_op("gem::jagged_gdpa", mutates_args=())
def attend(
    q: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, window: int, activation: str, alpha: float, beta: float
) -> Tensor:
    """[T, H, d] of jagged queries or [R, Q, H, d] of dense ones; a negative window takes all in."""
    out = q.new_empty(_shape(q, offsets))
    _over_queries(None, out, q, k_THd, v_THd, offsets, window, activation, alpha, beta)
    return out


@torch.library.custom_op("gem::jagged_gdpa_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    offsets: Tensor,
    window: int,
    activation: str,
    alpha: float,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    shared = q.dim() == 4 and len(q) == 1
    dq = q.new_empty(dout.shape, dtype=torch.float32 if shared else q.dtype)
    dk, dv = k_THd.new_empty(k_THd.shape), v_THd.new_empty(v_THd.shape)
    _over_queries(dout, dq, q, k_THd, v_THd, offsets, window, activation, alpha, beta)
    (heads, width), cut = q.shape[-2:], key_tiles(q.shape[-3], q.shape[-1])
    owner, firsts = tiles_of(offsets, len(k_THd), cut.BN, longest_first(offsets))
    for name, first, count in launches(activation, heads) if dk.numel() else ():
        with torch.cuda.device_of(q):
            _key_kernel[(len(owner), count)](
                q, k_THd, v_THd, dout, dk, dv, offsets, owner, firsts, alpha, beta, *_strides(q, k_THd, v_THd),
                q.shape[-3], len(offsets) - 1, window, heads, first,
                JAGGED=q.dim() == 3, WINDOWED=window >= 0, ACTIVATION=name, WIDTH=width, PRECISION=precision(),
                **cut._asdict(),
            )  # fmt: skip
    return dq.sum(0, keepdim=True).to(q.dtype) if shared else dq, dk, dv


def _over_queries(
    dout: Tensor | None,
    to: Tensor,
    q: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    offsets: Tensor,
    window: int,
    activation: str,
    alpha: float,
    beta: float,
) -> None:
    """Writes reads, or the queries' gradients of `dout`."""
    (queries, heads, width), rows, jagged = q.shape[-3:], len(offsets) - 1, q.dim() == 3
    cut = query_tiles(queries, width)
    if jagged:
        owner, firsts = tiles_of(offsets, queries, cut.BM, longest_first(offsets))
    else:
        tiles = -(-queries // cut.BM)
        program = torch.arange(rows * tiles, device=q.device)
        owner, firsts = program // max(1, tiles), program % max(1, tiles) * cut.BM
    for name, first, count in launches(activation, heads) if to.numel() else ():
        with torch.cuda.device_of(q):
            _query_kernel[(len(owner), count)](
                q, k_THd, v_THd, to if dout is None else dout, to, offsets, owner, firsts, alpha, beta,
                *_strides(q, k_THd, v_THd), queries, rows, window, heads, first,
                BACKWARD=dout is not None, JAGGED=jagged, WINDOWED=window >= 0, ACTIVATION=name, WIDTH=width,
                PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip


def _shape(q: Tensor, offsets: Tensor) -> tuple[int, ...]:
    return tuple(q.shape) if q.dim() == 3 else (len(offsets) - 1, *q.shape[1:])


@attend.register_fake
def _(
    q: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, window: int, activation: str, alpha: float, beta: float
) -> Tensor:
    return q.new_empty(_shape(q, offsets))


attend_backward.register_fake(like_inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window, ctx.activation, ctx.alpha, ctx.beta = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    options = (ctx.window, ctx.activation, ctx.alpha, ctx.beta)
    gradients = torch.ops.gem.jagged_gdpa_backward(dout.contiguous(), *ctx.saved_tensors, *options)
    return *gradients, None, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.jagged_gdpa, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: int, *_: Any, **__: Any) -> int:
    """Of the pairs within the window; where a trace has no numbers, as if one sequence held all tokens."""
    if q.dim() == 4:
        return 4 * k.shape[0] * q.shape[1] * q.shape[2] * q.shape[3]
    lengths = torch.tensor([len(q)]) if isinstance(offsets, FakeTensor) else offsets.diff()
    reach = (lengths - 1).clamp(min=0) if window < 0 else (lengths - 1).clamp(0, window)
    pairs = lengths + 2 * reach * lengths - reach * (reach + 1)
    return 4 * int(pairs.sum()) * q.shape[1] * q.shape[2]


@register_flop_formula(torch.ops.gem.jagged_gdpa_backward, get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **_: Any) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(*args)


def _strides(q: Tensor, k_THd: Tensor, v_THd: Tensor) -> tuple[int, ...]:
    """Numbers between sequences, queries and heads (jagged queries': tokens twice); tokens and heads of keys and values."""
    row = q.stride(0) if q.dim() == 3 or len(q) > 1 else 0
    return (row, *q.stride()[-3:-1], *k_THd.stride()[:2], *v_THd.stride()[:2])


@jit
def _scores(
    rows: tl.tensor, columns: tl.tensor, row: tl.tensor, column: tl.tensor, alpha: tl.tensor, window: tl.tensor,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(α · products, 0 outside the window; whether a pair is inside); `row` and `column` count from their sequence's start."""
    scores = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * alpha
    apart = row - column + tl.arange(0, ROWS)[:, None] - tl.arange(0, COLUMNS)[None, :]
    near = tl.abs(apart) <= window if WINDOWED else apart == apart
    return tl.where(near, scores, 0.0), near


@jit
def _query_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, out: tl.tensor, offsets: tl.tensor, owner: tl.tensor,
    firsts: tl.tensor, alpha: tl.tensor, beta: tl.tensor, q_row: tl.tensor, q_query: tl.tensor, q_head: tl.tensor,
    k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, queries: tl.tensor,
    rows: tl.tensor, window: tl.tensor, heads: tl.tensor, skip: tl.tensor,
    BACKWARD: tl.constexpr, JAGGED: tl.constexpr, WINDOWED: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """What BM queries read of the keys in their window, or their gradient, for one of the heads from `skip` on."""
    row, first, head = tl.load(owner + tl.program_id(0)), tl.load(firsts + tl.program_id(0)), skip + tl.program_id(1)
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length, first = (tl.load(offsets + row + 1) - start).to(tl.int32), first.to(tl.int32)
    left, origin, place = queries - first, row, row * queries + first
    if JAGGED:
        left, origin, place = length - first, start, start + first
    q_tile = load_tile(q + origin * q_row + first * q_query + head * q_head, q_query, left, BM, WIDTH, D, True)
    place = (place * heads + head) * WIDTH
    if BACKWARD:
        do_tile = load_tile(dout + place, heads * WIDTH, left, BM, WIDTH, D, True)
    low, high = 0, length
    if WINDOWED:
        low, high = tl.maximum(first - window, 0) // BN * BN, tl.minimum(first + BM + window, length)
    k += (start + low) * k_token + head * k_head
    v += (start + low) * v_token + head * v_head
    acc = tl.zeros((BM, D), tl.float32)
    for key in range(low, high, BN):
        k_tile = load_tile(k, k_token, length - key, BN, WIDTH, D, True)
        v_tile = load_tile(v, v_token, length - key, BN, WIDTH, D, True)
        scores, near = _scores(q_tile, k_tile, first, key, alpha, window, WINDOWED, PRECISION, BM, BN)
        p, slope = curve(scores, ACTIVATION)
        if BACKWARD:
            ds = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * tl.where(near, slope, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        k += BN * k_token
        v += BN * v_token
    store_tile(out + place, heads * WIDTH, left, acc * (alpha * beta if BACKWARD else beta), BM, WIDTH, D)


@jit
def _key_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, dk: tl.tensor, dv: tl.tensor, offsets: tl.tensor,
    owner: tl.tensor, firsts: tl.tensor, alpha: tl.tensor, beta: tl.tensor, q_row: tl.tensor, q_query: tl.tensor,
    q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor,
    queries: tl.tensor, rows: tl.tensor, window: tl.tensor, heads: tl.tensor, skip: tl.tensor,
    JAGGED: tl.constexpr, WINDOWED: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """dK and dV of BN keys over the queries that reach them, for one of the heads from `skip` on."""
    row, key, head = tl.load(owner + tl.program_id(0)), tl.load(firsts + tl.program_id(0)), skip + tl.program_id(1)
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length, key = (tl.load(offsets + row + 1) - start).to(tl.int32), key.to(tl.int32)
    k += (start + key) * k_token + head * k_head
    v += (start + key) * v_token + head * v_head
    k_tile = load_tile(k, k_token, length - key, BN, WIDTH, D, True)
    v_tile = load_tile(v, v_token, length - key, BN, WIDTH, D, True)
    count, origin, place = queries, row, row * queries
    if JAGGED:
        count, origin, place = length, start, start
    low, high = 0, count
    if WINDOWED:
        low, high = tl.maximum(key - window, 0) // BM * BM, tl.minimum(key + BN + window, count)
    q += origin * q_row + low * q_query + head * q_head
    dout += ((place + low) * heads + head) * WIDTH
    dk_tile, dv_tile = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for first in range(low, high, BM):
        q_tile = load_tile(q, q_query, count - first, BM, WIDTH, D, True)
        do_tile = load_tile(dout, heads * WIDTH, count - first, BM, WIDTH, D, True)
        scores, near = _scores(k_tile, q_tile, key, first, alpha, window, WINDOWED, PRECISION, BN, BM)
        p, slope = curve(scores, ACTIVATION)
        dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
        ds = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * tl.where(near, slope, 0.0)
        dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
        q += BM * q_query
        dout += BM * heads * WIDTH
    there = ((start + key) * heads + head) * WIDTH
    store_tile(dk + there, heads * WIDTH, length - key, dk_tile * (alpha * beta), BN, WIDTH, D)
    store_tile(dv + there, heads * WIDTH, length - key, dv_tile * beta, BN, WIDTH, D)
