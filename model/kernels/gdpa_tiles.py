"""Generalized dot-product attention by Triton: act(α · Q Kᵀ) · β · V, jagged queries over dense short keys.

Knows tiles. Does not know layouts of buckets, nor what conditions what: `model.kernels.gdpa` has the definition.

Forward, a program reads a run of a sequence's queries and keeps the keys where it can. Backward, a program owns a tile of
keys and goes over the queries once: it writes dK and dV, and dQ too where one tile holds all keys; else, and where there are
few sequences, programs write sums apart in float32, which are added in a fixed order. No atomics. Since act(0) = 0, queries
and keys that are not there add nothing.

T queries packed over R sequences, M keys a sequence, H heads, d width of a head, D the power of two that holds it; BM
queries and BN keys a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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

RUN = 8
"""Tiles of queries that share a load of the keys."""
PROGRAMS = 264
"""Programs that keep a GPU busy; a batch of fewer sequences and heads shares the queries of each out."""


def forward_tiles(keys: int, width: int) -> Tiles:
    """Tiles of the forward kernel; more keys than one tile holds come in smaller ones, or registers spill."""
    return Tiles(128, min(128, columns(keys)) if keys <= 128 else 64, columns(width), 8, 2)


def backward_tiles(keys: int, width: int) -> Tiles:
    """Tiles of the backward kernel: one holds up to 128 keys, as queries' gradients of several would have to be added."""
    BN = min(128, columns(keys))
    return Tiles(64 if BN <= 64 else 32, BN, columns(width), 8, 2)


@torch.library.custom_op("gem::gdpa", mutates_args=())
def attend(
    q_THd: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, offsets: Tensor, activation: str, alpha: float, beta: float
) -> Tensor:
    """[T, H, d]"""
    (total, heads, width), keys, out = q_THd.shape, k_RMHd.shape[1], q_THd.new_empty(q_THd.shape)
    if out.numel():
        cut = forward_tiles(keys, width)
        owner, firsts = tiles_of(offsets, total, RUN * cut.BM)
        for name, first, count in launches(activation, heads):
            with torch.cuda.device_of(q_THd):
                _forward_kernel[(len(owner), count)](
                    q_THd, k_RMHd, v_RMHd, out, offsets, owner, firsts, alpha, beta, *_strides(q_THd, k_RMHd, v_RMHd),
                    len(k_RMHd), heads, first, KEYS=keys, SPAN=RUN * cut.BM, ACTIVATION=name, WIDTH=width,
                    PRECISION=precision(), **cut._asdict(),
                )  # fmt: skip
    return out


