"""Runs one process of a training run, and publishes the model from the first.

Knows the stages of a run. Does not know the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Gauge

from feature_store.errors import Aborted, DeadlineExceeded, GemError, NotReady
from feature_store.replay import Replay, Requests
from feature_store.spec import load_spec
from feature_store.tables import Tables
from model.training.evaluate import flat
from model.training.fitting import FitConfig, Progress
from model.training.parallel import Processes, joined
from model.training.published import Version, publish_foundation
from model.training.rows import ReplayRows, spread
from model.training.trainer import RunConfig, Teams, Trained, train
from services.runtime import metrics, telemetry
from services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

PERMANENT, RETRYABLE = 2, 170
"""Exit codes: below 128 a job must not be tried again, from 128 on it may (Kubeflow's ExitCode policy)."""
_SECONDS_BETWEEN_LINES = 5.0


class Asked(NamedTuple):
    """What is trained, on what, and how it is called."""

    preset: str
    name: str
    version: str
    from_ms: int
    to_ms: int
    valid_to_ms: int


def main(settings: TrainerSettings, asked: Asked) -> int:
    """The exit code of a run: 0, PERMANENT or RETRYABLE."""
    try:
        run(settings, asked)
    except GemError as error:
        log.error("%s", error)
        return exit_code(error)
    return 0


def exit_code(error: GemError) -> int:
    """Whether the same run may succeed when it is started again."""
    return RETRYABLE if isinstance(error, (NotReady, DeadlineExceeded, Aborted)) else PERMANENT


def run(settings: TrainerSettings, asked: Asked) -> Path | None:
    """Trains, evaluates and publishes; returns the folder of the version, in the first process.

    Raises:
        GemError: the spec, the stretch, the checkpoints or the version do not fit.
    """
    torch.set_num_threads(settings.torch_threads)
    replay = Replay(load_spec(settings.spec), Tables(settings.tables))
    registry = CollectorRegistry()
    processes = Processes(rank=settings.rank, world_size=settings.world_size)
    with (
        telemetry.started(settings.telemetry, registry),
        metrics.exposed(registry, settings.metrics_listen if processes.leads else ""),
        joined(processes, "env://"),
    ):
        config = run_config(settings, asked)
        report = _Reporter(registry) if processes.leads else _silent
        trained = train(
            config, replay, processes=processes, checkpoints=settings.checkpoints, on_progress=report,
            teams=Teams(experts=settings.expert_processes, tables=settings.table_processes),
        )  # fmt: skip
        folder = _publish(settings.models, asked, config, trained, replay, processes) if processes.leads else None
        processes.barrier()
        return folder


def run_config(settings: TrainerSettings, asked: Asked) -> RunConfig:
    """The run that settings and command line describe."""
    return RunConfig(
        preset=asked.preset,
        train_from_ms=asked.from_ms,
        train_to_ms=asked.to_ms,
        valid_to_ms=asked.valid_to_ms,
        requests=cast(Requests, settings.requests),
        fit=FitConfig(
            batch_requests=settings.batch_requests,
            epochs=settings.epochs,
            seed=settings.seed,
            checkpoint_steps=settings.checkpoint_steps if settings.checkpoints else 0,
        ),
    )


def figures(trained: Trained, world_size: int) -> dict[str, float]:
    """What a run measured, by name: metrics of the validation stretch, speed, and seconds of its stages."""
    fit = trained.log
    return {
        **flat(trained.evaluation),
        "run/examples_per_second": world_size * fit.rows / max(fit.seconds, 1e-9),
        "run/processes": float(world_size),
        "run/flops_per_example": trained.flops_per_example,
        "run/mfu_of_measured_ceiling": trained.mfu,
        "run/ceiling_flops": trained.ceiling.measured,
        "run/effective_share": trained.stages.effective_share,
        "run/skipped_steps": float(fit.skipped),
        "run/quarantined_rows": float(trained.quarantine.rows),
        **{f"run/seconds/{stage}": seconds for stage, seconds in trained.stages.seconds.items()},
    }


def _publish(
    root: Path, asked: Asked, config: RunConfig, trained: Trained, replay: Replay, processes: Processes
) -> Path:
    rows = ReplayRows(replay, config.train_from_ms, config.train_to_ms, requests=config.requests)
    golden, _ = rows.batch(spread(len(rows), 4))
    measured = figures(trained, processes.world_size)
    folder = publish_foundation(
        root,
        Version(asked.name, asked.version, time.time_ns() // 1_000_000),
        trained.teacher,
        replay.spec,
        golden,
        watermark_ms=trained.watermark_ms,
        metrics=measured,
    )
    for name, value in measured.items():
        log.info("%s = %.6g", name, value)
    log.info("published %s", folder)
    return folder


class _Reporter:
    """Says how far a run is: a log line now and then, gauges always."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -np.inf
        self._gauges = {
            name: Gauge(f"gem_trainer_{name}", f"{name} of the run", registry=registry)
            for name in ("step", "num_steps", "loss", "rows_per_second", "mfu", "eta_seconds", "skipped")
        }

    def __call__(self, progress: Progress) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(progress, name))
        if self._clock() - self._last < _SECONDS_BETWEEN_LINES and progress.step < progress.num_steps:
            return
        self._last = self._clock()
        log.info(
            "step %d/%d loss %.4f, %.0f rows/s, MFU %.1f%%, %.0f s left", progress.step, progress.num_steps,
            progress.loss, progress.rows_per_second, 100 * progress.mfu, progress.eta_seconds,
        )  # fmt: skip


def _silent(progress: Progress) -> None:
    """Other processes than the first say nothing."""
