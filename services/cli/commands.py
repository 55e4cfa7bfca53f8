"""What the commands of gemctl do, composed of what the rooms and services offer.

Knows the order of calls. Does not know options or terminals. Heavy rooms are imported by the command that needs them, so
that `gemctl --help` answers at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_store.errors import FailedPrecondition, InvalidInput, NotFound, NotReady
from services.cli.console import Console, table
from services.cli.home import DATASETS, Home
from services.cli.period import Period

if TYPE_CHECKING:
    from feature_store.replay import Replay

_FOUNDATION = "foundation"
_STORE_SECONDS = 30.0
_ALL = Period()


def demo(console: Console, home: Home, *, size: str, data: Path | None) -> None:
    """The whole loop."""
    from services.demo.config import SIZES

    if size not in SIZES:
        raise InvalidInput(f"size {size!r} is not known; use one of {sorted(SIZES)}")
    from services.demo.loop import run_demo

    report = run_demo(SIZES[size], home, console, data=data)
    console.result(report, *_summary(report))
    console.say(f"report: {home.root / 'report.html'} and report.json")


def world(console: Console, home: Home, *, users: int, ads: int, days: int, seed: int) -> None:
    """A generated log."""
    from feature_store.world import WorldConfig, generate

    config = WorldConfig(users=users, ads=ads, days=days, seed=seed)
    _must_be_empty(home)
    home.adopt(DATASETS / "world.yaml")
    with console.progress("world") as advance:
        counts = generate(config, home.tables(), advance)
    console.result({"rows": counts, "seed": seed}, table("rows", ["table", "rows"], list(counts.items())))


def import_(console: Console, home: Home, *, source: Path, spec: Path | None, max_reject_share: float) -> None:
    """An own log."""
    from feature_store.importing.kuairand import import_kuairand, is_kuairand
    from feature_store.importing.mapped import import_mapped

    if not source.is_dir():
        raise NotFound(f"{source} is not a folder; give the folder that holds the files")
    kuairand = spec is None and is_kuairand(source)
    if spec is None and not kuairand:
        raise InvalidInput(f"{source} does not hold KuaiRand's files; give --spec to say what it holds")
    _must_be_empty(home)
    home.adopt(spec or DATASETS / "kuairand.yaml")
    run = import_kuairand if kuairand else import_mapped
    with console.progress("import") as advance:
        report = run(source, home.tables(), home.spec(), max_reject_share=max_reject_share, progress=advance)
    rows = [[name, count, ""] for name, count in report.rows.items()]
    rows += [["rejects", count, reason] for reason, count in report.rejects.most_common()]
    console.result(report.as_dict(), table("import", ["table", "rows", "reason"], rows))


def train_foundation(console: Console, home: Home, *, preset: str, period: Period, epochs: int) -> None:
    """A foundation model, published as the current one."""
    home.spec()  # a home without one is refused before torch is imported
    import numpy as np

    from model.training.fitting import FitConfig, Progress
    from model.training.published import Version, publish_foundation
    from model.training.rows import ReplayRows
    from model.training.trainer import RunConfig, train

    replay, (first, end) = _replay(console, home, period)
    run = RunConfig(preset=preset, train_from_ms=first, train_to_ms=end, fit=FitConfig(epochs=epochs))

    with console.progress("foundation model") as advance:

        def on_progress(progress: Progress) -> None:
            advance(progress.step, progress.num_steps)

        trained = train(run, replay, on_progress=on_progress)
    rows = ReplayRows(replay, first, end)
    golden, _ = rows.batch(np.arange(min(8, len(rows))))
    figures = {"flops_per_example": trained.flops_per_example, "mfu": trained.mfu, "loss": trained.log.losses[-1]}
    folder = publish_foundation(
        home.models_root, Version(_FOUNDATION, _stamp(), _now_ms()), trained.teacher, replay.spec, golden,
        watermark_ms=trained.watermark_ms, metrics=figures,
    )  # fmt: skip
    result = {"folder": str(folder), "watermark_ms": trained.watermark_ms, "steps": len(trained.log.losses), **figures}
    console.result(result, table("foundation model", ["what", "value"], list(result.items())))


def train_vertical(
    console: Console, home: Home, *, surface: str, arm_name: str, period: Period, epochs: int
) -> None:
    """One surface's model, published as its current one."""
    from model.vertical.presets import arm

    try:
        model = arm(arm_name, surface)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    home.spec().surface_index(surface)
    import numpy as np

    from feature_store.transfer import Annotations
    from model.training.fitting import FitConfig
    from model.training.published import Version, load_foundation, publish_vertical
    from model.training.rows import ReplayRows
    from model.training.vertical import VerticalRun
    from model.training.vertical import train_vertical as train

    replay, (first, end) = _replay(console, home, period)
    spaces = (b"", b"")
    if model.kd:
        manifest = load_foundation(_model(home, _FOUNDATION), replay.spec).manifest
        if not replay.tables.exists("annotations"):
            raise FailedPrecondition("no impression is annotated; run `gemctl annotate` before training this arm")
        spaces = (manifest.loopfm_space_id, manifest.solaris_space_id)
        annotations = Annotations(replay.tables, replay.impressions, space_id=spaces[0])
        replay.with_annotations(annotations)
        first = max(first, int(replay.impressions.event_ms[annotations.row].min()))
    if model.solaris:
        from services.solaris.replay import replayed_pairs

        replay.with_pairs(replayed_pairs(replay, spaces[1], from_ms=first))
    run = VerticalRun(model=model, train_from_ms=first, train_to_ms=end, fit=FitConfig(epochs=epochs))
    with console.progress(f"{surface} {arm_name}") as advance:
        trained = train(run, replay, on_progress=lambda progress: advance(progress.step, progress.num_steps))
    rows = ReplayRows(replay, first, end, surface=surface)
    golden, _ = rows.batch(np.arange(min(8, len(rows))))
    name = f"{surface}-{arm_name.lower()}"
    folder = publish_vertical(
        home.models_root, Version(name, _stamp(), _now_ms()), trained.tower, replay.spec, golden,
        watermark_ms=trained.watermark_ms, metrics={}, loopfm_space_id=spaces[0], solaris_space_id=spaces[1],
    )  # fmt: skip
    result = {"folder": str(folder), "steps": len(trained.log.losses), "loss": trained.log.losses[-1]}
    console.result(result, table(name, ["what", "value"], list(result.items())))


