"""GDPA and the block around it equal their definitions, in values and gradients, however their sequences are grouped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels.activations import ACTIVATIONS, POLYNOMIAL_BOUND, Activation, runs
from model.kernels.gdpa import LONG, gdpa, gdpa_reference
from model.kernels.pffn_block import pffn_block, pffn_block_reference
from model.nn.norm import layer_norm, rms_norm
from tests.model.twins import assert_equal, layout_of

LENGTHS = st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128]), min_size=1, max_size=5)
GROUPINGS = {
    "padded": [3, 0, 1, 4],
    "equal": [4, 4, 4],
    "one by one": [LONG - 1, 0, 2 * LONG, LONG + 3],
}
HEADS, WIDTH, KEYS = 2, 4, 3
OF_HEADS = [*sorted(ACTIVATIONS), ("squared_relu", "silu"), ("gelu", "gelu")]
"""What heads may have: one activation, or one each."""
TAMED = 0.02
"""Factor of queries that keeps all scores within the bound of a polynomial."""


def inputs(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    few = (len(lengths), KEYS, HEADS, WIDTH)
    shapes = ((sum(lengths), HEADS, WIDTH), few, few)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def tamed(q: Tensor, activation: str | tuple[str, ...]) -> Tensor:
    return q * TAMED if "polynomial" in activation else q


@pytest.mark.parametrize("activation", OF_HEADS, ids=str)
@pytest.mark.parametrize("lengths", GROUPINGS.values(), ids=GROUPINGS)
def test_every_grouping_of_sequences_gives_the_definition(lengths: list[int], activation: str | tuple[str, ...]) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    read = tamed(q, activation)
    assert_equal(
        gdpa(read, k, v, layout, activation=activation, alpha=0.7, beta=-2.0),
        gdpa_reference(read, k, v, layout, activation=activation, alpha=0.7, beta=-2.0),
        read, k, v,
    )  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.tuples(*[st.sampled_from(sorted(set(ACTIVATIONS) - {"gelu_polynomial"}))] * HEADS))
def test_heads_of_different_activations_equal_their_definition_at_every_edge_of_a_bucket(
    lengths: list[int], activation: tuple[str, ...]
) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    plain = gdpa_reference(q, k, v, layout, activation=activation, beta=0.5)
    assert_equal(gdpa(q, k, v, layout, activation=activation, beta=0.5), plain, q, k, v)


def test_a_head_of_several_activations_reads_what_it_reads_where_all_heads_have_its_own() -> None:
    layout, (q, k, v) = layout_of([5, 0, 3]), inputs([5, 0, 3])
    mixed = gdpa(q, k, v, layout, activation=["hardswish", "relu"])
    for head, name in enumerate(["hardswish", "relu"]):
        assert torch.equal(mixed[:, head], gdpa(q, k, v, layout, activation=name)[:, head])


@pytest.mark.parametrize("activation", OF_HEADS, ids=str)
def test_the_gradient_is_the_slope_of_the_value(activation: str | tuple[str, ...]) -> None:
    layout, given = layout_of([2, 0, 3]), inputs([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda q, k, v: gdpa(tamed(q, activation), k, v, layout, activation=activation), given
    )


def test_every_activation_is_zero_at_zero_and_one_that_is_not_is_refused() -> None:
    zero = torch.zeros(3)
    assert all(not activation.value(zero).any() for activation in ACTIVATIONS.values())
    for value, found in ((torch.sigmoid, "0.5"), (torch.exp, "1"), (torch.nn.functional.softplus, "0.693147")):
        with pytest.raises(ValueError, match=rf"is {found} at 0; it must be 0 there.*subtract"):
            Activation(value, torch.ops.aten.sigmoid_backward)


@pytest.mark.parametrize(
    ("activation", "error"),
    [
        ("sigmoid", "no activation is called sigmoid; choose of gelu, .*, all of which map 0 to 0"),
        (("gelu", "gelu", "relu"), "3 activations for 2 heads; give one for all or one for each"),
        ((), "0 activations for 2 heads"),
    ],
)
def test_activations_that_heads_cannot_have_are_refused(activation: str | tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        gdpa(*inputs([2]), layout_of([2]), activation=activation)


@pytest.mark.parametrize(("bound", "error"), [(0.5, 4.5e-6), (1.0, 1.1e-3), (1.25, 6.1e-3)])
def test_the_polynomial_errs_by_no_more_than_published_of_the_gelu_of_erf(bound: float, error: float) -> None:
    x = torch.linspace(-bound, bound, 20_001, dtype=torch.float64)
    found = float((ACTIVATIONS["gelu_polynomial"].value(x) - torch.nn.functional.gelu(x)).abs().max())
    assert 0.9 * error < found < 1.05 * error


@pytest.mark.parametrize("beyond", [POLYNOMIAL_BOUND + 1e-3, -4.0, float("nan"), float("inf")])
def test_a_score_beyond_the_bound_of_the_polynomial_is_refused(beyond: float) -> None:
    layout, (q, k, v) = layout_of([2]), (torch.ones(2, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    options = {"activation": "gelu_polynomial", "alpha": 1.0}
    assert gdpa(q * POLYNOMIAL_BOUND, k, v, layout, **options).isfinite().all()
    with pytest.raises(ValueError, match=r"magnitude .*; it is GELU only up to 1.25: normalize"):
        gdpa(q * beyond, k, v, layout, **options)


def test_normalized_queries_and_keys_scaled_by_their_width_stay_within_the_bound_of_the_polynomial() -> None:
    layout, (q, k, v) = layout_of([65]), inputs([65])
    q, k = (torch.nn.functional.rms_norm(100 * x, (WIDTH,)) for x in (q, k))
    read = gdpa(q, k, v, layout, activation="gelu_polynomial", alpha=1 / WIDTH)
    torch.testing.assert_close(read, gdpa(q, k, v, layout, alpha=1 / WIDTH), atol=2e-2, rtol=0)


def test_neighbouring_heads_that_share_an_activation_share_a_launch() -> None:
    assert runs(["gelu", "gelu", "relu", "gelu"]) == [("gelu", 0, 2), ("relu", 2, 1), ("gelu", 3, 1)]


@settings(max_examples=16, deadline=None)
@given(LENGTHS, st.sampled_from(["gelu", "squared_relu", ("silu", "leaky_relu")]), st.booleans())
def test_the_block_equals_its_definition_at_every_edge_of_a_bucket(
    lengths: list[int], activation: str | tuple[str, ...], normalize: bool
) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    s = q.flatten(1)
    if not len(s):
        assert len(pffn_block(s, k, v, layout)) == 0
        return
    options = {"activation": activation, "alpha": 0.3, "beta": -0.7, "normalize": normalize}
    assert_equal(pffn_block(s, k, v, layout, **options), pffn_block_reference(s, k, v, layout, **options), q, k, v)


def test_the_scales_and_the_norm_of_queries_of_the_block_are_those_of_its_attention() -> None:
    layout, (q, k, v) = layout_of([5, 2]), inputs([5, 2])
    s = q.flatten(1)
    normal = layer_norm(s)
    read = gdpa(normal.unflatten(-1, (HEADS, WIDTH)), k, v, layout, activation="relu", alpha=0.3, beta=2.0)
    found = pffn_block(s, k, v, layout, activation="relu", alpha=0.3, beta=2.0, normalize=False)
    torch.testing.assert_close(found, rms_norm(read.flatten(1) + normal) + s)


@pytest.mark.parametrize("lengths", GROUPINGS.values(), ids=GROUPINGS)
def test_the_block_is_the_same_for_every_grouping(lengths: list[int]) -> None:
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    s = q.flatten(1)
    assert_equal(pffn_block(s, k, v, layout), pffn_block_reference(s, k, v, layout), q, k, v)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_of_the_block_is_the_slope_of_its_value(normalize: bool) -> None:
    layout, (q, k, v) = layout_of([2, 0, 3]), inputs([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda s, k, v: pffn_block(s.flatten(1), k, v, layout, normalize=normalize), [q, k, v]
    )


def test_sequences_in_another_order_read_what_they_read() -> None:
    lengths, order = [65, 0, 1, 64], [2, 0, 3, 1]
    layout, (q, k, v) = layout_of(lengths), inputs(lengths)
    parts = gdpa(q, k, v, layout).split(lengths)
    moved = gdpa(torch.cat([q.split(lengths)[i] for i in order]), k[order], v[order], layout_of([lengths[i] for i in order]))
    torch.testing.assert_close(moved, torch.cat([parts[i] for i in order]))


def test_rows_of_keys_that_several_sequences_share_learn_from_all_of_them() -> None:
    layout, (q, k, v), request = layout_of([3, 65, 2]), inputs([3, 65, 2]), torch.tensor([0, 0, 1])
    shared = gdpa(q, k[:2][request], v[:2][request], layout)
    upstream = torch.randn_like(shared)
    both, one = torch.autograd.grad(shared, [k, v], upstream), layout_of([68])
    first = gdpa(q[:68], k[:1], v[:1], one)  # the first two are one sequence as far as keys go
    torch.testing.assert_close(shared[:68], first)
    for found, wanted in zip(both, torch.autograd.grad(first, [k, v], upstream[:68]), strict=True):
        torch.testing.assert_close(found[0], wanted[0])


def test_a_padded_place_reaches_no_gradient() -> None:
    """Sequences of 4 and 3 share a bucket; the shorter learns what it learns alone."""
    layout, (q, k, v) = layout_of([4, 3]), inputs([4, 3])
    upstream = torch.ones_like(q)
    _, keys, values = torch.autograd.grad(gdpa(q, k, v, layout), [q, k, v], upstream)
    alone = torch.autograd.grad(gdpa(q[4:], k[1:], v[1:], layout_of([3])), [k, v], upstream[4:])
    torch.testing.assert_close(keys[1], alone[0][1])
    torch.testing.assert_close(values[1], alone[1][1])


@pytest.mark.parametrize(
    "op",
    [gdpa, lambda q, *rest: pffn_block(q.flatten(1), *rest, activation=("relu", "gelu"), normalize=False)],
    ids=["gdpa", "block"],
)
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
