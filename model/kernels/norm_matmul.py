"""A linear layer of tokens normalized by their root mean square, in one: RMSNorm(A) Bᵀ = rstd ⊙ (A Bᵀ).

Knows rows, widths and weights as torch.nn.Linear has them. Does not know what is projected.

A row's scale moves past the product, so normalized tokens are never in memory, forward or backward: what is kept for the
gradient is A, which the residual keeps anyway, and a number a row (Meta's lazy pre-norm). On a CPU: torch's products. On an
NVIDIA GPU one kernel forward, which adds up Σ a² while it multiplies, and two backward. There the mean of dn ⊙ n that the
norm's gradient takes is Σ dy ⊙ y / D, as n Bᵀ = y: a tile of columns needs no other one, and y is kept by what reads it.

T tokens, D width of a token, N outputs; BM tokens, BN outputs and BK columns a tile; n normalized tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from model.kernels.gpu import alike, autocasts, jit, on_gpu, precision, tl
from model.nn.norm import EPS, inverse_rms, rms_norm, rms_norm_backward

WIDEST_TOKEN = 512
"""D up to which the kernels are chosen; of wider tokens the product outweighs the norm."""
PROGRAMS = 264
"""Programs that keep a GPU busy; the gradient of few weights is shared out by tokens."""


def norm_matmul(a_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """[T, N]: RMSNorm(A) · weightᵀ, the norm affine-free."""
    if on_gpu(a_TD, weight_ND, widest=WIDEST_TOKEN * a_TD.element_size()):
        out: Tensor = torch.ops.gem.norm_matmul(*alike(a_TD, weight_ND))[0]
        return out
    if a_TD.is_cuda or autocasts(a_TD.device):
        return norm_matmul_reference(a_TD, weight_ND)
    product: Tensor = _NormMatmul.apply(a_TD, weight_ND)
    return product


def norm_linear(a_TD: Tensor, layer: nn.Linear) -> Tensor:
    """`layer` of normalized tokens; a layer that adds a bias, was replaced, or that hooks watch is called as it stands."""
    watched = layer._forward_hooks or layer._forward_pre_hooks
    if type(layer) is not nn.Linear or layer.bias is not None or watched:
        called: Tensor = layer(rms_norm(a_TD))
        return called
    return norm_matmul(a_TD, layer.weight)


def norm_matmul_reference(a_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """The definition: first the norm, then the product."""
    return F.linear(rms_norm(a_TD), weight_ND)


def norm_matmul_flops(tokens: int, width: int, outputs: int) -> int:
    """Forward FLOPs of the product."""
    return 2 * tokens * width * outputs


class _NormMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Tensor:
        rstd = inverse_rms(a)
        ctx.save_for_backward(a, weight, rstd)
        return (a @ weight.t()).mul_(rstd)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, weight, rstd = ctx.saved_tensors
        normal = a * rstd
        dweight = dy.t() @ normal if ctx.needs_input_grad[1] else None
        da = rms_norm_backward(dy @ weight, normal, rstd) if ctx.needs_input_grad[0] else None
        return da, dweight


class Tiles(NamedTuple):
    """How a kernel cuts its work."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


FORWARD = Tiles(128, 128, 64, 8, 3)
TOKENS = Tiles(64, 64, 128, 8, 3)
"""Of the gradient of tokens."""
WEIGHTS = Tiles(64, 128, 128, 8, 2)
"""Of the gradient of weights."""


