"""Runs training steps over rows: order, prefetch, checkpoints, progress and speed.

Knows steps and clocks. Does not know what is trained, nor why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from feature_store.batch import FeatureBatch, Targets
from feature_store.errors import FailedPrecondition, InvalidInput
from model.training import checkpoint
from model.training.ahead import read_ahead
from model.training.checkpoint import Checkpoint
from model.training.learner import Learner, StepLog
from model.training.parallel import Processes
from model.training.quarantine import Quarantine
from model.training.rows import RowSource
from model.training.state import BatchOrder, Rows
from model.training.throughput import TRAINING_FACTOR
from model.training.work import Flops, work_of

BeforeStep = Callable[[FeatureBatch, Targets], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """How rows become steps."""

    batch_requests: int = 128
    """Requests of a step over all processes."""
    window_requests: int = 8192
    """Requests that are shuffled among themselves; time order is kept beyond."""
    epochs: int = 1
    fresh_tables: bool = True
    """Embedding tables start over with every pass (MEDA, Liu et al. 2023, arXiv 2305.19531): they know the labels of rows that
    they have seen, so that in a second pass dense weights would learn to trust them, even if they were frozen."""
    seed: int = 0
    checkpoint_steps: int = 0
    """Steps between checkpoints; 0 writes none."""

    def __post_init__(self) -> None:
        for name, least in (("batch_requests", 1), ("window_requests", 1), ("epochs", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.checkpoint_steps < 0:
            raise InvalidInput(f"checkpoint_steps is {self.checkpoint_steps}; it must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is."""

    step: int
    """Steps done."""
    num_steps: int
    loss: float
    rows_per_second: float
    flops_per_second: float
    mfu: float
    """Of the measured ceiling; 0 if there is none."""
    eta_seconds: float
    skipped: int


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class FitLog:
    """What a run did."""

    losses: list[float] = field(default_factory=list)
    last: StepLog | None = None
    rows: int = 0
    """Candidates trained on by this process."""
    flops: float = 0.0
    """Model FLOPs of this process, forward and backward."""
    seconds: float = 0.0
    skipped: int = 0
    first_step: int = 0
    """Step at which it began: 0 unless it was resumed."""
    steps: int = 0
    """Steps of these rows that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run keeps its checkpoints, and what a resumed one must agree with."""

    folder: Path
    facts: dict[str, str]


def fit(
    learner: Learner,
    rows: RowSource,
    config: FitConfig,
    *,
    quarantine: Quarantine,
    flops: Flops = lambda batch: 0.0,
    ceiling: float = 0.0,
    place: Place | None = None,
    on_progress: OnProgress = lambda progress: None,
    until_step: int | None = None,
    before_step: BeforeStep = lambda batch, targets: None,
    steps_before: int = 0,
    schedule_steps: int | None = None,
) -> FitLog:
    """Trains to the end of the rows, or to `until_step`; goes on from the newest checkpoint at `place` if there is one.

    `before_step` sees the rows of each step before it is taken. `steps_before` are steps that the learner took on other rows: its rates and its dropout go on from there. Rates fall over
    `schedule_steps`, by default those of these rows, and stay at their final share beyond.

    Raises:
        FailedPrecondition: the checkpoint belongs to a run with another configuration or spec.
    """
    order = BatchOrder(
        num_rows=len(rows), batch_rows=config.batch_requests, window_rows=config.window_requests,
        seed=config.seed, epochs=config.epochs,
    )  # fmt: skip
    log = FitLog(first_step=_resumed(learner, place))
    log.skipped = learner.skipped
    last = order.num_steps if until_step is None else min(until_step, order.num_steps)
    work = work_of(rows, flops, learner.processes)
    start = time.perf_counter()
    for step, batch, targets in _batches(rows, order, range(log.first_step, last), learner.processes, work):
        batch, targets = quarantine.clean(batch, targets)
        before_step(batch, targets)
        if config.fresh_tables and step and order.epoch(step) > order.epoch(step - 1):
            learner.start_tables_over(steps_before + step)
        done = learner.step(steps_before + step, schedule_steps or order.num_steps, batch, targets)
        _count(log, step, done, learner, targets, TRAINING_FACTOR * flops(batch), time.perf_counter() - start)
        on_progress(_progress(log, order.num_steps, ceiling, learner.processes.world_size))
        if place and config.checkpoint_steps and (step + 1) % config.checkpoint_steps == 0:
            save(learner, place, step + 1)
    return log


def save(learner: Learner, place: Place, step: int) -> None:
    """Writes a checkpoint after `step` steps, once for all processes."""
    model, optimizer = learner.state()
    if learner.processes.leads:
        facts = {**place.facts, "skipped": str(learner.skipped)}
        checkpoint.save(place.folder, Checkpoint(step, model, optimizer, facts))
    learner.processes.barrier()


def _resumed(learner: Learner, place: Place | None) -> int:
    if place is None or not (place.folder / "latest").exists():
        return 0
    found = checkpoint.load(place.folder)
    wrong = [
        f"{name}: {found.facts.get(name)} → {value}" for name, value in place.facts.items() if found.facts.get(name) != value
    ]
    if wrong:
        raise FailedPrecondition(f"the checkpoint at {place.folder} is of another run ({'; '.join(wrong)}); choose another folder")
    learner.load(found.model, found.optimizer)
    learner.skipped = int(found.facts.get("skipped", "0"))
    return found.step


def _batches(
    rows: RowSource, order: BatchOrder, steps: Sequence[int], processes: Processes, work: Callable[[Rows], Rows]
) -> Iterator[tuple[int, FeatureBatch, Targets]]:
    """The process's share of each step; the next one is gathered while the last is trained on."""
    for step, made in read_ahead(lambda step: rows.batch(processes.share(order.rows(step), work)), steps):
        yield step, *made


def _count(log: FitLog, step: int, done: StepLog, learner: Learner, targets: Targets, flops: float, seconds: float) -> None:
    log.losses.append(done.loss)
    log.last, log.skipped, log.steps = done, learner.skipped, step + 1
    log.rows += len(targets.labels)
    log.flops += flops
    log.seconds = seconds


def _progress(log: FitLog, num_steps: int, ceiling: float, world_size: int) -> Progress:
    done = log.steps
    per_step = log.seconds / max(1, done - log.first_step)
    speed = log.flops / max(log.seconds, 1e-9)
    return Progress(
        step=done,
        num_steps=num_steps,
        loss=float(np.mean(log.losses[-20:])),
        rows_per_second=world_size * log.rows / max(log.seconds, 1e-9),
        flops_per_second=world_size * speed,
        mfu=speed / ceiling if ceiling else 0.0,
        eta_seconds=per_step * (num_steps - done),
        skipped=log.skipped,
    )
