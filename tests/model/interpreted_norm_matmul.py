"""Triton's interpreter runs the kernels of a linear layer of normalized tokens on CPU tensors: they equal the definition.

`test_norm_matmul` runs this file in a process of its own, with TRITON_INTERPRET set before kernels are decorated.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.kernels import norm_matmul as kernels
from model.kernels.norm_matmul import norm_matmul_flops, norm_matmul_reference, project
from tests.model.twins import assert_equal, normal

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/model/test_norm_matmul.py"
near = partial(assert_equal, rtol=1e-5, atol=5e-5, slack=2)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 700])
@pytest.mark.parametrize(("width", "outputs"), [(4, 3), (16, 48), (200, 130)])
def test_values_and_gradients_equal_norm_then_product(tokens: int, width: int, outputs: int) -> None:
    a, weight = normal(tokens, width).requires_grad_(), normal(outputs, width, seed=1).requires_grad_()
    near(project(a, weight)[0], norm_matmul_reference(a, weight), a, weight)


def test_parts_of_the_weights_gradient_are_summed_and_one_part_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    a, weight = normal(700, 16).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    for programs in (1, 2, 100):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        near(project(a, weight)[0], norm_matmul_reference(a, weight), a, weight)


def test_tokens_may_be_rows_of_something_wider() -> None:
    wide, weight = normal(70, 32).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    a = wide[:, 16:]
    near(project(a, weight)[0], norm_matmul_reference(a, weight), wide, weight)


def test_no_tokens_give_no_outputs_and_weights_no_gradient() -> None:
    a, weight = normal(0, 16).requires_grad_(), normal(8, 16).requires_grad_()
    y = project(a, weight)[0]
    assert y.shape == (0, 8)
    assert not torch.autograd.grad(y.sum(), weight)[0].any()


def test_half_precision_differs_by_its_rounding_only() -> None:
    a, weight = normal(70, 48).half().requires_grad_(), (normal(24, 48, seed=1) / 7).half().requires_grad_()
    y, plain = project(a, weight)[0], norm_matmul_reference(a.float(), weight.float())
    torch.testing.assert_close(y.float(), plain, rtol=3e-3, atol=3e-3)
    ours, theirs = (torch.autograd.grad(x.float().square().sum(), (a, weight)) for x in (y, plain))
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), exact.float(), rtol=1e-2, atol=3e-2)


def test_the_operator_is_what_torch_asks_of_it_and_compiles_whole() -> None:
    a, weight = normal(9, 16).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    what = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.gem.norm_matmul.default, (a, weight), test_utils=what)
    whole = torch.compile(lambda a, w: project(a, w)[0].square().sum(), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(whole(a, weight), (a, weight))
    theirs = torch.autograd.grad(project(a, weight)[0].square().sum(), (a, weight))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)


def test_the_counter_of_torch_counts_the_product_and_twice_as_much_backward() -> None:
    a, weight = normal(9, 16).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = project(a, weight)[0].sum()
    assert counter.get_total_flops() == norm_matmul_flops(9, 16, 8)
    with FlopCounterMode(display=False) as counter:
        y.backward()
    assert counter.get_total_flops() == 2 * norm_matmul_flops(9, 16, 8)
