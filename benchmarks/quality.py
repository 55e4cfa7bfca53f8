"""Compares models on the same rows of a real log: base rates, LightGBM, published architectures, and the foundation model.

    python -m benchmarks.quality --data kuairand --source DIR --seeds 3 --json OUT
    python -m benchmarks.quality --data trivago --source DIR --seeds 3 --json OUT

Knows the protocol. Does not know models. Every model gets the same information: histories, counters, profiles, all as they
were known at each impression's own time; every impression is a request of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt

from benchmarks import libraries
from benchmarks.learning import against, begun, learner_of, scorer
from benchmarks.logs import LOGS, Log
from benchmarks.measure import finish, names_of, parser
from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from feature_store.replay import Replay
from feature_store.splits import Splits
from feature_store.tables import Tables
from model.baselines.frame import Baseline
from model.baselines.presets import PRESETS
from model.nn.shape import input_shape
from model.training.evaluate import (
    POOLED,
    Predictions,
    SliceMetrics,
    evaluate,
    predict,
)
from model.training.fitting import FitConfig, fit
from model.training.metrics import Undefined, mrr
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows
from model.training.trainer import RunConfig, train

BATCH = 256
"""Rows of a neural model's step: of 128, 256 and 512 the best on the validation days for a tiny foundation model; DIN gets the same."""
QUICK_MS = 5_400_000
"""Of each part of a quick run: enough for a few steps."""
Fit = Callable[["Split", int], Predictions]


class Split:
    """Training, validation and test rows of a log."""

    def __init__(self, log: Log, replay: Replay, bounds: tuple[int, int, int, int]) -> None:
        self.log, self.replay, self.bounds = log, replay, bounds
        first, train_end, valid_end, test_end = bounds
        self.train = ReplayRows(replay, first, train_end, requests="impression")
        self.valid = ReplayRows(replay, train_end, valid_end, requests="impression")
        self.test = ReplayRows(replay, valid_end, test_end, requests="impression")

    def batches(self, name: str) -> tuple[FeatureBatch, Targets]:
        """All rows of a part, at once."""
        rows: ReplayRows = getattr(self, name)
        return rows.batch(np.arange(len(rows)))

    def lists(self) -> npt.NDArray[np.int64]:
        """[test rows] number of the list that a row was shown in: impressions of one user and instant."""
        shown, at = self.test.examples.impression, self.replay.impressions
        pairs = np.stack([at.user_key[shown], at.event_ms[shown]], axis=1)
        return np.asarray(np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1), dtype=np.int64)


