from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.errors import InvalidInput
from model.solaris.pair import quantize_int8
from services.solaris import rows
from services.solaris.rows import Pair

SPACE, OTHER = b"space-01", b"space-02"
HOUR_MS = 3_600_000


def pair(
    vector: list[int], computed_ms: int = 1_000, *, space: bytes = SPACE, version: str = "v1"
) -> Pair:
    return Pair(
        space_id=space, model_version=version, surface=1, computed_ms=computed_ms,
        available_ms=computed_ms + 5, scale=0.25, vector=np.array(vector, dtype=np.int8),
    )  # fmt: skip


def encoded(*pairs: Pair) -> list[bytes]:
    return rows.values_of(rows.pair_rows(pairs, dim=len(pairs[0].vector)))


def grown(mean: rows.Table | None, pairs: list[Pair], *, half_life_ms: float = HOUR_MS) -> rows.Table:
    dim = len(pairs[0].vector)
    old = rows.blank_means(1, dim=dim) if mean is None else mean
    return rows.grow(old, rows.pair_rows(pairs, dim=dim), np.zeros(1, np.int64), half_life_ms=np.array([half_life_ms]))


def test_a_pair_comes_back_as_it_was_written() -> None:
    table, known = rows.pair_table(encoded(pair([1, -127, 0, 7])), dim=4)
    assert known.tolist() == [True]
    row = table[0]
    assert (row["space"].tobytes(), row["version"], row["surface"]) == (SPACE, b"v1", 1)
    assert (row["computed_ms"], row["available_ms"], row["scale"]) == (1_000, 1_005, 0.25)
    assert row["vector"].tolist() == [1, -127, 0, 7]


def test_a_mean_comes_back_as_it_was_written() -> None:
    table, known = rows.mean_table(rows.values_of(grown(None, [pair([4, 8])])), dim=2)
    assert known.tolist() == [True]
    row = table[0]
    assert (row["count"], row["weight"], row["reference_ms"]) == (1, 1.0, 1_000)
    assert (row["version"], row["available_ms"], row["surface"]) == (b"v1", 1_005, rows.NO_SURFACE)
    assert row["mean"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [b"", b"\x00" * 40, *encoded(pair([1, 2, 3]))])
def test_a_value_of_another_width_or_format_is_not_a_pair(value: bytes) -> None:
    assert not rows.pair_table([value], dim=2)[1].any()


def test_a_mean_is_never_read_as_a_pair() -> None:
    assert not rows.pair_table(rows.values_of(grown(None, [pair([4, 8])])), dim=2)[1].any()


def test_a_vector_of_another_width_is_refused_by_both_widths() -> None:
    with pytest.raises(InvalidInput, match="3 values; rows of this space have 2"):
        rows.pair_rows([pair([1, 2]), pair([1, 2, 3])], dim=2)


def test_absent_fields_decode_to_unreadable_rows_in_place() -> None:
    table, known = rows.pair_table([None, *encoded(pair([5, 6])), b"junk"], dim=2)
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
    mean: rows.Table | None = None
    for portion in np.array_split(np.arange(len(pairs)), min(portions, len(pairs))):
        mean = grown(mean, [pairs[i] for i in portion], half_life_ms=half_life_ms)
    weights = np.array([2.0 ** (-(max(times) - time) / half_life_ms) for time in times])
    values = np.stack([each.values for each in pairs]).astype(np.float64)
    expected = (weights[:, None] * values).sum(axis=0) / weights.sum()
    assert mean is not None
    np.testing.assert_allclose(mean["mean"][0], expected, rtol=1e-5, atol=1e-5)
    assert mean["weight"][0] == pytest.approx(weights.sum())
    assert (mean["count"][0], mean["computed_ms"][0]) == (len(times), max(times))


def test_a_mean_of_another_space_starts_anew_rather_than_mix() -> None:
    new = grown(grown(None, [pair([100, 100], space=OTHER)]), [pair([4, 8])])[0]
    assert (new["space"].tobytes(), new["count"]) == (SPACE, 1)
    assert new["mean"].tolist() == [1.0, 2.0]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    dim=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 1_000),
)
def test_means_grown_together_have_the_bits_of_means_grown_alone(lengths: list[int], dim: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    pairs = rows.blank_pairs(2 * sum(lengths), dim=dim)
    pairs["space"], pairs["scale"] = np.void(SPACE), random.uniform(0, 1, len(pairs))
    pairs["computed_ms"] = random.integers(0, 50 * HOUR_MS, len(pairs))
    pairs["vector"] = random.integers(-127, 128, (len(pairs), dim))
    starts, ends = np.cumsum([0, *lengths])[:-1], np.cumsum(lengths)
    lives = random.choice([0.7 * HOUR_MS, 6.0 * HOUR_MS], len(lengths))
    first, second = np.split(pairs, 2)
    means = rows.grow(rows.blank_means(len(lengths), dim=dim), first, starts, half_life_ms=lives)
    means = rows.grow(means, second, starts, half_life_ms=lives)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        alone = rows.blank_means(1, dim=dim)
        for portion in (first, second):
            alone = rows.grow(alone, portion[start:end], np.zeros(1, np.int64), half_life_ms=lives[i : i + 1])
        assert alone.tobytes() == means[i : i + 1].tobytes()


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
