"""Products of MXFP8 numbers, with gradients; operands turned first where asked for.

Knows products of quantized matrices. Does not know layers, nor how a number is quantized: `model.kernels.quantize` does.

Rotation and stochastic gradients are what Meta names for its ads models. Nothing here is faster than fp32: it shows what the
formats cost in accuracy. `fp8_matmul` is another thing: the FP8 product of tensor cores before Blackwell, with one fp32 scale
a row.

M, N rows; K the axis that a product sums over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from model.kernels.quantize import (
    BLOCK,
    E4M3,
    Format,
    Quantized,
    Scaling,
    Tile,
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)


@lru_cache
def hadamard(size: int, seed: int) -> Tensor:
    """[size, size] orthonormal: Sylvester's Hadamard matrix, rows under random signs; its transpose is its inverse.

    Raises:
        ValueError: size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a rotation of size {size} does not exist here; choose a power of two")
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return signs * matrix / math.sqrt(size)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """[..., K], every block of `len(rotation)` numbers turned: outliers spread, x·y is what it was if both are turned.

    Raises:
        ValueError: K is no multiple of the block.
    """
    size = len(rotation)
    if x.shape[-1] % size:
        found = f"a last axis of {x.shape[-1]} has no whole blocks of {size}"
        raise ValueError(f"{found}; choose a power of two that divides it")
    return (x.unflatten(-1, (-1, size)) @ rotation.to(x)).flatten(-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the operands of a product and its gradient are quantized.

    Raises:
        ValueError: the rotation's size is no power of two.
    """

    forward: Format = E4M3
    """Of activations and weights."""
    backward: Format = E4M3
    """Of gradients."""
    scaling: Scaling = "up"
    square: bool = True
    """Tiles of 32×32: one quantized copy serves a product over either axis. Else 1×32 along the axis that a product
    sums over: rows share no scale, and gradients need a second copy."""
    stochastic: bool = True
    """Gradients are rounded stochastically, activations and weights to the nearest."""
    exact_weight_gradient: bool = False
    """The weights' gradient is computed from what was not quantized."""
    rotation: int = 0
    """Size of the Hadamard blocks that turn both operands along the summed axis first; 0 turns nothing."""
    rotation_seed: int = 0

    def __post_init__(self) -> None:
        if self.rotation:
            hadamard(self.rotation, self.rotation_seed)

    @property
    def rows(self) -> Tile:
        """The tile of an operand whose product sums over the last axis."""
        return (BLOCK if self.square else 1, BLOCK)

    @property
    def columns(self) -> Tile:
        """The tile of an operand whose product sums over the axis before the last."""
        return (BLOCK, BLOCK if self.square else 1)


def mx_matmul(a_MK: Tensor, b_NK: Tensor, recipe: Recipe, *, generator: torch.Generator | None = None) -> Tensor:
    """A Bᵀ [M, N] of quantized operands, products and sums in float32, in A's dtype; gradients likewise.

    dA = G B and dB = Gᵀ A of the quantized G, A and B: straight through the rounding, in the turned basis where one is
    asked for. With square tiles the backward pass keeps and reads the forward's bytes.

    Args:
        a_MK: activations.
        b_NK: weights, as torch.nn.Linear has them.
        recipe: formats, tiles, rounding.
        generator: of stochastic rounding; torch's own of the device if None.
    """
    with _no_autocast(a_MK):
        if recipe.rotation:
            rotation = hadamard(recipe.rotation, recipe.rotation_seed)
            a_MK, b_NK = rotate(a_MK, rotation), rotate(b_NK, rotation)
        out: Tensor = _Product.apply(a_MK, b_NK, recipe, generator)
    return out


def _no_autocast(x: Tensor) -> torch.autocast:
    """Autocast would make bfloat16 of the float32 that the emulation needs."""
    return torch.autocast(x.device.type, enabled=False)


class _Product(torch.autograd.Function):
    """A Bᵀ; keeps bytes, not floats, unless the weights' gradient is to be exact."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, recipe: Recipe, generator: torch.Generator | None) -> Tensor:
        ctx.recipe, ctx.generator, ctx.dtypes = recipe, generator, (a.dtype, b.dtype)
        pair = [quantize(x, recipe.forward, tile=recipe.rows, scaling=recipe.scaling) for x in (a, b)]
        kept = pair
        if not recipe.square and any(ctx.needs_input_grad):
            kept = [quantize(x, recipe.forward, tile=recipe.columns, scaling=recipe.scaling) for x in (a, b)]
        exact = (a,) if recipe.exact_weight_gradient else (kept[0].elements, kept[0].scales)
        ctx.save_for_backward(kept[1].elements, kept[1].scales, *exact)
        return _dot(*pair).to(a.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        recipe, (elements, scales, *a) = ctx.recipe, ctx.saved_tensors
        with _no_autocast(gradient):
            rows = _gradient(gradient, recipe, recipe.rows, ctx.generator)
            da = _dot(rows, Quantized(elements, scales, recipe.columns).transposed)
            if recipe.exact_weight_gradient:
                db = gradient.mT.float() @ a[0].float()
            else:
                columns = rows if recipe.square else _gradient(gradient, recipe, recipe.columns, ctx.generator)
                db = _dot(columns.transposed, Quantized(a[0], a[1], recipe.columns).transposed)
        return da.to(ctx.dtypes[0]), db.to(ctx.dtypes[1]), None, None


def _gradient(gradient: Tensor, recipe: Recipe, tile: Tile, generator: torch.Generator | None) -> Quantized:
    noise = torch.rand(gradient.shape, generator=generator, device=gradient.device) if recipe.stochastic else None
    return quantize(gradient, recipe.backward, tile=tile, scaling=recipe.scaling, noise=noise)


def _dot(a: Quantized, b: Quantized) -> Tensor:
    return dequantize(a) @ dequantize(b).mT


def fp8_matmul(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """A Bᵀ [M, N] in bfloat16 from E4M3 with one fp32 scale a row: not MX, but what Hopper's tensor cores multiply.

    No gradient. On a CPU it is as slow as any product; the bytes and scales are the same.

    Raises:
        ValueError: K or N is no multiple of 16, which the hardware asks for.
    """
    if a_MK.shape[1] % 16 or b_NK.shape[0] % 16:
        found = f"the product sums over {a_MK.shape[1]} and has {b_NK.shape[0]} columns"
        raise ValueError(f"{found}; both must be multiples of 16: pad them")
    (a, a_scale), (b, b_scale) = _row_scaled(a_MK), _row_scaled(b_NK)
    return torch._scaled_mm(a, b.mT, scale_a=a_scale, scale_b=b_scale.mT, out_dtype=torch.bfloat16)


def fp8_matmul_reference(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """The definition, in float32."""
    (a, a_scale), (b, b_scale) = _row_scaled(a_MK), _row_scaled(b_NK)
    return (a.float() * a_scale) @ (b.float() * b_scale).mT


def _row_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 elements, fp32 scales [rows, 1]) with each row's greatest magnitude at the greatest element."""
    greatest = x.float().abs().amax(1, keepdim=True)
    scale = torch.where(greatest > 0, greatest / E4M3.largest, 1.0)
    return (x.float() / scale).clamp(-E4M3.largest, E4M3.largest).to(E4M3.dtype), scale


def mx_matmul_reference(
    a_MK: Tensor, b_NK: Tensor, upstream_MN: Tensor, recipe: Recipe, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(A Bᵀ, dA, dB) in float64: operands of all three products quantized for each, along the axis it sums over."""

    def rounded(x: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
        """x [P, S] as a product over S reads it."""
        codes, scales = quantize_reference(x, format, tile=recipe.rows, scaling=recipe.scaling, noise=noise)
        return dequantize_reference(codes, scales, format, recipe.rows)

    turn = torch.eye(a_MK.shape[1])
    if recipe.rotation:
        turn = torch.block_diag(*[hadamard(recipe.rotation, recipe.rotation_seed)] * (a_MK.shape[1] // recipe.rotation))
    a, b = a_MK @ turn, b_NK @ turn
    noises: list[Tensor | None] = [None, None]
    if recipe.stochastic:
        first = torch.rand(upstream_MN.shape, generator=generator)
        noises = [first, (first if recipe.square else torch.rand(upstream_MN.shape, generator=generator)).mT]
    out = rounded(a, recipe.forward) @ rounded(b, recipe.forward).mT
    da = rounded(upstream_MN, recipe.backward, noises[0]) @ rounded(b.mT, recipe.forward).mT
    if recipe.exact_weight_gradient:
        db = upstream_MN.double().mT @ a.double()
    else:
        db = rounded(upstream_MN.mT, recipe.backward, noises[1]) @ rounded(a.mT, recipe.forward).mT
    return out, da @ turn.double().mT, db @ turn.double().mT
