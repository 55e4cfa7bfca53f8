"""Trains a surface's small model on replayed rows, with the channels of knowledge that its arm has.

Knows stretches of time, channels and stages. Does not know how annotations and pair embeddings were made: the replay
carries them (`Replay.with_annotations`, `Replay.with_pairs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from feature_store.errors import InvalidInput
from feature_store.replay import Replay, Requests
from model.training.base_rates import base_logits
from model.training.distill import VerticalCriterion
from model.training.evaluate import Evaluation, Predictions, evaluate, predict
from model.training.fitting import FitConfig, FitLog, OnProgress, fit
from model.training.learner import Learner
from model.training.loss import DistillConfig
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.published import score_of
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows
from model.training.throughput import Stages
from model.vertical.config import VerticalConfig
from model.vertical.tower import VerticalTower

ALONE = Processes()


@dataclass(frozen=True, kw_only=True, slots=True)
class VerticalRun:
    """A training run of one surface's model."""

    model: VerticalConfig
    train_from_ms: int
    train_to_ms: int
    """Exclusive; labels count only if they had settled by then."""
    test_to_ms: int = 0
    """Requests from train_to_ms to here, exclusive, are scored; 0 scores none."""
    requests: Requests = "request"
    objective_weights: tuple[float, ...] = ()
    """One an objective of the spec; empty weighs all alike."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    statistics_requests: int = 20_000
    fit: FitConfig = field(default_factory=FitConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if not self.train_from_ms < self.train_to_ms:
            raise InvalidInput(f"train_to_ms {self.train_to_ms} must lie after train_from_ms {self.train_from_ms}")
        if self.test_to_ms and self.test_to_ms <= self.train_to_ms:
            raise InvalidInput(f"test_to_ms {self.test_to_ms} must lie after train_to_ms {self.train_to_ms}, or be 0")


class TrainedVertical(NamedTuple):
    """A finished run."""

    tower: VerticalTower
    log: FitLog
    quarantine: Quarantine
    predictions: Predictions | None
    """Of the test stretch, in time order; None if there is none."""
    evaluation: Evaluation
    stages: Stages
    watermark_ms: int
    """Newest event whose label has entered; train_from_ms − 1 if none has."""


def train_vertical(
    run: VerticalRun,
    replay: Replay,
    *,
    processes: Processes = ALONE,
    on_progress: OnProgress = lambda progress: None,
) -> TrainedVertical:
    """Trains on the surface's requests in [train_from_ms, train_to_ms), scores those in [train_to_ms, test_to_ms).

    Raises:
        InvalidInput: the surface has no request in the stretch, or a weight is missing.
    """
    stages = Stages()
    with stages.stage("load"):
        rows = _rows(run, replay, run.train_from_ms, run.train_to_ms, known_by_ms=run.train_to_ms)
    if not len(rows):
        raise InvalidInput(
            f"surface {run.model.surface!r} has no request from {run.train_from_ms} to {run.train_to_ms}; "
            "give a stretch that its log covers"
        )
    with stages.stage("statistics"):
        tower = _tower(run, replay, rows)
        criterion = VerticalCriterion(tower, objective_weights=_weights(run, replay), distill=run.distill)
        learner = Learner(tower, criterion, run.optimizer, processes, seed=run.fit.seed)
    quarantine = Quarantine(replay.layout)
    with stages.stage("train"):
        log = fit(learner, rows, run.fit, quarantine=quarantine, on_progress=on_progress)
    with stages.stage("evaluate"):
        predictions = _predicted(tower, run, replay) if processes.leads else None
        found = evaluate(predictions, replay.spec.surfaces, replay.spec.objectives) if predictions else {}
        processes.barrier()
    trained = rows.trained()
    newest = int(replay.impressions.event_ms[trained].max()) if len(trained) else run.train_from_ms - 1
    return TrainedVertical(tower, log, quarantine, predictions, found, stages, newest)


def _rows(run: VerticalRun, replay: Replay, from_ms: int, to_ms: int, *, known_by_ms: int | None) -> ReplayRows:
    return ReplayRows(
        replay, from_ms, to_ms, requests=run.requests, surface=run.model.surface, known_by_ms=known_by_ms
    )


def _tower(run: VerticalRun, replay: Replay, rows: ReplayRows) -> VerticalTower:
    torch.manual_seed(run.fit.seed)
    tower = VerticalTower(run.model, replay.layout)
    samples = rows.samples(run.statistics_requests)
    tower.fit_statistics(batch for batch, _ in samples)
    tower.start_at(base_logits(samples, len(replay.spec.surfaces)))
    return tower


def _predicted(tower: VerticalTower, run: VerticalRun, replay: Replay) -> Predictions | None:
    if not run.test_to_ms:
        return None
    rows = _rows(run, replay, run.train_to_ms, run.test_to_ms, known_by_ms=None)
    return predict(score_of(tower), rows) if len(rows) else None


def _weights(run: VerticalRun, replay: Replay) -> tuple[float, ...]:
    names = replay.spec.objectives
    if run.objective_weights and len(run.objective_weights) != len(names):
        raise InvalidInput(f"objective_weights has {len(run.objective_weights)} values; give one for each of {list(names)}")
    return run.objective_weights or (1.0,) * len(names)
