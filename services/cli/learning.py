"""What the commands of gemctl do that train, annotate and measure models.

Knows the order of calls. Does not know options or terminals. Torch is imported once what was asked for can be done.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from feature_store.errors import FailedPrecondition, InvalidInput, NotFound
from services.cli.console import Console, table
from services.cli.home import Home
from services.cli.period import Period

if TYPE_CHECKING:
    from feature_store.batch import FeatureBatch
    from feature_store.replay import Replay
    from model.vertical.config import VerticalConfig

FOUNDATION = "foundation"
"""Name of the foundation model."""
STORE_SECONDS = 30.0
"""Seconds that a write to the online store may wait for another."""
_ALL = Period()


def train_foundation(console: Console, home: Home, *, preset: str, period: Period, epochs: int) -> None:
    """A foundation model, published as the current one."""
    home.spec()  # a home without one is refused before torch is imported
    from model.training.fitting import FitConfig, Progress
    from model.training.published import Version, publish_foundation
    from model.training.trainer import RunConfig, train

    replay, (first, end) = counted_replay(console, home, period)
    run = RunConfig(preset=preset, train_from_ms=first, train_to_ms=end, fit=FitConfig(epochs=epochs))
    golden = _golden(replay, first, end)
    with console.progress("foundation model") as advance:

        def on_progress(progress: Progress) -> None:
            advance(progress.step, progress.num_steps)

        trained = train(run, replay, on_progress=on_progress)
    figures = {"flops_per_example": trained.flops_per_example, "mfu": trained.mfu, "loss": trained.log.losses[-1]}
    folder = publish_foundation(
        home.models_root, Version(FOUNDATION, _stamp(), now_ms()), trained.teacher, replay.spec, golden,
        watermark_ms=trained.watermark_ms, metrics=figures,
    )  # fmt: skip
    result = {"folder": str(folder), "watermark_ms": trained.watermark_ms, "steps": len(trained.log.losses), **figures}
    console.result(result, table("foundation model", ["what", "value"], list(result.items())))


def train_vertical(
    console: Console, home: Home, *, surface: str, arm_name: str, period: Period, epochs: int
) -> None:
    """One surface's model, published as its current one."""
    model = _arm(home, arm_name, surface)
    from model.training.fitting import FitConfig
    from model.training.published import Version, publish_vertical
    from model.training.vertical import VerticalRun
    from model.training.vertical import train_vertical as train

    replay, (first, end) = counted_replay(console, home, period)
    spaces = (b"", b"")
    if model.kd:
        spaces, first = _with_teacher(replay, home, first, pairs=model.solaris)
    golden = _golden(replay, first, end, surface)
    run = VerticalRun(model=model, train_from_ms=first, train_to_ms=end, fit=FitConfig(epochs=epochs))
    with console.progress(f"{surface} {arm_name}") as advance:
        trained = train(run, replay, on_progress=lambda progress: advance(progress.step, progress.num_steps))
    name = f"{surface}-{arm_name.lower()}"
    folder = publish_vertical(
        home.models_root, Version(name, _stamp(), now_ms()), trained.tower, replay.spec, golden,
        watermark_ms=trained.watermark_ms, metrics={}, loopfm_space_id=spaces[0], solaris_space_id=spaces[1],
    )  # fmt: skip
    result = {"folder": str(folder), "steps": len(trained.log.losses), "loss": trained.log.losses[-1]}
    console.result(result, table(name, ["what", "value"], list(result.items())))


def _arm(home: Home, name: str, surface: str) -> VerticalConfig:
    """The configuration of an arm on a surface of the home; a name that is not known is refused before torch is imported."""
    from model.vertical.presets import arm

    try:
        found = arm(name, surface)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    home.spec().surface_index(surface)
    return found


def _with_teacher(replay: Replay, home: Home, first: int, *, pairs: bool) -> tuple[tuple[bytes, bytes], int]:
    """Lets rows carry what the current foundation model says of them; returns its spaces and where that begins."""
    from feature_store.transfer import Annotations
    from model.training.published import load_foundation

    manifest = load_foundation(home.model(FOUNDATION), replay.spec).manifest
    known = replay.tables.exists("annotations")
    annotations = Annotations(replay.tables, replay.impressions, space_id=manifest.loopfm_space_id) if known else None
    if annotations is None or not len(annotations.row):
        raise FailedPrecondition(
            f"no impression is annotated by {manifest.name}/{manifest.version}; run `gemctl annotate` before training this arm"
        )
    replay.with_annotations(annotations)
    first = max(first, int(replay.impressions.event_ms[annotations.row].min()))
    if pairs:
        from services.solaris.replay import replayed_pairs

        replay.with_pairs(replayed_pairs(replay, manifest.solaris_space_id, from_ms=first))
    return (manifest.loopfm_space_id, manifest.solaris_space_id), first


