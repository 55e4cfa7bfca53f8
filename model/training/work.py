"""Says how much work each request is before its batch is gathered, so that processes can share a step evenly.

Knows counts of events and candidates, and what a model says that a batch costs. Does not know models, nor who works.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from feature_store.batch import FeatureBatch
from model.training.parallel import Processes
from model.training.rows import RowSource, spread
from model.training.state import Rows

Flops = Callable[[FeatureBatch], float]
"""Forward model FLOPs of a batch, over its actual lengths."""

_PROBES = 64
"""Requests whose cost is asked for."""


def work_of(rows: RowSource, flops: Flops, processes: Processes) -> Callable[[Rows], Rows]:
    """Work of some requests [R], at the prices that the first process found; one process shares with nobody, and asks none."""
    prices = torch.ones(3, dtype=torch.int64)
    if processes.world_size > 1:
        if processes.leads:
            prices = torch.from_numpy(prices_of(rows, flops))
        processes.copy_from_first([prices])
    return lambda asked: counts_of(rows, asked) @ prices.numpy()  # whole numbers: alike on every machine


def prices_of(rows: RowSource, flops: Flops) -> Rows:
    """FLOPs [3] of an event, a candidate and a request for which the FLOPs of a few requests come out best (least squares).

    Ones where no request costs any.
    """
    probes = spread(len(rows), _PROBES)
    costs = np.array([flops(rows.batch(probe[None])[0]) for probe in probes])
    if not costs.any():
        return np.ones(3, dtype=np.int64)
    found, *_ = np.linalg.lstsq(counts_of(rows, probes).astype(np.float64), costs)
    return np.maximum(found, 0.0).round().astype(np.int64)


def counts_of(rows: RowSource, asked: Rows) -> Rows:
    """[R, 3] events, candidates, and 1 for the request itself."""
    return np.concatenate([rows.lengths(asked), np.ones((len(asked), 1), dtype=np.int64)], axis=1)
