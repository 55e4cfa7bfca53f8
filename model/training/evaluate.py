"""Measures a model per surface and objective on one table of predictions.

Knows slices, masks and rows that must not be counted. Does not know how predictions were made.

N rows, K objectives. A row with a prediction or label that is not finite is set aside and counted, per objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feature_store.batch import FeatureBatch, Targets
from model.training import metrics
from model.training.ahead import read_ahead
from model.training.metrics import GroupedAuc, Interval, Metric, Undefined, Value
from model.training.rows import RowSource

POOLED = "all"
"""Name of the slice of all surfaces."""


class Predictions(NamedTuple):
    """What a model said of N rows, and what happened."""

    probabilities_NK: npt.NDArray[np.floating]
    labels_NK: npt.NDArray[np.floating]
    mask_NK: npt.NDArray[np.bool_]
    """The label is settled."""
    surface_N: npt.NDArray[np.integer]
    user_N: npt.NDArray[np.int64]
    example_id_N: npt.NDArray[np.void] | npt.NDArray[np.bytes_]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceMetrics:
    """One surface and objective."""

    rows: int
    n_pos: int
    quarantined: int
    """Rows left out because a prediction or label was not finite."""
    ne: Value
    auc: Value
    gauc: GroupedAuc
    calibration: Value
    ece: Value


Evaluation = Mapping[tuple[str, str], SliceMetrics]
"""(surface or POOLED, objective) → metrics."""


Score = Callable[[FeatureBatch], npt.NDArray[np.float32]]
"""Logits [N, K] of a batch."""


def predict(score: Score, rows: RowSource, *, batch_requests: int = 512) -> Predictions:
    """What a model says of all rows, in their order.

    Raises:
        ValueError: there are no rows.
    """
    read = read_ahead(
        lambda start: rows.batch(np.arange(start, min(start + batch_requests, len(rows)))), range(0, len(rows), batch_requests)
    )
    return concatenate([_scored(score, batch, targets) for _, (batch, targets) in read])


class Progressive:
    """Progressive validation: every training row is scored before it is trained on. Give it to `fit` as `before_step`."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._parts: list[Predictions] = []

    def __call__(self, batch: FeatureBatch, targets: Targets) -> None:
        """Scores the rows of a step that is about to be taken."""
        if len(targets.labels):
            self._parts.append(_scored(self._score, batch, targets))

    def predictions(self) -> Predictions:
        """What was said of all rows so far, in the order they were trained on.

        Raises:
            ValueError: there were no rows.
        """
        return concatenate(self._parts)


def _scored(score: Score, batch: FeatureBatch, targets: Targets) -> Predictions:
    return Predictions(
        probabilities_NK=sigmoid(score(batch).astype(np.float64)),
        labels_NK=targets.labels,
        mask_NK=targets.label_mask,
        surface_N=np.repeat(batch.surface, np.diff(batch.candidate_offsets)),
        user_N=targets.user_key,
        example_id_N=targets.example_id,
    )


def sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities of logits; no overflow at either end, NaN stays NaN."""
    half = np.exp(-np.abs(logits))
    return np.asarray(np.where(logits >= 0, 1.0, half) / (1.0 + half), dtype=np.float64)


def evaluate(
    predictions: Predictions, surfaces: Sequence[str], objectives: Sequence[str]
) -> dict[tuple[str, str], SliceMetrics]:
    """Metrics of every surface × objective, and of all surfaces pooled."""
    return {
        (name, objectives[k]): _measure(predictions, rows_N, k)
        for name, rows_N in _slices(predictions, surfaces)
        for k in range(len(objectives))
    }


def compare(
    first: Predictions,
    second: Predictions,
    surfaces: Sequence[str],
    objectives: Sequence[str],
    *,
    metric: Metric = "ne",
    num_draws: int = 1000,
    seed: int = 0,
) -> dict[tuple[str, str], Interval]:
    """Intervals of first − second on identical rows; a row that either model cannot score is left out for both.

    Raises:
        ValueError: the two were not made for the same rows in the same order.
    """
    if first.example_id_N.tobytes() != second.example_id_N.tobytes():
        raise ValueError("the two models scored different rows; predict the same examples in the same order")
    found: dict[tuple[str, str], Interval] = {}
    for name, rows_N in _slices(first, surfaces):
        for k, objective in enumerate(objectives):
            kept = rows_N & _usable(first, k) & _usable(second, k)
            found[name, objective] = metrics.paired_interval(
                metric,
                first.probabilities_NK[kept, k],
                second.probabilities_NK[kept, k],
                first.labels_NK[kept, k],
                first.user_N[kept],
                num_draws=num_draws,
                seed=seed,
            )
    return found


def flat(evaluation: Evaluation) -> dict[str, float]:
    """Metrics that exist, as `surface/objective/metric` → value; for a manifest."""
    return {
        f"{surface}/{objective}/{name}": value
        for (surface, objective), measured in evaluation.items()
        for name, value in _values(measured)
        if not isinstance(value, Undefined)
    }


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Predictions of several batches as one.

    Raises:
        ValueError: there is no part, so shapes are not known.
    """
    if not parts:
        raise ValueError("there is no batch of predictions; the period holds no rows")
    return Predictions(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _values(measured: SliceMetrics) -> Iterator[tuple[str, Value]]:
    yield from (("ne", measured.ne), ("auc", measured.auc), ("gauc", measured.gauc.value))
    yield from (("calibration", measured.calibration), ("ece", measured.ece), ("rows", float(measured.rows)))


def _slices(
    predictions: Predictions, surfaces: Sequence[str]
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    for index, name in enumerate(surfaces):
        yield name, predictions.surface_N == index
    yield POOLED, np.ones(len(predictions.surface_N), dtype=np.bool_)


def _usable(predictions: Predictions, k: int) -> npt.NDArray[np.bool_]:
    return predictions.mask_NK[:, k] & _finite(predictions, k)


def _finite(predictions: Predictions, k: int) -> npt.NDArray[np.bool_]:
    finite: npt.NDArray[np.bool_] = np.isfinite(predictions.probabilities_NK[:, k])
    finite &= np.isfinite(predictions.labels_NK[:, k])
    return finite


def _measure(predictions: Predictions, rows_N: npt.NDArray[np.bool_], k: int) -> SliceMetrics:
    kept = rows_N & _usable(predictions, k)
    p, y = predictions.probabilities_NK[kept, k], predictions.labels_NK[kept, k]
    return SliceMetrics(
        rows=len(p),
        n_pos=int(y.sum()),
        quarantined=int((rows_N & predictions.mask_NK[:, k] & ~_finite(predictions, k)).sum()),
        ne=metrics.ne(p, y),
        auc=metrics.auc(p, y),
        gauc=metrics.gauc(p, y, predictions.user_N[kept]),
        calibration=metrics.calibration(p, y),
        ece=metrics.ece(p, y),
    )
