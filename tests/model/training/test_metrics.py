from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.training import metrics
from model.training.evaluate import POOLED, Predictions, compare, concatenate, evaluate, flat
from model.training.metrics import Undefined

ROWS = st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 1), st.integers(0, 4)), max_size=40)


def columns(rows: list[tuple[float, int, int]]) -> tuple[npt.NDArray[np.float64], ...]:
    return tuple(np.array([row[i] for row in rows], dtype=np.float64) for i in range(3))


def brute_auc(scores: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> float | None:
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, b in itertools.product(scores[labels == 1], scores[labels == 0])
    ]
    return sum(wins) / len(wins) if wins else None


@given(ROWS)
def test_auc_is_the_share_of_ordered_pairs_with_ties_counting_half(rows: list[tuple[float, int, int]]) -> None:
    scores, labels, _ = columns(rows)
    expected, found = brute_auc(scores, labels), metrics.auc(scores, labels)
    if expected is None:
        assert found == Undefined(int(labels.sum()), int((1 - labels).sum()))
    else:
        assert found == pytest.approx(expected, abs=1e-12)


@given(ROWS)
def test_gauc_weighs_users_by_rows_and_reports_who_is_left_out(rows: list[tuple[float, int, int]]) -> None:
    scores, labels, users = columns(rows)
    found = metrics.gauc(scores, labels, users)
    total = weight = 0.0
    counted = 0
    excluded = {"one_row": 0, "only_positive": 0, "only_negative": 0}
    for user in np.unique(users):
        own = users == user
        value = brute_auc(scores[own], labels[own])
        if value is not None:
            total, weight, counted = total + own.sum() * value, weight + own.sum(), counted + 1
        elif own.sum() == 1:
            excluded["one_row"] += 1
        else:
            excluded["only_positive" if labels[own].all() else "only_negative"] += 1
    assert found.num_users == counted
    assert found.excluded == excluded
    if weight:
        assert found.value == pytest.approx(total / weight, abs=1e-12)
    else:
        assert isinstance(found.value, Undefined)


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 1), st.integers(0, 2)), max_size=7))
def test_mrr_is_the_mean_reciprocal_place_of_the_first_positive_over_every_order_of_ties(rows: list[tuple[float, int, int]]) -> None:
    scores, labels, lists = columns(rows)
    each = []
    for own in (lists == one for one in np.unique(lists)):
        if labels[own].any():
            orders = itertools.permutations(zip(scores[own], labels[own], strict=True))
            sorted_orders = [o for o in orders if all(a[0] >= b[0] for a, b in itertools.pairwise(o))]
            each.append(np.mean([1 / (1 + [label for _, label in order].index(1)) for order in sorted_orders]))
    found = metrics.mrr(scores, labels, lists)
    if each:
        assert found == pytest.approx(np.mean(each), abs=1e-12)
    else:
        assert found == Undefined(0, len(rows))


@given(st.integers(1, 50), st.integers(1, 50))
def test_predicting_the_base_rate_has_ne_one(positives: int, negatives: int) -> None:
    labels = np.r_[np.ones(positives), np.zeros(negatives)]
    assert metrics.ne(np.full(len(labels), labels.mean()), labels) == pytest.approx(1.0, abs=1e-9)


