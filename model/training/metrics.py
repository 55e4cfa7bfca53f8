"""Measures predictions against outcomes: NE, AUC, grouped AUC, reciprocal rank, calibration, and intervals of their differences.

Knows arrays of predictions, labels and users. Does not know models, surfaces or where rows come from.

A metric that a slice cannot have (one class, no row) is `Undefined` with its counts, never a stand-in number.
N rows, U users; predictions are probabilities, labels are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]

SMALLEST_PROBABILITY = 1e-12
"""Predictions are kept this far from 0 and 1 inside logarithms."""


class Undefined(NamedTuple):
    """A metric that does not exist for a slice."""

    n_pos: int
    n_neg: int

    def __str__(self) -> str:
        return f"undefined ({self.n_pos} positive, {self.n_neg} negative)"


Value = float | Undefined


class GroupedAuc(NamedTuple):
    """AUC averaged over users, weighted by their rows, and who could not be counted."""

    value: Value
    num_users: int
    """Users with both classes."""
    excluded: Mapping[str, int]
    """Reason → users left out: one_row, only_positive, only_negative."""


def log_loss(probabilities_N: Values, labels_N: Values) -> Floats:
    """Cross entropy of each row, in nats."""
    p = np.clip(np.asarray(probabilities_N, np.float64), SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    y = np.asarray(labels_N, np.float64)
    return np.asarray(-(y * np.log(p) + (1 - y) * np.log1p(-p)), np.float64)


def entropy(rate: float) -> float:
    """Entropy of a coin with that rate, in nats; 0 at 0 and 1."""
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def ne(probabilities_N: Values, labels_N: Values) -> Value:
    """Normalized entropy: mean cross entropy over the entropy of this slice's own rate."""
    positives, negatives = _counts(labels_N)
    if not positives or not negatives:
        return Undefined(positives, negatives)
    rate = positives / (positives + negatives)
    return float(log_loss(probabilities_N, labels_N).mean() / entropy(rate))


def auc(scores_N: Values, labels_N: Values) -> Value:
    """Chance that a positive row scores above a negative one, ties counting half."""
    positives, negatives = _counts(labels_N)
    if not positives or not negatives:
        return Undefined(positives, negatives)
    return _weighted_auc(_Ranking(scores_N, labels_N), np.ones(positives + negatives))


def gauc(scores_N: Values, labels_N: Values, users_N: Values) -> GroupedAuc:
    """Σ n_u·AUC_u / Σ n_u over the users that have both classes."""
    users = _per_user_auc(scores_N, labels_N, users_N)
    return users.total(np.ones(len(users.rows_U)))


def mrr(scores_N: Values, labels_N: Values, lists_N: Values) -> Value:
    """Mean over lists of the expected 1 / place of the best placed positive row (Voorhees 1999); ties are in random order.

    Lists without a positive have no such place and are left out.
    """
    positives, negatives = _counts(labels_N)
    if not positives:
        return Undefined(positives, negatives)
    scores, (_, list_N) = np.asarray(scores_N, np.float64), np.unique(lists_N, return_inverse=True)
    best_L = np.full(list_N.max() + 1, -np.inf)
    positive_N = np.asarray(labels_N, np.float64) > 0
    np.maximum.at(best_L, list_N[positive_N], scores[positive_N])
    tied_N = scores == best_L[list_N]
    places = np.stack([np.bincount(list_N[rows], minlength=len(best_L)) for rows in (
        scores > best_L[list_N], tied_N, tied_N & positive_N
    )], axis=1)  # fmt: skip
    kinds, counts = np.unique(places[np.isin(np.arange(len(best_L)), list_N[positive_N])], axis=0, return_counts=True)
    return float(np.average([_reciprocal(*kind) for kind in kinds.tolist()], weights=counts))


def _reciprocal(above: int, tied: int, positives: int) -> float:
    """Expected 1 / place of the first of some positives among tied rows in random order, below rows that rank above.

    The first stands at place j of the tied rows in C(tied − j, positives − 1) of C(tied, positives) orders.
    """
    return sum(comb(tied - j, positives - 1) / (above + j) for j in range(1, tied - positives + 2)) / comb(tied, positives)


def calibration(probabilities_N: Values, labels_N: Values) -> Value:
    """Σp / Σy: above 1 means too many were predicted."""
    positives, negatives = _counts(labels_N)
    if not positives:
        return Undefined(positives, negatives)
    return float(np.asarray(probabilities_N, np.float64).sum() / positives)


