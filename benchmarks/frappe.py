"""Compares the foundation model with published figures on Frappe, where it has ids and no history: its interactions alone.

    python -m benchmarks.frappe --source DIR --seeds 5 --json OUT

Knows the data set's rows and protocol (BARS Frappe_x1). Does not know models. The published validation and test rows
are used as they are; of the training rows the positives are published, and two apps that the user has in no training
row with that context are drawn to each of them here, by seed: the data set's authors drew theirs alike, but theirs are
not published. A run ends when AUC on the validation rows has not risen for `PATIENCE` passes, and the pass with the
highest is what is tested.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from benchmarks.learning import Make, Scored, begun, learner_of, scorer
from benchmarks.logs import DATASETS
from benchmarks.measure import finish, names_of, parser
from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from feature_store.spec import load_spec
from model.baselines.presets import PRESETS
from model.gem.config import GemConfig
from model.gem.foundation import FoundationModel
from model.training.evaluate import predict
from model.training.fitting import FitConfig, fit
from model.training.metrics import auc
from model.training.optimizers import OptimizerConfig
from model.training.quarantine import Quarantine

PUBLISHED = {"DCN-V2": 0.9845, "FinalNet": 0.9857, "FinalMLP": 0.9861}
"""Test AUC, as BARS states it (reczoo/BARS, Frappe_x1)."""
CONTEXT = ("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
COLUMNS = ("user", *CONTEXT, "item")
NEGATIVES, PATIENCE, BATCH, QUICK = 2, 2, 512, 3_000
MOST_PASSES = 30
Ints = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Labelled rows, each a request with one candidate."""

    fields_NF: Ints
    """In the order of COLUMNS."""
    label_N: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.label_N)

    def batch(self, rows: Ints) -> tuple[FeatureBatch, Targets]:
        """Some of them."""
        return _batch(self.fields_NF[rows]), _targets(self.label_N[rows])

    def lengths(self, rows: Ints) -> Ints:
        """No event and one candidate each."""
        return np.tile(np.array([0, 1], dtype=np.int64), (len(rows), 1))


def main() -> None:
    """Trains every model and prints its test AUC beside the published ones."""
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--source", type=Path, required=True, help="folder of the Parquet files")
    made.add_argument("--seeds", type=int, default=5, help="runs of every model; the drawn negatives differ too")
    known = names_of(["foundation", *PRESETS])
    made.add_argument("--models", type=known, default="foundation,wukong,dcnv2", help=f"rows of the table; also {', '.join(PRESETS)}")
    options = made.parse_args()
    cells = [_cell(name, options) for name in options.models]
    rows: list[list[object]] = [[cell[key] for key in ("model", "auc", "low", "high", "passes")] for cell in cells]
    rows += [[f"{name} (published)", value, None, None, None] for name, value in PUBLISHED.items()]
    result = {"benchmark": "test AUC on Frappe", "cells": cells, "published": PUBLISHED, "quick": options.quick}
    finish(result, out=options.json, columns=["model", "AUC, median", "least", "most", "passes"], rows=rows)


def interactions() -> GemConfig:
    """A foundation model whose strength lies in its interactions: there is nothing to attend to."""
    return GemConfig(
        width=32, layers=3, user_tokens=9, ad_tokens=2, id_width=16, factor_tokens=8, linear_tokens=8, rank=16, hidden=256,
        experts=2, id_dropout=0.0,
    )  # fmt: skip


def _cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    layout = Layout(load_spec(DATASETS / "frappe.yaml"))
    make = partial(FoundationModel, interactions()) if name == "foundation" else PRESETS[name]
    runs = []
    for seed in range(1 if options.quick else options.seeds):
        start = time.monotonic()
        runs.append(_run(make, layout, _parts(options, seed), seed, most=1 if options.quick else MOST_PASSES))
        print(f"{name}, seed {seed}: {runs[-1]}, {time.monotonic() - start:.0f} s", flush=True)  # a benchmark prints
    values = [value for value, _ in runs]
    return {
        "model": name, "auc": float(np.median(values)), "low": min(values), "high": max(values), "runs": values,
        "passes": float(np.median([passes for _, passes in runs])),
    }  # fmt: skip


def _parts(options: argparse.Namespace, seed: int) -> dict[str, Rows]:
    """Training, validation and test rows."""
    positives = _table(options.source / "train_positives.parquet", COLUMNS)
    published = {name: _labelled(options.source / f"nfm_frappe_{name}.parquet") for name in ("val", "test")}
    train = with_negatives(positives, np.random.default_rng(seed))
    parts = {"train": train, **published}
    most = QUICK if options.quick else None
    return {name: Rows(rows.fields_NF[:most], rows.label_N[:most]) for name, rows in parts.items()}


