from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.errors import InvalidInput
from model.solaris.pair import quantize_int8
from services.solaris import rows
from services.solaris.rows import Mean, Pair

SPACE, OTHER = b"space-01", b"space-02"
HOUR_MS = 3_600_000


def pair(
    vector: list[int], computed_ms: int = 1_000, *, space: bytes = SPACE, version: str = "v1"
) -> Pair:
    return Pair(
        space_id=space, model_version=version, surface=1, computed_ms=computed_ms,
        available_ms=computed_ms + 5, scale=0.25, vector=np.array(vector, dtype=np.int8),
    )  # fmt: skip


def test_a_pair_comes_back_as_it_was_written() -> None:
    read = rows.decode_pair(rows.encode_pair(pair([1, -127, 0, 7])), dim=4)
    assert read is not None
    assert (read.space_id, read.model_version, read.surface) == (SPACE, "v1", 1)
    assert (read.computed_ms, read.available_ms, read.scale) == (1_000, 1_005, 0.25)
    assert read.vector.tolist() == [1, -127, 0, 7]


def test_a_mean_comes_back_as_it_was_written() -> None:
    mean = rows.add(None, [pair([4, 8])], half_life_ms=HOUR_MS)
    read = rows.decode_mean(rows.encode_mean(mean), dim=2)
    assert read is not None
    assert (read.count, read.weight, read.reference_ms) == (1, 1.0, 1_000)
    assert read.mean.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [b"", b"\x00" * 40, rows.encode_pair(pair([1, 2, 3]))])
def test_a_value_of_another_width_or_format_is_not_a_pair(value: bytes) -> None:
    assert rows.decode_pair(value, dim=2) is None


def test_a_mean_is_never_read_as_a_pair() -> None:
    mean = rows.add(None, [pair([4, 8])], half_life_ms=HOUR_MS)
    assert rows.decode_pair(rows.encode_mean(mean), dim=2) is None


def test_absent_fields_decode_to_unreadable_rows_in_place() -> None:
    table, known = rows.pair_table([None, rows.encode_pair(pair([5, 6])), b"junk"], dim=2)
    assert known.tolist() == [False, True, False]
    assert table["vector"][1].tolist() == [5, 6]
    assert table["vector"][0].tolist() == [0, 0]


def test_a_space_id_or_version_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="8"):
        pair([1], space=b"short")
    with pytest.raises(InvalidInput, match="48 bytes"):
        pair([1], version="v" * 49)


@settings(max_examples=50, deadline=None)
@given(
    times=st.lists(st.integers(0, 48 * HOUR_MS), min_size=1, max_size=30),
    half_life_hours=st.sampled_from([1, 6]),
    portions=st.integers(1, 30),
    seed=st.integers(0, 1_000),
)
def test_adding_in_any_order_and_portions_equals_the_batch_formula(
    times: list[int], half_life_hours: int, portions: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    half_life_ms = half_life_hours * HOUR_MS
    pairs = [pair(random.integers(-127, 128, 8).tolist(), computed_ms=time) for time in times]
    mean: Mean | None = None
    for portion in np.array_split(np.arange(len(pairs)), min(portions, len(pairs))):
        mean = rows.add(mean, [pairs[i] for i in portion], half_life_ms=half_life_ms)
    weights = np.array([2.0 ** (-(max(times) - time) / half_life_ms) for time in times])
    values = np.stack([each.values for each in pairs]).astype(np.float64)
    expected = (weights[:, None] * values).sum(axis=0) / weights.sum()
    assert mean is not None
    np.testing.assert_allclose(mean.mean, expected, rtol=1e-5, atol=1e-5)
    assert mean.weight == pytest.approx(weights.sum())
    assert (mean.count, mean.computed_ms) == (len(times), max(times))


def test_a_mean_of_another_space_starts_anew_rather_than_mix() -> None:
    old = rows.add(None, [pair([100, 100], space=OTHER)], half_life_ms=HOUR_MS)
    new = rows.add(old, [pair([4, 8])], half_life_ms=HOUR_MS)
    assert (new.space_id, new.count) == (SPACE, 1)
    assert new.mean.tolist() == [1.0, 2.0]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1_000), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_int8_coding_is_off_by_at_most_half_a_step_and_idempotent(seed: int, scale: float) -> None:
    values = (np.random.default_rng(seed).normal(size=(3, 16)) * scale).astype(np.float32)
    values[1] = 0.0
    steps, scales = rows.quantize(values)
    decoded = steps * scales[:, None]
    assert (np.abs(decoded - values) <= scales[:, None] * 0.5001).all()
    again, _ = rows.quantize(decoded.astype(np.float32))
    assert (again == steps).all()
    assert scales[1] == 0.0
    assert steps.min() >= -127


def test_a_vector_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InvalidInput, match="NaN"):
        rows.quantize(np.array([[1.0, np.nan]], dtype=np.float32))


def test_the_model_and_the_store_code_vectors_alike() -> None:
    values = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    values[3] = 0.0
    steps, scales = rows.quantize(values)
    model_steps, model_scales = quantize_int8(torch.from_numpy(values))
    assert (steps == model_steps.numpy()).all()
    assert (scales == model_scales.numpy()).all()
