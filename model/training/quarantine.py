"""Sets rows aside whose numbers would poison a model, and says which feature was to blame.

Knows the batch and its columns. Does not know models.

NaN in a dense feature means "no value" and is legal; Inf is not. A row is taken out of every loss and its infinite values
become "no value", so that the batch keeps its shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from feature_store.batch import FeatureBatch, Targets
from feature_store.errors import InvalidInput
from feature_store.layout import Column, Layout

_DENSE = ("user_dense", "event_dense", "ad_dense")


@dataclass(slots=True)
class Quarantine:
    """Rows set aside so far."""

    layout: Layout
    strict: bool = False
    """Stop at the first one."""
    rows: int = 0
    by_feature: Counter[str] = field(default_factory=Counter)
    """Feature, or label/<objective>, → rows that it made unusable."""
    example_ids: list[str] = field(default_factory=list)
    """The first hundred, in hex."""

    def clean(self, batch: FeatureBatch, targets: Targets) -> tuple[FeatureBatch, Targets]:
        """The batch without what is not finite.

        Raises:
            InvalidInput: strict, and there is such a row; names example and features.
        """
        blamed: dict[str, npt.NDArray[np.bool_]] = {}
        for name in _DENSE:
            batch = self._clean_features(name, batch, blamed)
        for k, objective in enumerate(self.layout.spec.objectives):
            bad_N = ~np.isfinite(targets.labels[:, k]) & targets.label_mask[:, k]
            if bad_N.any():
                blamed[f"label/{objective}"] = bad_N
        if not blamed:
            return batch, targets
        bad_N = np.logical_or.reduce(list(blamed.values()))
        self._count(blamed, bad_N, targets)
        labels = np.where(np.isfinite(targets.labels), targets.labels, 0.0).astype(np.float32)
        return batch, targets._replace(labels=labels, label_mask=targets.label_mask & ~bad_N[:, None])

    def _clean_features(
        self, name: str, batch: FeatureBatch, blamed: dict[str, npt.NDArray[np.bool_]]
    ) -> FeatureBatch:
        values = getattr(batch, name)
        infinite = np.isinf(values)
        if not infinite.any():
            return batch
        for column, feature in enumerate(_names(getattr(self.layout, name))):
            rows = np.flatnonzero(infinite[:, column])
            if len(rows):
                blamed[feature] = blamed.get(feature, False) | _candidates(name, rows, batch)
        return batch._replace(**{name: np.where(infinite, np.float32(np.nan), values)})

    def _count(self, blamed: dict[str, npt.NDArray[np.bool_]], bad_N: npt.NDArray[np.bool_], targets: Targets) -> None:
        ids = np.ascontiguousarray(targets.example_id)[bad_N].tobytes().hex()
        names = [ids[start : start + 32] for start in range(0, len(ids), 32)]
        if self.strict:
            raise InvalidInput(f"example {names[0]} is not finite in {sorted(blamed)}; fix its source or train without strict")
        self.rows += int(bad_N.sum())
        self.example_ids.extend(names[: 100 - len(self.example_ids)])
        for feature, rows in blamed.items():
            self.by_feature[feature] += int(rows.sum())


def _candidates(name: str, rows: npt.NDArray[np.int64], batch: FeatureBatch) -> npt.NDArray[np.bool_]:
    """Candidates [N] that a row of a tensor belongs to."""
    if name == "ad_dense":
        bad = np.zeros(batch.num_candidates, dtype=np.bool_)
        bad[rows] = True
        return bad
    request = rows
    if name == "event_dense":
        request = np.searchsorted(batch.event_offsets, rows, side="right") - 1
    bad_R = np.zeros(batch.num_requests, dtype=np.bool_)
    bad_R[request] = True
    return np.repeat(bad_R, np.diff(batch.candidate_offsets))


def _names(columns: tuple[Column, ...]) -> list[str]:
    return [column.name for column in columns for _ in range(column.width)]
