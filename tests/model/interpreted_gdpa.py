"""Triton's interpreter runs the kernels of attention without softmax on CPU tensors: they equal their definitions.

`test_gdpa_tiles` runs this file in a process of its own, with TRITON_INTERPRET set before kernels are decorated.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from model.kernels import gdpa_tiles
from model.kernels.activations import ACTIVATIONS, POLYNOMIAL_BOUND, curve
from model.kernels.gdpa import gdpa_reference
from model.kernels.gpu import jit, tl
from model.nn.jagged import Jagged, jagged

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/model/test_gdpa_tiles.py"
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def layout_of(lengths: list[int]) -> Jagged:
    return jagged(torch.tensor([0, *np.cumsum(lengths)]))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(fast: Tensor, plain: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=2e-5)
    upstream = torch.randn_like(fast)
    fasts = torch.autograd.grad(fast, inputs, upstream)
    for a, b in zip(fasts, torch.autograd.grad(plain, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@jit
def _curve_kernel(x: tl.tensor, value: tl.tensor, slope: tl.tensor, ACTIVATION: tl.constexpr, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    there, steep = curve(tl.load(x + at), ACTIVATION)
    tl.store(value + at, there)
    tl.store(slope + at, steep)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_the_curve_of_a_kernel_is_that_of_the_activation_with_its_slope(activation: str) -> None:
    x = torch.cat([torch.linspace(-6, 6, 1019), torch.tensor([0.0, -0.0, 3.0, -3.0, 1e-20])])
    known = x[x.abs() <= POLYNOMIAL_BOUND] if activation == "gelu_polynomial" else x
    value, slope, plain = torch.empty(1024), torch.empty(1024), ACTIVATIONS[activation]
    _curve_kernel[(1,)](x, value, slope, activation, 1024)
    inside = torch.isin(x, known)
    torch.testing.assert_close(value[inside], plain.value(known), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope[inside], plain.slope(torch.ones_like(known), known), rtol=1e-5, atol=1e-6)
    assert value[~inside].isnan().all()  # beyond a polynomial's bound nothing looks like a number


@pytest.mark.parametrize("activation", [("relu", "gelu", "gelu"), ("hardswish", "leaky_relu", "squared_relu")])
def test_every_head_has_its_own_activation(activation: tuple[str, ...]) -> None:
    lengths, heads, keys, width = [0, 1, 65], 3, 5, 4
    layout, q = layout_of(lengths), normal(sum(lengths), heads, width).requires_grad_()
    k, v = (normal(len(lengths), keys, heads, width, seed=i).requires_grad_() for i in (1, 2))
    plain = gdpa_reference(q, k, v, layout, activation=activation, alpha=0.4, beta=0.5)
    same(gdpa_tiles.attend(q, k, v, layout.offsets, ",".join(activation), 0.4, 0.5), plain, q, k, v)
