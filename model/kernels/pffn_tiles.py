"""The block around a personalized feed-forward network by Triton: LN → RMSNorm of a head → GDPA → + LN → RMSNorm → + S.

Knows tiles, and the order of norms and residuals. Does not know layouts of buckets: `model.kernels.pffn_block` has the
definition.

Forward is one kernel: a program has a tile of tokens and goes over their heads three times, for the mean and variance, for
what a head reads, for the last norm. What heads have read waits in the output, which the program alone touches, since all
heads of a tile are more than registers hold. Kept are three numbers a token; the output gives the last norm's back, as
S' − S (Meta's norm fusion). Backward three kernels: the last norm's gradient; dK, dV and what reaches LN's output by way of
the queries, head by head, of queries made anew on load; LN's gradient. No atomics.

S [T, D] packed over R sequences, M keys a sequence, H heads, W width of a head, D = H · W; in a kernel D is the power of
two that holds W, BM tokens and BN keys a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from model.kernels.activations import curve
from model.kernels.gdpa_tiles import PROGRAMS, added, forward_step
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

WIDEST_TOKEN = 512
"""D up to which the kernels are chosen; one goes over all heads of a tile."""
MOST_KEYS = 256


class Rows(NamedTuple):
    """How a kernel of whole tokens cuts its work."""

    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


def token_tiles(size: int) -> Rows:
    """Rows of the kernels that hold all numbers of a token."""
    return Rows(8, columns(size), 4, 2)


def forward_tiles(keys: int, width: int) -> Tiles:
    """Tiles of the forward kernel."""
    return Tiles(64, min(64, columns(keys)), columns(width), 8, 2)


def backward_tiles(keys: int, width: int) -> Tiles:
    """Tiles of the kernel of the keys' gradients; two stages of 128 keys spill a register on Hopper."""
    BN = min(128, columns(keys))
    return Tiles(32, BN, columns(width), 8, 2 if BN <= 64 else 1)


