"""MXFP8: 8-bit floats that share a power of two a tile, emulated to the bit.

Knows numbers and tiles. Does not know products: `model.kernels.quantized_matmul` has them; nor what a tensor stands for.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3, for elements and scales; the scale under which nothing
saturates is what Transformer Engine and torchao (RCEIL) use; square tiles and stochastic gradients are what Meta names for
its ads models. Nothing here is faster than fp32: it shows what the formats cost in accuracy.

M rows; K columns; a tile (m, k) holds m rows and k columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Numbers that share a scale along an axis, as the MX formats have it."""
SCALE_BIAS = 127
SCALE_NAN = 255
"""E8M0: byte b means 2^(b − 127), from 2^−127 to 2^127; 255 means NaN. There is no zero, sign or infinity."""

Tile = tuple[int, int]
Scaling = Literal["floor", "up"]
"""Which power of two a tile shares, given its greatest magnitude: `floor` takes 2^(⌊log2 amax⌋ − emax), as the
standard does, and may saturate what lies above the greatest element; `up` takes the least under which nothing does."""


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit float: sign, exponent, mantissa; subnormals where the exponent is zero."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype
    infinities: bool
    """Whether the greatest exponent is kept for infinities and NaN, as IEEE 754 does, or only its last code for NaN."""

    def __post_init__(self) -> None:
        if self.exponent_bits + self.mantissa_bits != 7:
            bits = f"{self.exponent_bits} + {self.mantissa_bits}"
            raise ValueError(f"{self.name} has {bits} bits beside its sign; exponent and mantissa must make 7")

    @property
    def largest(self) -> float:
        """The greatest finite value: 448 in E4M3, 57344 in E5M2."""
        return torch.finfo(self.dtype).max

    @property
    def smallest_step(self) -> int:
        """log2 of the distance between subnormals: −9 in E4M3, −16 in E5M2."""
        return 2 - 2 ** (self.exponent_bits - 1) - self.mantissa_bits


E4M3 = Format("E4M3", 4, 3, torch.float8_e4m3fn, infinities=False)
E5M2 = Format("E5M2", 5, 2, torch.float8_e5m2, infinities=True)


class Quantized(NamedTuple):
    """A matrix of elements and the scales of its tiles: value = element · 2^(scale − 127)."""

    elements: Tensor
    """[..., M, K] of a format's dtype."""
    scales: Tensor
    """[..., ⌈M/m⌉, ⌈K/k⌉] E8M0 bytes."""
    tile: Tile

    @property
    def transposed(self) -> Quantized:
        """The transpose, without a copy and without rounding again."""
        return Quantized(self.elements.mT, self.scales.mT, (self.tile[1], self.tile[0]))


def quantize(
    x: Tensor, format: Format, *, tile: Tile, scaling: Scaling, noise: Tensor | None = None
) -> Quantized:
    """Elements and scales of a matrix; the last tile of an axis may be cut off, as if zeros followed.

    A tile that holds a NaN or an infinity gets the scale NaN, so that all of it reads NaN: bad numbers do not hide.
    What `floor` leaves above the greatest element saturates (OCP MX 6.3).

    Args:
        x: [..., M, K] float32, or narrower.
        format: of the elements.
        tile: rows and columns that share a scale.
        scaling: how the scale is rounded.
        noise: [..., M, K] uniform in [0, 1) for stochastic rounding, which is unbiased to 2^−24 of a step where nothing
            saturates; None rounds to the nearest, ties to even.

    Raises:
        ValueError: x has fewer than two axes or float64, or noise another shape.
    """
    if x.dim() < 2 or x.dtype == torch.float64:
        found = f"x is {x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"{found}; quantize takes a matrix of float32 or narrower: reshape or round it first")
    if noise is not None and noise.shape != x.shape:
        raise ValueError(f"noise has shape {tuple(noise.shape)}, x {tuple(x.shape)}; draw one number for each of x")
    wide = x.float()
    scales = _scales(_greatest(wide, tile), format, scaling)
    scaled = wide * _spread(_power(2 * SCALE_BIAS - scales), tile, wide)
    scaled = scaled.clamp(-format.largest, format.largest)
    rounded = scaled if noise is None else _stochastic(scaled, noise, format)
    return Quantized(rounded.to(format.dtype), scales, tile)


def dequantize(q: Quantized) -> Tensor:
    """[..., M, K] in float32, exactly what the elements and scales say."""
    elements = q.elements.float()
    return elements * _spread(_power(q.scales), q.tile, elements)