def ece(probabilities_N: Values, labels_N: Values, *, num_bins: int = 20) -> Value:
    """Expected calibration error over bins of equal numbers of rows, ordered by prediction.

    Equal predictions stay in one bin, so that the order of rows does not matter.
    """
    p, y = np.asarray(probabilities_N, np.float64), np.asarray(labels_N, np.float64)
    if not len(p):
        return Undefined(0, 0)
    _, tie_N, tie_counts = np.unique(p, return_inverse=True, return_counts=True)
    first_rank = np.cumsum(tie_counts) - tie_counts
    bin_N = (first_rank * num_bins // len(p))[tie_N]
    gaps = np.bincount(bin_N, weights=p - y, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(p))


Metric = Literal["ne", "auc", "gauc", "calibration"]
METRICS: tuple[Metric, ...] = ("ne", "auc", "gauc", "calibration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A difference of two models' metric on the same rows, and how far chance alone moves it."""

    difference: Value
    """Metric of the first model minus that of the second."""
    low: Value
    high: Value
    num_users: int
    num_draws: int
    """Draws in which the metric existed."""


def paired_interval(
    metric: Metric,
    first_N: Values,
    second_N: Values,
    labels_N: Values,
    users_N: Values,
    *,
    num_draws: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of a difference: whole users are drawn, the same ones for both models.

    Raises:
        ValueError: the metric is not one of METRICS.
    """
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} has no interval; use one of {list(METRICS)}")
    user_ids, user_N = np.unique(np.asarray(users_N), return_inverse=True)
    one = _resampled(metric, first_N, labels_N, user_N, len(user_ids))
    two = _resampled(metric, second_N, labels_N, user_N, len(user_ids))
    generator = np.random.default_rng(seed)
    drawn = [
        value
        for _ in range(num_draws if len(user_ids) else 0)
        if not isinstance(value := _difference(one, two, _draw(generator, len(user_ids))), Undefined)
    ]
    point = _difference(one, two, np.ones(len(user_ids)))
    tail = (1 - confidence) / 2
    undefined = Undefined(*_counts(labels_N))
    low, high = np.quantile(drawn, [tail, 1 - tail]) if drawn else (undefined, undefined)
    return Interval(
        difference=point,
        low=low if isinstance(low, Undefined) else float(low),
        high=high if isinstance(high, Undefined) else float(high),
        num_users=len(user_ids),
        num_draws=len(drawn),
    )


_Statistic = Callable[[Floats], Value]


def _draw(generator: np.random.Generator, num_users: int) -> Floats:
    """How often each user was drawn, with replacement."""
    return np.bincount(generator.integers(num_users, size=num_users), minlength=num_users).astype(np.float64)


def _difference(one: _Statistic, two: _Statistic, weight_U: Floats) -> Value:
    first, second = one(weight_U), two(weight_U)
    if isinstance(first, Undefined):
        return first
    return second if isinstance(second, Undefined) else first - second


def _resampled(metric: Metric, p_N: Values, y_N: Values, user_N: Ints, num_users: int) -> _Statistic:
    """The metric as a function of how often each user counts; what does not change is computed once."""
    y = np.asarray(y_N, np.float64)
    if metric == "auc":
        ranking = _Ranking(p_N, y)
        return lambda weight_U: _weighted_auc(ranking, weight_U[user_N])
    if metric == "gauc":
        users = _per_user_auc(p_N, y, user_N)
        return lambda weight_U: users.total(weight_U).value

    def sums(values_N: Floats) -> Floats:
        return _sums(user_N, values_N, num_users)

    rows_U, positives_U = sums(np.ones(len(y))), sums(y)
    if metric == "calibration":
        predicted_U = sums(np.asarray(p_N, np.float64))
        return lambda weight_U: _ratio(weight_U, predicted_U, positives_U, rows_U)
    loss_U = sums(log_loss(p_N, y))
    return lambda weight_U: _weighted_ne(weight_U, loss_U, positives_U, rows_U)


def _ratio(weight_U: Floats, predicted_U: Floats, positives_U: Floats, rows_U: Floats) -> Value:
    positives = float(weight_U @ positives_U)
    if not positives:
        return Undefined(0, int(weight_U @ rows_U))
    return float(weight_U @ predicted_U) / positives


def _weighted_ne(weight_U: Floats, loss_U: Floats, positives_U: Floats, rows_U: Floats) -> Value:
    rows, positives = float(weight_U @ rows_U), float(weight_U @ positives_U)
    if positives <= 0 or positives >= rows:
        return Undefined(int(positives), int(rows - positives))
    return float(weight_U @ loss_U) / rows / entropy(positives / rows)


class _Ranking:
    """Rows in order of score, with where each run of equal scores begins."""

    def __init__(self, scores_N: Values, labels_N: Values) -> None:
        scores = np.asarray(scores_N, np.float64)
        self.order_N = np.argsort(scores, kind="stable")
        ordered = scores[self.order_N]
        self.positive_N = np.asarray(labels_N, np.float64)[self.order_N]
        self.starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)


def _weighted_auc(ranking: _Ranking, weight_N: Floats) -> Value:
    weights = weight_N[ranking.order_N]
    if not len(weights):
        return Undefined(0, 0)
    positive = np.add.reduceat(weights * ranking.positive_N, ranking.starts)
    negative = np.add.reduceat(weights * (1 - ranking.positive_N), ranking.starts)
    total = positive.sum() * negative.sum()
    if not total:
        return Undefined(int(positive.sum()), int(negative.sum()))
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / total)


class _UserAucs(NamedTuple):
    """AUC of each user; where a class is missing it is 0 and does not count."""

    auc_U: Floats
    rows_U: Floats
    positives_U: Floats

    def total(self, weight_U: Floats) -> GroupedAuc:
        """Average over users that have both classes, each counted `weight_U` times."""
        negatives_U = self.rows_U - self.positives_U
        both_U = (self.positives_U > 0) & (negatives_U > 0)
        single_U = self.rows_U == 1
        excluded = {
            "one_row": int(weight_U @ single_U),
            "only_positive": int(weight_U @ ((negatives_U == 0) & ~single_U)),
            "only_negative": int(weight_U @ ((self.positives_U == 0) & ~single_U)),
        }
        weighted_U = weight_U * self.rows_U * both_U
        total = float(weighted_U.sum())
        missing = Undefined(int(weight_U @ self.positives_U), int(weight_U @ negatives_U))
        value = float(weighted_U @ self.auc_U) / total if total else missing
        return GroupedAuc(value, int(weight_U @ both_U), excluded)


def _per_user_auc(scores_N: Values, labels_N: Values, users_N: Values) -> _UserAucs:
    scores, labels = np.asarray(scores_N, np.float64), np.asarray(labels_N, np.float64)
    ids, user_N = np.unique(np.asarray(users_N), return_inverse=True)
    positives_U = _sums(user_N, labels, len(ids))
    rows_U = _sums(user_N, np.ones(len(labels)), len(ids))
    if not len(ids):
        return _UserAucs(positives_U, rows_U, positives_U)
    order = np.lexsort((scores, user_N))
    user, score, positive = user_N[order], scores[order], labels[order]
    starts = np.flatnonzero(np.r_[True, (user[1:] != user[:-1]) | (score[1:] != score[:-1])])
    tie_user = user[starts]
    tie_positive = np.add.reduceat(positive, starts)
    tie_negative = np.add.reduceat(1 - positive, starts)
    negatives_U = rows_U - positives_U
    before_user_U = np.cumsum(negatives_U) - negatives_U
    below = np.cumsum(tie_negative) - tie_negative - before_user_U[tie_user]
    wins_U = _sums(tie_user, tie_positive * (below + 0.5 * tie_negative), len(ids))
    pairs_U = positives_U * negatives_U
    auc_U = np.divide(wins_U, pairs_U, out=np.zeros(len(ids)), where=pairs_U > 0)
    return _UserAucs(auc_U, rows_U, positives_U)


def _sums(user_N: Ints, values_N: Floats, num_users: int) -> Floats:
    return np.bincount(user_N, weights=values_N, minlength=num_users).astype(np.float64)


def _counts(labels_N: Values) -> tuple[int, int]:
    """Positive and negative rows.

    Raises:
        ValueError: a label is neither 0 nor 1.
    """
    labels = np.asarray(labels_N)
    positives, negatives = int((labels == 1).sum()), int((labels == 0).sum())
    if positives + negatives != len(labels):
        bad = labels[(labels != 0) & (labels != 1)][0]
        raise ValueError(f"label {bad} is neither 0 nor 1; mask or quarantine its row first")
    return positives, negatives
