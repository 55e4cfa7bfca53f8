"""The learning loop of a demo: a foundation model that annotates days it has not seen, and four arms a surface.

Knows the order of training stages. Does not know processes or reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from feature_store.online import OnlineStore
from feature_store.replay import Replay
from feature_store.transfer import Annotations
from feature_store.world import DAY_MS
from model.gem.flops import forward_flops
from model.solaris.pair import pair_space_id
from model.training.evaluate import Evaluation, Predictions, concatenate, evaluate, predict
from model.training.fitting import FitConfig, Progress
from model.training.optimizers import OptimizerConfig
from model.training.published import Version, publish_foundation, publish_vertical
from model.training.rows import ReplayRows
from model.training.teacher import Teacher
from model.training.throughput import measure_ceiling
from model.training.trainer import RunConfig, Snapshot, walk_forward
from model.training.vertical import TrainedVertical, VerticalRun, train_vertical
from model.vertical.presets import ARMS, arm
from services.cli.console import Advance, Console
from services.demo.config import Days, DemoConfig
from services.demo.forks import forked
from services.loopfm.memory import MemoryWriter
from services.loopfm.metrics import LoopFmMetrics
from services.loopfm.records import Pinned
from services.loopfm.writer import Annotator
from services.solaris.lifetimes import Lifetimes
from services.solaris.replay import replayed_pairs

FAMILY = "foundation"
_STEADY_SHARE = 0.5
"""Of the full rates, from the end of the first stretch on: most of what the model learns, it learns day after day."""


@dataclass(slots=True)
class Learned:
    """What the learning loop leaves."""

    space_id: bytes
    foundation: Path
    """Folder of the published version."""
    predictions: dict[str, Predictions]
    """Arm (or FM) → what it says of the last day, every surface."""
    evaluations: dict[str, Evaluation]
    verticals: dict[str, Path] = field(default_factory=dict)
    """Name on the protocol → folder of the version."""
    flops_per_example: float = 0.0
    mfu: float = 0.0
    losses: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    annotated: dict[str, int] = field(default_factory=dict)


def learn_foundation(
    config: DemoConfig, replay: Replay, days: Days, models: Path, store: OnlineStore, console: Console
) -> Learned:
    """Trains, annotates the next day, trains on it, and so on; scores and publishes the last snapshot."""
    run = RunConfig(
        preset=config.preset,
        train_from_ms=days.first_ms,
        train_to_ms=days.annotate_ms,
        fit=FitConfig(batch_requests=batch_requests(config.batch_candidates, replay)),
        optimizer=OptimizerConfig(final_share=_STEADY_SHARE),
    )
    torch.set_num_threads(1)  # batches are read on the other core meanwhile; two threads fighting over it are slower
    metrics, ceiling = LoopFmMetrics(CollectorRegistry()), measure_ceiling()
    learned: Learned | None = None
    flops = seconds = rows = 0.0
    for snapshot in _snapshots(run, replay, days, console):
        pinned = _pinned(snapshot)
        learned = learned or Learned(pinned.space_id, Path(), {}, {})
        flops, seconds, rows = (
            flops + snapshot.log.flops, seconds + snapshot.log.seconds, rows + snapshot.log.rows,
        )  # fmt: skip
        learned.losses.extend(snapshot.log.losses)
        learned.drift.append(snapshot.drift)
        last = snapshot.annotate_to_ms >= days.end_ms
        _annotate(replay, pinned, metrics, snapshot, None if last else store, learned)
        if last:
            _score_and_publish(snapshot, replay, days, models, learned)
    assert learned is not None
    learned.flops_per_example = flops / 3.0 / max(1.0, rows)
    learned.mfu = flops / max(seconds, 1e-9) / ceiling.measured
    return learned


def learn_verticals(config: DemoConfig, replay: Replay, days: Days, models: Path, learned: Learned, console: Console) -> None:
    """Four arms a surface, on annotations and on pair embeddings as they stood; scored on the last day."""
    with console.progress("pair embeddings as of each request") as advance:
        replay.with_annotations(Annotations(replay.tables, replay.impressions, space_id=learned.space_id))
        lifetimes = Lifetimes().stretched(config.lifetime_factor)
        space_id = pair_space_id(learned.space_id)
        replay.with_pairs(replayed_pairs(replay, space_id, from_ms=days.annotate_ms, lifetimes=lifetimes))
        advance(1, 1)
    rows = ReplayRows(replay, days.annotate_ms, days.test_ms)
    rows.batch(np.arange(min(1, len(rows))))  # reads the tables here: their reader does not survive a fork
    jobs = [(surface, name) for surface in replay.spec.surfaces for name in ARMS]
    made: dict[tuple[str, str], TaughtVertical] = {}
    results = forked(
        partial(_vertical, config, replay, days, models, learned.space_id), jobs, processes=os.cpu_count() or 1
    )
    with console.progress("vertical models") as advance:
        for done, (job, result) in enumerate(results):
            if result is not None:
                made[job] = result
            advance(done + 1, len(jobs))
    _adopt_verticals(learned, replay, made)


def _adopt_verticals(learned: Learned, replay: Replay, made: Mapping[tuple[str, str], TaughtVertical]) -> None:
    for (surface, name), result in made.items():
        learned.verticals[f"{surface}-{name.lower()}"] = result.folder
    for name in ARMS:
        parts = [made[surface, name].predictions for surface in replay.spec.surfaces if (surface, name) in made]
        if own := [part for part in parts if part is not None]:
            learned.predictions[name] = concatenate(own)
            learned.evaluations[name] = evaluate(learned.predictions[name], replay.spec.surfaces, replay.spec.objectives)


def batch_requests(candidates: int, replay: Replay) -> int:
    """Requests that hold about so many candidates."""
    log = replay.impressions
    return max(1, round(candidates * len(log.request_ids) / max(1, len(log))))


def _snapshots(run: RunConfig, replay: Replay, days: Days, console: Console) -> Iterator[Snapshot]:
    with console.progress("foundation model, day by day") as advance:
        steps = _Steps(advance)
        yield from walk_forward(run, replay, until_ms=days.end_ms, on_progress=steps)


class _Steps:
    """Progress over several stretches: a bar that restarts with each."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def __call__(self, progress: Progress) -> None:
        self._advance(progress.step, progress.num_steps)