def main() -> None:
    """Runs the comparison and prints it."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        split = _split(options, Path(folder))
        runs = {name: _seeds(name, run, split, options) for name, run in _models(options).items()}
    columns, rows, result = _report(split, runs, options)
    finish(result, out=options.json, columns=columns, rows=rows)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--data", choices=[*LOGS], default="kuairand", help="which log")
    made.add_argument("--source", type=Path, required=True, help="folder of its files")
    made.add_argument("--train-end", help="last day of training in the log's zone, or the instant after it; else the log's own")
    made.add_argument("--valid-end", help="last day of validation, or the instant after it")
    made.add_argument("--test-end", help="last day of test, or the instant after it")
    made.add_argument("--seeds", type=int, default=3, help="runs of every neural model")
    made.add_argument("--preset", default="model.gem.presets:public_s", help="foundation model")
    made.add_argument("--epochs", type=int, default=2, help="passes of a neural model over the training rows, in order of time as the trainer makes them")
    others = [*PRESETS, *libraries.LIBRARY]
    known = names_of(["rate", "lightgbm", *others, "foundation"])
    made.add_argument("--models", type=known, default="rate,lightgbm,din,foundation", help=f"rows of the table; also {', '.join(others)}")
    made.add_argument("--keep", type=Path, help="folder that keeps the imported tables and every run, so that the same command goes on where it was stopped")
    return made.parse_args()


def _split(options: argparse.Namespace, folder: Path) -> Split:
    log = LOGS[options.data]
    spec, tables = log.spec(), Tables(options.keep or folder)
    if not tables.exists("impressions"):
        log.fill(options.source, tables, spec)
    replay = Replay(spec, tables)
    first = int(replay.impressions.event_ms.min())
    ends = (options.train_end, options.valid_end, options.test_end)
    train_to, valid_to, test_to = (log.end_ms(given or own) for given, own in zip(ends, log.ends, strict=True))
    if options.quick:
        first, valid_to, test_to = train_to - QUICK_MS, train_to + QUICK_MS, train_to + 2 * QUICK_MS
    cut = Splits(train_from_ms=first, train_to_ms=train_to, valid_to_ms=valid_to, test_to_ms=test_to)
    return Split(log, replay, (*cut.train, *cut.test))


def _models(options: argparse.Namespace) -> Mapping[str, Fit]:
    known: dict[str, Fit] = {
        "rate": _rate,
        "lightgbm": _lightgbm,
        **{name: partial(_neural, made, options=options) for name, made in PRESETS.items()},
        **{name: partial(_library, name) for name in libraries.LIBRARY},
        "foundation": lambda split, seed: _foundation(split, seed, options),
    }
    return {name: known[name] for name in options.models}


def _seeds(name: str, run: Fit, split: Split, options: argparse.Namespace) -> list[Predictions]:
    count = 1 if name in ("rate", "lightgbm") or options.quick else options.seeds
    made = []
    for seed in range(count):
        start = time.monotonic()
        made.append(_kept(name, run, split, seed, options))
        ne = evaluate(made[-1], split.replay.spec.surfaces, split.replay.spec.objectives)[("all", "click")].ne
        print(f"{name}, seed {seed}: click NE {ne}, {time.monotonic() - start:.0f} s", flush=True)  # a benchmark prints
    return made


def _kept(name: str, run: Fit, split: Split, seed: int, options: argparse.Namespace) -> Predictions:
    """A run: what it said lies in the kept folder, or it is made now."""
    if not options.keep:
        return run(split, seed)
    facts = (name, options.preset if name == "foundation" else "", options.epochs, split.bounds, BATCH, split.replay.spec.hash)
    path = options.keep / "runs" / f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}-{seed}.npy"
    if path.exists():
        return _predictions(split, np.load(path))
    made = run(split, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npy")
    np.save(part, made.probabilities_NK)
    part.replace(path)  # a killed run leaves none, or a whole one
    return made


def _rate(split: Split, seed: int) -> Predictions:
    """The training rate of each surface and objective."""
    (train, learned), (test, _) = split.batches("train"), split.batches("test")
    rates = np.zeros((len(split.replay.spec.surfaces), learned.labels.shape[1]))
    for surface in range(len(rates)):
        own = train.surface == surface
        masked = np.where(learned.label_mask[own], learned.labels[own], 0).sum(0)
        rates[surface] = (masked + 1) / (learned.label_mask[own].sum(0) + 2)
    return _predictions(split, rates[test.surface])


def _lightgbm(split: Split, seed: int) -> Predictions:
    """One booster an objective; categories coded by their training vocabulary."""
    parts = {name: split.batches(name) for name in ("train", "valid", "test")}
    codes = _Codes(parts["train"][0])
    x = {name: codes.table(batch) for name, (batch, _) in parts.items()}
    out = np.zeros(parts["test"][1].labels.shape)
    for k, objective in enumerate(split.replay.spec.objectives):
        if objective not in split.log.objectives:
            continue
        label = {name: targets.labels[:, k] for name, (_, targets) in parts.items()}
        train = lightgbm.Dataset(x["train"], label["train"], free_raw_data=False)
        valid = lightgbm.Dataset(x["valid"], label["valid"], reference=train, free_raw_data=False)
        options = {"objective": "binary", "num_leaves": 63, "learning_rate": 0.05, "verbose": -1, "num_threads": 2, "seed": seed}
        stop = lightgbm.early_stopping(50, verbose=False)
        booster = lightgbm.train(options, train, 1500, valid_sets=[valid], callbacks=[stop])
        out[:, k] = booster.predict(x["test"])
    return _predictions(split, out)


class _Codes:
    """Ids as small integers; one that training has not seen is −1. User and ad ids are left to their counters."""

    def __init__(self, batch: FeatureBatch) -> None:
        ids = self._ids(batch)
        self._known = [np.unique(ids[:, column]) for column in range(ids.shape[1])]

    def table(self, batch: FeatureBatch) -> npt.NDArray[np.float32]:
        ids, coded = self._ids(batch), []
        for column, known in enumerate(self._known):
            at = np.minimum(np.searchsorted(known, ids[:, column]), len(known) - 1)
            coded.append(np.where(known[at] == ids[:, column], at, -1))
        return np.column_stack([batch.surface, *coded, batch.user_dense, batch.ad_dense]).astype(np.float32)

    def _ids(self, batch: FeatureBatch) -> npt.NDArray[np.int64]:
        return np.concatenate([batch.user_ids[:, 1:], batch.ad_ids[:, 1:]], axis=1)


def _neural(made: Callable[[Layout], Baseline], split: Split, seed: int, options: argparse.Namespace) -> Predictions:
    model = begun(made, split.replay.layout, split.train.samples(20_000), seed)
    config = FitConfig(batch_requests=BATCH, epochs=options.epochs, seed=seed)
    fit(learner_of(model, seed), split.train, config, quarantine=Quarantine(split.replay.layout))
    return predict(scorer(model), split.test)


def _library(name: str, split: Split, seed: int) -> Predictions:
    parts = {part: split.batches(part) for part in ("train", "valid", "test")}
    known = split.replay.spec.objectives
    objectives = [known.index(objective) for objective in split.log.objectives]
    return _predictions(split, libraries.fitted(name, input_shape(split.replay.layout), parts, objectives, seed))


def _foundation(split: Split, seed: int, options: argparse.Namespace) -> Predictions:
    first, train_end, *_ = split.bounds
    run = RunConfig(
        preset=options.preset, train_from_ms=first, train_to_ms=train_end, requests="impression",
        fit=FitConfig(batch_requests=BATCH, epochs=options.epochs, seed=seed),
    )  # fmt: skip
    return predict(train(run, split.replay).teacher.score, split.test)


def _predictions(split: Split, probabilities: npt.NDArray[np.floating[Any]]) -> Predictions:
    blank = predict(lambda batch: np.zeros((batch.num_candidates, probabilities.shape[1]), np.float32), split.test)
    return blank._replace(probabilities_NK=np.asarray(probabilities, dtype=np.float64))


def _report(
    split: Split, runs: Mapping[str, list[Predictions]], options: argparse.Namespace
) -> tuple[list[str], list[list[object]], dict[str, Any]]:
    log, spec = split.log, split.replay.spec
    measured = {name: [evaluate(run, spec.surfaces, spec.objectives) for run in made] for name, made in runs.items()}
    versus = {
        name: against(made, runs["lightgbm"], spec.surfaces, spec.objectives, num_draws=200 if options.quick else 1000)
        for name, made in runs.items()
        if name != "lightgbm" and "lightgbm" in runs
    }
    lists, ranked = (split.lists(), ["mrr"]) if log.lists else (None, [])
    rows, cells = [], []
    for slice_ in [(s, o) for s in (POOLED, *spec.surfaces) for o in log.objectives]:
        for name, made in runs.items():
            cell = _cell([evaluation[slice_] for evaluation in measured[name]])
            cell["mrr"] = None if lists is None else _median([_mrr(run, lists, split, slice_) for run in made])
            interval = versus.get(name, {}).get(slice_)
            cells.append({"surface": slice_[0], "objective": slice_[1], "model": name, **cell, "against_lightgbm": _interval(interval)})
            shown = [cell[key] for key in ("ne", "ne_spread", "auc", "gauc", *ranked, "calibration", "rows")]
            rows.append([f"{slice_[0]} · {slice_[1]} · {name}", *shown, _shown(interval)])
    columns = [
        "slice · model", "NE", "±", "AUC", "GAUC", *map(str.upper, ranked), "calibration", "rows", "NE − LightGBM (95 %)",
    ]  # fmt: skip
    return columns, rows, {
        "benchmark": f"quality on {log.title}", "cells": cells, "bar": dict(log.bar), "seeds": options.seeds,
        "bounds_ms": split.bounds, "rows": {"train": len(split.train), "valid": len(split.valid), "test": len(split.test)},
        "preset": options.preset, "batch": BATCH, "epochs": options.epochs, "quick": options.quick,
    }  # fmt: skip


def _mrr(run: Predictions, lists_N: npt.NDArray[np.int64], split: Split, slice_: tuple[str, str]) -> float | Undefined:
    """Mean reciprocal rank of a run in one surface and objective."""
    surface, objective = slice_
    kept, k = np.ones(len(lists_N), dtype=np.bool_), split.replay.spec.objectives.index(objective)
    if surface != POOLED:
        kept = run.surface_N == split.replay.spec.surface_index(surface)
    return mrr(run.probabilities_NK[kept, k], run.labels_NK[kept, k], lists_N[kept])


def _cell(slices: list[SliceMetrics]) -> dict[str, Any]:
    ne = _defined(s.ne for s in slices)
    return {
        "ne": _median(ne),
        "ne_spread": (max(ne) - min(ne)) / 2 if ne else None,
        "auc": _median(s.auc for s in slices),
        "gauc": _median(s.gauc.value for s in slices),
        "calibration": _median(s.calibration for s in slices),
        "rows": slices[0].rows,
    }


def _defined(values: Iterable[float | Undefined]) -> list[float]:
    return [float(value) for value in values if not isinstance(value, Undefined)]


def _median(values: Iterable[float | Undefined]) -> float | None:
    defined = _defined(values)
    return float(np.median(defined)) if defined else None


def _interval(interval: Any) -> dict[str, Any] | None:
    return None if interval is None else {"low": _number(interval.low), "high": _number(interval.high)}


def _shown(interval: Any) -> str | None:
    return None if interval is None or _number(interval.low) is None else f"{interval.low:+.4f} … {interval.high:+.4f}"


def _number(value: Any) -> float | None:
    return None if isinstance(value, Undefined) else float(value)


if __name__ == "__main__":
    main()
