"""The whole loop on one machine: data, foundation model, annotation, vertical models, services, traffic, report.

Knows the order of stages and what each leaves in the home folder. Does not know how any of them works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from feature_store.errors import InvalidInput
from feature_store.importing.kuairand import import_kuairand, is_kuairand
from feature_store.importing.mapped import import_mapped
from feature_store.online import OnlineStore, open_store
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.world import generate
from model.solaris.pair import pair_space_id
from model.vertical.config import VerticalConfig
from services.cli.console import Console
from services.cli.home import DATASETS, Home
from services.cli.processes import Ports, free_base_port, platform
from services.cli.routes import write_routes
from services.cli.traces import read_spans
from services.demo import summary
from services.demo.config import Days, DemoConfig, days_of
from services.demo.learning import Learned, learn_foundation, learn_verticals
from services.demo.page import render
from services.demo.serving import Served, replay_day
from services.runtime import telemetry
from services.runtime.telemetry import TelemetrySettings
from services.sequence.materialize import materialize
from services.solaris.lifetimes import Lifetimes
from services.solaris.replay import PairReplay

_STORE_SECONDS = 30.0


def run_demo(config: DemoConfig, home: Home, console: Console, *, data: Path | None = None) -> dict[str, Any]:
    """Runs every stage and writes report.json and report.html; returns the report.

    Raises:
        FailedPrecondition: the home holds a platform that no demo made.
        InvalidInput: `data` is no log that is known, and no spec says what it is.
    """
    stages: dict[str, float] = {}
    with _stage("data", stages):
        replay, rejects = _load(config, home, console, data)
        days = _days(config, replay)
    with open_store(home.store_url, timeout_seconds=_STORE_SECONDS) as store:
        with _stage("counters", stages), console.progress("counters of every request") as advance:
            replay.count("request", advance)
        with _stage("foundation", stages):
            learned = learn_foundation(config, replay, days, home.models_root, store, console)
        with _stage("verticals", stages):
            learn_verticals(config, replay, days, home.models_root, learned, console)
        with _stage("materialize", stages):
            _materialize(config, replay, days, learned, store, console)
    write_routes(home, replay.spec, learned.verticals)
    with _stage("serve", stages):
        served = _serve(config, home, replay, days, learned, console)
    report = _report(replay, days, learned, served, home, stages, rejects)
    (home.root / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    (home.root / "report.html").write_text(render(report))
    return report


def _load(config: DemoConfig, home: Home, console: Console, data: Path | None) -> tuple[Replay, Mapping[str, int]]:
    kuairand = data is not None and is_kuairand(data)
    chosen = _spec_of(data, kuairand=kuairand)
    load_spec(chosen)  # a demo that cannot begin removes nothing
    home.start_over()
    home.adopt(chosen)
    spec, tables = home.spec(), home.tables()
    rejects: Mapping[str, int] = {}
    with console.progress("import" if data else "world") as advance:
        if data is None:
            generate(config.world, tables, advance)
        elif kuairand:
            rejects = import_kuairand(data, tables, spec, progress=advance).rejects
        else:
            rejects = import_mapped(data, tables, spec, progress=advance).rejects
    return Replay(spec, tables), dict(rejects)


def _spec_of(data: Path | None, *, kuairand: bool) -> Path:
    if data is None or kuairand:
        return DATASETS / ("kuairand.yaml" if kuairand else "world.yaml")
    own = data / "spec.yaml"
    if not own.exists():
        raise InvalidInput(
            f"{data} holds neither KuaiRand's files nor a spec.yaml; put a spec.yaml there that says what its files hold"
        )
    return own


def _materialize(
    config: DemoConfig, replay: Replay, days: Days, learned: Learned, store: OnlineStore, console: Console
) -> None:
    """Puts what was known when the last day began into the online store; memories are there since they were written."""
    with console.progress("online rows") as advance:
        materialize(replay, store, until_ms=days.test_ms, progress=advance)
    with console.progress("online pair embeddings") as advance:
        lifetimes = Lifetimes().stretched(config.lifetime_factor)
        log = replay.tables.read("pairs")
        pairs = PairReplay(log, space_id=pair_space_id(learned.space_id), dim=VerticalConfig().solaris_dim, lifetimes=lifetimes)
        pairs.materialize(store, until_ms=days.test_ms, progress=advance)


def _days(config: DemoConfig, replay: Replay) -> Days:
    at = replay.impressions.event_ms
    return days_of(config, int(at.min()), int(at.max()) + 1)


def _serve(
    config: DemoConfig, home: Home, replay: Replay, days: Days, learned: Learned, console: Console
) -> Served:
    ports = Ports(base=free_base_port())
    models = [f"{name}={folder}" for name, folder in learned.verticals.items()]
    running = platform(
        home, ports, models, foundation=learned.foundation, clock="request", lifetime_factor=config.lifetime_factor
    )
    console.say("starting six services …")
    client = TelemetrySettings(service_name="client", trace_file=home.trace_path / "client.jsonl")
    provider = telemetry.build_provider(client, CollectorRegistry())
    try:
        with running:
            return replay_day(
                replay, days, ports, home.store_url,
                requests=config.requests, tracer=provider.get_tracer("gem.demo"), console=console,
            )  # fmt: skip
    finally:
        provider.shutdown()


def _report(
    replay: Replay,
    days: Days,
    learned: Learned,
    served: Served,
    home: Home,
    stages: Mapping[str, float],
    rejects: Mapping[str, int],
) -> dict[str, Any]:
    evaluation = summary.quality(learned)
    floor = summary.bayes(replay, days, learned.evaluations["FM"])
    spans = list(read_spans(home.trace_path))
    wanted = served.trace_ids[-1] if served.trace_ids else ""
    return {
        "dataset": replay.spec.message.name,
        "note": _note(replay, floor),
        "evaluation": evaluation,
        "bayes": floor,
        "headroom": summary.headroom(evaluation, floor),
        "against_control": summary.against_control(replay, learned),
        "top_slot_value": summary.top_slot(replay, days, learned),
        "coverage": served.coverage(),
        "coverage_over_time": served.coverage_over_time(),
        "latency_ms": summary.latency(spans, served),
        "served": {
            "requests": served.requests,
            "candidates": served.candidates,
            "degraded": dict(served.degraded),
            "errors": dict(served.errors),
            "arms": dict(served.arms),
        },
        "annotated": learned.annotated,
        "drift": learned.drift,
        "flops_per_example": learned.flops_per_example,
        "mfu": learned.mfu,
        "losses": learned.losses[:: max(1, len(learned.losses) // 200)],
        "rejects": dict(rejects),
        "stage_seconds": dict(stages),
        "trace": summary.one_trace([span for span in spans if span.trace_id == wanted]),
    }


def _note(replay: Replay, floor: Mapping[str, Any]) -> str:
    rows = f"{len(replay.impressions):,} impressions"
    if floor:
        return f"A generated world of {rows}; its functional form is ours, so confirm what it shows on real logs."
    return f"A real log of {rows}; requests are its sessions, candidates what was shown in them."


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = round(time.monotonic() - start, 2)
