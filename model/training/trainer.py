"""Trains the foundation model on a replayed log: once, or day after day as a teacher that has not seen what it teaches.

Knows stretches of time, and the stages of a run. Does not know processes' start, artefact folders or services.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from feature_store.batch import FeatureBatch
from feature_store.errors import InvalidInput
from feature_store.replay import Replay, Requests
from model.gem.config import GemConfig
from model.gem.flops import forward_flops
from model.loopfm.config import CompressorConfig
from model.training import configuration
from model.training.base_rates import base_logits
from model.training.evaluate import Evaluation, evaluate, predict
from model.training.experts import join_experts, shard_experts
from model.training.fitting import FitConfig, FitLog, OnProgress, Place, fit
from model.training.learner import Learner
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows, spread
from model.training.shards import Shard
from model.training.tables import join_tables, shard_tables
from model.training.teacher import Teacher, TeacherConfig, TeacherCriterion, drift
from model.training.throughput import Ceiling, Stages, measure_ceiling

ALONE = Processes()
_PROBE_REQUESTS = 1024
"""Of the first stretch: rows whose representation each snapshot must keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run of the foundation model."""

    preset: str
    """A function that returns a GemConfig, as `module:function`."""
    train_from_ms: int
    train_to_ms: int
    """Exclusive; labels count only if they had settled by then."""
    valid_to_ms: int = 0
    """Requests from train_to_ms to here, exclusive, are scored; 0 scores none."""
    requests: Requests = "request"
    """What a row is: a request with its candidates, or each impression by itself."""
    objective_weights: tuple[float, ...] = ()
    """One an objective of the spec; empty weighs all alike."""
    statistics_requests: int = 20_000
    """Training requests, evenly spread, from which quantiles and vocabularies are taken."""
    strict: bool = False
    """Stop at the first row that is not finite, instead of counting it."""
    fit: FitConfig = field(default_factory=FitConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compressor: CompressorConfig = field(default_factory=CompressorConfig)

    def __post_init__(self) -> None:
        if not self.train_from_ms < self.train_to_ms:
            raise InvalidInput(f"train_to_ms {self.train_to_ms} must lie after train_from_ms {self.train_from_ms}")
        if self.valid_to_ms and self.valid_to_ms <= self.train_to_ms:
            raise InvalidInput(f"valid_to_ms {self.valid_to_ms} must lie after train_to_ms {self.train_to_ms}, or be 0")
        if self.statistics_requests < 1:
            raise InvalidInput(f"statistics_requests is {self.statistics_requests}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """Neighbours among the processes who share out parts of the model, of which each would hold all; 1 shares nothing."""

    experts: int = 1
    """Size of a team that shares the experts of mixtures; divides the processes and the experts."""
    tables: int = 1
    """Size of a team that shares the rows of embedding tables; divides the processes."""


WITHOUT_TEAMS = Teams()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A finished run."""

    teacher: Teacher
    log: FitLog
    quarantine: Quarantine
    evaluation: Evaluation
    """Of the validation stretch; empty if there is none."""
    stages: Stages
    ceiling: Ceiling
    watermark_ms: int
    """Newest event whose label has entered; train_from_ms − 1 if none has."""
    flops_per_example: float
    """Forward model FLOPs a candidate."""
    mfu: float
    """Of the measured ceiling, of this process."""


class Snapshot(NamedTuple):
    """A teacher that may annotate the requests of a stretch: it has seen no label of theirs."""

    teacher: Teacher
    annotate_from_ms: int
    annotate_to_ms: int
    watermark_ms: int
    seen: npt.NDArray[np.bool_]
    """[impressions of the log] any label of the impression has entered the weights: the offset log."""
    drift: float
    """How far the mean representation of fixed probe rows moved since the last snapshot, realigned; 0 for the first."""
    log: FitLog


def preset(path: str) -> GemConfig:
    """The configuration that a preset returns.

    Raises:
        InvalidInput: there is no such function, or it returns something else.
    """
    module, separator, name = path.partition(":")
    try:
        made = getattr(import_module(module), name)() if separator else None
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InvalidInput(f"preset {path!r} cannot be called: {error}; try model.gem.presets:tiny") from error
    if not isinstance(made, GemConfig):
        raise InvalidInput(f"preset {path!r} is no function that returns a GemConfig; try model.gem.presets:tiny")
    return made