def annotate(console: Console, home: Home, *, period: Period) -> None:
    """Soft labels, memories and pair embeddings of one snapshot."""
    home.spec()
    _model(home, _FOUNDATION)
    from prometheus_client import CollectorRegistry

    from feature_store.online import open_store
    from model.training.published import load_foundation
    from services.loopfm.memory import MemoryWriter
    from services.loopfm.metrics import LoopFmMetrics
    from services.loopfm.records import Pinned
    from services.loopfm.writer import Annotator

    replay, (_, last) = _replay(console, home)
    loaded = load_foundation(_model(home, _FOUNDATION), replay.spec)
    begin, end = period.bounds(loaded.manifest.train_watermark_ms + 1, last)
    pinned = Pinned.of(loaded)
    with open_store(home.store_url, timeout_seconds=_STORE_SECONDS) as store:
        memory = MemoryWriter(
            store, space_id=pinned.space_id, num_objectives=len(replay.spec.objectives),
            num_bytes=loaded.teacher.config.compressor.dim // 2,
        )  # fmt: skip
        annotator = Annotator(replay, pinned, LoopFmMetrics(CollectorRegistry()), memory=memory)
        with console.progress("annotate") as advance:
            done = annotator.annotate(begin, end, on_progress=advance)
    console.result(done._asdict(), table("annotated", ["what", "count"], list(done._asdict().items())))