def _greatest(x: Tensor, tile: Tile) -> Tensor:
    """[..., ⌈M/m⌉, ⌈K/k⌉] greatest magnitude of each tile; NaN where it holds one."""
    rows, columns = (-(-size // side) for size, side in zip(x.shape[-2:], tile, strict=True))
    below, right = rows * tile[0] - x.shape[-2], columns * tile[1] - x.shape[-1]
    tiles = F.pad(x, (0, right, 0, below)).unflatten(-1, (columns, tile[1])).unflatten(-3, (rows, tile[0]))
    return tiles.abs().amax((-3, -1))


def _scales(greatest: Tensor, format: Format, scaling: Scaling) -> Tensor:
    """E8M0 bytes, of exponents and mantissas alone: no logarithm is rounded."""
    mantissa, exponent = torch.frexp(greatest)
    top_mantissa, top_exponent = math.frexp(format.largest)
    power = exponent - top_exponent  # emax is top_exponent − 1, and ⌊log2⌋ is exponent − 1
    if scaling == "up":
        power = power + (mantissa > top_mantissa)
    power = power.clamp(-SCALE_BIAS, SCALE_BIAS).masked_fill(greatest == 0, -SCALE_BIAS)
    return (power + SCALE_BIAS).masked_fill(~greatest.isfinite(), SCALE_NAN).to(torch.uint8)


def _power(scales: Tensor) -> Tensor:
    """2^(byte − 127) in float32. The byte of a reciprocal is 254 − byte, and NaN's stays 255 as bytes wrap round."""
    return scales.view(torch.float8_e8m0fnu).float()


def _spread(values: Tensor, tile: Tile, like: Tensor) -> Tensor:
    """A tile's value at each of its places."""
    for axis, side in zip((-2, -1), tile, strict=True):
        values = values.repeat_interleave(side, axis).narrow(axis, 0, like.shape[axis])
    return values


def _stochastic(x: Tensor, noise: Tensor, format: Format) -> Tensor:
    """x between two neighbours goes to the upper with the probability of its distance from the lower."""
    size = x.abs()
    exponent = (torch.frexp(size)[1] - 1 - format.mantissa_bits).clamp(min=format.smallest_step)
    step = _power((exponent + SCALE_BIAS).to(torch.uint8))
    steps = size / step
    lower = steps.floor()
    return torch.copysign((lower + (noise < steps - lower)) * step, x)


@lru_cache
def code_values(format: Format) -> tuple[float, ...]:
    """The value of each of the 256 codes, from their bits."""
    values, bias = [], 2 ** (format.exponent_bits - 1) - 1
    greatest, steps = 2**format.exponent_bits - 1, 2**format.mantissa_bits
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, (code >> format.mantissa_bits) & greatest, code % steps
        if exponent == greatest and (format.infinities or mantissa == steps - 1):
            values.append(math.nan if mantissa else sign * math.inf)
        elif exponent:
            values.append(sign * (1 + mantissa / steps) * 2.0 ** (exponent - bias))
        else:
            values.append(sign * mantissa / steps * 2.0 ** (1 - bias))
    return tuple(values)


def code_of(value: float, format: Format, chance: float | None = None) -> int:
    """The code that a number becomes: neighbours are looked up, and the nearer, the even or the drawn one is taken."""
    sign, size = (128 if math.copysign(1.0, value) < 0 else 0), min(abs(value), format.largest)
    values = [v for v in code_values(format)[:128] if math.isfinite(v)]
    lower = max(code for code, v in enumerate(values) if v <= size)
    if values[lower] == size:
        return sign + lower
    share = Fraction(size - values[lower]) / Fraction(values[lower + 1] - values[lower])
    if chance is not None:
        return sign + lower + (chance < share)
    return sign + lower + (share > Fraction(1, 2) or (share == Fraction(1, 2) and lower % 2 == 1))


def scale_of(greatest: float, format: Format, scaling: Scaling) -> int:
    """The byte of the power of two that a tile shares."""
    if not math.isfinite(greatest):
        return SCALE_NAN
    emax = math.floor(math.log2(format.largest))
    fits = (
        (lambda power: format.largest * 2.0**power >= greatest)
        if scaling == "up"
        else (lambda power: 2.0 ** (power + emax + 1) > greatest)
    )
    return next(byte for byte in range(SCALE_NAN) if fits(byte - SCALE_BIAS))


def quantize_reference(
    x: Tensor, format: Format, *, tile: Tile, scaling: Scaling, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(codes [M, K], scales) of finite tiles as bytes, a number at a time."""
    rows, columns = (-(-size // side) for size, side in zip(x.shape, tile, strict=True))
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(rows, columns, dtype=torch.uint8)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1]))
            values = x[part].double()
            byte = scale_of(float(values.abs().max()), format, scaling)
            scaled = (values * 2.0 ** (SCALE_BIAS - byte)).flatten().tolist()
            chances = [None] * len(scaled) if noise is None else noise[part].flatten().tolist()
            found = [code_of(value, format, chance) for value, chance in zip(scaled, chances, strict=True)]
            codes[part], scales[i, j] = torch.tensor(found, dtype=torch.uint8).view(values.shape), byte
    return codes, scales


def dequantize_reference(codes: Tensor, scales: Tensor, format: Format, tile: Tile) -> Tensor:
    """[M, K] in float64, a number at a time."""
    values, out = code_values(format), torch.zeros(codes.shape, dtype=torch.float64)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            byte = int(scales[row // tile[0], column // tile[1]])
            out[row, column] = values[int(codes[row, column])] * 2.0 ** (byte - SCALE_BIAS)
    return out