def train(
    run: RunConfig,
    replay: Replay,
    *,
    processes: Processes = ALONE,
    teams: Teams = WITHOUT_TEAMS,
    checkpoints: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Trained:
    """Trains on [train_from_ms, train_to_ms) and scores [train_to_ms, valid_to_ms); resumes from `checkpoints` if it can.

    What teams share out is whole in checkpoints and in the result.

    Raises:
        InvalidInput: the stretch holds no request, a weight is missing, or the model cannot be shared out so.
        FailedPrecondition: the checkpoints are of another run.
    """
    stages = Stages()
    with stages.stage("ceiling"):
        ceiling = measure_ceiling()
    with stages.stage("load"):
        rows = ReplayRows(
            replay, run.train_from_ms, run.train_to_ms, requests=run.requests, known_by_ms=run.train_to_ms
        )
    _require_rows(rows, run)
    with stages.stage("statistics"):
        course = _Course(run, replay, rows, processes, teams=teams)
    with stages.stage("train"):
        log = course.fit(rows, run.fit, ceiling=ceiling, place=_place(run, replay, checkpoints), on_progress=on_progress)
        course.join()
    with stages.stage("evaluate"):
        evaluation = _evaluate(course.teacher, run, replay) if processes.leads else {}
        processes.barrier()
    return Trained(
        teacher=course.teacher,
        log=log,
        quarantine=course.quarantine,
        evaluation=evaluation,
        stages=stages,
        ceiling=ceiling,
        watermark_ms=_watermark(replay, rows.trained(), run),
        flops_per_example=log.flops / 3.0 / max(1, log.rows),
        mfu=log.flops / max(log.seconds, 1e-9) / ceiling.measured,
    )


def walk_forward(
    run: RunConfig,
    replay: Replay,
    *,
    until_ms: int,
    every_ms: int = 86_400_000,
    processes: Processes = ALONE,
    on_progress: OnProgress = lambda progress: None,
) -> Iterator[Snapshot]:
    """Trains through train_to_ms, lets the snapshot annotate the next stretch, trains through that, and so on to `until_ms`.

    A label enters once, in the first stretch by whose end it has settled; stretches after the first are passed once. The
    compressor is trained in the first stretch; from then on it is only realigned, so that all snapshots write one coordinate
    system. Rates fall over the first stretch and then stay at their final share: the run has no end of its own, and every
    snapshot must be fit to teach.
    The yielded teacher goes on training when the next snapshot is asked for: use it, or publish it, before.

    Raises:
        InvalidInput: the first stretch holds no request.
    """
    rows = ReplayRows(replay, run.train_from_ms, run.train_to_ms, requests=run.requests, known_by_ms=run.train_to_ms)
    _require_rows(rows, run)
    course = _Course(run, replay, rows, processes)
    probe, before = rows.batch(spread(len(rows), _PROBE_REQUESTS))[0], None
    seen = np.zeros(len(replay.impressions), dtype=np.bool_)
    longest_ms = max(o.attribution_window_seconds for o in replay.spec.message.objectives) * 1000
    cut_ms, config = run.train_to_ms, run.fit
    while True:
        log = course.fit(rows, config, on_progress=on_progress)
        seen[rows.trained()] = True
        if before is None:
            course.mint_space()
        else:
            course.teacher.realign(probe, before)
        after = course.teacher.represent(probe)
        moved = drift(before, after) if before is not None else 0.0
        next_ms = min(cut_ms + every_ms, until_ms)
        yield Snapshot(
            course.teacher, cut_ms, next_ms, _watermark(replay, np.flatnonzero(seen), run), seen.copy(), moved, log
        )
        if next_ms >= until_ms:
            return
        rows = ReplayRows(
            replay, max(run.train_from_ms, cut_ms - longest_ms), next_ms,
            requests=run.requests, known_by_ms=next_ms, settled_after_ms=cut_ms,
        )  # fmt: skip
        # Tables that start over with a second pass would forget all earlier stretches.
        cut_ms, before, config = next_ms, after, dataclasses.replace(run.fit, epochs=1)


class _Course:
    """A teacher in training over one stretch or several."""

    def __init__(
        self, run: RunConfig, replay: Replay, rows: ReplayRows, processes: Processes, *, teams: Teams = WITHOUT_TEAMS
    ) -> None:
        self._run, self._processes = run, processes
        config = TeacherConfig(foundation=preset(run.preset), compressor=run.compressor)
        torch.manual_seed(run.fit.seed)
        self.teacher = Teacher(config, replay.layout)
        samples = rows.samples(run.statistics_requests)
        self.teacher.foundation.fit_statistics(batch for batch, _ in samples)
        self.teacher.foundation.start_at(base_logits(samples, len(replay.spec.surfaces)))
        self.quarantine = Quarantine(replay.layout, strict=run.strict)
        self._weights = _objective_weights(run, replay)
        criterion = TeacherCriterion(self.teacher, objective_weights=self._weights)
        self._experts = shard_experts(self.teacher, processes, teams.experts)
        self._tables = shard_tables(self.teacher, processes, teams.tables)
        self._learner = Learner(
            self.teacher, criterion, run.optimizer, processes,
            seed=run.fit.seed, clip_apart=("compressor",),
            shard=Shard(self._experts.parts + self._tables.parts),
        )  # fmt: skip
        self._steps = 0
        self._schedule_steps: int | None = None

    def fit(
        self,
        rows: ReplayRows,
        config: FitConfig,
        *,
        ceiling: Ceiling | None = None,
        place: Place | None = None,
        on_progress: OnProgress = lambda progress: None,
    ) -> FitLog:
        log = fit(
            self._learner,
            rows,
            config,
            quarantine=self.quarantine,
            flops=self._flops,
            ceiling=ceiling.measured if ceiling else 0.0,
            place=place,
            on_progress=on_progress,
            steps_before=self._steps,
            schedule_steps=self._schedule_steps,
        )
        self._steps += len(log.losses)
        self._schedule_steps = self._schedule_steps or self._steps
        return log

    def join(self) -> None:
        """Ends the sharing: the teacher is whole on every process, and trains no further."""
        join_experts(self.teacher, self._experts)
        join_tables(self.teacher, self._tables)

    def mint_space(self) -> None:
        self.teacher.compressor.mint()
        self._learner.criterion = TeacherCriterion(self.teacher, objective_weights=self._weights, reconstruct=False)

    def _flops(self, batch: FeatureBatch) -> float:
        return forward_flops(self.teacher.foundation, batch)


def _require_rows(rows: ReplayRows, run: RunConfig) -> None:
    if not len(rows):
        raise InvalidInput(
            f"there is no request from {run.train_from_ms} to {run.train_to_ms}; give a stretch that the log covers"
        )


def _evaluate(teacher: Teacher, run: RunConfig, replay: Replay) -> Evaluation:
    if not run.valid_to_ms:
        return {}
    rows = ReplayRows(replay, run.train_to_ms, run.valid_to_ms, requests=run.requests)
    if not len(rows):
        return {}
    return evaluate(predict(teacher.score, rows), replay.spec.surfaces, replay.spec.objectives)


def _objective_weights(run: RunConfig, replay: Replay) -> tuple[float, ...]:
    names = replay.spec.objectives
    if run.objective_weights and len(run.objective_weights) != len(names):
        raise InvalidInput(f"objective_weights has {len(run.objective_weights)} values; give one for each of {list(names)}")
    return run.objective_weights or (1.0,) * len(names)


def _watermark(replay: Replay, trained: npt.NDArray[np.int64], run: RunConfig) -> int:
    return int(replay.impressions.event_ms[trained].max()) if len(trained) else run.train_from_ms - 1


def _place(run: RunConfig, replay: Replay, folder: Path | None) -> Place | None:
    if folder is None:
        return None
    return Place(folder=folder, facts={"run": configuration.dump(run), "spec_hash": replay.spec.hash.hex()})