def with_negatives(positives_NF: Ints, random: np.random.Generator) -> Rows:
    """The positives and, to each, `NEGATIVES` apps that its user and context have in no other positive, in random order."""
    apps = np.unique(positives_NF[:, -1])
    situation = np.unique(positives_NF[:, :-1], axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    span = int(apps.max()) + 1
    used = np.unique(situation * span + positives_NF[:, -1])
    owner = np.repeat(np.arange(len(positives_NF)), NEGATIVES)
    drawn = random.choice(apps, len(owner))
    while len(again := np.flatnonzero(np.isin(situation[owner] * span + drawn, used))):  # ends: no situation uses every app
        drawn[again] = random.choice(apps, len(again))
    negatives = positives_NF[owner].copy()
    negatives[:, -1] = drawn
    labels = np.repeat(np.array([1.0, 0.0], np.float32), [len(positives_NF), len(negatives)])
    order = random.permutation(len(labels))
    return Rows(np.concatenate([positives_NF, negatives])[order], labels[order])


def _labelled(path: Path) -> Rows:
    table = _table(path, ("label", *COLUMNS))
    return Rows(table[:, 1:], (table[:, 0] > 0).astype(np.float32))


def _table(path: Path, columns: tuple[str, ...]) -> Ints:
    table = pq.read_table(path, columns=list(columns))
    return np.stack([table[name].to_numpy() for name in columns], axis=1).astype(np.int64)


def _run(make: Make, layout: Layout, parts: dict[str, Rows], seed: int, *, most: int) -> tuple[float, int]:
    """(test AUC of the pass that was best on the validation rows, that pass)."""
    train = parts["train"]
    model = begun(make, layout, [train.batch(np.arange(len(train)))], seed)
    learner = learner_of(model, seed, OptimizerConfig(dense_rate=1e-3, final_share=1.0))
    steps = -(-len(train) // BATCH)
    best, tested, passes = 0.0, 0.0, 0
    for number in range(1, most + 1):
        config = FitConfig(batch_requests=BATCH, window_requests=len(train), seed=seed + 1000 * number)
        fit(learner, train, config, quarantine=Quarantine(layout), steps_before=(number - 1) * steps, schedule_steps=steps * most)
        if (value := _auc(model, parts["val"])) > best:
            best, tested, passes = value, _auc(model, parts["test"]), number
        elif number - passes >= PATIENCE:
            break
    return tested, passes


def _auc(model: Scored, rows: Rows) -> float:
    said = predict(scorer(model), rows, batch_requests=4096)
    value = auc(said.probabilities_NK[:, 0], said.labels_NK[:, 0])
    assert isinstance(value, float), "both labels occur"
    return value


def _batch(fields_RF: Ints) -> FeatureBatch:
    """Requests of one candidate, no events."""
    count = len(fields_RF)
    none, zeros = np.zeros(count + 1, np.int64), np.zeros(count, np.int32)
    ids = np.ascontiguousarray
    return FeatureBatch(
        user_key=ids(fields_RF[:, 0]), surface=zeros, request_ms=np.zeros(count, np.int64), user_ids=ids(fields_RF[:, :-1]),
        user_dense=np.zeros((count, 0), np.float32), event_offsets=none, event_ms=np.zeros(0, np.int64),
        event_source=np.zeros(0, np.int32), event_surface=np.zeros(0, np.int32), event_labels=np.zeros(0, np.int32),
        event_ids=np.zeros((0, 0), np.int64), event_dense=np.zeros((0, 0), np.float32),
        candidate_offsets=np.arange(count + 1, dtype=np.int64), ad_ids=ids(fields_RF[:, -1:]),
        ad_dense=np.zeros((count, 0), np.float32), memory_offsets=none, memory_ms=np.zeros(0, np.int64),
        memory_surface=np.zeros(0, np.int32), memory_labels=np.zeros(0, np.int32), memory_q=np.zeros((0, 0), np.uint8),
        pair_q=np.zeros((count, 0), np.int8), pair_scale=np.zeros(count, np.float32), pair_level=np.full(count, 4, np.int32),
        pair_meta=np.zeros((count, 3), np.float32),
    )  # fmt: skip


def _targets(label_N: npt.NDArray[np.float32]) -> Targets:
    count = len(label_N)
    return Targets(
        example_id=np.zeros(count, "V16"), user_key=np.zeros(count, np.int64), labels=label_N[:, None],
        label_mask=np.ones((count, 1), np.bool_), teacher_logits=np.zeros((count, 1), np.float32),
        teacher_mask=np.zeros(count, np.bool_),
    )  # fmt: skip


if __name__ == "__main__":
    main()