@torch.library.custom_op("gem::gdpa_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q_THd: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    (heads, width), (rows, keys) = q_THd.shape[1:], k_RMHd.shape[:2]
    cut = backward_tiles(keys, width)
    tiles = -(-keys // cut.BN)
    parts = min(16, max(1, PROGRAMS // max(1, rows * heads * tiles)))
    dq = q_THd.new_empty((tiles, *q_THd.shape), dtype=torch.float32 if tiles > 1 else q_THd.dtype)
    dk, dv = (x.new_empty((parts, *x.shape), dtype=torch.float32 if parts > 1 else x.dtype) for x in (k_RMHd, v_RMHd))
    order = longest_first(offsets)
    for name, first, count in launches(activation, heads) if dk.numel() else ():
        with torch.cuda.device_of(q_THd):
            _backward_kernel[(rows * parts, count, tiles)](
                q_THd, k_RMHd, v_RMHd, dout, dq, dk, dv, offsets, order, alpha, beta,
                *_strides(q_THd, k_RMHd, v_RMHd), len(q_THd), rows, parts, heads, first,
                KEYS=keys, ACTIVATION=name, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return added(dq, q_THd), added(dk, k_RMHd), added(dv, v_RMHd)


def added(parts: Tensor, like: Tensor) -> Tensor:
    """The sum of what programs wrote apart, in `like`'s dtype."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(like.dtype)


@attend.register_fake
def _(
    q_THd: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, offsets: Tensor, activation: str, alpha: float, beta: float
) -> Tensor:
    return q_THd.new_empty(q_THd.shape)


attend_backward.register_fake(like_inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.alpha, ctx.beta = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    options = (ctx.activation, ctx.alpha, ctx.beta)
    gradients = torch.ops.gem.gdpa_backward(dout.contiguous(), *ctx.saved_tensors, *options)
    return *gradients, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.gdpa)
def _forward_flops(q_shape: tuple[int, ...], k_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 4 * q_shape[0] * k_shape[1] * q_shape[1] * q_shape[2]


@register_flop_formula(torch.ops.gem.gdpa_backward)
def _backward_flops(_: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...], *__: Any, **___: Any) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(q_shape, k_shape)


def _strides(q_THd: Tensor, k_RMHd: Tensor, v_RMHd: Tensor) -> tuple[int, ...]:
    """Numbers between queries and heads; between sequences, keys and heads of each."""
    return (*q_THd.stride()[:2], *k_RMHd.stride()[:3], *v_RMHd.stride()[:3])


@jit
def forward_step(
    acc: tl.tensor, q_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, alpha: tl.tensor,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds act(α · Q Kᵀ) V of more keys."""
    p, _ = curve(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * alpha, ACTIVATION)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)


@jit
def _forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, offsets: tl.tensor, owner: tl.tensor, firsts: tl.tensor,
    alpha: tl.tensor, beta: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_key: tl.tensor,
    k_head: tl.tensor, v_row: tl.tensor, v_key: tl.tensor, v_head: tl.tensor, rows: tl.tensor,
    heads: tl.tensor, skip: tl.tensor,
    KEYS: tl.constexpr, SPAN: tl.constexpr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """At most SPAN queries of a sequence over all its keys, for one of the heads from `skip` on."""
    row = tl.load(owner + tl.program_id(0))
    if row >= rows:
        return
    head = skip + tl.program_id(1)
    start = tl.load(offsets + row) + tl.load(firsts + tl.program_id(0))
    count = tl.minimum(tl.load(offsets + row + 1) - start, SPAN).to(tl.int32)
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    q += start * q_token + head * q_head
    out += (start * heads + head) * WIDTH
    if KEYS <= BN:  # keys and values stay
        k_tile = load_tile(k, k_key, KEYS, BN, WIDTH, D, True)
        v_tile = load_tile(v, v_key, KEYS, BN, WIDTH, D, True)
        for left in range(count, 0, -BM):
            q_tile = load_tile(q, q_token, left, BM, WIDTH, D, True)
            acc = forward_step(
                tl.zeros((BM, D), tl.float32), q_tile, k_tile, v_tile, alpha, ACTIVATION, PRECISION
            )
            store_tile(out, heads * WIDTH, left, acc * beta, BM, WIDTH, D)
            q += BM * q_token
            out += BM * heads * WIDTH
    else:
        for left in range(count, 0, -BM):
            q_tile = load_tile(q, q_token, left, BM, WIDTH, D, True)
            acc = tl.zeros((BM, D), tl.float32)
            for key in range(0, KEYS, BN):
                k_tile = load_tile(k + key * k_key, k_key, KEYS - key, BN, WIDTH, D, True)
                v_tile = load_tile(v + key * v_key, v_key, KEYS - key, BN, WIDTH, D, True)
                acc = forward_step(acc, q_tile, k_tile, v_tile, alpha, ACTIVATION, PRECISION)
            store_tile(out, heads * WIDTH, left, acc * beta, BM, WIDTH, D)
            q += BM * q_token
            out += BM * heads * WIDTH


@jit
def _backward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, dq: tl.tensor, dk: tl.tensor, dv: tl.tensor,
    offsets: tl.tensor, order: tl.tensor, alpha: tl.tensor, beta: tl.tensor, q_token: tl.tensor, q_head: tl.tensor,
    k_row: tl.tensor, k_key: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_key: tl.tensor, v_head: tl.tensor,
    total: tl.tensor, rows: tl.tensor, parts: tl.tensor, heads: tl.tensor, skip: tl.tensor,
    KEYS: tl.constexpr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of keys over every `parts`-th tile of its sequence's queries, for one of the heads from `skip` on.

    Keys lie down, queries across.
    """
    row, part = tl.load(order + tl.program_id(0) // parts), tl.program_id(0) % parts
    head, key = skip + tl.program_id(1), tl.program_id(2) * BN
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    k_tile = load_tile(k + row * k_row + key * k_key + head * k_head, k_key, KEYS - key, BN, WIDTH, D, True)
    v_tile = load_tile(v + row * v_row + key * v_key + head * v_head, v_key, KEYS - key, BN, WIDTH, D, True)
    token, step = heads * WIDTH, parts * BM
    q += (start + part * BM) * q_token + head * q_head
    dout += (start + part * BM) * token + head * WIDTH
    dq += (tl.program_id(2).to(tl.int64) * total + start + part * BM) * token + head * WIDTH
    dk_tile, dv_tile = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for first in range(part * BM, length, step):
        left = length - first
        q_tile = load_tile(q, q_token, left, BM, WIDTH, D, True)
        do_tile = load_tile(dout, token, left, BM, WIDTH, D, True)
        p, slope = curve(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * alpha, ACTIVATION)
        dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
        ds = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * slope
        ds = (ds * (alpha * beta)).to(q_tile.dtype)
        dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision=PRECISION)
        store_tile(dq, token, left, tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION), BM, WIDTH, D)
        q += step * q_token
        dout += step * token
        dq += step * token
    there = (((part.to(tl.int64) * rows + row) * KEYS + key) * heads + head) * WIDTH
    store_tile(dk + there, token, KEYS - key, dk_tile, BN, WIDTH, D)
    store_tile(dv + there, token, KEYS - key, dv_tile * beta, BN, WIDTH, D)
