"""What the Triton kernels share: when they run, tiles of rows, precision of products, steps of a running softmax.

Knows Triton, which may be missing: then CUDA tensors take the portable path of every op. Does not know any op.

Kernels do index arithmetic in 64 bits up to a tile's first row and in 32 bits inside a tile, so that tables of
tokens may exceed 2³¹ numbers. BM queries and BN keys a tile, D columns of it, the first WIDTH of them a head's;
`power` is log2(e) times the scale of scores, so that p = 2^(power · score − norm).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AVAILABLE",
    "WIDEST",
    "Tiles",
    "alike",
    "autocasts",
    "capability",
    "columns",
    "jit",
    "key_step",
    "like_inputs",
    "load_tile",
    "longest_first",
    "on_gpu",
    "precision",
    "query_step",
    "row_dots",
    "scales",
    "softmax_step",
    "store_tile",
    "tiles_of",
    "tl",
]  # fmt: skip

try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, None

AVAILABLE = triton is not None
WIDEST = 256
"""Bytes of a head that tiles are chosen for: 128 bfloat16 or 64 float32; of wider ones the portable path takes care."""


class Tiles(NamedTuple):
    """How a kernel of attention cuts its work."""

    BM: int
    BN: int
    D: int
    num_warps: int
    num_stages: int


def like_inputs(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a backward operator returns where there are no numbers: gradients of the shapes of its inputs."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def jit(kernel: Callable[..., Any]) -> Any:
    """A Triton kernel; where Triton is missing the function as it stands, which nothing calls."""
    return triton.jit(kernel) if AVAILABLE else kernel


def on_gpu(*inputs: Tensor, widest: int = WIDEST) -> bool:
    """Whether Triton is there and takes these tensors: on an NVIDIA GPU, of 16 or 32 bits, rows of at most `widest` bytes."""
    kinds, bytes_ = (torch.bfloat16, torch.float16, torch.float32), inputs[0].element_size()
    return AVAILABLE and all(x.is_cuda and x.dtype in kinds and x.shape[-1] * bytes_ <= widest for x in inputs)


def capability(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU, 90 for Hopper; 0 for the interpreter's CPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def precision() -> str:
    """How float32 tiles are multiplied, as `torch.set_float32_matmul_precision` asks of every product."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def autocasts(device: torch.device) -> bool:
    """Whether products on this device take autocast's dtype now."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def alike(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs of one dtype (autocast's, where it is on), with numbers of a row side by side."""
    kind = torch.get_autocast_dtype(inputs[0].device.type) if autocasts(inputs[0].device) else inputs[0].dtype
    return tuple(x.to(kind) if x.stride(-1) == 1 else x.to(kind).contiguous() for x in inputs)


def scales(scale: float) -> tuple[float, float]:
    """(scale, `power`) of scores."""
    return scale, scale * math.log2(math.e)


def columns(width: int) -> int:
    """D: what a product of tiles can take that holds a head."""
    return max(16, 1 << (width - 1).bit_length())


def longest_first(offsets: Tensor) -> Tensor:
    """Sequences in the order in which programs should take them: the last to start has little to do."""
    return offsets.diff().argsort(descending=True)


