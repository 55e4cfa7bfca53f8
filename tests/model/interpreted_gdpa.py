"""Triton's interpreter runs the kernels of attention without softmax on CPU tensors: they equal their definitions.

`test_gdpa_tiles` runs this file in a process of its own, with TRITON_INTERPRET set before kernels are decorated.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.kernels import gdpa_tiles, jagged_gdpa_tiles, pffn_tiles
from model.kernels.activations import ACTIVATIONS, POLYNOMIAL_BOUND, curve
from model.kernels.gdpa import gdpa_flops, gdpa_reference
from model.kernels.gpu import jit, tl
from model.kernels.jagged_gdpa import (
    pooled_gdpa_reference,
    windowed_gdpa_flops,
    windowed_gdpa_reference,
)
from model.kernels.pffn_block import pffn_block_reference
from tests.model.twins import assert_equal, layout_of, normal

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/model/test_gdpa_tiles.py"
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
near = partial(assert_equal, rtol=1e-5, atol=2e-5)


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
    near(gdpa_tiles.attend(q, k, v, layout.offsets, ",".join(activation), 0.4, 0.5), plain, q, k, v)


@pytest.mark.parametrize(
    ("window", "activation"), [(-1, "gelu"), (0, "silu"), (9, "relu,leaky_relu"), (70, "gelu"), (200, "hardswish")]
)
def test_jagged_queries_in_a_window_equal_their_definition(window: int, activation: str) -> None:
    lengths = [0, 1, 65, 140]
    layout, width = layout_of(lengths), 4 if window else 16
    q, k, v = normal(sum(lengths), 6, width).requires_grad_().chunk(3, dim=1)  # side by side, as layers make them
    options = {"window": None if window < 0 else window, "activation": activation.split(","), "alpha": 0.3, "beta": 0.2}
    plain = windowed_gdpa_reference(q, k, v, layout, **options)
    near(jagged_gdpa_tiles.attend(q, k, v, layout.offsets, window, activation, 0.3, 0.2), plain, q, k, v)


@pytest.mark.parametrize(("shared", "queries"), [(True, 3), (True, 140), (False, 3), (False, 40)])
def test_dense_queries_over_jagged_keys_equal_their_definition(shared: bool, queries: int) -> None:
    lengths = [0, 1, 63, 64, 65, 130]
    layout, q = layout_of(lengths), normal(1 if shared else len(lengths), queries, 2, 8).requires_grad_()
    k, v = normal(sum(lengths), 4, 8, seed=3).requires_grad_().chunk(2, dim=1)
    plain = pooled_gdpa_reference(q, k, v, layout, activation="gelu", alpha=0.3, beta=0.2)
    near(jagged_gdpa_tiles.attend(q, k, v, layout.offsets, -1, "gelu", 0.3, 0.2), plain, q, k, v)


def test_sequences_without_keys_read_zeros() -> None:
    q, none = normal(2, 3, 2, 16).requires_grad_(), torch.zeros(0, 2, 16, requires_grad=True)
    out = jagged_gdpa_tiles.attend(q, none, none, torch.tensor([0, 0, 0]), -1, "gelu", 0.5, 1.0)
    assert not out.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, none)))


def test_operators_are_what_torch_asks_of_them_and_compile_whole() -> None:
    layout, q, k = layout_of([2, 0, 9]), normal(11, 2, 4).requires_grad_(), normal(11, 2, 4, seed=1).requires_grad_()
    seeds = normal(1, 3, 2, 4, seed=2).requires_grad_()
    what = ("test_schema", "test_autograd_registration", "test_faketensor")
    for queries, window in ((q, 3), (seeds, -1)):
        given = (queries, k, k, layout.offsets, window, "gelu,relu", 0.5, 1.0)
        torch.library.opcheck(torch.ops.gem.jagged_gdpa.default, given, test_utils=what)
    keys = normal(3, 5, 2, 4, seed=3).requires_grad_()
    given = (q.flatten(1), keys, keys, layout.offsets, "gelu", 0.5, 1.0, True)
    torch.library.opcheck(torch.ops.gem.pffn_block.default, given, test_utils=what)

    def both(q: Tensor, seeds: Tensor) -> Tensor:
        q = pffn_tiles.block(q.flatten(1), keys, keys, layout.offsets, "gelu", 0.5, 1.0, True)[0].view(q.shape)
        near = jagged_gdpa_tiles.attend(q, q, q, layout.offsets, 3, "gelu", 0.5, 1.0)
        return jagged_gdpa_tiles.attend(seeds, near, near, layout.offsets, -1, "silu", 0.5, 1.0).square().sum()

    whole = torch.compile(both, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(function(q, seeds), (q, seeds)) for function in (whole, both))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [-1, 3])
def test_the_counter_of_torch_counts_pairs_within_the_window_and_nothing_computed_again(window: int) -> None:
    lengths = [2, 0, 9, 30]
    layout, q = layout_of(lengths), normal(41, 2, 4).requires_grad_()
    seeds = normal(1, 3, 2, 4, seed=2).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss = jagged_gdpa_tiles.attend(q, q, q, layout.offsets, window, "gelu", 0.5, 1.0).sum()
        loss = loss + jagged_gdpa_tiles.attend(seeds, q, q, layout.offsets, -1, "gelu", 0.5, 1.0).sum()
        keys = seeds.expand(4, -1, -1, -1)
        loss = loss + pffn_tiles.block(q.flatten(1), keys, keys, layout.offsets, "gelu", 0.5, 1.0, True)[0].sum()
    forward = windowed_gdpa_flops(lengths, window=None if window < 0 else window, width=8) + 2 * gdpa_flops(41, 3, 8)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * forward


@pytest.mark.parametrize(
    ("heads", "width", "keys", "activation", "normalize", "programs"),
    [(3, 4, 5, "gelu", True, 1), (2, 16, 130, "gelu", True, 100), (1, 20, 3, "silu", False, 1), (4, 8, 7, "relu", True, 1)],
)
def test_the_block_around_the_network_is_one_function_of_tokens_keys_and_values(
    heads: int, width: int, keys: int, activation: str, normalize: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pffn_tiles, "PROGRAMS", programs)  # several parts of a sequence, where programs are to be many
    lengths = [0, 1, 65, 130]
    layout, size = layout_of(lengths), heads * width
    s = (3 + 2 * normal(sum(lengths), 2 * size)).requires_grad_()[:, size:]  # a view, far from a mean of 0
    k, v = normal(len(lengths), keys, 2 * heads, width, seed=8).requires_grad_().chunk(2, dim=2)
    options = {"activation": activation, "alpha": 0.4, "beta": 0.3, "normalize": normalize}
    plain = pffn_block_reference(s, k, v, layout, **options)
    near(pffn_tiles.block(s, k, v, layout.offsets, activation, 0.4, 0.3, normalize)[0], plain, s, k, v)


@pytest.mark.parametrize("tokens", [torch.float32, torch.float16])
def test_tokens_may_be_wider_than_the_keys_whose_precision_products_have(tokens: torch.dtype) -> None:
    lengths = [5, 70]
    layout, s = layout_of(lengths), normal(75, 32).to(tokens).requires_grad_()
    k, v = (normal(2, 5, 2, 16, seed=i).half().requires_grad_() for i in (1, 2))
    out = pffn_tiles.block(s, k, v, layout.offsets, "gelu", 0.25, 1.0, True)[0]
    plain = pffn_block_reference(s.float(), k.float(), v.float(), layout)
    assert out.dtype == tokens
    torch.testing.assert_close(out.float(), plain, rtol=5e-3, atol=5e-3)
    upstream = normal(75, 32, seed=3)
    ours, theirs = (torch.autograd.grad(x.float(), (s, k, v), upstream) for x in (out, plain))
    for a, b, like in zip(ours, theirs, (s, k, v), strict=True):
        assert a.dtype == like.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
