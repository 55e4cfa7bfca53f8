"""Kunlun's components do what their equations say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from feature_store.batch import FeatureBatch
from feature_store.ids import ABSENT
from feature_store.layout import Layout, total_width
from feature_store.spec import load_spec
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.encoder import PersonalizedFeedForward
from model.gem.flops import forward_flops
from model.gem.foundation import FoundationModel, stream_rows
from model.gem.presets import public_s, tiny
from model.kernels.block_attention import block_attention, block_attention_reference, blocks
from model.kernels.gdpa import ACTIVATIONS, gdpa, gdpa_reference
from model.kernels.jagged_attention import jagged_attention, jagged_attention_reference
from model.nn.embedding import IdEmbeddings, hashed_rows, mix64, mix64_reference
from model.nn.interaction import MixtureOfWukongExperts, factorization_machine
from model.nn.jagged import Jagged, jagged, newest, reverse
from model.nn.norm import layer_norm, rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.pooling import HierarchicalSeedPooling, SumKronLinear, sum_kron_reference
from model.nn.shape import DenseColumn, IdColumn
from model.nn.time import gap_log, rotate, rote_angles, turns

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65]), min_size=1, max_size=5)


def layout_of(lengths: list[int]) -> Jagged:
    return jagged(torch.tensor([0, *np.cumsum(lengths)]))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_gradients(fast: Tensor, plain: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(fast, plain)
    if not (fast.requires_grad and plain.requires_grad):  # no token at all
        return
    upstream = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, inputs, upstream, allow_unused=True),
        torch.autograd.grad(plain, inputs, upstream, allow_unused=True),
        strict=True,
    ):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from(sorted(ACTIVATIONS)))
def test_gdpa_equals_its_definition_in_values_and_gradients(lengths: list[int], activation: str) -> None:
    total, layout = sum(lengths), layout_of(lengths)
    q, k, v = (
        normal(*shape, seed=i).requires_grad_()
        for i, shape in enumerate([(total, 2, 4), (len(lengths), 3, 2, 4), (len(lengths), 3, 2, 4)])
    )
    same_gradients(
        gdpa(q, k, v, layout, activation=activation, beta=0.5),
        gdpa_reference(q, k, v, layout, activation=activation, beta=0.5),
        q, k, v,
    )  # fmt: skip


def test_gdpa_is_a_two_layer_network_per_example_and_scales_after_the_activation() -> None:
    q, k, v = normal(5, 2, 4), normal(1, 3, 2, 4, seed=1), normal(1, 3, 2, 4, seed=2)
    layout = layout_of([5])
    expected = torch.stack(
        [ACTIVATIONS["gelu"](q[:, h] @ k[0, :, h].T / 2.0) @ v[0, :, h] for h in range(2)], dim=1
    )
    torch.testing.assert_close(gdpa(q, k, v, layout), expected)
    torch.testing.assert_close(gdpa(q, k, v, layout, beta=3.0), 3.0 * expected)
    linear = torch.einsum("thd,mhd,mhe->the", q, k[0], v[0])
    torch.testing.assert_close(gdpa(q, k, v, layout, activation="identity", alpha=1.0), linear)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from([(8, 0), (8, 1), (64, 0), (4, 2)]))
def test_block_attention_equals_dense_attention_with_the_block_mask(lengths: list[int], shape: tuple[int, int]) -> None:
    block, radius = shape
    layout = layout_of(lengths)
    q, k, v = (normal(sum(lengths), 2, 4, seed=i).requires_grad_() for i in range(3))
    maps = blocks(layout, block=block, radius=radius)
    same_gradients(
        block_attention(q, k, v, maps),
        block_attention_reference(q, k, v, layout, block=block, radius=radius),
        q, k, v,
    )  # fmt: skip


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
    same_gradients(fast, jagged_attention_reference(q, k, v, layout), q, k, v)


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


# The whole model.


def layout() -> Layout:
    return Layout(load_spec(WORLD))


def batch_of(lengths: list[int], shown: list[int], *, seed: int = 0) -> FeatureBatch:
    rng = np.random.default_rng(seed)
    made, r, n, t = layout(), len(lengths), sum(shown), sum(lengths)
    request = np.repeat(np.arange(r), lengths)
    request_ms = np.full(r, 1_767_400_000_000)
    age = np.concatenate([np.sort(rng.integers(1, 10**8, length))[::-1] for length in lengths] + [np.zeros(0, int)])
    return FeatureBatch(
        user_key=rng.integers(0, 99, r),
        surface=rng.integers(0, 5, r).astype(np.int32),
        request_ms=request_ms,
        user_ids=rng.integers(0, 9, (r, len(made.user_ids))),
        user_dense=rng.normal(size=(r, total_width(made.user_dense))).astype(np.float32),
        event_offsets=np.append(0, np.cumsum(lengths)).astype(np.int64),
        event_ms=request_ms[request] - age.astype(np.int64),
        event_source=rng.integers(0, 2, t).astype(np.int32),
        event_surface=rng.integers(-1, 5, t).astype(np.int32),
        event_labels=rng.integers(0, 8, t).astype(np.int32),
        event_ids=rng.integers(0, 50, (t, len(made.event_ids))),
        event_dense=np.zeros((t, total_width(made.event_dense)), dtype=np.float32),
        candidate_offsets=np.append(0, np.cumsum(shown)).astype(np.int64),
        ad_ids=rng.integers(0, 50, (n, len(made.ad_ids))),
        ad_dense=rng.normal(size=(n, total_width(made.ad_dense))).astype(np.float32),
        memory_offsets=np.zeros(r + 1, dtype=np.int64),
        memory_ms=np.zeros(0, dtype=np.int64),
        memory_surface=np.zeros(0, dtype=np.int32),
        memory_labels=np.zeros(0, dtype=np.int32),
        memory_q=np.zeros((0, 32), dtype=np.uint8),
        pair_q=np.zeros((n, 64), dtype=np.int8),
        pair_scale=np.zeros(n, dtype=np.float32),
        pair_level=np.full(n, 4, dtype=np.int32),
        pair_meta=np.zeros((n, 3), dtype=np.float32),
    )


def model_of(config: GemConfig) -> FoundationModel:
    torch.manual_seed(0)
    model = FoundationModel(config, layout())
    with torch.no_grad():
        model.heads.out.normal_()
    return model.eval()


def rows_of(batch: FeatureBatch, request: int) -> FeatureBatch:
    """One request of a batch."""
    e, c = batch.event_offsets[request : request + 2], batch.candidate_offsets[request : request + 2]
    kept: dict[str, np.ndarray] = {}
    for name, value in batch._asdict().items():
        if name.endswith("_offsets"):
            kept[name] = value[request : request + 2] - value[request]
        elif name.startswith("event_"):
            kept[name] = value[e[0] : e[1]]
        elif name.startswith(("ad_", "pair_")):
            kept[name] = value[c[0] : c[1]]
        elif name.startswith("memory_"):
            kept[name] = value
        else:
            kept[name] = value[request : request + 1]
    return FeatureBatch(**kept)


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_a_score_depends_on_its_own_request_and_candidate_only(context: str) -> None:
    model = model_of(dataclasses.replace(tiny(), pffn_context=context))  # type: ignore[arg-type]
    batch = batch_of([5, 0, 17], [3, 2, 4])
    with torch.no_grad():
        whole = model(Batch.from_numpy(batch)).logits_NK
        alone = [model(Batch.from_numpy(rows_of(batch, r))).logits_NK for r in range(3)]
    torch.testing.assert_close(torch.cat(alone), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("lengths", "shown"), [([], []), ([3], [0]), ([0], [2]), ([2, 3], [0, 5])])
def test_empty_batches_histories_and_requests_have_scores_of_the_right_shape(lengths: list[int], shown: list[int]) -> None:
    out = model_of(tiny())(Batch.from_numpy(batch_of(lengths, shown)))
    assert out.logits_NK.shape == (sum(shown), 3)
    assert torch.isfinite(out.logits_NK).all()


def test_a_score_follows_the_time_of_the_request_and_not_of_the_clock() -> None:
    model, batch = model_of(tiny()), batch_of([6], [2])
    day = 7 * 86_400_000
    with torch.no_grad():
        now = model(Batch.from_numpy(batch)).logits_NK
        moved = batch._replace(request_ms=batch.request_ms + day, event_ms=batch.event_ms + day)
        later = batch._replace(request_ms=batch.request_ms + day)
        torch.testing.assert_close(model(Batch.from_numpy(moved)).logits_NK, now)
        assert not torch.allclose(model(Batch.from_numpy(later)).logits_NK, now)


def test_a_skipped_stream_is_untouched_and_the_summary_is_the_cached_one() -> None:
    config = dataclasses.replace(tiny(), layers=3)
    assert [sorted(config.parts(layer)) for layer in range(3)] == [["pffn", "pooling"], ["attention"], ["pffn", "pooling"]]
    model, seen = model_of(config), []
    model.layers[1].register_forward_hook(lambda module, given, made: seen.append((given[3], made[2])))
    model(Batch.from_numpy(batch_of([4], [1])))
    assert seen[0][0] is seen[0][1], "an attention layer hands the cached summary on"
    assert model.layers[1].streams[0].pffn is None
    assert model.layers[0].streams[0].attention is None


def test_information_flows_both_ways_and_reaches_the_oldest_event_through_the_summary() -> None:
    model = model_of(dataclasses.replace(tiny(), layers=4, block=2))
    events: list[Tensor] = []

    def keep(module: torch.nn.Module, given: object, made: Tensor) -> None:
        made.retain_grad()
        events.append(made)

    model.tokens.events.register_forward_hook(keep)
    model(Batch.from_numpy(batch_of([30], [1]))).logits_NK.sum().backward()
    assert float(events[0].grad[-1].abs().sum()) > 0  # newest first: the last is the oldest
    assert float(model.layers[2].context_summary.compress.grad.abs().sum()) > 0


def test_every_parameter_learns_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    model = FoundationModel(dataclasses.replace(tiny(), id_dropout=0.0), layout())
    batch, before = batch_of([7] * 100, [1] * 100), {}
    model.fit_statistics([batch])
    labels = torch.rand(100, 3, generator=torch.Generator().manual_seed(1)).round()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(Batch.from_numpy(batch)).logits_NK, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < 0.69 < losses[0] + 0.01
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == []


def grouped() -> Layout:
    """The world's layout with searches in a stream of their own."""
    spec = load_spec(WORLD)
    message = type(spec.message).FromString(spec.message.SerializeToString())
    for source in message.event_sources:
        source.merge_group = source.name
    return Layout(dataclasses.replace(spec, message=message))


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_sources_of_another_merge_group_are_a_stream_of_their_own(context: str) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(tiny(), pffn_context=context)  # type: ignore[arg-type]
    model, batch = FoundationModel(config, grouped()), batch_of([40, 0, 3], [1, 2, 1])
    assert model.shape.streams == ((0,), (1,))
    seen: list[int] = []
    for read in model.reads:
        read.register_forward_hook(lambda module, given, made: seen.append(len(given[1].values_TD)))
    out = model(Batch.from_numpy(batch)).logits_NK
    counts = np.bincount(batch.event_source)
    assert out.shape == (4, 3)
    assert seen == counts.tolist()


