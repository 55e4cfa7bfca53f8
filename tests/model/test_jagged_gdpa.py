"""Attention without softmax over jagged keys equals its definition, in values and gradients, within its window and beyond."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels.activations import ACTIVATIONS
from model.kernels.gdpa import gdpa
from model.kernels.jagged_gdpa import (
    pooled_gdpa,
    pooled_gdpa_reference,
    windowed_gdpa,
    windowed_gdpa_flops,
    windowed_gdpa_reference,
)
from model.nn.jagged import LONG
from tests.model.twins import assert_equal, double, layout_of

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128]), min_size=1, max_size=4)
HEADS, WIDTH, QUERIES = 2, 4, 3
FREE = sorted(set(ACTIVATIONS) - {"gelu_polynomial"})
OF_HEADS = st.one_of(st.sampled_from(FREE), st.tuples(*[st.sampled_from(FREE)] * HEADS))


def learned(*shape: int, seed: int) -> Tensor:
    return double(*shape, seed=seed).requires_grad_()


def tokens(lengths: list[int]) -> list[Tensor]:
    return [learned(sum(lengths), HEADS, WIDTH, seed=i) for i in range(3)]


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([None, 0, 1, 5, 16, 63, 64, 65, 127, 500]), OF_HEADS)
def test_a_window_equals_dense_scores_set_to_zero_outside_it(
    lengths: list[int], window: int | None, activation: str | tuple[str, ...]
) -> None:
    layout, (q, k, v) = layout_of(lengths), tokens(lengths)
    options = {"window": window, "activation": activation, "alpha": 0.7, "beta": -0.5}
    plain = windowed_gdpa_reference(q, k, v, layout, **options)
    assert_equal(windowed_gdpa(q, k, v, layout, **options), plain, q, k, v)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.booleans(), OF_HEADS)
def test_dense_queries_over_jagged_keys_equal_their_definition(
    lengths: list[int], shared: bool, activation: str | tuple[str, ...]
) -> None:
    layout, (_, k, v) = layout_of(lengths), tokens(lengths)
    q = learned(1 if shared else len(lengths), QUERIES, HEADS, WIDTH, seed=5)
    plain = pooled_gdpa_reference(q, k, v, layout, activation=activation, alpha=0.3, beta=2.0)
    fast = pooled_gdpa(q, k, v, layout, activation=activation, alpha=0.3, beta=2.0)
    assert_equal(fast, plain, q, k, v)
    assert fast.shape == (len(lengths), QUERIES, HEADS, WIDTH)


def test_queries_shared_by_all_sequences_read_as_if_repeated_and_their_gradient_is_the_sum() -> None:
    lengths = [5, 0, LONG, 64]
    layout, (_, k, v), q = layout_of(lengths), tokens(lengths), learned(1, QUERIES, HEADS, WIDTH, seed=5)
    repeated = q.detach().expand(len(lengths), -1, -1, -1).clone().requires_grad_()
    once, many = (pooled_gdpa(x, k, v, layout) for x in (q, repeated))
    torch.testing.assert_close(once, many)
    upstream = torch.randn_like(once)
    ours, each = torch.autograd.grad(once, q, upstream)[0], torch.autograd.grad(many, repeated, upstream)[0]
    torch.testing.assert_close(ours, each.sum(0, keepdim=True))


def test_a_window_that_takes_all_in_reads_what_jagged_queries_read_of_dense_keys() -> None:
    layout, (q, k, v) = layout_of([7, 7]), tokens([7, 7])
    dense = gdpa(q, k.unflatten(0, (2, 7)), v.unflatten(0, (2, 7)), layout)
    for window in (None, 6, 100):
        torch.testing.assert_close(windowed_gdpa(q, k, v, layout, window=window), dense)
    assert not torch.allclose(windowed_gdpa(q, k, v, layout, window=5), dense)


def test_a_token_outside_the_window_changes_nothing_to_the_bit() -> None:
    layout, (q, k, v) = layout_of([40, 10]), [x.detach() for x in tokens([40, 10])]
    before = windowed_gdpa(q, k, v, layout, window=3)
    k[20], v[20] = 100.0, 100.0
    after = windowed_gdpa(q, k, v, layout, window=3)
    changed = (before != after).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(17, 24))


def test_the_scale_after_the_activation_multiplies_what_is_read() -> None:
    layout, (q, k, v) = layout_of([9, 4]), tokens([9, 4])
    torch.testing.assert_close(
        windowed_gdpa(q, k, v, layout, window=2, beta=3.0), 3 * windowed_gdpa(q, k, v, layout, window=2)
    )
    seeds = learned(1, QUERIES, HEADS, WIDTH, seed=5)
    torch.testing.assert_close(pooled_gdpa(seeds, k, v, layout, beta=3.0), 3 * pooled_gdpa(seeds, k, v, layout))


@pytest.mark.parametrize("activation", FREE)
def test_the_gradient_is_the_slope_of_the_value(activation: str) -> None:
    layout, (q, k, v) = layout_of([2, 0, 3]), tokens([2, 0, 3])
    seeds = learned(1, 2, HEADS, WIDTH, seed=5)
    window = lambda q, k, v: windowed_gdpa(q, k, v, layout, window=1, activation=activation)  # noqa: E731
    assert torch.autograd.gradcheck(window, (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: pooled_gdpa(q, k, v, layout, activation=activation), (seeds, k, v))


def test_windows_and_activations_that_cannot_be_are_refused() -> None:
    layout, (q, k, v) = layout_of([2]), tokens([2])
    with pytest.raises(ValueError, match="window is -1; 0 reads a token itself, None the whole sequence"):
        windowed_gdpa(q, k, v, layout, window=-1)
    with pytest.raises(ValueError, match="no activation is called softplus"):
        windowed_gdpa(q, k, v, layout, activation="softplus")
    with pytest.raises(ValueError, match="3 activations for 2 heads"):
        pooled_gdpa(q[None], k, v, layout, activation=["gelu"] * 3)


@given(st.lists(st.integers(0, 60), max_size=5), st.one_of(st.none(), st.integers(0, 70)))
def test_the_pairs_counted_are_those_within_the_window(lengths: list[int], window: int | None) -> None:
    pairs = 0
    for length in lengths:
        place = np.arange(length)
        near = np.abs(place[:, None] - place) <= (length if window is None else window)
        pairs += int(near.sum())
    assert windowed_gdpa_flops(lengths, window=window, width=8) == 4 * 8 * pairs
