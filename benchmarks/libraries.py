"""DIN and DCN-V2 as deepctr-torch has them, trained by the library's own code on the rows that our models get.

Knows the library's interface (extra `peers`). Does not know splits or metrics. Every objective has a model of its own, since
the library's have one; passes go on until cross entropy on the validation rows has not fallen in one, and the best is kept.
All ids and all dense features are read, these as their quantile among training rows. DIN weighs the ids of the newest events
of every source; the library has no place for an event's label, time or source, nor has DCN-V2 for a history: what they say is
in the counters.

N rows, L events read, K objectives.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from feature_store.batch import FeatureBatch, Targets
from model.nn.shape import IdColumn, InputShape

Part = tuple[FeatureBatch, Targets]
Columns = dict[str, npt.NDArray[np.float32]]
EVENTS, ID_WIDTH, BATCH, MOST_PASSES = 50, 16, 256, 6
ATTENTION, DEEP, CROSSES = (36,), (200, 80), 3
"""Of DIN's paper; crosses of DCN-V2's, and its deep part as DIN's."""
HISTORY, LENGTH, SURFACE = "hist_", "hist_length", "surface"


class Table:
    """Rows as columns; a dense feature is its quantile among training rows, 0 where there is none."""

    def __init__(self, shape: InputShape, train: FeatureBatch) -> None:
        self.shape = shape
        self.ids = (*shape.user_ids, *shape.ad_ids)
        dense = _dense(train)
        self._sorted = [np.sort(column[np.isfinite(column)]) for column in dense.T]

    @property
    def dense(self) -> list[str]:
        """Names of dense columns."""
        return [f"dense_{number}" for number in range(len(self._sorted))]

    @property
    def read(self) -> list[IdColumn]:
        """Columns of the ad that events have too."""
        known = {column.name for column in self.shape.event_ids}
        return [column for column in self.shape.ad_ids if column.name in known]

    def columns(self, batch: FeatureBatch) -> Columns:
        """Of requests with one candidate each: [N], and [N, L] of histories, zeros behind the last event."""
        ids = np.concatenate([batch.user_ids, batch.ad_ids], axis=1)
        out = {SURFACE: batch.surface.astype(np.float32)}
        out |= {column.name: _row(ids[:, at], column) for at, column in enumerate(self.ids)}
        for name, column, known in zip(self.dense, _dense(batch).T, self._sorted, strict=True):
            out[name] = (np.searchsorted(known, np.nan_to_num(column)) / max(1, len(known))).astype(np.float32)
        return out | self._histories(batch)

    def _histories(self, batch: FeatureBatch) -> Columns:
        lengths = np.minimum(np.diff(batch.event_offsets), EVENTS)
        place = np.arange(EVENTS)
        there = place < lengths[:, None]
        at = np.where(there, batch.event_offsets[:-1, None] + place, 0)
        names = [column.name for column in self.shape.event_ids]
        out = {LENGTH: lengths.astype(np.float32)}
        for column in self.read:
            keys = np.append(batch.event_ids[:, names.index(column.name)], 0)  # one more: a batch may have no event
            out[HISTORY + column.name] = np.where(there, _row(keys[at], column), np.float32(0))
        return out


def _row(keys: npt.NDArray[np.int64], column: IdColumn) -> npt.NDArray[np.float32]:
    """Rows of a table that keys fall on, as the numbers that the library takes: exact below 2^24."""
    return (keys % column.rows).astype(np.float32)


def _dense(batch: FeatureBatch) -> npt.NDArray[np.float32]:
    return np.concatenate([batch.user_dense, batch.ad_dense], axis=1)


def din(table: Table, seed: int) -> nn.Module:
    """The library's DIN."""
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    features = _features(table)
    for column in table.read:
        one = SparseFeat(HISTORY + column.name, column.rows, ID_WIDTH, embedding_name=column.name)
        features.append(VarLenSparseFeat(one, EVENTS, length_name=LENGTH))
    names = [column.name for column in table.read]
    made: nn.Module = DIN(features, names, dnn_hidden_units=DEEP, att_hidden_size=ATTENTION, seed=seed)
    return made


def dcnv2(table: Table, seed: int) -> nn.Module:
    """The library's DCN with matrices: DCN-V2."""
    from deepctr_torch.models import DCN

    features = _features(table)
    sizes: dict[str, Any] = {"cross_num": CROSSES, "cross_parameterization": "matrix", "dnn_hidden_units": DEEP}
    made: nn.Module = DCN(features, features, seed=seed, **sizes)
    return made


def _features(table: Table) -> list[Any]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    surface = SparseFeat(SURFACE, len(table.shape.surfaces), ID_WIDTH)
    ids = [SparseFeat(column.name, column.rows, ID_WIDTH) for column in table.ids]
    return [surface, *ids, *(DenseFeat(name, 1) for name in table.dense)]


LIBRARY: Mapping[str, Callable[[Table, int], nn.Module]] = {"deepctr-din": din, "deepctr-dcnv2": dcnv2}


def fitted(
    name: str, shape: InputShape, parts: Mapping[str, Part], objectives: Sequence[int], seed: int
) -> npt.NDArray[np.float64]:
    """Probabilities [N, K] of the test rows; zeros for objectives that are not asked for.

    `parts` are train, valid and test: requests with one candidate each.

    Raises:
        ModuleNotFoundError: deepctr-torch is not installed; the extra `peers` adds it.
    """
    table = Table(shape, parts["train"][0])
    columns = {part: table.columns(batch) for part, (batch, _) in parts.items()}
    out = np.zeros(parts["test"][1].labels.shape)
    for k in objectives:
        out[:, k] = _best(LIBRARY[name](table, seed), columns, {part: targets for part, (_, targets) in parts.items()}, k)
    return out


def _best(
    model: Any, columns: Mapping[str, Columns], targets: Mapping[str, Targets], k: int
) -> npt.NDArray[np.float64]:
    """What the model says of the test rows after the pass that was best on the validation rows."""
    model.compile("adam", "binary_crossentropy")
    (x, y), (x_valid, y_valid) = (_labelled(columns[part], targets[part], k) for part in ("train", "valid"))
    least, said = np.inf, np.zeros(0)
    for _ in range(MOST_PASSES):
        with redirect_stdout(io.StringIO()):  # it prints each pass
            model.fit(dict(x), y, batch_size=BATCH, epochs=1, verbose=0)
        p = np.clip(model.predict(dict(x_valid), 4096)[:, 0], 1e-7, 1 - 1e-7)
        entropy = -float(np.mean(np.where(y_valid > 0, np.log(p), np.log1p(-p))))
        if entropy >= least:
            break
        least, said = entropy, model.predict(dict(columns["test"]), 4096)[:, 0]
    return said


def _labelled(columns: Columns, targets: Targets, k: int) -> tuple[Columns, npt.NDArray[np.float32]]:
    rows = np.flatnonzero(targets.label_mask[:, k])
    return {name: column[rows] for name, column in columns.items()}, targets.labels[rows, k]
