"""The rows that a run trains on: stretches of a replayed log, each label entering once, when it has settled.

Knows the replay and attribution windows. Does not know models.

A label is taken when its attribution window has closed by `known_by_ms`; a positive that is known early waits until then,
so that early positives do not outnumber negatives that cannot be known yet. A run that trains day after day takes each
label in the first stretch in which it has settled (`settled_after_ms` is the end of the stretch before).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from feature_store.asof import expand
from feature_store.batch import FeatureBatch, Targets
from feature_store.replay import Examples, Replay, Requests

Rows = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Requests in time order."""

    def __len__(self) -> int:
        """Number of requests."""

    def batch(self, rows: Rows) -> tuple[FeatureBatch, Targets]:
        """Some of them."""

    def lengths(self, rows: Rows) -> Rows:
        """Events and candidates of each of some [R, 2], as far as it is cheap to know; processes share rows by them."""


class ReplayRows:
    """Requests with from_ms ≤ time < to_ms."""

    def __init__(
        self,
        replay: Replay,
        from_ms: int,
        to_ms: int,
        *,
        requests: Requests = "request",
        surface: str | None = None,
        known_by_ms: int | None = None,
        settled_after_ms: int | None = None,
    ) -> None:
        """`known_by_ms` is when the run is made; None knows how every outcome ended."""
        self.replay = replay
        known = {} if known_by_ms is None else {"known_by_ms": known_by_ms}
        self.examples: Examples = replay.examples(from_ms, to_ms, requests=requests, surface=surface, **known)
        self._settled_after_ms = settled_after_ms
        spec = replay.spec.message
        self._windows_ms = np.array([o.attribution_window_seconds * 1000 for o in spec.objectives], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: Rows) -> tuple[FeatureBatch, Targets]:
        """Features as known at each request, and the labels that enter in this stretch."""
        batch, targets = self.replay.batch(self.examples, rows)
        entering_NK = self._entering(self._closed_ms(rows))
        mask_NK = targets.label_mask & entering_NK
        return batch, targets._replace(label_mask=mask_NK, labels=np.where(mask_NK, targets.labels, 0.0).astype(np.float32))

    def lengths(self, rows: Rows) -> Rows:
        """Events and candidates of each of some requests [R, 2]; events that were not known yet count, too."""
        return self.replay.lengths(self.examples, rows)

    def samples(self, most: int) -> list[tuple[FeatureBatch, Targets]]:
        """At most `most` requests, evenly over the stretch, in batches of about 1024: what statistics are taken from."""
        rows = spread(len(self), most)
        return [self.batch(part) for part in np.array_split(rows, max(1, len(rows) // 1024))]

    def trained(self) -> Rows:
        """Impressions of the log [n] of which any label enters in this stretch: what a snapshot has seen."""
        log, known_by_ms = self.replay.impressions, self.examples.known_by_ms
        shown = self.examples.impression
        settled_NK = self._entering(log.event_ms[shown][:, None] + self._windows_ms)
        for k in range(len(self._windows_ms)):
            parent = self.replay.spec.parent_index(k)
            if parent is not None:
                settled_NK[:, k] &= log.label_ms[shown, parent] <= known_by_ms
        return np.unique(shown[settled_NK.any(axis=1)])

    def _shown(self, rows: Rows) -> Rows:
        _, at = expand(self.examples.offsets[rows], self.examples.offsets[rows + 1])
        return self.examples.impression[at]

    def _closed_ms(self, rows: Rows) -> npt.NDArray[np.int64]:
        """When the attribution windows [N, K] of the candidates of some requests close."""
        closed: npt.NDArray[np.int64] = self.replay.impressions.event_ms[self._shown(rows)][:, None] + self._windows_ms
        return closed

    def _entering(self, closed_NK: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        entering = closed_NK <= self.examples.known_by_ms
        if self._settled_after_ms is not None:
            entering &= closed_NK > self._settled_after_ms
        return entering


def spread(total: int, most: int) -> Rows:
    """At most `most` of `total` rows, evenly over all."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64))
