"""Triton's interpreter runs the kernels on CPU tensors: they equal their definitions.

`test_triton_kernels` runs this file in a process of its own, with TRITON_INTERPRET set before kernels are decorated.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.kernels import block_tiles, gdpa_tiles, jagged_tiles
from model.kernels.block_attention import (
    Blocks,
    block_attention_flops,
    block_attention_reference,
    blocks,
)
from model.kernels.gdpa import gdpa_flops, gdpa_reference
from model.kernels.jagged_attention import jagged_attention_flops, jagged_attention_reference
from model.nn.jagged import Jagged, jagged
from model.nn.time import turns
from tests.model.twins import assert_equal, layout_of, normal

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/model/test_triton_kernels.py"
LENGTHS = [0, 1, 63, 64, 65, 128]
# The row of a key that is not there overflows where all scores are very negative; it is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
near = partial(assert_equal, rtol=1e-5, atol=2e-5)


def packed(total: int, heads: int, width: int, count: int, seed: int = 7) -> tuple[Tensor, ...]:
    """Views of one projection, side by side as layers make them."""
    return normal(total, count * heads, width, seed=seed).requires_grad_().chunk(count, dim=1)


def read(q: Tensor, k: Tensor, v: Tensor, layout: Jagged, bias: Tensor | None = None) -> Tensor:
    return jagged_tiles.attend(q, k, v, layout.offsets, bias)[0]


def read_blocks(
    q: Tensor, k: Tensor, v: Tensor, maps: Blocks, angles: Tensor | None = None, rotate_values: bool = False
) -> Tensor:
    pairs = None if angles is None else torch.view_as_real(turns(angles)).flatten(1)
    return block_tiles.attend(q, k, v, pairs, maps.spans, maps.block, maps.before, maps.radius, rotate_values)[0]


@pytest.mark.parametrize(("shared", "queries", "width"), [(True, 3, 16), (True, 70, 4), (False, 3, 4), (False, 70, 16)])
def test_jagged_attention_equals_its_definition(
    shared: bool, queries: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jagged_tiles, "PARTS", 4)  # a part sums gradients of several sequences
    layout = layout_of(LENGTHS)
    q = normal(1 if shared else len(LENGTHS), queries, 2, width).requires_grad_()
    k, v = packed(sum(LENGTHS), 2, width, 2)
    near(read(q, k, v, layout), jagged_attention_reference(q, k, v, layout), q, k, v)


@pytest.mark.parametrize(("shared", "queries"), [(True, 3), (False, 70)])
def test_a_bias_of_keys_is_added_to_their_scores_and_learns(
    shared: bool, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jagged_tiles, "PARTS", 2)
    lengths = [0, 1, 65, 128]
    layout, q = layout_of(lengths), normal(1 if shared else len(lengths), queries, 2, 16).requires_grad_()
    k, v = packed(sum(lengths), 2, 16, 2)
    bias = (4 * normal(sum(lengths), 2, seed=5)).requires_grad_()
    near(read(q, k, v, layout, bias), jagged_attention_reference(q, k, v, layout, bias), q, k, v, bias)


def test_keys_that_are_not_there_do_not_outweigh_very_negative_scores() -> None:
    layout = layout_of([3, 66])
    q, k = torch.full((1, 2, 1, 16), 5.0).requires_grad_(), (-5 - 0.01 * normal(69, 1, 16)).requires_grad_()
    v = normal(69, 1, 16, seed=1).requires_grad_()
    near(read(q, k, v, layout), jagged_attention_reference(q, k, v, layout), q, k, v)


def test_sequences_without_keys_read_zeros_and_give_no_gradient() -> None:
    q, k = normal(2, 3, 2, 16).requires_grad_(), torch.zeros(0, 2, 16, requires_grad=True)
    out = read(q, k, k, layout_of([0, 0]))
    gradients = torch.autograd.grad(out.sum(), (q, k))
    assert not out.any()
    assert not gradients[0].any()
    assert read(q[:0], k, k, jagged(torch.zeros(1, dtype=torch.int64))).shape == (0, 3, 2, 16)


@pytest.mark.parametrize(
    ("block", "radius", "width", "causal"),
    [
        *((64, 0, 16, False), (64, 1, 4, False), (8, 0, 4, False), (8, 2, 16, False), (20, 1, 16, False)),
        *((64, 1, 4, True), (8, 2, 16, True)),
    ],
)
def test_block_attention_equals_dense_attention_with_the_block_mask(
    block: int, radius: int, width: int, causal: bool
) -> None:
    lengths = LENGTHS if block == 64 else [0, 1, 7, 8, 9, 41]
    layout = layout_of(lengths)
    q, k, v = packed(sum(lengths), 2, width, 3)
    maps = blocks(layout, block=block, radius=radius, causal=causal)
    plain = block_attention_reference(q, k, v, layout, block=block, radius=radius, causal=causal)
    near(read_blocks(q, k, v, maps), plain, q, k, v)


@pytest.mark.parametrize(
    ("block", "radius", "width", "rotate_values"),
    [(64, 0, 16, True), (64, 1, 4, False), (8, 2, 16, True), (20, 0, 12, False), (64, 1, 80, True)],
)
def test_pairs_turned_on_load_and_back_before_the_store_equal_pairs_turned_before(
    block: int, radius: int, width: int, rotate_values: bool
) -> None:
    lengths = [0, 1, 63, 65, 127] if block == 64 else [0, 1, 7, 8, 9, 41]
    layout = layout_of(lengths)
    q, k, v = packed(sum(lengths), 1, width, 3)
    maps, angles = blocks(layout, block=block, radius=radius), 3 * normal(sum(lengths), width // 2, seed=9)
    options = {"turns": turns(angles), "rotate_values": rotate_values}
    plain = block_attention_reference(q, k, v, layout, block=block, radius=radius, **options)
    near(read_blocks(q, k, v, maps, angles, rotate_values), plain, q, k, v)


@pytest.mark.parametrize(
    ("activation", "keys", "programs"),
    [("gelu", 3, 1), ("gelu", 130, 100), ("silu", 3, 100), ("relu", 130, 1), ("identity", 3, 1)],
)
def test_gdpa_equals_its_definition(
    activation: str, keys: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdpa_tiles, "RUN", 1)  # a sequence is several runs
    monkeypatch.setattr(gdpa_tiles, "PROGRAMS", programs)  # and several parts, where programs are to be many
    lengths = [0, 1, 65, 130]
    layout, width = layout_of(lengths), 4 if keys == 3 else 16
    q = packed(sum(lengths), 1, width, 2)[0]
    k, v = packed(len(lengths) * keys, 1, width, 2, seed=8)
    k, v = (x.unflatten(0, (len(lengths), keys)) for x in (k, v))
    plain = gdpa_reference(q, k, v, layout, activation=activation, alpha=0.4, beta=0.5)
    near(gdpa_tiles.attend(q, k, v, layout.offsets, activation, 0.4, 0.5), plain, q, k, v)


def test_half_precision_differs_by_its_rounding_only() -> None:
    layout = layout_of([5, 70])
    q, k, v = (normal(75, 2, 16, seed=i).half() for i in range(3))
    maps = blocks(layout, block=64, radius=1)
    wide = block_attention_reference(q.float(), k.float(), v.float(), layout, block=64, radius=1)
    torch.testing.assert_close(read_blocks(q, k, v, maps).float(), wide, rtol=2e-3, atol=2e-3)
    angles = 3 * normal(75, 8, seed=9)
    turned = {"turns": turns(angles), "rotate_values": True}
    wide = block_attention_reference(q.float(), k.float(), v.float(), layout, block=64, radius=1, **turned)
    torch.testing.assert_close(read_blocks(q, k, v, maps, angles, True).float(), wide, rtol=2e-3, atol=2e-3)
    seeds = normal(1, 3, 2, 16, seed=4).half().requires_grad_()
    plain = jagged_attention_reference(seeds.float(), k.float(), v.float(), layout)
    out = read(seeds, k, v, layout)
    torch.testing.assert_close(out.float(), plain, rtol=2e-3, atol=2e-3)
    ours, theirs = (torch.autograd.grad(x.float().square().sum(), seeds)[0] for x in (out, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_operators_are_what_torch_asks_of_them() -> None:
    layout = layout_of([2, 0, 9])
    q, k, v = (normal(11, 1, 16, seed=i).requires_grad_() for i in range(3))
    seeds, maps = normal(1, 2, 1, 16).requires_grad_(), blocks(layout, block=8, radius=1)
    keys, operators = normal(3, 2, 1, 16).requires_grad_(), torch.ops.gem
    what = ("test_schema", "test_autograd_registration", "test_faketensor")
    for bias in (None, normal(11, 1).requires_grad_()):
        torch.library.opcheck(operators.jagged_attention.default, (seeds, k, v, layout.offsets, bias), test_utils=what)
    for pairs in (None, torch.view_as_real(turns(normal(11, 8))).flatten(1)):
        given = (q, k, v, pairs, maps.spans, 8, 1, 1, False)
        torch.library.opcheck(operators.block_attention.default, given, test_utils=what)
    torch.library.opcheck(operators.gdpa.default, (q, keys, keys, layout.offsets, "gelu", 0.5, 1.0), test_utils=what)


def test_compiled_whole_they_give_the_same() -> None:
    layout = layout_of([2, 0, 9])
    q, k, v = (normal(11, 1, 16, seed=i).requires_grad_() for i in range(3))
    seeds, maps = normal(1, 2, 1, 16).requires_grad_(), blocks(layout, block=8, radius=1)

    def both(seeds: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x[:6].view(3, 2, 1, 16) for x in (k, v))
        conditioned = gdpa_tiles.attend(q, keys, values, layout.offsets, "gelu", 0.5, 1.0)
        return read(seeds, k, v, layout).sum() + read_blocks(conditioned, k, v, maps, k[:, 0, :8].detach()).square().sum()

    inputs = (seeds, q, k, v)
    whole = torch.compile(both, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(whole(*inputs), inputs), torch.autograd.grad(both(*inputs), inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("radius", "causal"), [(0, False), (1, False), (2, True)])
def test_the_counter_of_torch_counts_actual_lengths_and_nothing_computed_again(radius: int, causal: bool) -> None:
    lengths = [2, 0, 9, 30]
    layout = layout_of(lengths)
    q, k, v = (normal(41, 1, 16, seed=i).requires_grad_() for i in range(3))
    seeds, maps = normal(1, 2, 1, 16).requires_grad_(), blocks(layout, block=8, radius=radius, causal=causal)
    keys = normal(4, 3, 1, 16).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss = read(seeds, k, v, layout).sum() + read_blocks(q, k, v, maps, normal(41, 8)).sum()
        loss = loss + gdpa_tiles.attend(q, keys, keys, layout.offsets, "gelu", 0.5, 1.0).sum()
    forward = jagged_attention_flops(41, 2, 16) + block_attention_flops(
        lengths, block=8, radius=radius, causal=causal, width=16
    )
    forward += gdpa_flops(41, 3, 16)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * forward