@torch.library.custom_op("gem::norm_matmul", mutates_args=())
def project(a_TD: Tensor, weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(y [T, N], rstd [T] in float32) by Triton."""
    (total, width), outputs, cut = a_TD.shape, len(weight_ND), FORWARD
    y, rstd = a_TD.new_empty(total, outputs), a_TD.new_empty(total, dtype=torch.float32)
    if total:
        grid = (-(-total // cut.BM) * -(-outputs // cut.BN),)
        with torch.cuda.device_of(a_TD):
            _forward_kernel[grid](
                a_TD, weight_ND, y, rstd, a_TD.stride(0), weight_ND.stride(0), total, outputs, EPS,
                WIDTH=width, PRECISION=precision(), **cut._asdict(),
            )  # fmt: skip
    return y, rstd


@torch.library.custom_op("gem::norm_matmul_backward", mutates_args=())
def project_backward(
    dy: Tensor, a_TD: Tensor, weight_ND: Tensor, y: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and weights by Triton; parts of the latter are added in a fixed order, in float32."""
    (total, width), outputs = a_TD.shape, len(weight_ND)
    da = a_TD.new_empty(a_TD.shape)
    if not total:
        return da, torch.zeros_like(weight_ND)
    strides, common = (a_TD.stride(0), weight_ND.stride(0)), {"WIDTH": width, "PRECISION": precision()}
    with torch.cuda.device_of(a_TD):
        cut = TOKENS
        _token_kernel[(-(-total // cut.BM) * -(-width // cut.BK),)](
            dy, a_TD, weight_ND, y, rstd, da, *strides, total, outputs, **common, **cut._asdict()
        )
        cut = WEIGHTS
        tiles = -(-outputs // cut.BN) * -(-width // cut.BK)
        parts = max(1, min(PROGRAMS // tiles, total // (4 * cut.BM)))
        dtype = weight_ND.dtype if parts == 1 else torch.float32
        dweight = weight_ND.new_empty((parts, outputs, width), dtype=dtype)
        _weight_kernel[(tiles, parts)](
            dy, a_TD, rstd, dweight, strides[0], total, outputs, parts, **common, **cut._asdict()
        )
    return da, dweight[0] if parts == 1 else dweight.sum(0).to(weight_ND.dtype)


@project.register_fake
def _(a_TD: Tensor, weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    return a_TD.new_empty(len(a_TD), len(weight_ND)), a_TD.new_empty(len(a_TD), dtype=torch.float32)


@project_backward.register_fake
def _(dy: Tensor, a_TD: Tensor, weight_ND: Tensor, y: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return a_TD.new_empty(a_TD.shape), weight_ND.new_empty(weight_ND.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.gem.norm_matmul_backward(dy.contiguous(), *ctx.saved_tensors)


project.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.gem.norm_matmul)
def _forward_flops(a_shape: tuple[int, ...], weight_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    return norm_matmul_flops(a_shape[0], a_shape[1], weight_shape[0])


@register_flop_formula(torch.ops.gem.norm_matmul_backward)
def _backward_flops(
    _: Any, a_shape: tuple[int, ...], weight_shape: tuple[int, ...], *__: Any, **___: Any
) -> int:
    """Two products."""
    return 2 * _forward_flops(a_shape, weight_shape)


@jit
def _load(
    base: tl.tensor, stride: tl.tensor, rows: tl.tensor, columns: tl.tensor, R: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """[R, C]; zeros from row `rows` and from column `columns`."""
    row, column = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    return tl.load(base + row * stride + column, mask=(row < rows) & (column < columns), other=0.0)


@jit
def _store(
    base: tl.tensor, stride: tl.tensor, rows: tl.tensor, columns: tl.tensor, tile: tl.tensor,
    R: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Writes rows below `rows` and columns below `columns`, rounded to what `base` holds."""
    row, column = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    mask = (row < rows) & (column < columns)
    tl.store(base + row * stride + column, tile.to(base.dtype.element_ty), mask=mask)


@jit
def _forward_kernel(
    a: tl.tensor, weight: tl.tensor, y: tl.tensor, rstd: tl.tensor, a_row: tl.tensor, weight_row: tl.tensor,
    total: tl.tensor, outputs: tl.tensor, eps: tl.tensor,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of y; programs side by side share tokens."""
    tiles = tl.cdiv(outputs, BN)
    first, output = (tl.program_id(0) // tiles).to(tl.int64) * BM, tl.program_id(0) % tiles * BN
    rows, columns = (total - first).to(tl.int32), outputs - output
    a += first * a_row
    weight += output * weight_row
    acc, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM,), tl.float32)
    for k in range(0, WIDTH, BK):
        a_tile = _load(a + k, a_row, rows, WIDTH - k, BM, BK)
        b_tile = _load(weight + k, weight_row, columns, WIDTH - k, BN, BK)
        acc = tl.dot(a_tile, tl.trans(b_tile), acc, input_precision=PRECISION)
        wide = a_tile.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    scale = tl.rsqrt(squares / WIDTH + eps)
    _store(y + first * outputs + output, outputs, rows, columns, acc * scale[:, None], BM, BN)
    if output == 0:
        row = tl.arange(0, BM)
        tl.store(rstd + first + row, scale, mask=row < rows)


@jit
def _token_kernel(
    dy: tl.tensor, a: tl.tensor, weight: tl.tensor, y: tl.tensor, rstd: tl.tensor, da: tl.tensor, a_row: tl.tensor,
    weight_row: tl.tensor, total: tl.tensor, outputs: tl.tensor,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of dA = rstd · (dn − n · mean(dn ⊙ n)), dn = dY · weight."""
    tiles = tl.cdiv(WIDTH, BK)
    first, k = (tl.program_id(0) // tiles).to(tl.int64) * BM, tl.program_id(0) % tiles * BK
    rows = (total - first).to(tl.int32)
    dy += first * outputs
    y += first * outputs
    acc, along = tl.zeros((BM, BK), tl.float32), tl.zeros((BM,), tl.float32)
    for output in range(0, outputs, BN):
        dy_tile = _load(dy + output, outputs, rows, outputs - output, BM, BN)
        y_tile = _load(y + output, outputs, rows, outputs - output, BM, BN)
        b_tile = _load(weight + output * weight_row + k, weight_row, outputs - output, WIDTH - k, BN, BK)
        acc = tl.dot(dy_tile, b_tile, acc, input_precision=PRECISION)
        along += tl.sum(dy_tile.to(tl.float32) * y_tile.to(tl.float32), 1)
    row = tl.arange(0, BM)
    scale = tl.load(rstd + first + row, mask=row < rows, other=0.0)
    a_tile = _load(a + first * a_row + k, a_row, rows, WIDTH - k, BM, BK).to(tl.float32)
    out = scale[:, None] * (acc - a_tile * (scale * along / WIDTH)[:, None])
    _store(da + first * WIDTH + k, WIDTH, rows, WIDTH - k, out, BM, BK)


@jit
def _weight_kernel(
    dy: tl.tensor, a: tl.tensor, rstd: tl.tensor, dweight: tl.tensor, a_row: tl.tensor, total: tl.tensor,
    outputs: tl.tensor, parts: tl.tensor,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of dYᵀ · n over every `parts`-th tile of tokens; n is made anew on load."""
    tiles, part, row = tl.cdiv(WIDTH, BK), tl.program_id(1), tl.arange(0, BM)
    output, k = tl.program_id(0) // tiles * BN, tl.program_id(0) % tiles * BK
    dy += part * BM * outputs + output
    a += part * BM * a_row + k
    rstd += part * BM
    acc, step = tl.zeros((BN, BK), tl.float32), parts * BM
    for first in range(part * BM, total, step):
        rows = total - first
        dy_tile = _load(dy, outputs, rows, outputs - output, BM, BN)
        a_tile = _load(a, a_row, rows, WIDTH - k, BM, BK)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normal = (a_tile.to(tl.float32) * scale[:, None]).to(a_tile.dtype)
        acc = tl.dot(tl.trans(dy_tile), normal, acc, input_precision=PRECISION)
        dy += step * outputs
        a += step * a_row
        rstd += step
    there = (part.to(tl.int64) * outputs + output) * WIDTH + k
    _store(dweight + there, WIDTH, outputs - output, WIDTH - k, acc, BN, BK)