def _pinned(snapshot: Snapshot) -> Pinned:
    return Pinned(
        teacher=snapshot.teacher,
        family=FAMILY,
        model_version=f"{FAMILY}/until-{snapshot.annotate_from_ms}",
        watermark_ms=snapshot.watermark_ms,
        seen=snapshot.seen,
    )


def _annotate(
    replay: Replay,
    pinned: Pinned,
    metrics: LoopFmMetrics,
    snapshot: Snapshot,
    store: OnlineStore | None,
    learned: Learned,
) -> None:
    memory = None
    if store is not None:
        memory = MemoryWriter(
            store, space_id=pinned.space_id, num_objectives=len(replay.spec.objectives),
            num_bytes=snapshot.teacher.config.compressor.dim // 2,
        )  # fmt: skip
    annotator = Annotator(replay, pinned, metrics, memory=memory, at_once=os.cpu_count() or 1)
    done = annotator.annotate(snapshot.annotate_from_ms, snapshot.annotate_to_ms)
    for name in ("rows", "forwards", "memories", "self_label_seen"):
        learned.annotated[name] = learned.annotated.get(name, 0) + getattr(done, name)


def _score_and_publish(snapshot: Snapshot, replay: Replay, days: Days, models: Path, learned: Learned) -> None:
    rows = ReplayRows(replay, days.test_ms, days.end_ms)
    teacher: Teacher = snapshot.teacher
    learned.predictions["FM"] = predict(teacher.score, rows)
    learned.evaluations["FM"] = evaluate(learned.predictions["FM"], replay.spec.surfaces, replay.spec.objectives)
    golden, _ = rows.batch(np.arange(min(8, len(rows))))
    learned.foundation = publish_foundation(
        models, Version(FAMILY, _stamp(), _now_ms()), teacher, replay.spec, golden,
        watermark_ms=snapshot.watermark_ms, metrics={"flops": forward_flops(teacher.foundation, golden)},
    )  # fmt: skip


class TaughtVertical(NamedTuple):
    """A published vertical model."""

    folder: Path
    predictions: Predictions | None
    """Of the last day; None if its surface has no request then."""


def _vertical(
    config: DemoConfig, replay: Replay, days: Days, models: Path, space_id: bytes, job: tuple[str, str]
) -> TaughtVertical | None:
    """Trains and publishes one arm of a surface; None if the surface has no request to learn from."""
    surface, name = job
    if not len(ReplayRows(replay, days.annotate_ms, days.test_ms, surface=surface)):
        return None
    run = VerticalRun(
        model=arm(name, surface),
        train_from_ms=days.annotate_ms,
        train_to_ms=days.test_ms,
        test_to_ms=days.end_ms,
        fit=FitConfig(
            batch_requests=batch_requests(config.vertical_candidates, replay), epochs=config.vertical_epochs
        ),
    )
    trained = train_vertical(run, replay)
    return TaughtVertical(_publish(trained, replay, models, surface, name, space_id), trained.predictions)


def _publish(trained: TrainedVertical, replay: Replay, models: Path, surface: str, name: str, space_id: bytes) -> Path:
    config = trained.tower.config
    rows = ReplayRows(replay, trained.watermark_ms - DAY_MS, trained.watermark_ms, surface=surface)
    golden, _ = rows.batch(np.arange(min(8, len(rows))))
    return publish_vertical(
        models, Version(f"{surface}-{name.lower()}", _stamp(), _now_ms()), trained.tower, replay.spec, golden,
        watermark_ms=trained.watermark_ms, metrics={},
        loopfm_space_id=space_id if config.loopfm else b"",
        solaris_space_id=pair_space_id(space_id) if config.solaris else b"",
    )  # fmt: skip


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