@torch.library.custom_op("gem::pffn_block", mutates_args=())
def block(
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    beta: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """(S' [T, D], (mean of S, 1/σ of S, 1/RMS of what the last norm takes) [3, T])."""
    (keys, heads, width), out = k_RMHd.shape[1:], s_TD.new_empty(s_TD.shape)
    kept = s_TD.new_empty((3, len(s_TD)), dtype=torch.float32)
    if out.numel():
        cut = forward_tiles(keys, width)
        owner, firsts = tiles_of(offsets, len(s_TD), cut.BM)
        with torch.cuda.device_of(s_TD):
            _forward_kernel[(len(owner),)](
                s_TD, k_RMHd, v_RMHd, out, *kept, offsets, owner, firsts, alpha, beta, *_strides(s_TD, k_RMHd, v_RMHd),
                len(k_RMHd), heads, KEYS=keys, NORMALIZE=normalize, ACTIVATION=activation, WIDTH=width,
                PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return out, kept


@torch.library.custom_op("gem::pffn_block_backward", mutates_args=())
def block_backward(
    dout: Tensor,
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    out: Tensor,
    kept: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    beta: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of S, keys and values."""
    (rows, keys, heads, width), total = k_RMHd.shape, len(s_TD)
    cut, strides = backward_tiles(keys, width), _strides(s_TD, k_RMHd, v_RMHd)
    tiles = -(-keys // cut.BN)
    parts = min(16, max(1, PROGRAMS // max(1, rows * heads * tiles)))
    ds, du = (s_TD.new_empty(s_TD.shape) for _ in range(2))
    by_keys = s_TD.new_empty((tiles, *s_TD.shape), dtype=torch.float32 if tiles > 1 else s_TD.dtype)
    dk, dv = (x.new_empty((parts, *x.shape), dtype=torch.float32 if parts > 1 else x.dtype) for x in (k_RMHd, v_RMHd))
    size, whole = s_TD.shape[1], token_tiles(s_TD.shape[1])
    grid = (-(-total // whole.ROWS),)
    if dk.numel():
        with torch.cuda.device_of(s_TD):
            if total:
                _last_kernel[grid](s_TD, out, dout, kept[2], du, strides[0], total, size, **whole._asdict())
            _backward_kernel[(rows * parts, heads, tiles)](
                s_TD, k_RMHd, v_RMHd, du, *kept[:2], by_keys, dk, dv, offsets, longest_first(offsets), alpha, beta,
                *strides, total, rows, parts, heads,
                KEYS=keys, NORMALIZE=normalize, ACTIVATION=activation, WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
            if total:
                _norm_kernel[grid](
                    s_TD, dout, du, *kept[:2], by_keys, ds, strides[0], total, size, TILES=tiles, **whole._asdict()
                )
    return ds, added(dk, k_RMHd), added(dv, v_RMHd)


@block.register_fake
def _(
    s_TD: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    beta: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    return s_TD.new_empty(s_TD.shape), s_TD.new_empty((3, len(s_TD)), dtype=torch.float32)


block_backward.register_fake(like_inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    s, k, v, offsets, *ctx.options = inputs
    ctx.save_for_backward(s, k, v, *output, offsets)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    gradients = torch.ops.gem.pffn_block_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None


block.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.pffn_block)
def _forward_flops(s_shape: tuple[int, ...], k_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Of the two products; norms are not counted."""
    return 4 * s_shape[0] * s_shape[1] * k_shape[1]


@register_flop_formula(torch.ops.gem.pffn_block_backward)
def _backward_flops(_: Any, s_shape: tuple[int, ...], k_shape: tuple[int, ...], *__: Any, **___: Any) -> int:
    """Four products: scores computed again are not counted."""
    return 2 * _forward_flops(s_shape, k_shape)


def _strides(s_TD: Tensor, k_RMHd: Tensor, v_RMHd: Tensor) -> tuple[int, ...]:
    """Numbers between tokens; between sequences, keys and heads of each."""
    return (s_TD.stride(0), *k_RMHd.stride()[:3], *v_RMHd.stride()[:3])


@jit
def _normal_tile(
    s: tl.tensor, s_token: tl.tensor, left: tl.tensor, mean: tl.tensor, rstd: tl.tensor,
    BM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """LayerNorm's output for one head [BM, D]; zeros from column WIDTH."""
    x = (load_tile(s, s_token, left, BM, WIDTH, D, True).to(tl.float32) - mean[:, None]) * rstd[:, None]
    return x if WIDTH == D else tl.where(tl.arange(0, D)[None, :] < WIDTH, x, 0.0)


@jit
def _turn(x: tl.tensor, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr) -> tl.tensor:
    """[rows] what RMSNorm scales them by; 1 if there is none."""
    if NORMALIZE:
        return tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-5)
    return tl.full((x.shape[0],), 1.0, tl.float32)


@jit
def _forward_kernel(
    s: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, mean: tl.tensor, rstd: tl.tensor, rms: tl.tensor,
    offsets: tl.tensor, owner: tl.tensor, firsts: tl.tensor, alpha: tl.tensor, beta: tl.tensor, s_token: tl.tensor,
    k_row: tl.tensor, k_key: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_key: tl.tensor, v_head: tl.tensor,
    rows: tl.tensor, heads: tl.tensor,
    KEYS: tl.constexpr, NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """BM tokens of a sequence over all its keys, for all heads."""
    row = tl.load(owner + tl.program_id(0))
    if row >= rows:
        return
    start = tl.load(offsets + row) + tl.load(firsts + tl.program_id(0))
    left, number, size = (tl.load(offsets + row + 1) - start).to(tl.int32), tl.arange(0, BM), heads * WIDTH
    s += start * s_token
    out += start * size
    k += row * k_row
    v += row * v_row
    center, spread = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    for head in range(0, heads):  # means and squares of heads make those of the token (Chan et al.)
        x = load_tile(s + head * WIDTH, s_token, left, BM, WIDTH, D, True).to(tl.float32)
        own = tl.sum(x, 1) / WIDTH
        away = tl.where(tl.arange(0, D)[None, :] < WIDTH, x - own[:, None], 0.0)
        shift = own - center
        center += shift / (head + 1)
        spread += tl.sum(away * away, 1) + shift * shift * (WIDTH * head / (head + 1))
    scale = tl.rsqrt(spread / size + 1e-5)
    tl.store(mean + start + number, center, mask=number < left)
    tl.store(rstd + start + number, scale, mask=number < left)
    square = tl.zeros((BM,), tl.float32)
    for head in range(0, heads):
        x = _normal_tile(s + head * WIDTH, s_token, left, center, scale, BM, WIDTH, D)
        q_tile = (x * _turn(x, WIDTH, NORMALIZE)[:, None]).to(k.dtype.element_ty)
        acc = tl.zeros((BM, D), tl.float32)
        for key in range(0, KEYS, BN):
            k_tile = load_tile(k + key * k_key + head * k_head, k_key, KEYS - key, BN, WIDTH, D, True)
            v_tile = load_tile(v + key * v_key + head * v_head, v_key, KEYS - key, BN, WIDTH, D, True)
            acc = forward_step(acc, q_tile, k_tile, v_tile, alpha, ACTIVATION, PRECISION)
        # Loaded again: registers that held it all along would spill.
        acc = acc * beta + _normal_tile(s + head * WIDTH, s_token, left, center, scale, BM, WIDTH, D)
        square += tl.sum(acc * acc, 1)
        store_tile(out + head * WIDTH, size, left, acc, BM, WIDTH, D)
    scale = tl.rsqrt(square / size + 1e-5)
    tl.store(rms + start + number, scale, mask=number < left)
    tl.debug_barrier()  # what a thread reads now another may have written
    for head in range(0, heads):
        acc = load_tile(out + head * WIDTH, size, left, BM, WIDTH, D, True).to(tl.float32) * scale[:, None]
        x = load_tile(s + head * WIDTH, s_token, left, BM, WIDTH, D, True).to(tl.float32)
        store_tile(out + head * WIDTH, size, left, acc + x, BM, WIDTH, D)


@jit
def _last_kernel(
    s: tl.tensor, out: tl.tensor, dout: tl.tensor, rms: tl.tensor, du: tl.tensor, s_token: tl.tensor, total: tl.tensor,
    size: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """What reaches the last norm's input, of a few tokens: (dS' − y·mean(dS'·y)) / RMS, for y = S' − S."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, inside = tl.arange(0, COLUMNS)[None, :], number < total
    there, where = inside[:, None] & (column < size), number[:, None] * size + column
    y = tl.load(out + where, mask=there, other=0.0).to(tl.float32)
    y -= tl.load(s + number[:, None] * s_token + column, mask=there, other=0.0).to(tl.float32)
    gradient = tl.load(dout + where, mask=there, other=0.0).to(tl.float32)
    gradient -= y * (tl.sum(gradient * y, 1) / size)[:, None]
    gradient *= tl.load(rms + number, mask=inside, other=0.0)[:, None]
    tl.store(du + where, gradient.to(du.dtype.element_ty), mask=there)


@jit
def _backward_kernel(
    s: tl.tensor, k: tl.tensor, v: tl.tensor, du: tl.tensor, mean: tl.tensor, rstd: tl.tensor,
    by_keys: tl.tensor, dk: tl.tensor, dv: tl.tensor, offsets: tl.tensor, order: tl.tensor,
    alpha: tl.tensor, beta: tl.tensor, s_token: tl.tensor, k_row: tl.tensor, k_key: tl.tensor,
    k_head: tl.tensor, v_row: tl.tensor, v_key: tl.tensor, v_head: tl.tensor, total: tl.tensor, rows: tl.tensor,
    parts: tl.tensor, heads: tl.tensor,
    KEYS: tl.constexpr, NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of keys over every `parts`-th tile of its sequence's tokens, for one head; keys down, tokens across."""
    row, part = tl.load(order + tl.program_id(0) // parts), tl.program_id(0) % parts
    head, key, number = tl.program_id(1), tl.program_id(2) * BN, tl.arange(0, BM)
    start = tl.load(offsets + row)
    length, token, step = (tl.load(offsets + row + 1) - start).to(tl.int32), heads * WIDTH, parts * BM
    k_tile = load_tile(k + row * k_row + key * k_key + head * k_head, k_key, KEYS - key, BN, WIDTH, D, True)
    v_tile = load_tile(v + row * v_row + key * v_key + head * v_head, v_key, KEYS - key, BN, WIDTH, D, True)
    dk_tile, dv_tile = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    at = start + part * BM
    s += at * s_token + head * WIDTH
    du += at * token + head * WIDTH
    by_keys += (tl.program_id(2).to(tl.int64) * total + at) * token + head * WIDTH
    for first in range(part * BM, length, step):
        left = length - first
        center = tl.load(mean + start + first + number, mask=number < left, other=0.0)
        scale = tl.load(rstd + start + first + number, mask=number < left, other=0.0)
        x = _normal_tile(s, s_token, left, center, scale, BM, WIDTH, D)
        turn = _turn(x, WIDTH, NORMALIZE)
        q_tile = (x * turn[:, None]).to(k_tile.dtype)
        du_tile = load_tile(du, token, left, BM, WIDTH, D, True).to(k_tile.dtype)
        p, slope = curve(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * alpha, ACTIVATION)
        dv_tile = tl.dot(p.to(k_tile.dtype), du_tile, dv_tile, input_precision=PRECISION)
        grown = tl.dot(v_tile, tl.trans(du_tile), input_precision=PRECISION) * slope
        grown = (grown * (alpha * beta)).to(k_tile.dtype)
        dk_tile = tl.dot(grown, q_tile, dk_tile, input_precision=PRECISION)
        dq = tl.dot(tl.trans(grown), k_tile, input_precision=PRECISION)
        if NORMALIZE:
            x = q_tile.to(tl.float32)
            dq = (dq - x * (tl.sum(dq * x, 1) / WIDTH)[:, None]) * turn[:, None]
        store_tile(by_keys, token, left, dq, BM, WIDTH, D)
        s += step * s_token
        du += step * token
        by_keys += step * token
    there = (((part.to(tl.int64) * rows + row) * KEYS + key) * heads + head) * WIDTH
    store_tile(dk + there, token, KEYS - key, dk_tile, BN, WIDTH, D)
    store_tile(dv + there, token, KEYS - key, dv_tile * beta, BN, WIDTH, D)


@jit
def _norm_kernel(
    s: tl.tensor, dout: tl.tensor, du: tl.tensor, mean: tl.tensor, rstd: tl.tensor, by_keys: tl.tensor, ds: tl.tensor,
    s_token: tl.tensor, total: tl.tensor, size: tl.tensor,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """dS of a few tokens: what reaches LayerNorm's output straight and by way of the queries, and the outer residual."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, inside = tl.arange(0, COLUMNS)[None, :], number < total
    there, where = inside[:, None] & (column < size), number[:, None] * size + column
    gradient = tl.load(du + where, mask=there, other=0.0).to(tl.float32)
    for tile in tl.static_range(TILES):
        gradient += tl.load(by_keys + tile * total.to(tl.int64) * size + where, mask=there, other=0.0).to(tl.float32)
    center, scale = tl.load(mean + number, mask=inside, other=0.0), tl.load(rstd + number, mask=inside, other=0.0)
    x = tl.load(s + number[:, None] * s_token + column, mask=there, other=0.0).to(tl.float32)
    x = tl.where(there, (x - center[:, None]) * scale[:, None], 0.0)
    gradient -= (tl.sum(gradient, 1) / size)[:, None] + x * (tl.sum(gradient * x, 1) / size)[:, None]
    outer = tl.load(dout + where, mask=there, other=0.0).to(tl.float32)
    tl.store(ds + where, (gradient * scale[:, None] + outer).to(ds.dtype.element_ty), mask=there)