def evaluate_model(console: Console, home: Home, *, model: str, period: Period) -> None:
    """NE, AUC, GAUC and calibration of a published model."""
    home.spec()
    folder = _model(home, model)
    from feature_store.transfer import Annotations
    from model.training.artefact import read_manifest, resolve
    from model.training.evaluate import evaluate, predict
    from model.training.published import load_foundation, load_vertical, score_of
    from model.training.rows import ReplayRows
    from services.demo.summary import numbers

    replay, (_, last) = _replay(console, home)
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


def up(console: Console, home: Home, *, base_port: int) -> None:
    """The six services in the foreground."""
    from feature_store.online import open_store
    from services.cli.processes import Ports, platform
    from services.cli.routes import published_verticals, write_routes
    from services.sequence.materialize import materialize

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    ports = Ports(base=base_port)
    replay, (_, last) = _replay(console, home)
    verticals = published_verticals(home, replay.spec)
    if not home.routes_path.exists():
        write_routes(home, replay.spec, verticals)
    with open_store(home.store_url, timeout_seconds=_STORE_SECONDS) as store, console.progress("online rows") as advance:
        materialize(replay, store, until_ms=last, progress=advance)
    models = [f"{name}={folder}" for name, folder in verticals.items()]
    with platform(home, ports, models, foundation=_model(home, _FOUNDATION)) as running:
        console.say(f"router at {ports.router}; try: gemctl rank --surface {replay.spec.surfaces[0]} --user 1 --ads 1,2,3")
        console.say("Ctrl-C stops everything")
        try:
            running.watch()
        finally:
            console.say("stopping …")


def _stop(*_: object) -> None:
    """A supervisor's SIGTERM ends a platform as it should: with 0."""
    raise SystemExit(0)


def rank(console: Console, *, surface: str, user: str, ads: str, at: str | None, router: str) -> None:
    """One request."""
    import grpc
    from gem.router.v1 import router_service_pb2 as messages
    from gem.router.v1 import router_service_pb2_grpc

    from feature_store.splits import instant
    from services.runtime.client import call

    candidates = [messages.Candidate(ad_id=ad.strip(), bid=1.0) for ad in ads.split(",") if ad.strip()]
    if not candidates:
        raise InvalidInput(f"--ads {ads!r} names no ad; write ids separated by commas, such as 1,2,3")
    request = messages.RankRequest(
        surface=surface, user_id=user, candidates=candidates, request_ms=instant(at) if at else _now_ms()
    )
    with grpc.insecure_channel(router) as channel:
        try:
            answer = call(router_service_pb2_grpc.RankingServiceStub(channel).Rank, request, timeout=5.0)
        except NotReady as error:
            raise NotReady(f"no router answers at {router} ({error}); run `gemctl up`, or give its --router") from error
    from services.demo.serving import LEVELS

    ranked = [
        {"ad": ad.ad_id, "value": ad.value, "level": LEVELS.get(ad.level, "default"), **dict(ad.probabilities)}
        for ad in answer.ads
    ]
    degraded = [messages.DegradedInput.Name(each) for each in answer.degraded]
    result = {
        "ads": ranked, "arm": answer.arm, "model": answer.model_version, "degraded": degraded, "trace": answer.trace_id,
        "request_id": answer.request_id,
    }  # fmt: skip
    columns = list(ranked[0]) if ranked else ["ad"]
    title = f"{surface} · arm {answer.arm} · {answer.model_version} · trace {answer.trace_id}"
    console.result(result, table(title, columns, [[row[c] for c in columns] for row in ranked]))
    if degraded:
        console.say(f"degraded: {', '.join(degraded)}")