def _golden(replay: Replay, first: int, end: int, surface: str | None = None) -> FeatureBatch:
    """Some rows that are published with a model, with what it says of them.

    Raises:
        NotFound: there is none to train on.
    """
    import numpy as np

    from model.training.rows import ReplayRows

    rows = ReplayRows(replay, first, end, surface=surface)
    if not len(rows):
        raise NotFound(f"no request of {surface or 'any surface'} lies from {first} to {end}; give another --since or --until")
    return rows.batch(np.arange(min(8, len(rows))))[0]


def annotate(console: Console, home: Home, *, period: Period) -> None:
    """Soft labels, memories and pair embeddings of one snapshot."""
    home.spec()
    home.model(FOUNDATION)
    from prometheus_client import CollectorRegistry

    from feature_store.online import open_store
    from model.training.published import load_foundation
    from services.loopfm.memory import MemoryWriter
    from services.loopfm.metrics import LoopFmMetrics
    from services.loopfm.records import Pinned
    from services.loopfm.writer import Annotator

    replay, (_, last) = counted_replay(console, home)
    loaded = load_foundation(home.model(FOUNDATION), replay.spec)
    begin, end = period.bounds(loaded.manifest.train_watermark_ms + 1, last)
    pinned = Pinned.of(loaded)
    with open_store(home.store_url, timeout_seconds=STORE_SECONDS) as store:
        memory = MemoryWriter(
            store, space_id=pinned.space_id, num_objectives=len(replay.spec.objectives),
            num_bytes=loaded.teacher.config.compressor.dim // 2,
        )  # fmt: skip
        annotator = Annotator(replay, pinned, LoopFmMetrics(CollectorRegistry()), memory=memory, at_once=os.cpu_count() or 1)
        with console.progress("annotate") as advance:
            done = annotator.annotate(begin, end, on_progress=advance)
    console.result(done._asdict(), table("annotated", ["what", "count"], list(done._asdict().items())))


def evaluate_model(console: Console, home: Home, *, model: str, period: Period) -> None:
    """NE, AUC, GAUC and calibration of a published model."""
    home.spec()
    folder = home.model(model)
    from feature_store.transfer import Annotations
    from model.training.artefact import read_manifest, resolve
    from model.training.evaluate import evaluate, predict
    from model.training.published import load_foundation, load_vertical, score_of
    from model.training.rows import ReplayRows
    from services.demo.summary import numbers

    replay, (_, last) = counted_replay(console, home)
    manifest = read_manifest(resolve(folder))
    if manifest.loopfm_space_id and manifest.surface:
        replay.with_annotations(Annotations(replay.tables, replay.impressions, space_id=manifest.loopfm_space_id))
    begin, end = period.bounds(manifest.train_watermark_ms + 1, last)
    rows = ReplayRows(replay, begin, end, surface=manifest.surface or None)
    if not len(rows):
        raise NotFound(f"no request from {begin} on; give --since, or import later events")
    if manifest.surface and manifest.solaris_space_id:
        from services.solaris.replay import replayed_pairs

        replay.with_pairs(replayed_pairs(replay, manifest.solaris_space_id, from_ms=begin))
    vertical = bool(manifest.surface)
    score = score_of(load_vertical(folder, replay.spec).tower) if vertical else load_foundation(folder, replay.spec).teacher.score
    with console.progress("score") as advance:
        found = evaluate(predict(score, rows), replay.spec.surfaces, replay.spec.objectives)
        advance(1, 1)
    shown = {key: numbers(value) for key, value in found.items() if value.rows}
    result: dict[str, dict[str, Any]] = {}
    for (surface, objective), figures in shown.items():
        result.setdefault(surface, {})[objective] = figures | _undefined(found[surface, objective])
    columns = ["ne", "auc", "gauc", "calibration", "rows"]
    lines = [[f"{s} · {o}", *(figures[c] for c in columns)] for (s, o), figures in shown.items()]
    console.result({"model": model, "evaluation": result}, table(model, ["surface · objective", *columns], lines))


def _undefined(measured: Any) -> dict[str, dict[str, str]]:
    """Why metrics of a slice are null, by name."""
    from model.training.metrics import Undefined

    values = {"ne": measured.ne, "auc": measured.auc, "gauc": measured.gauc.value, "calibration": measured.calibration}
    reasons = {name: str(value) for name, value in values.items() if isinstance(value, Undefined)}
    return {"undefined": reasons} if reasons else {}


def counted_replay(console: Console, home: Home, period: Period = _ALL) -> tuple[Replay, tuple[int, int]]:
    """The home's log with the counters of every request, and the bounds of a period of it."""
    from feature_store.replay import Replay

    replay = Replay(home.spec(), home.tables())
    at = replay.impressions.event_ms
    if not len(at):
        raise NotFound(f"{home.tables_root} holds no impression; import some first")
    bounds = period.bounds(int(at.min()), int(at.max()) + 1)
    with console.progress("counters of every request") as advance:
        replay.count("request", advance)
    return replay, bounds


def now_ms() -> int:
    """Milliseconds since the epoch, by the wall clock."""
    return time.time_ns() // 1_000_000


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())
