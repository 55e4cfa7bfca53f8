"""What the commands of gemctl do, composed of what the rooms and services offer.

Knows the order of calls. Does not know options or terminals. Heavy rooms are imported by the command that needs them, so
that `gemctl --help` answers at once.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from feature_store.errors import FailedPrecondition, InvalidInput, NotFound, NotReady
from services.cli.console import Console, table
from services.cli.home import DATASETS, Home
from services.cli.learning import FOUNDATION, STORE_SECONDS, counted_replay, now_ms


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
    from feature_store.importing.trivago import import_trivago, is_trivago

    if not source.is_dir():
        raise NotFound(f"{source} is not a folder; give the folder that holds the files")
    known = {"kuairand": (is_kuairand, import_kuairand), "trivago": (is_trivago, import_trivago)}
    found = next((name for name, (holds, _) in known.items() if holds(source)), None) if spec is None else None
    if spec is None and found is None:
        raise InvalidInput(f"{source} does not hold KuaiRand's or trivago's files; give --spec to say what it holds")
    _must_be_empty(home)
    home.adopt(spec or DATASETS / f"{found}.yaml")
    run = known[found][1] if found else import_mapped
    with console.progress("import") as advance:
        report = run(source, home.tables(), home.spec(), max_reject_share=max_reject_share, progress=advance)
    rows = [[name, count, ""] for name, count in report.rows.items()]
    rows += [["rejects", count, reason] for reason, count in report.rejects.most_common()]
    console.result(report.as_dict(), table("import", ["table", "rows", "reason"], rows))


def up(console: Console, home: Home, *, base_port: int) -> None:
    """The six services in the foreground."""
    from feature_store.online import open_store
    from services.cli.processes import Ports, platform
    from services.cli.routes import published_verticals, write_routes
    from services.sequence.materialize import materialize

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    ports = Ports(base=base_port)
    replay, (_, last) = counted_replay(console, home)
    verticals = published_verticals(home, replay.spec)
    if not home.routes_path.exists():
        write_routes(home, replay.spec, verticals)
    with open_store(home.store_url, timeout_seconds=STORE_SECONDS) as store, console.progress("online rows") as advance:
        materialize(replay, store, until_ms=last, progress=advance)
    models = [f"{name}={folder}" for name, folder in verticals.items()]
    with platform(home, ports, models, foundation=home.model(FOUNDATION)) as running:
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
        surface=surface, user_id=user, candidates=candidates, request_ms=instant(at) if at else now_ms()
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
    foundation = home.model(FOUNDATION)
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


def _must_be_empty(home: Home) -> None:
    if home.tables().exists("impressions"):
        raise FailedPrecondition(f"{home.tables_root} already holds a log; give another --home, or remove that folder")


def _summary(report: Mapping[str, Any]) -> list[Any]:
    from services.demo.page import interval

    arms = ["FM", "A0", "A1", "A2", "A3"]
    rows: list[list[Any]] = []
    for surface, objectives in report["evaluation"].items():
        for objective, by_arm in objectives.items():
            floor = report["bayes"].get(surface, {}).get(objective, {}).get("ne")
            ne = [by_arm.get(arm, {}).get("ne") for arm in arms]
            auc = [by_arm.get(arm, {}).get("auc") for arm in arms]
            share = report["headroom"].get(surface, {}).get(objective, {}).get("A3")
            rows.append([f"{surface} · {objective}", by_arm["FM"]["rows"], *ne, floor, share, *auc])
    head = ["surface · objective", "rows", *(f"NE {a}" for a in arms), "Bayes", "A3 headroom", *(f"AUC {a}" for a in arms)]
    made = [table("Quality on the last day (lower NE is better)", head, rows)]
    if report["against_control"]:
        compared = [arm for arm in arms if any(arm in by_arm for by_arm in report["against_control"].values())]
        against = [
            [objective, *(interval(by_arm.get(arm, {})) for arm in compared)]
            for objective, by_arm in report["against_control"].items()
        ]
        made.append(table("NE minus A0's on the same rows (95 % over users)", ["objective", *compared], against))
    if report["top_slot_value"]:
        made.append(table("True expected value of the top slot", ["arm", "value"], list(report["top_slot_value"].items())))
    made.append(table("Coverage by level", ["level", "share"], list(report["coverage"].items())))
    hops = [[hop, v["p50"], v["p99"], v["calls"]] for hop, v in report["latency_ms"].items()]
    made.append(table("Latency, ms", ["hop", "p50", "p99", "calls"], hops))
    cost = [*((f"seconds · {s}", v) for s, v in report["stage_seconds"].items()),
            ("FLOPs an example (forward)", report["flops_per_example"]), ("MFU", report["mfu"])]  # fmt: skip
    made.append(table("Cost", ["what", "value"], cost))
    return made