def trace(console: Console, home: Home, trace_id: str) -> None:
    """A waterfall."""
    from services.cli.traces import draw, find_trace, waterfall

    rows = waterfall(find_trace(home.trace_path, trace_id))
    spans = [
        {"service": r.span.service, "name": r.span.name, "depth": r.depth, "offset_ms": r.offset_ms,
         "duration_ms": r.span.milliseconds, "attributes": r.span.attributes}
        for r in rows
    ]  # fmt: skip
    console.result({"trace_id": rows[0].span.trace_id, "spans": spans})
    if not console.as_json:
        click_echo("\n".join(draw(rows)))


def solaris_status(console: Console, home: Home) -> None:
    """How far pair embeddings reach."""
    foundation = _model(home, _FOUNDATION)
    from feature_store.online import open_store
    from feature_store.streams import open_stream
    from model.training.artefact import read_manifest, resolve
    from services.solaris.status import read_status

    space = read_manifest(resolve(foundation)).solaris_space_id
    with open_store(home.store_url) as store, open_stream(home.store_url, "speculation") as stream:
        status = read_status(store, stream, space_id=space)
    values: Mapping[str, Any] = asdict(status)
    console.result(dict(values), table("solaris", ["what", "value"], [[k, str(v)] for k, v in values.items()]))


def click_echo(text: str) -> None:
    """Text on stdout."""
    import click

    click.echo(text)


def _model(home: Home, name: str) -> Path:
    folder = home.models_root / name
    if not folder.is_dir():
        known = sorted(path.name for path in home.models_root.glob("*")) if home.models_root.is_dir() else []
        raise NotFound(f"{home.models_root} holds no model {name!r}, only {known}; run `gemctl train` with --home {home.root} first")
    return folder


def _replay(console: Console, home: Home, period: Period = _ALL) -> tuple[Replay, tuple[int, int]]:
    from feature_store.replay import Replay

    replay = Replay(home.spec(), home.tables())
    at = replay.impressions.event_ms
    if not len(at):
        raise NotFound(f"{home.tables_root} holds no impression; import some first")
    bounds = period.bounds(int(at.min()), int(at.max()) + 1)
    with console.progress("counters of every request") as advance:
        replay.count("request", advance)
    return replay, bounds


def _must_be_empty(home: Home) -> None:
    if home.tables().exists("impressions"):
        raise FailedPrecondition(f"{home.tables_root} already holds a log; give another --home, or remove that folder")


def _summary(report: Mapping[str, Any]) -> list[Any]:
    arms = ("FM", "A0", "A1", "A2", "A3")
    rows = []
    for surface, objectives in report["evaluation"].items():
        for objective, by_arm in objectives.items():
            floor = report["bayes"].get(surface, {}).get(objective, {}).get("ne")
            ne = [by_arm.get(arm, {}).get("ne") for arm in arms]
            auc = [by_arm.get(arm, {}).get("auc") for arm in arms]
            share = report["headroom"].get(surface, {}).get(objective, {}).get("A3")
            rows.append([f"{surface} · {objective}", by_arm["FM"]["rows"], *ne, floor, share, *auc])
    head = ["surface · objective", "rows", *(f"NE {a}" for a in arms), "Bayes", "A3 headroom", *(f"AUC {a}" for a in arms)]
    made = [table("Quality on the last day (lower NE is better)", head, rows)]
    if report["top_slot_value"]:
        made.append(table("True expected value of the top slot", ["arm", "value"], list(report["top_slot_value"].items())))
    made.append(table("Coverage by level", ["level", "share"], list(report["coverage"].items())))
    hops = [[hop, v["p50"], v["p99"], v["calls"]] for hop, v in report["latency_ms"].items()]
    made.append(table("Latency, ms", ["hop", "p50", "p99", "calls"], hops))
    cost = [*((f"seconds · {s}", v) for s, v in report["stage_seconds"].items()),
            ("FLOPs an example (forward)", report["flops_per_example"]), ("MFU", report["mfu"])]  # fmt: skip
    made.append(table("Cost", ["what", "value"], cost))
    return made


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())