def test_a_stream_holds_its_sources_newest_first_and_the_other_events_fall_out() -> None:
    batch = Batch.from_numpy(batch_of([30, 5], [1, 1]))
    rows, offsets = stream_rows(batch, (1,), 6)
    assert (batch.event_source[rows] == 1).all()
    for r in range(2):
        times = batch.event_ms[rows[offsets[r] : offsets[r + 1]]]
        own = batch.event_ms[batch.event_offsets[r] : batch.event_offsets[r + 1]][
            batch.event_source[batch.event_offsets[r] : batch.event_offsets[r + 1]] == 1
        ]
        assert times.tolist() == own.flip(0)[:6].tolist()
    merged, _ = stream_rows(batch, (0, 1), 99)
    assert sorted(merged.tolist()) == list(range(35))


@pytest.mark.parametrize("context", ["request", "candidate"])
@pytest.mark.parametrize("made", [layout, grouped])
def test_analytic_flops_equal_what_torch_counts(context: str, made: Callable[[], Layout]) -> None:
    config = dataclasses.replace(public_s(), pffn_context=context, radius=0)  # type: ignore[arg-type]
    model, batch = FoundationModel(config, made()), batch_of([32, 32], [3, 3])
    batch = batch._replace(event_source=np.tile(np.repeat([0, 1], 16), 2).astype(np.int32))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):
        model(Batch.from_numpy(batch))
    assert forward_flops(model, batch) == pytest.approx(counter.get_total_flops(), rel=0.01)
