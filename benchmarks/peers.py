"""DIN as two public libraries have it, over the same ids; a library that is not installed is left out.

Knows the libraries' interfaces (extra `peers`). Does not know clocks. Both take a row of ids for every candidate, its user's
history included; rows are laid out here, before anything is timed. They read ids only: no dense feature, label or time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feature_store.batch import FeatureBatch
from model.nn.shape import InputShape

Run = Callable[[], Tensor]
Make = Callable[[InputShape, FeatureBatch], Run]
Columns = dict[str, npt.NDArray[np.int64]]
ATTENTION, DEEP, ID_WIDTH = [36], [200, 80], 16
"""Sizes of DIN's paper, and the width of an id in the baselines."""
HISTORY, LENGTH = "hist_", "hist_length"


def installed() -> tuple[dict[str, Make], dict[str, str]]:
    """(libraries that are here, why the others are not)."""
    found: dict[str, Make] = {}
    absent: dict[str, str] = {}
    for package, made in (("torch-rechub", torch_rechub), ("deepctr-torch", deepctr_torch)):
        try:
            found[f"DIN of {package} {version(package)}"] = made
        except PackageNotFoundError:
            absent[package] = f"{package} is not installed; pip install 'gem[peers]' adds it"
    return found, absent


def torch_rechub(shape: InputShape, batch: FeatureBatch) -> Run:
    """Scores of all candidates of the one request of a batch."""
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DIN

    rows, read = _rows(shape, batch), _read(shape)
    sparse = {c.name: SparseFeature(c.name, c.rows, ID_WIDTH) for c in (*shape.user_ids, *shape.ad_ids)}
    history = [SequenceFeature(HISTORY + c.name, c.rows, ID_WIDTH, pooling="concat", shared_with=c.name) for c in read]
    targets = [sparse.pop(c.name) for c in read]
    model = DIN(list(sparse.values()), history, targets, {"dims": DEEP}, {"dims": ATTENTION}).eval()
    inputs = {name: torch.from_numpy(column) for name, column in rows.items()}
    return lambda: model(inputs)


def deepctr_torch(shape: InputShape, batch: FeatureBatch) -> Run:
    """Scores of all candidates of the one request of a batch."""
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    rows, read, longest = _rows(shape, batch), _read(shape), len(batch.event_ids)
    rows[LENGTH] = np.full(batch.num_candidates, longest)
    features: list[Any] = [SparseFeat(c.name, c.rows, ID_WIDTH) for c in (*shape.user_ids, *shape.ad_ids)]
    for column in read:
        one = SparseFeat(HISTORY + column.name, column.rows, ID_WIDTH, embedding_name=column.name)
        features.append(VarLenSparseFeat(one, longest, length_name=LENGTH))
    names = [column.name for column in read]
    model = DIN(features, names, dnn_hidden_units=DEEP, att_hidden_size=ATTENTION).eval()
    wide = [rows[name].reshape(batch.num_candidates, -1) for name in model.feature_index]
    inputs = torch.from_numpy(np.concatenate(wide, axis=1)).float()
    return lambda: model(inputs)


def _read(shape: InputShape) -> list[Any]:
    """Columns of the ad that the history has too."""
    known = {column.name for column in shape.event_ids}
    return [column for column in shape.ad_ids if column.name in known]


def _rows(shape: InputShape, batch: FeatureBatch) -> Columns:
    """Every column for every candidate [N] or [N, T]."""
    count, out = batch.num_candidates, {}
    for at, column in enumerate(shape.user_ids):
        out[column.name] = np.repeat(batch.user_ids[0, at], count) % column.rows
    for at, column in enumerate(shape.ad_ids):
        out[column.name] = batch.ad_ids[:, at] % column.rows
    for at, column in enumerate(shape.event_ids):
        out[HISTORY + column.name] = np.tile(batch.event_ids[:, at] % column.rows, (count, 1))
    return out
