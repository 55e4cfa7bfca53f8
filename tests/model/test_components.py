"""The parts of which Kunlun is made do what their equations say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.ids import ABSENT
from model.gem.encoder import PersonalizedFeedForward
from model.kernels.activations import ACTIVATIONS
from model.kernels.block_attention import block_attention, block_attention_reference, blocks
from model.kernels.gdpa import gdpa, gdpa_reference
from model.kernels.jagged_attention import jagged_attention, jagged_attention_reference
from model.nn.embedding import IdEmbeddings, hashed_rows, mix64, mix64_reference
from model.nn.interaction import (
    MixtureOfWukongExperts,
    factorization_machine,
    gram_is_cheaper,
    machines,
    machines_reference,
)
from model.nn.jagged import LONG, newest, pad, reverse, unpad
from model.nn.norm import CACHED, layer_norm, rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.pooling import HierarchicalSeedPooling, SumKronLinear, sum_kron_reference
from model.nn.shape import DenseColumn, IdColumn
from model.nn.time import gap_log, rotate, rote_angles, turns
from tests.model.twins import assert_equal, layout_of
from tests.model.twins import double as normal

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128]), min_size=1, max_size=5)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from(sorted(set(ACTIVATIONS) - {"gelu_polynomial"})))
def test_gdpa_equals_its_definition_in_values_and_gradients(lengths: list[int], activation: str) -> None:
    total, layout = sum(lengths), layout_of(lengths)
    q, k, v = (
        normal(*shape, seed=i).requires_grad_()
        for i, shape in enumerate([(total, 2, 4), (len(lengths), 3, 2, 4), (len(lengths), 3, 2, 4)])
    )
    assert_equal(
        gdpa(q, k, v, layout, activation=activation, beta=0.5),
        gdpa_reference(q, k, v, layout, activation=activation, beta=0.5),
        q, k, v,
    )  # fmt: skip


def test_gdpa_is_a_two_layer_network_per_example_and_scales_after_the_activation() -> None:
    q, k, v = normal(5, 2, 4), normal(1, 3, 2, 4, seed=1), normal(1, 3, 2, 4, seed=2)
    layout = layout_of([5])
    expected = torch.stack(
        [ACTIVATIONS["gelu"].value(q[:, h] @ k[0, :, h].T / 2.0) @ v[0, :, h] for h in range(2)], dim=1
    )
    torch.testing.assert_close(gdpa(q, k, v, layout), expected)
    torch.testing.assert_close(gdpa(q, k, v, layout, beta=3.0), 3.0 * expected)
    linear = torch.einsum("thd,mhd,mhe->the", q, k[0], v[0])
    torch.testing.assert_close(gdpa(q, k, v, layout, activation="identity", alpha=1.0), linear)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from([(8, 0), (8, 1), (64, 0), (4, 2)]), st.booleans())
def test_block_attention_equals_dense_attention_with_the_block_mask(
    lengths: list[int], shape: tuple[int, int], causal: bool
) -> None:
    block, radius = shape
    layout = layout_of(lengths)
    q, k, v = (normal(sum(lengths), 2, 4, seed=i).requires_grad_() for i in range(3))
    maps = blocks(layout, block=block, radius=radius, causal=causal)
    assert_equal(
        block_attention(q, k, v, maps),
        block_attention_reference(q, k, v, layout, block=block, radius=radius, causal=causal),
        q, k, v,
    )  # fmt: skip


@pytest.mark.parametrize("radius", [0, 1, 3])
def test_causal_blocks_read_no_newer_block_to_the_bit_and_the_older_ones_in_reach(radius: int) -> None:
    q, k, v = (normal(60, 2, 4, seed=i) for i in range(3))
    maps = blocks(layout_of([40, 20]), block=8, radius=radius, causal=True)
    before = block_attention(q, k, v, maps)
    k[8:16], v[8:16], q[8:16] = 100.0, 100.0, 100.0  # the second newest block of the first sequence
    changed = (block_attention(q, k, v, maps) != before).flatten(1).any(1)
    assert changed[8 - 8 * min(radius, 1) : 16].all()
    assert not changed[16:].any()
    assert changed[:8].any() == (radius > 0)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from([(8, 0), (8, 1), (64, 0), (4, 2)]), st.booleans())
def test_block_attention_turns_queries_and_keys_and_values_if_asked(
    lengths: list[int], shape: tuple[int, int], rotate_values: bool
) -> None:
    block, radius = shape
    layout, total = layout_of(lengths), sum(lengths)
    q, k, v = normal(total, 6, 4).requires_grad_().chunk(3, dim=1)
    options = {"turns": turns(3 * normal(total, 2, seed=1)), "rotate_values": rotate_values}
    assert_equal(
        block_attention(q, k, v, blocks(layout, block=block, radius=radius), **options),
        block_attention_reference(q, k, v, layout, block=block, radius=radius, **options),
        q, k, v,
    )  # fmt: skip


def test_a_token_alone_in_its_block_reads_its_own_value_turned() -> None:
    v, angles = normal(5, 2, 4), normal(5, 2, seed=1)
    maps = blocks(layout_of([1] * 5), block=8, radius=1)
    read = block_attention(v, v, v, maps, turns=turns(angles), rotate_values=True)
    torch.testing.assert_close(rotate(read, turns(-angles)), v)


def test_a_token_outside_the_blocks_in_reach_changes_nothing_to_the_bit() -> None:
    layout = layout_of([40])
    q, k, v = (normal(40, 2, 4, seed=i) for i in range(3))
    maps = blocks(layout, block=8, radius=1)
    before = block_attention(q, k, v, maps)
    k[30], v[30] = 100.0, 100.0
    after = block_attention(q, k, v, maps)
    assert torch.equal(before[:16], after[:16])
    assert not torch.equal(before[16:40], after[16:40])


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.booleans())
def test_jagged_attention_equals_its_definition_and_stays_finite(lengths: list[int], shared: bool) -> None:
    layout = layout_of(lengths)
    q = normal(1 if shared else len(lengths), 3, 2, 4).requires_grad_()
    k, v = ((normal(sum(lengths), 2, 4, seed=i) * 8).requires_grad_() for i in (1, 2))
    fast = jagged_attention(q, k, v, layout)
    assert torch.isfinite(fast).all()
    assert_equal(fast, jagged_attention_reference(q, k, v, layout), q, k, v)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.booleans())
def test_a_bias_of_keys_is_added_to_their_scores_whatever_the_query_and_learns(lengths: list[int], shared: bool) -> None:
    layout = layout_of(lengths)
    q = normal(1 if shared else len(lengths), 3, 2, 4).requires_grad_()
    k, v = (normal(sum(lengths), 2, 4, seed=i).requires_grad_() for i in (1, 2))
    bias = (4 * normal(sum(lengths), 2, seed=3)).requires_grad_()
    fast = jagged_attention(q, k, v, layout, bias)
    assert_equal(fast, jagged_attention_reference(q, k, v, layout, bias), q, k, v, bias)
    torch.testing.assert_close(jagged_attention(q, k, v, layout, bias + 7), fast)  # softmax forgets what all keys share
    torch.testing.assert_close(jagged_attention(q, k, v, layout, 0 * bias), jagged_attention(q, k, v, layout))


def test_a_key_of_very_low_bias_is_not_read() -> None:
    layout, q = layout_of([5, 3]), normal(1, 2, 2, 4)
    k, v, bias = normal(8, 2, 4, seed=1), normal(8, 2, 4, seed=2), torch.zeros(8, 2, dtype=torch.float64)
    bias[2] = -1e4
    kept = [0, 1, 3, 4, 5, 6, 7]
    torch.testing.assert_close(
        jagged_attention(q, k, v, layout, bias), jagged_attention(q, k[kept], v[kept], layout_of([4, 3]))
    )


def test_the_pffn_block_has_metas_order_of_norms_and_residuals() -> None:
    block = PersonalizedFeedForward(8, 2).double()
    s, summary, layout = normal(6, 8), normal(2, 3, 8, seed=1), layout_of([4, 2])
    ln = layer_norm(s)
    k = rms_norm(block.key(summary).unflatten(-1, (2, -1)))
    v = block.value(summary).unflatten(-1, (2, -1))
    u = gdpa_reference(rms_norm(ln.unflatten(-1, (2, -1))), k, v, layout).flatten(1) + ln
    torch.testing.assert_close(block(s, summary, layout), rms_norm(u) + s)
    torch.nn.init.zeros_(block.value.weight)
    torch.testing.assert_close(block(s, summary, layout), rms_norm(ln) + s)


def test_the_feed_forward_has_the_activations_scales_and_norms_it_is_given() -> None:
    options = {"activations": ("relu", "hardswish"), "alpha": 0.3, "beta": 2.0}
    block = PersonalizedFeedForward(8, 2, qk_norm=False, **options).double()
    s, summary, layout = normal(6, 8), normal(2, 3, 8, seed=1), layout_of([4, 2])
    ln = layer_norm(s)
    k, v = (project(summary).unflatten(-1, (2, -1)) for project in (block.key, block.value))
    read = gdpa_reference(ln.unflatten(-1, (2, -1)), k, v, layout, activation=("relu", "hardswish"), alpha=0.3, beta=2.0)
    torch.testing.assert_close(block(s, summary, layout), rms_norm(read.flatten(1) + ln) + s)


def test_sum_kron_is_the_sum_of_kronecker_products() -> None:
    module = SumKronLinear(6, 3, 4, 2).double()
    x = normal(1, 6, 4)
    dense = sum(torch.kron(module.w[i].T.contiguous(), module.z[i].T.contiguous()) for i in range(2))
    vec = dense @ x[0].T.flatten()  # vec stacks columns
    torch.testing.assert_close(module(x)[0].T.flatten(), vec)
    torch.testing.assert_close(module(x)[0], sum_kron_reference(x[0], module.z, module.w))
    assert sum(p.numel() for p in module.parameters()) == 2 * (6 * 3 + 4 * 4)


def test_pooling_ignores_order_and_is_constant_for_an_empty_sequence() -> None:
    pool = HierarchicalSeedPooling(8, heads=2, seeds=6, tokens=2, terms=2).double()
    s = normal(5, 8)
    first, second = pool(s, layout_of([5])), pool(s[[3, 1, 4, 0, 2]], layout_of([5]))
    torch.testing.assert_close(first, second)
    empty = pool(s[:0], layout_of([0, 0]))
    assert torch.isfinite(empty).all()
    torch.testing.assert_close(empty[0], empty[1])
    with pytest.raises(ValueError, match="exceed"):
        HierarchicalSeedPooling(8, heads=2, seeds=2, tokens=2, terms=1)


def test_the_factorization_machine_is_associative_and_of_degree_two() -> None:
    x, y = normal(2, 5, 4), normal(5, 3, seed=1)
    torch.testing.assert_close(factorization_machine(x, y), (x @ x.transpose(1, 2)) @ y)
    torch.testing.assert_close(factorization_machine(3 * x, y), 9 * factorization_machine(x, y))


@pytest.mark.parametrize(("tokens", "gram"), [(4, True), (9, False)])
def test_factorization_machines_of_all_experts_equal_one_at_a_time(tokens: int, gram: bool) -> None:
    x, *ys = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(3, tokens, 5), (tokens, 2), (tokens, 2)]))
    assert gram_is_cheaper(tokens, 5, rank=2, count=2) == gram
    assert_equal(torch.stack(machines(x, ys)), torch.stack(machines_reference(x, ys)), x, *ys)


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_linear_parts_in_one_product_equal_an_expert_at_a_time(combine: str) -> None:
    mixture = MixtureOfWukongExperts(5, 4, experts=2, factors=2, linear=4, rank=2, hidden=8, combine=combine).double()
    x = normal(3, 5, 4).requires_grad_()
    assert_equal(mixture(x), mixture.forward_reference(x), x, *mixture.parameters())


def test_one_expert_is_the_expert_and_concat_lays_tokens_side_by_side() -> None:
    one = MixtureOfWukongExperts(5, 4, experts=1, factors=2, linear=2, rank=2, hidden=8).double()
    x = normal(3, 5, 4)
    torch.testing.assert_close(one(x), layer_norm(one.experts[0](x) + one.shortcut @ x))
    two = MixtureOfWukongExperts(5, 4, experts=2, factors=2, linear=2, rank=2, hidden=8, combine="concat").double()
    joined = torch.cat([expert(x) for expert in two.experts], dim=1) + two.shortcut @ x
    torch.testing.assert_close(two(x), layer_norm(joined))
    with pytest.raises(ValueError, match="divisible"):
        MixtureOfWukongExperts(5, 4, experts=2, factors=3, linear=2, rank=2, hidden=8, combine="concat")


def test_rotation_keeps_norms_and_depends_on_relative_angles_only() -> None:
    x, y = normal(4, 2, 8), normal(4, 2, 8, seed=1)
    a, b, shift = normal(4, 4, seed=2), normal(4, 4, seed=3), normal(4, 4, seed=4)
    torch.testing.assert_close(rotate(x, turns(a)).norm(dim=-1), x.norm(dim=-1))
    before = (rotate(x, turns(a)) * rotate(y, turns(b))).sum(-1)
    torch.testing.assert_close((rotate(x, turns(a + shift)) * rotate(y, turns(b + shift))).sum(-1), before)
    torch.testing.assert_close(rotate(rotate(x, turns(a)), turns(-a)), x)


def test_time_is_read_relative_to_the_request_in_integers() -> None:
    event, request = torch.tensor([10**13, 10**13 - 3_600_000]), torch.tensor([10**13, 10**13])
    tau = gap_log(event, request, scale_ms=3_600_000)
    torch.testing.assert_close(tau, torch.tensor([0.0, float(np.log(2))]))
    torch.testing.assert_close(gap_log(event + 7, request + 7, scale_ms=3_600_000), tau)
    position = torch.arange(2)
    rope = rote_angles(position, torch.zeros(2), 8)
    torch.testing.assert_close(rope[1], 10_000.0 ** -(torch.arange(4) / 4.0))


@given(st.lists(st.integers(-(2**63) + 1, 2**63 - 1), min_size=1, max_size=50), st.integers(0, 2**40))
def test_hashing_in_torch_is_splitmix64(keys: list[int], salt: int) -> None:
    array = np.array(keys, dtype=np.int64)
    assert mix64(torch.from_numpy(array), salt).tolist() == mix64_reference(array, salt).tolist()
    rows = hashed_rows(torch.from_numpy(array), 10, salt)
    assert int(rows.min()) >= 2
    assert int(rows.max()) < 10


def test_absent_unknown_and_frequent_keys_have_the_rows_they_should() -> None:
    column = IdColumn(name="ad", table="ad", rows=5, min_count=2)
    embeddings = IdEmbeddings([column], 4)
    embeddings.fit({"ad": Counter({7: 2, -3: 5, 9: 1})})
    keys = torch.tensor([ABSENT, 9, 123, -3, 7])
    assert embeddings.rows_of("ad", keys).tolist() == [0, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="raise rows"):
        embeddings.fit({"ad": Counter(dict.fromkeys(range(9), 9))})


def test_piecewise_linear_codes_are_exact_at_quantiles_and_flag_missing_values() -> None:
    codes = PiecewiseLinear((DenseColumn(name="x"), DenseColumn(name="v", width=2, is_embedding=True)), num_bins=2)
    codes.fit(np.array([[0, 1, 1], [1, 1, 1], [2, 1, 1]], dtype=np.float32))
    out = codes(torch.tensor([[0.5, 3.0, 4.0], [float("nan"), 5.0, 6.0], [9.0, 0.0, 0.0]]))
    assert out.tolist() == [[0.5, 0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 1.0, 5.0, 6.0], [1.0, 1.0, 0.0, 0.0, 0.0]]


def test_reversing_and_cutting_sequences_keeps_their_newest_events_first() -> None:
    offsets = torch.tensor([0, 3, 3, 5])
    assert reverse(offsets).tolist() == [2, 1, 0, 4, 3]
    rows, cut = newest(offsets, 2)
    assert (rows.tolist(), cut.tolist()) == ([1, 2, 3, 4], [0, 2, 2, 4])


def test_a_radius_that_reaches_everything_is_full_attention() -> None:
    lengths = [17, 1, 30]
    q, k, v = (normal(48, 2, 4, seed=i) for i in range(3))
    made = layout_of(lengths)
    wide = block_attention(q, k, v, blocks(made, block=4, radius=9))
    parts = [x.split(lengths) for x in (q, k, v)]
    full = [
        torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1)
        for part in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(wide, torch.cat(full))


def test_attention_of_very_negative_scores_stays_finite() -> None:
    q, k = torch.full((1, 1, 1, 4), 50.0), torch.full((3, 1, 4), -50.0)
    read = jagged_attention(q, k, torch.ones(3, 1, 4), layout_of([3]))
    torch.testing.assert_close(read, torch.ones(1, 1, 1, 4))


def test_normalizing_by_the_root_mean_square_has_the_gradient_of_its_formula() -> None:
    x = normal(5, 3, 8).requires_grad_()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_equal(rms_norm(x), plain, x)
    torch.testing.assert_close(rms_norm(x.detach()), plain.detach())


def test_normalizing_many_rows_part_by_part_has_the_gradient_of_the_whole() -> None:
    x = normal(2500, 4, 16).requires_grad_()
    assert x.numel() > CACHED
    assert_equal(rms_norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), x)


def test_long_sequences_have_buckets_of_their_own() -> None:
    made = layout_of([LONG - 1, 3, LONG, 0, LONG + 88])
    assert [b.rows.tolist() for b in made.buckets if b.valid.shape[1] >= LONG] == [[2], [4]]


@pytest.mark.parametrize(
    ("lengths", "straight"), [([LONG - 1, 3, LONG, 0, LONG + 88], False), ([LONG + 9, LONG], True), ([7, 7, 7], True)]
)
def test_long_and_equal_sequences_have_the_same_values_and_gradients(lengths: list[int], straight: bool) -> None:
    layout, total = layout_of(lengths), sum(lengths)
    assert layout.straight is straight
    q, k, v = (normal(total, 2, 4, seed=i).requires_grad_() for i in range(3))
    keys, values = (normal(len(lengths), 3, 2, 4, seed=i).requires_grad_() for i in (3, 4))
    seeds = normal(1, 3, 2, 4, seed=5).requires_grad_()
    assert_equal(gdpa(q, keys, values, layout), gdpa_reference(q, keys, values, layout), q, keys, values)
    assert_equal(jagged_attention(seeds, k, v, layout), jagged_attention_reference(seeds, k, v, layout), seeds, k, v)


def test_jagged_operations_have_the_gradients_that_differences_show() -> None:
    layout = layout_of([2, 0, 3, 1])
    maps = blocks(layout, block=2, radius=1)
    q, k, v = (normal(6, 1, 2, seed=i).requires_grad_() for i in range(3))
    keys, values = (normal(4, 2, 1, 2, seed=i).requires_grad_() for i in (3, 4))
    seeds = normal(1, 2, 1, 2, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v: gdpa(q, k, v, layout), (q, keys, values))
    assert torch.autograd.gradcheck(lambda q, k, v: block_attention(q, k, v, maps), (q, k, v))
    turned = {"turns": turns(normal(6, 1, seed=6)), "rotate_values": True}
    assert torch.autograd.gradcheck(lambda q, k, v: block_attention(q, k, v, maps, **turned), (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: jagged_attention(q, k, v, layout), (seeds, k, v))
    bias = normal(6, 1, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v, b: jagged_attention(q, k, v, layout, b), (seeds, k, v, bias))
    assert torch.autograd.gradcheck(rms_norm, (q,))


def test_blocks_alone_do_not_carry_the_oldest_event_and_the_summary_does() -> None:
    made = layout_of([40])
    x = normal(40, 2, 4).requires_grad_()
    block_attention(x, x, x, blocks(made, block=8, radius=0))[:8].sum().backward()
    assert x.grad is not None
    assert not x.grad[8:].any()
    s, pool = normal(40, 8).requires_grad_(), HierarchicalSeedPooling(8, heads=2, seeds=6, tokens=2, terms=2).double()
    pool(s, made).square().sum().backward()
    pool(s, made)[0, 0, 0].backward()
    assert s.grad is not None
    assert float(s.grad[-1].abs().sum()) > 0


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_buckets_hold_every_token_once_and_waste_less_than_thirty_percent(lengths: list[int]) -> None:
    made = layout_of(lengths)
    for bucket in made.buckets:
        longest = bucket.valid.shape[1]
        assert int(bucket.valid.sum(1).min()) * 2**0.5 > longest - 1e-6
        assert bucket.valid.sum(1).tolist() == made.lengths[bucket.rows].tolist()
    tokens = torch.arange(1, sum(lengths) + 1, dtype=torch.float64)[:, None]
    if sum(lengths):
        places = pad(tokens, made)
        assert torch.equal(unpad(places, made), tokens)
        assert sum(float(part.sum()) for part in places) == float(tokens.sum())
