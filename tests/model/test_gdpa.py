"""GDPA and the block around it equal their definitions, in values and gradients, however their sequences are grouped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels.gdpa import ACTIVATIONS, LONG, gdpa, gdpa_reference
from model.kernels.pffn_block import pffn_block, pffn_block_reference
from model.nn.jagged import Jagged, jagged

LENGTHS = st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128]), min_size=1, max_size=5)
GROUPINGS = {
    "padded": [3, 0, 1, 4],
    "equal": [4, 4, 4],
    "one by one": [LONG - 1, 0, 2 * LONG, LONG + 3],
}
HEADS, WIDTH, KEYS = 2, 4, 3


def layout_of(lengths: list[int]) -> Jagged:
    return jagged(torch.tensor([0, *np.cumsum(lengths)]))


def inputs(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    few = (len(lengths), KEYS, HEADS, WIDTH)
    shapes = ((sum(lengths), HEADS, WIDTH), few, few)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def assert_same(fast: Tensor, plain: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(fast, plain)
    upstream = torch.randn_like(plain)
    found, expected = (torch.autograd.grad(out, given, upstream) for out in (fast, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("lengths", GROUPINGS.values(), ids=GROUPINGS)
def test_every_grouping_of_sequences_gives_the_definition(lengths: list[int], activation: str) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    assert_same(
        gdpa(q, k, v, layout, activation=activation, alpha=0.7, beta=-2.0),
        gdpa_reference(q, k, v, layout, activation=activation, alpha=0.7, beta=-2.0),
        [q, k, v],
    )


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_the_gradient_is_the_slope_of_the_value(activation: str) -> None:
    layout, given = layout_of([2, 0, 3]), inputs([2, 0, 3])
    assert torch.autograd.gradcheck(lambda q, k, v: gdpa(q, k, v, layout, activation=activation), given)


@settings(max_examples=12, deadline=None)
@given(LENGTHS)
def test_the_block_equals_its_definition_at_every_edge_of_a_bucket(lengths: list[int]) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    s = q.flatten(1)
    if not len(s):
        assert len(pffn_block(s, k, v, layout)) == 0
        return
    assert_same(pffn_block(s, k, v, layout), pffn_block_reference(s, k, v, layout), [q, k, v])


@pytest.mark.parametrize("lengths", GROUPINGS.values(), ids=GROUPINGS)
def test_the_block_is_the_same_for_every_grouping(lengths: list[int]) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    s = q.flatten(1)
    assert_same(pffn_block(s, k, v, layout), pffn_block_reference(s, k, v, layout), [q, k, v])


def test_the_gradient_of_the_block_is_the_slope_of_its_value() -> None:
    layout, (q, k, v) = layout_of([2, 0, 3]), inputs([2, 0, 3])
    assert torch.autograd.gradcheck(lambda s, k, v: pffn_block(s.flatten(1), k, v, layout), [q, k, v])


def test_a_padded_place_reaches_no_gradient() -> None:
    """Sequences of 4 and 3 share a bucket; the shorter learns what it learns alone."""
    layout, (q, k, v) = layout_of([4, 3]), inputs([4, 3])
    upstream = torch.ones_like(q)
    _, keys, values = torch.autograd.grad(gdpa(q, k, v, layout), [q, k, v], upstream)
    alone = torch.autograd.grad(gdpa(q[4:], k[1:], v[1:], layout_of([3])), [k, v], upstream[4:])
    torch.testing.assert_close(keys[1], alone[0][1])
    torch.testing.assert_close(values[1], alone[1][1])


@pytest.mark.parametrize("op", [gdpa, lambda q, *rest: pffn_block(q.flatten(1), *rest)], ids=["gdpa", "block"])
def test_autocast_multiplies_in_its_precision(op: Callable[..., Tensor]) -> None:
    layout, single = layout_of([5, 0, 3]), [x.detach().float().requires_grad_() for x in inputs([5, 0, 3])]
    exact = op(*single, layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = op(*single, layout)
    torch.testing.assert_close(rounded.float(), exact, rtol=0.02, atol=0.02)
    assert not torch.equal(rounded.float(), exact)
    for gradient, wanted in zip(*(torch.autograd.grad(x.float().sum(), single) for x in (rounded, exact)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("op", [gdpa, pffn_block])
def test_a_batch_without_tokens_gives_none(op: Callable[..., Tensor]) -> None:
    q, k, v = inputs([0, 0])
    assert op(q if op is gdpa else q.flatten(1), k, v, layout_of([0, 0])).shape[0] == 0
