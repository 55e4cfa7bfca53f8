"""Joins batches of one request each into one, so that one forward serves several users.

Knows axes and offsets. Does not know what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feature_store.batch import FIELDS, OFFSETS, Array, FeatureBatch


def concatenate(batches: Sequence[FeatureBatch]) -> FeatureBatch:
    """One batch of all requests, in order.

    Raises:
        ValueError: there is no batch, or widths differ.
    """
    if len(batches) == 1:
        return batches[0]
    columns: dict[str, Array] = {
        name: np.concatenate([getattr(batch, name) for batch in batches]) for name in FIELDS
    }
    offsets = {
        name: _joined([getattr(batch, name) for batch in batches]) for name in OFFSETS.values()
    }
    return FeatureBatch(**columns, **offsets)  # type: ignore[arg-type]  # dtypes are kept


def _joined(offsets: Sequence[Array]) -> Array:
    lengths = np.concatenate([np.diff(each) for each in offsets])
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
