"""What carries knowledge out of the foundation model, and the tower that reads it, do what their equations say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from feature_store import packing
from feature_store.batch import FeatureBatch
from feature_store.layout import Layout
from feature_store.spec import load_spec
from model.gem.batch import Batch
from model.loopfm.compressor import Compressor, dequantize_int4, quantize_int4, space_id
from model.loopfm.config import CompressorConfig
from model.solaris.pair import pair_embeddings, pair_space_id, quantize_int8
from model.vertical.config import VerticalConfig
from model.vertical.presets import arm
from model.vertical.tower import VerticalTower
from tests.model.world_batches import WORLD, batch_of, rows_of

SURFACE = load_spec(WORLD).surfaces[0]


def taps_of(rows: int, *, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(rows, 4, generator=generator)
    maps = [torch.randn(4, width, generator=torch.Generator().manual_seed(width)) for width in (12, 12, 20)]
    return tuple((low @ mix).requires_grad_() for mix in maps)


def compressor_of(seed: int = 0) -> Compressor:
    torch.manual_seed(seed)
    return Compressor(CompressorConfig(dim=8, prefixes=(2, 4, 8), tap_width=8, hidden=32), (12, 12, 20))


# LoopFM.


def test_four_bit_codes_are_those_of_the_store_for_every_byte() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(-1, 2)
    values = dequantize_int4(torch.from_numpy(every))
    assert values.numpy().tobytes() == packing.dequantize_int4(every).tobytes()
    assert torch.equal(quantize_int4(values), torch.from_numpy(every))
    assert sorted(set(values.flatten().tolist())) == [k / 8 for k in range(-8, 8)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=16))
def test_four_bits_lose_at_most_half_a_step_except_at_plus_one(values: list[float]) -> None:
    z = torch.tensor(values[: len(values) // 2 * 2])[None]
    code = quantize_int4(z)
    assert code.numpy().tobytes() == packing.quantize_int4(z.numpy()).tobytes()
    error = (dequantize_int4(code) - z).abs()
    assert bool((error[z <= 7.5 / 8] <= 1 / 16).all())
    assert bool((error <= 1 / 8).all())


def test_a_representation_that_is_not_finite_is_refused_in_either_code() -> None:
    bad = torch.tensor([[0.0, float("nan")]])
    for quantize in (quantize_int4, quantize_int8):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(bad)


def test_compression_learns_and_sends_nothing_into_the_foundation_model() -> None:
    compressor, taps = compressor_of(), taps_of(64)
    fixed = [projection.weight.clone() for projection in compressor.project]
    trained = [p for p in compressor.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=1e-2), []
    for _ in range(60):
        loss = compressor.reconstruction_loss(taps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(tap.grad is None for tap in taps)
    assert all(torch.equal(a, b.weight) for a, b in zip(fixed, compressor.project, strict=True))
    assert compressor.reconstruction_loss([tap[:0] for tap in taps]).item() == 0.0


def test_no_tap_dominates_and_every_number_lies_within_one() -> None:
    compressor, taps = compressor_of(), taps_of(8)
    loud = (taps[0] * 1000, *taps[1:])
    torch.testing.assert_close(compressor(loud), compressor(taps), atol=1e-4, rtol=1e-4)
    assert float(compressor(taps).detach().abs().max()) <= 1


def test_a_space_is_named_by_family_weights_and_sizes_and_by_nothing_else() -> None:
    name = space_id(compressor_of(), "gem")
    assert len(name) == 8
    assert space_id(compressor_of(), "gem") == name
    assert space_id(compressor_of(), "other") != name
    assert space_id(compressor_of(1), "gem") != name
    moved = compressor_of()
    with torch.no_grad():
        moved.encoder[0].bias[0] += 1e-3
    assert space_id(moved, "gem") != name
    assert pair_space_id(name) != name


def test_a_minted_space_keeps_its_name_while_its_encoder_follows_the_model() -> None:
    compressor, rows = compressor_of(), 400
    name, before = space_id(compressor, "gem"), taps_of(rows)
    compressor.mint()
    wanted = compressor.preactivation(before)
    turn = torch.linalg.qr(torch.randn(before[2].shape[1], before[2].shape[1])).Q
    after = (*before[:2], before[2] @ turn + 0.1)
    lost = torch.cosine_similarity(compressor(after), torch.tanh(wanted), dim=1).mean()
    kept = compressor.realign(after, wanted)
    assert kept > 0.98 > lost
    assert (compressor(after).mean(0) - torch.tanh(wanted).mean(0)).norm() < 0.05
    assert space_id(compressor, "gem") == name
    assert not any(parameter.requires_grad for parameter in compressor.parameters())


def test_realigning_a_model_that_has_not_moved_changes_nothing() -> None:
    compressor, taps = compressor_of(), taps_of(50)
    wanted = compressor.preactivation(taps)
    assert compressor.realign(taps, wanted) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(compressor.preactivation(taps), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [{"dim": 7}, {"prefixes": (8, 4)}, {"prefixes": (8,)}])
def test_a_compressor_whose_sizes_do_not_fit_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dim|prefixes"):
        CompressorConfig(**bad)


# Solaris.


def test_a_pair_is_the_representation_in_eight_bits() -> None:
    compressor, taps = compressor_of(), taps_of(16)
    z = pair_embeddings(compressor, taps)
    assert not z.requires_grad
    torch.testing.assert_close(z, compressor(taps).detach())
    codes, scale = quantize_int8(z)
    assert codes.dtype == torch.int8
    assert float((codes.float() * scale[:, None] - z).abs().amax()) <= float(scale.max()) * 0.5001
    assert torch.equal(quantize_int8(-z)[0], -codes)
    nothing, zero = quantize_int8(torch.zeros(2, 8))
    assert not nothing.any()
    assert zero.tolist() == [0.0, 0.0]


# The tower.


def knowing(lengths: list[int], shown: list[int], memory: list[int], *, seed: int = 0) -> FeatureBatch:
    """A batch with LoopFM windows and pairs at every level."""
    rng = np.random.default_rng(seed + 7)
    batch, n, m = batch_of(lengths, shown, seed=seed), sum(shown), sum(memory)
    request = np.repeat(np.arange(len(memory)), memory)
    return batch._replace(
        surface=np.zeros_like(batch.surface),
        memory_offsets=np.append(0, np.cumsum(memory)).astype(np.int64),
        memory_ms=batch.request_ms[request] - rng.integers(1, 10**8, m),
        memory_surface=rng.integers(0, 5, m).astype(np.int32),
        memory_labels=rng.integers(0, 8, m).astype(np.int32),
        memory_q=rng.integers(0, 256, (m, 32)).astype(np.uint8),
        pair_q=rng.integers(-127, 128, (n, 64)).astype(np.int8),
        pair_scale=np.full(n, 1 / 127, dtype=np.float32),
        pair_level=(np.arange(n) % 5).astype(np.int32),
        pair_meta=np.abs(rng.normal(size=(n, 3))).astype(np.float32),
    )


def tower_of(config: VerticalConfig) -> VerticalTower:
    torch.manual_seed(0)
    return VerticalTower(config, Layout(load_spec(WORLD))).eval()


def scores(tower: VerticalTower, batch: FeatureBatch) -> Tensor:
    with torch.no_grad():
        logits: Tensor = tower(Batch.from_numpy(batch)).logits_NK
    return logits


@pytest.mark.parametrize("encoder", ["attention", "mean", "sum"])
def test_a_candidate_is_scored_as_if_it_were_alone(encoder: str) -> None:
    config = dataclasses.replace(arm("A3", SURFACE), loopfm_encoder=encoder)  # type: ignore[arg-type]
    tower, batch = tower_of(config), knowing([9], [6], [5])
    whole = scores(tower, batch)
    for i in range(6):
        candidate = {
            name: value[i : i + 1] for name, value in batch._asdict().items() if name.startswith(("ad_", "pair_"))
        }
        alone = batch._replace(candidate_offsets=np.array([0, 1], dtype=np.int64), **candidate)
        torch.testing.assert_close(scores(tower, alone), whole[i : i + 1], atol=1e-5, rtol=1e-5)


def test_requests_in_one_batch_do_not_meet() -> None:
    tower, batch = tower_of(arm("A1", SURFACE)), knowing([5, 0, 30], [2, 1, 3], [0, 0, 0])
    alone = torch.cat([scores(tower, rows_of(batch, r)) for r in range(3)])
    torch.testing.assert_close(alone, scores(tower, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "memory", "pair"), [("A0", False, False), ("A1", False, False), ("A2", True, False), ("A3", True, True)]
)
def test_a_channel_that_is_off_is_not_read_and_one_that_is_on_is(name: str, memory: bool, pair: bool) -> None:
    tower, batch = tower_of(arm(name, SURFACE)), knowing([4], [5], [6])
    before = scores(tower, batch)
    other_memory = batch._replace(memory_q=255 - batch.memory_q)
    other_pair = batch._replace(pair_q=-batch.pair_q)
    assert (not torch.equal(scores(tower, other_memory), before)) == memory
    assert (not torch.equal(scores(tower, other_pair), before)) == pair


def test_at_the_default_level_neither_vector_nor_age_is_read() -> None:
    tower, batch = tower_of(arm("A3", SURFACE)), knowing([4], [5], [6])
    level = np.full(5, 4, dtype=np.int32)
    zeros = batch._replace(
        pair_level=level, pair_q=np.zeros_like(batch.pair_q), pair_meta=np.zeros_like(batch.pair_meta)
    )
    assert torch.equal(scores(tower, batch._replace(pair_level=level)), scores(tower, zeros))


def test_an_empty_window_is_a_learned_token_and_training_has_seen_it() -> None:
    config = dataclasses.replace(arm("A2", SURFACE), memory_dropout=0.9, id_dropout=0.0)
    tower, batch = tower_of(config), knowing([3] * 40, [1] * 40, [4] * 40)
    assert tower.memory is not None
    read: list[Tensor] = []
    tower.memory.register_forward_hook(lambda module, given, made: read.append(made))
    scores(tower, batch)
    tower.train()
    scores(tower, batch)
    hidden = [(made == tower.memory.empty).flatten(1).all(1) for made in read]
    assert not hidden[0].any(), "in service nothing is dropped"
    assert 25 < int(hidden[1].sum()) < 40
    assert torch.isfinite(scores(tower.eval(), knowing([0], [2], [0]))).all()


def test_the_auxiliary_head_exists_in_training_only() -> None:
    batch = Batch.from_numpy(knowing([3], [2], [1]))
    tower = tower_of(arm("A1", SURFACE))
    assert tower(batch).kd_logits_NK is None
    assert tower.train()(batch).kd_logits_NK is not None
    assert tower_of(arm("A0", SURFACE)).train()(batch).kd_logits_NK is None


@pytest.mark.parametrize(("lengths", "shown"), [([], []), ([3], [0]), ([0], [2]), ([2, 3], [0, 5])])
def test_empty_inputs_have_scores_of_the_right_shape(lengths: list[int], shown: list[int]) -> None:
    out = scores(tower_of(arm("A3", SURFACE)), knowing(lengths, shown, [0] * len(lengths)))
    assert out.shape == (sum(shown), 3)
    assert torch.isfinite(out).all()


def test_every_parameter_of_the_tower_learns() -> None:
    tower = tower_of(dataclasses.replace(arm("A3", SURFACE), id_dropout=0.0)).train()
    batch = knowing([7] * 60, [2] * 60, [4] * 60)
    batch = batch._replace(event_surface=np.zeros_like(batch.event_surface))
    tower.fit_statistics([batch])
    labels = torch.rand(120, 3, generator=torch.Generator().manual_seed(1)).round()
    before = {name: value.clone() for name, value in tower.named_parameters()}
    optimizer, losses = torch.optim.Adam(tower.parameters(), lr=3e-3), []
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for _ in range(30):
        output = tower(Batch.from_numpy(batch))
        loss = bce(output.logits_NK, labels)
        optimizer.zero_grad()
        (loss + bce(output.kd_logits_NK, labels)).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert [name for name, value in tower.named_parameters() if torch.equal(value, before[name])] == []
