"""Fills the change log for a past that had no workers: pairs of logged requests, as of each request.

Knows batches and the log. Does not know where batches come from, nor when they are read again: `services.solaris.replay`.
"""

from __future__ import annotations

import numpy as np

from feature_store.batch import FeatureBatch
from feature_store.ids import ABSENT
from feature_store.layout import Layout, column_index
from services.solaris.rows import Pair, quantize_finite
from services.solaris.worker.loop import ChangeLog, Embedder
from services.solaris.writer import NewPair


class Backfill:
    """Computes every candidate of every request it is given."""

    def __init__(
        self, embedder: Embedder, changes: ChangeLog, layout: Layout, *, lag_ms: int
    ) -> None:
        """Writes to `changes` what becomes available `lag_ms` after its request.

        Raises:
            ValueError: the lag is not positive: a pair is never there for the very request it was computed from.
        """
        if lag_ms < 1:
            raise ValueError(f"lag_ms is {lag_ms}; it must be at least 1")
        self._embedder, self._changes, self._lag_ms = embedder, changes, lag_ms
        ad = column_index(layout.ad_ids, "ad")
        if ad is None:
            raise ValueError(
                "the spec has no ad feature named 'ad'; declare it to name pairs by it"
            )
        self._ad, self._group = ad, column_index(layout.ad_ids, "ad_group")

    def add(self, batch: FeatureBatch) -> list[NewPair]:
        """Pairs of one batch of requests: one forward, one append; what is not finite is left out."""
        steps_ND, scales_N, finite_N = quantize_finite(self._embedder.embed(batch))
        request_N = np.repeat(np.arange(batch.num_requests), np.diff(batch.candidate_offsets))
        pairs = [
            NewPair(
                int(batch.user_key[request]),
                int(batch.ad_ids[i, self._ad]),
                self._group_of(batch, i),
                self._pair(batch, request, steps_ND[i], float(scales_N[i])),
            )
            for i, request in enumerate(request_N.tolist())
            if finite_N[i]
        ]
        if pairs:
            self._changes.append(pairs)
        return pairs

    def _group_of(self, batch: FeatureBatch, row: int) -> int | None:
        if self._group is None or batch.ad_ids[row, self._group] == ABSENT:
            return None
        return int(batch.ad_ids[row, self._group])

    def _pair(self, batch: FeatureBatch, request: int, steps: np.ndarray, scale: float) -> Pair:
        computed_ms = int(batch.request_ms[request])
        return Pair(
            space_id=self._embedder.space_id,
            model_version=self._embedder.version,
            surface=int(batch.surface[request]),
            computed_ms=computed_ms,
            available_ms=computed_ms + self._lag_ms,
            scale=scale,
            vector=steps,
        )