def test_ne_follows_its_closed_form_and_not_the_order_of_rows() -> None:
    p, y = np.array([0.8, 0.3, 0.1]), np.array([1.0, 0.0, 0.0])
    loss = -(math.log(0.8) + math.log(0.7) + math.log(0.9)) / 3
    rate = 1 / 3
    expected = loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metrics.ne(p, y) == pytest.approx(expected, abs=1e-12)
    assert metrics.ne(p[::-1], y[::-1]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("labels", [[1.0, 1.0, 1.0], [0.0, 0.0], []])
def test_one_class_is_undefined_with_its_counts(labels: list[float]) -> None:
    y = np.array(labels)
    p = np.full(len(y), 0.5)
    counts = Undefined(int(y.sum()), int(len(y) - y.sum()))
    assert metrics.ne(p, y) == counts
    assert metrics.auc(p, y) == counts
    assert metrics.gauc(p, y, np.arange(len(y))).value == counts


def test_calibration_is_predicted_over_happened() -> None:
    assert metrics.calibration(np.array([0.5, 0.7, 0.6]), np.array([1, 0, 1])) == pytest.approx(0.9)
    assert metrics.calibration(np.array([0.5]), np.array([0])) == Undefined(0, 1)


def test_ece_of_bins_that_match_is_zero_and_of_a_constant_is_its_gap() -> None:
    y = np.tile([1, 0, 0, 0], 25)
    assert metrics.ece(np.full(100, 0.25), y) == pytest.approx(0.0, abs=1e-12)
    assert metrics.ece(np.full(100, 0.75), y) == pytest.approx(0.5, abs=1e-12)
    ordered = np.r_[np.full(50, 0.2), np.full(50, 0.8)]
    truth = np.r_[np.tile([1, 0, 0, 0, 0], 10), np.tile([1, 1, 1, 1, 0], 10)]
    assert metrics.ece(ordered, truth) == pytest.approx(0.0, abs=1e-12)
    assert metrics.ece(ordered, 1 - truth) == pytest.approx(0.6, abs=1e-12)


def test_a_label_that_is_neither_0_nor_1_is_named() -> None:
    with pytest.raises(ValueError, match=r"label 0\.3 is neither"):
        metrics.auc(np.array([0.1, 0.2]), np.array([0.3, 1.0]))


@settings(max_examples=20)
@given(ROWS, st.sampled_from(metrics.METRICS))
def test_a_model_never_differs_from_itself(rows: list[tuple[float, int, int]], metric: metrics.Metric) -> None:
    p, y, users = columns(rows)
    found = metrics.paired_interval(metric, p, p, y, users, num_draws=20)
    for value in (found.difference, found.low, found.high):
        assert isinstance(value, Undefined) or value == 0.0


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_the_point_of_an_interval_is_the_difference_of_the_metrics(metric: metrics.Metric) -> None:
    generator = np.random.default_rng(0)
    users = generator.integers(60, size=900)
    y = (generator.random(900) < 0.3).astype(float)
    good, bad = 0.2 + 0.4 * y * generator.random(900), generator.random(900)
    direct: Callable[..., metrics.Value] = {
        "ne": metrics.ne, "auc": metrics.auc, "calibration": metrics.calibration,
        "gauc": lambda p, labels: metrics.gauc(p, labels, users).value,
    }[metric]  # fmt: skip
    found = metrics.paired_interval(metric, good, bad, y, users, num_draws=200)
    first, second = direct(good, y), direct(bad, y)
    assert not isinstance(first, Undefined)
    assert not isinstance(second, Undefined)
    assert found.difference == pytest.approx(first - second, abs=1e-9)
    assert isinstance(found.low, float)
    assert isinstance(found.high, float)
    assert found.low < first - second < found.high
    assert found.num_users == 60


def test_users_who_click_alike_widen_the_interval() -> None:
    """Copies of one row under one user bring no news; under many users they do."""
    generator = np.random.default_rng(1)
    y = np.repeat((generator.random(100) < 0.5).astype(float), 20)
    first, second = np.repeat(generator.random(100), 20), np.repeat(generator.random(100), 20)
    blocks = metrics.paired_interval("ne", first, second, y, np.repeat(np.arange(100), 20), num_draws=300)
    rows = metrics.paired_interval("ne", first, second, y, np.arange(2000), num_draws=300)
    assert all(isinstance(v, float) for v in (blocks.low, blocks.high, rows.low, rows.high))
    assert float(blocks.high) - float(blocks.low) > 3 * (float(rows.high) - float(rows.low))  # type: ignore[arg-type]


def predictions(p: list[list[float]], y: list[list[float]], mask: list[list[bool]], surface: list[int]) -> Predictions:
    n = len(surface)
    ids = np.arange(n).astype("S16")
    shape = (n, -1) if n else (0, 2)
    return Predictions(
        np.array(p, dtype=np.float64).reshape(shape), np.array(y, dtype=np.float64).reshape(shape),
        np.array(mask, dtype=bool).reshape(shape), np.array(surface, dtype=np.int32), np.arange(n, dtype=np.int64), ids,
    )  # fmt: skip


def test_slices_are_surfaces_and_their_sum_and_a_missing_label_counts_nowhere() -> None:
    rows = predictions(
        [[0.9, 0.5], [0.2, 0.5], [0.7, 0.4], [0.1, 0.3]], [[1, 1], [0, 0], [1, 0], [0, 0]],
        [[True, True], [True, False], [True, False], [True, True]], [0, 0, 1, 1],
    )  # fmt: skip
    found = evaluate(rows, ["feed", "reels"], ["click", "buy"])
    assert {key: value.rows for key, value in found.items()} == {
        ("feed", "click"): 2, ("feed", "buy"): 1, ("reels", "click"): 2, ("reels", "buy"): 1,
        (POOLED, "click"): 4, (POOLED, "buy"): 2,
    }  # fmt: skip
    assert found["feed", "click"].auc == 1.0
    assert isinstance(found["feed", "buy"].auc, Undefined)
    assert "feed/buy/auc" not in flat(found)
    assert flat(found)["feed/click/auc"] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_set_aside_and_counted(bad: float) -> None:
    rows = predictions([[0.9], [bad], [0.1], [0.2]], [[1], [1], [0], [bad]], [[True]] * 4, [0, 0, 0, 0])
    clean = predictions([[0.9], [0.1]], [[1], [0]], [[True]] * 2, [0, 0])
    found, expected = (evaluate(r, ["feed"], ["click"])["feed", "click"] for r in (rows, clean))
    assert (found.rows, found.quarantined) == (2, 2)
    assert (found.ne, found.auc) == (expected.ne, expected.auc)


def test_no_rows_at_all_is_an_answer() -> None:
    found = evaluate(predictions([], [], [], []), ["feed"], ["click", "buy"])
    assert found["feed", "click"].rows == 0
    assert found["feed", "click"].ne == Undefined(0, 0)
    assert {name: value for name, value in flat(found).items() if not name.endswith("rows")} == {}


def test_models_are_compared_on_the_same_rows_or_not_at_all() -> None:
    one = predictions([[0.9], [0.1], [0.4]], [[1], [0], [1]], [[True]] * 3, [0, 0, 0])
    two = one._replace(probabilities_NK=np.array([[0.6], [math.nan], [0.5]]))
    found = compare(one, two, ["feed"], ["click"], metric="calibration", num_draws=50)
    assert found["feed", "click"].difference == pytest.approx((1.3 - 1.1) / 2)
    with pytest.raises(ValueError, match="different rows"):
        compare(one, two._replace(example_id_N=two.example_id_N[::-1]), ["feed"], ["click"])


def test_batches_join_into_one_table() -> None:
    one = predictions([[0.9], [0.1]], [[1], [0]], [[True]] * 2, [0, 1])
    joined = concatenate([one, one])
    assert joined.probabilities_NK.shape == (4, 1)
    with pytest.raises(ValueError, match="holds no rows"):
        concatenate([])
