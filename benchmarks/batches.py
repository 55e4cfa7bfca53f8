"""Batches of random features in the generated world's layout, with histories of chosen lengths.

Knows the layout. Does not know models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from feature_store.batch import FeatureBatch
from feature_store.layout import Layout, total_width
from feature_store.spec import load_spec

WORLD = Path(__file__).resolve().parents[1] / "feature_store/datasets/world.yaml"


def layout() -> Layout:
    """The generated world's."""
    return Layout(load_spec(WORLD))


def batch_of(lengths: list[int], shown: list[int], *, seed: int = 0) -> FeatureBatch:
    """A request for every length of a history, with so many candidates `shown`."""
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