def tiles_of(offsets: Tensor, total: int, size: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sequence, first token) of every tile of `size` tokens of `total`; R past the last, as their number is only a bound.

    The bound is known without waiting for the device. Sequences follow each other, in `order` if there is one. Where a
    tile's work grows with its sequence that is the longest first: a GPU gives the next tile to whatever is free first, so
    that this evens out as Meta's deal of sorted tiles to persistent programs does ("Generalized Dot-Product Attention",
    PyTorch blog, 2026: to and fro, which they call zigzag).
    """
    counts = (offsets.diff() + size - 1) // size
    if order is not None:
        counts = counts[order]
    ends = counts.cumsum(0)
    tile = torch.arange(total // size + len(counts), device=offsets.device)
    place = torch.searchsorted(ends, tile, right=True)
    firsts = (tile - (ends - counts)[place.clamp(max=len(counts) - 1)]) * size
    return (place if order is None else torch.cat([order, order.new_full((1,), len(order))])[place]), firsts


@jit
def load_tile(
    base: tl.tensor, stride: tl.tensor, limit: tl.tensor,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, D]; zeros from column WIDTH and, if TAIL, from row `limit`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    where = base + row * stride + column
    if TAIL:
        return tl.load(where, mask=(row < limit) & (column < WIDTH), other=0.0)
    if WIDTH == D:
        return tl.load(where)
    return tl.load(where, mask=(row >= 0) & (column < WIDTH), other=0.0)


@jit
def store_tile(
    base: tl.tensor, stride: tl.tensor, limit: tl.tensor, tile: tl.tensor,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """Writes rows below `limit` and columns below WIDTH, rounded to what `base` holds."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    tl.store(base + row * stride + column, tile.to(base.dtype.element_ty), mask=(row < limit) & (column < WIDTH))


@jit
def row_dots(
    a: tl.tensor, b: tl.tensor, stride: tl.tensor, limit: tl.tensor,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS] Σ a · b of each row, in float32; a few columns at a time, since whole tiles would take all registers."""
    row, total = tl.arange(0, ROWS)[:, None], tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, D, 16):
        column = first + tl.arange(0, 16)[None, :]
        where, there = row * stride + column, (row < limit) & (column < WIDTH)
        left, right = tl.load(a + where, mask=there, other=0.0), tl.load(b + where, mask=there, other=0.0)
        total += tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    return total


@jit
def softmax_step(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor,
    left: tl.tensor, power: tl.tensor,
    BN: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
    bias: tl.tensor = None, BIASED: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """(Σ p·v, largest score, Σ p) after BN more keys, `left` of them there if TAIL; p relative to the largest.

    If BIASED, `bias` is added to the scores of each key, in base-2 units as they are.
    """
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * power
    if BIASED:
        scores += bias[None, :]
    if TAIL:
        scores = tl.where(tl.arange(0, BN)[None, :] < left, scores, float("-inf"))
    larger = tl.maximum(top, tl.max(scores, 1))
    p, shrink = tl.exp2(scores - larger[:, None]), tl.exp2(top - larger)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return acc, larger, total * shrink + tl.sum(p, 1)


@jit
def query_step(
    acc: tl.tensor, q_tile: tl.tensor, do_tile: tl.tensor, norm: tl.tensor, delta: tl.tensor, k_tile: tl.tensor,
    v_tile: tl.tensor, left: tl.tensor, power: tl.tensor,
    BN: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
    bias: tl.tensor = None, BIASED: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Adds dS · K of BN more keys, dS = P ⊙ (dO Vᵀ − Δ); the scale is left to the end."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * power
    if BIASED:
        scores += bias[None, :]
    if TAIL:  # a key that is not there scores 0, which may be far above the others
        scores = tl.where(tl.arange(0, BN)[None, :] < left, scores, float("-inf"))
    p = tl.exp2(scores - norm[:, None])
    ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@jit
def key_step(
    dk_tile: tl.tensor, dv_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, q_tile: tl.tensor,
    do_tile: tl.tensor, norm: tl.tensor, delta: tl.tensor, power: tl.tensor,
    PRECISION: tl.constexpr, bias: tl.tensor = None, BIASED: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Adds dSᵀ · Q and Pᵀ · dO of more queries to (dK, dV); keys down; a query that is not there has norm ∞.

    If BIASED, `bias` is added to the scores of each key, and the sum of its dS is returned third.
    """
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * power
    if BIASED:
        scores += bias[:, None]
    p = tl.exp2(scores - norm[None, :])
    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
    ds = p * (tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) - delta[None, :])
    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
    return (dk_tile, dv_tile, tl.sum(ds, 1)) if BIASED else (dk_tile, dv_tile)
