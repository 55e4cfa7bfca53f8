"""Measures Rank and GetUserState over real processes: latency by candidates and by hop, and whose CPU it takes.

    python -m benchmarks.serving --json OUT

On SQLite and on Redis, alternately, each round from the same rows. Open loop: requests are sent at their own times whether
or not earlier ones have been answered, and latency counts from the time a request was due, so that a slow answer cannot
hide the wait of those behind it. Models are real and small, trained on a generated world unless a demo's home is given.
Knows a home folder, calls and spans. Does not know how services answer.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from gem.router.v1 import router_service_pb2 as messages
from gem.router.v1 import router_service_pb2_grpc
from gem.sequence.v1.sequence_service_pb2 import GetUserStateRequest
from gem.sequence.v1.sequence_service_pb2_grpc import SequenceServiceStub
from rich.console import Console

from benchmarks.measure import finish, parser
from benchmarks.stores import STORES, available, small_home
from feature_store.replay import Replay
from services.cli.console import table
from services.cli.home import Home
from services.cli.processes import Platform, Ports, free_base_port, platform
from services.cli.routes import published_verticals, write_routes
from services.cli.traces import Span, read_spans

SIZES = (1, 200, 1000)
ARM = "a3"
"""The arm that reads everything."""
RANK, STATE = "Rank", "GetUserState"
HOPS = ("router", "sequence", "solaris", "vertical")
_CALLS = {
    ("sequence", "/gem.sequence.v1.SequenceService/GetUserState"): "sequence",
    ("solaris", "/gem.solaris.v1.SolarisService/ReadPairs"): "solaris",
    ("vertical", "/inference.GRPCInferenceService/ModelInfer"): "vertical",
    ("router", "/gem.router.v1.RankingService/Rank"): "whole",
    ("router", "router.read"): "read",
    ("router", "router.score"): "score",
}
_SECONDS, _WARM = 10.0, 5


@dataclass(slots=True)
class Cell:
    """One call at one size on one store, over all rounds."""

    store: str
    call: str
    candidates: int
    p50s: list[float] = field(default_factory=list)
    """Of each round, ms."""
    taken: list[float] = field(default_factory=list)
    errors: int = 0
    trace_ids: list[str] = field(default_factory=list)
    cpu_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Process → CPU milliseconds."""
    hops: dict[str, float] = field(default_factory=dict)
    """Hop → median ms of its own span; the router's without what it waits for."""

    def plain(self) -> dict[str, Any]:
        """For the JSON file."""
        calls, total = max(1, len(self.taken)), sum(self.cpu_ms.values()) or 1.0
        return {
            "store": self.store,
            "call": self.call,
            "candidates": self.candidates,
            "sent": len(self.taken) + self.errors,
            "errors": self.errors,
            "p50": self._percentile(50),
            "p99": self._percentile(99),
            "p50_low": min(self.p50s, default=None),
            "p50_high": max(self.p50s, default=None),
            "hop_p50": self.hops,
            "cpu_ms_per_call": {name: spent / calls for name, spent in self.cpu_ms.items()},
            "cpu_share": {name: spent / total for name, spent in self.cpu_ms.items()},
        }

    def _percentile(self, share: float) -> float | None:
        return float(np.percentile(self.taken, share)) if self.taken else None


def main() -> None:
    """Makes a home if none is given, measures, and prints the tables."""
    options = _options()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        home = Home(options.home) if options.home else small_home(folder / "home")
        replay = Replay(home.spec(), home.tables())
        cells = {
            (store, call, size): Cell(store, call, size) for call in (STATE, RANK) for store in available() for size in SIZES
        }
        for _ in range(options.rounds):
            for store in available():
                with _started(home, replay, store, folder) as (running, ports):
                    _round([cell for cell in cells.values() if cell.store == store], running, ports, replay, options)
        _add_hops(list(cells.values()), read_spans(folder / "traces"))
    _report([cell.plain() for cell in cells.values()], options)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--home", type=Path, help="folder of a finished demo, which is only read; else a small one is made")
    made.add_argument("--surface", default="feed", help="surface that is asked for")
    made.add_argument("--qps", type=float, default=4.0, help="requests a second")
    made.add_argument("--seconds", type=float, default=15.0, help="length of each measurement")
    made.add_argument("--rounds", type=int, default=3, help="times that each store is measured")
    made.add_argument("--seed", type=int, default=0, help="of users and candidates")
    options = made.parse_args()
    if options.quick:
        options.seconds, options.rounds = 3.0, 1
    return options


@contextmanager
def _started(home: Home, replay: Replay, store: str, folder: Path) -> Iterator[tuple[Platform, Ports]]:
    """The services over a home's models and a copy of its rows; what they write stays out of the home."""
    own, ports = Home(folder / "run"), Ports(base=free_base_port())
    shutil.rmtree(own.root, ignore_errors=True)
    own.adopt(home.spec_path)
    every = published_verticals(home, replay.spec)
    verticals = {name: path for name, path in every.items() if name.endswith(f"-{ARM}")}
    write_routes(own, replay.spec, verticals)
    with STORES[store](home, folder) as url:
        models = [f"{name}={path}" for name, path in verticals.items()]
        made = platform(own, ports, models, foundation=home.models_root / "foundation", store_url=url)
        with made as running:
            yield running, ports
    (folder / "traces").mkdir(exist_ok=True)
    for path in own.trace_path.glob("*.jsonl"):
        path.rename(folder / "traces" / f"{time.monotonic_ns()}-{path.name}")


def _round(
    cells: Sequence[Cell], running: Platform, ports: Ports, replay: Replay, options: argparse.Namespace
) -> None:
    with grpc.insecure_channel(ports.router) as router, grpc.insecure_channel(ports.sequence) as sequence:
        rank, state = router_service_pb2_grpc.RankingServiceStub(router), SequenceServiceStub(sequence)
        for cell in cells:
            if cell.call == RANK:
                calls = [_bound(_rank, rank, request, cell) for request in _ranks(replay, cell.candidates, options)]
            else:
                calls = [_bound(_state, state, request, cell) for request in _states(replay, cell.candidates, options)]
            _measure(cell, calls, running, options.qps)


def _bound(call: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: call(*arguments)


def _rank(stub: router_service_pb2_grpc.RankingServiceStub, request: messages.RankRequest, cell: Cell) -> None:
    cell.trace_ids.append(stub.Rank(request, timeout=_SECONDS).trace_id)


def _state(stub: SequenceServiceStub, request: GetUserStateRequest, cell: Cell) -> None:
    stub.GetUserState(request, timeout=_SECONDS)


def _measure(cell: Cell, calls: Sequence[Callable[[], None]], running: Platform, qps: float) -> None:
    """Sends calls at their times; the first few are not counted."""
    counted = len(cell.trace_ids)
    for call in calls[:_WARM]:
        _timed(call, time.perf_counter())
    del cell.trace_ids[counted:]
    before, start = _cpu(running), time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        pending = []
        for index, call in enumerate(calls[_WARM:]):
            due = start + index / qps
            time.sleep(max(0.0, due - time.perf_counter()))
            pending.append(pool.submit(_timed, call, due))
        taken = [each.result() for each in pending]
    for name, spent in _cpu(running).items():
        cell.cpu_ms[name] += 1000 * (spent - before[name])
    good = [ms for ms in taken if ms is not None]
    cell.taken += good
    cell.errors += len(taken) - len(good)
    cell.p50s += [float(np.median(good))] if good else []


def _timed(call: Callable[[], None], due: float) -> float | None:
    """Milliseconds from when the call was due; None if it failed."""
    try:
        call()
    except grpc.RpcError:
        return None
    return (time.perf_counter() - due) * 1000


def _ranks(replay: Replay, size: int, options: argparse.Namespace) -> list[messages.RankRequest]:
    at = int(replay.impressions.event_ms.max()) + 1000
    return [
        messages.RankRequest(
            surface=options.surface, user_id=user, request_ms=at,
            candidates=[messages.Candidate(ad_id=ad, bid=1.0) for ad in ads],
        )
        for user, ads in _drawn(replay, size, options)
    ]  # fmt: skip


def _states(replay: Replay, size: int, options: argparse.Namespace) -> list[GetUserStateRequest]:
    at = int(replay.impressions.event_ms.max()) + 1000
    return [
        GetUserStateRequest(surface=options.surface, user_id=user, as_of_ms=at, ad_ids=ads)
        for user, ads in _drawn(replay, size, options)
    ]


def _drawn(replay: Replay, size: int, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """A user by how often they come, and ads of the catalogue; where it has too few, ads that nobody knows."""
    rng, log, ads = np.random.default_rng([options.seed, size]), replay.impressions, replay.ads.versions.keys
    strangers = int(ads.max()) + 1 + np.arange(max(0, size - len(ads)))
    for _ in range(_WARM + max(1, int(options.seconds * options.qps))):
        drawn = np.append(rng.choice(ads, min(size, len(ads)), replace=False), strangers)
        yield str(log.user_key[rng.integers(len(log))]), [str(ad) for ad in drawn.tolist()]


def _cpu(running: Platform) -> dict[str, float]:
    """CPU seconds of every process so far."""
    spent = {}
    for process in running.processes:
        assert process.running is not None
        times = psutil.Process(process.running.pid).cpu_times()
        spent[process.name] = times.user + times.system
    return spent


def _add_hops(cells: Sequence[Cell], spans: Iterator[Span]) -> None:
    """Median time of each hop, from the spans of the calls' own traces."""
    of = {trace_id: cell for cell in cells for trace_id in cell.trace_ids}
    traces: dict[str, dict[str, float]] = defaultdict(dict)
    for span in spans:
        name = _CALLS.get((span.service, span.name))
        if name and span.trace_id in of:
            traces[span.trace_id][name] = span.milliseconds
    times: dict[int, list[dict[str, float]]] = defaultdict(list)
    for trace_id, steps in traces.items():
        if {"whole", "read", "score"} <= set(steps):
            steps["router"] = steps["whole"] - steps["read"] - steps["score"]
            times[id(of[trace_id])].append(steps)
    for cell in cells:
        own = times[id(cell)]
        cell.hops = {hop: float(np.median([s[hop] for s in own if hop in s])) for hop in HOPS if any(hop in s for s in own)}


def _report(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    columns = ["call, store", "candidates", "p50 ms", "low", "high", "p99 ms", "sent", "errors", *HOPS]
    rows = [
        [f"{c['call']}, {c['store']}", c["candidates"], *map(_short, (c["p50"], c["p50_low"], c["p50_high"], c["p99"])),
         c["sent"], c["errors"], *(_short(c["hop_p50"].get(hop)) for hop in HOPS)]
        for c in cells
    ]  # fmt: skip
    names = sorted({name for cell in cells for name in cell["cpu_ms_per_call"]})
    shares = [
        [f"{c['call']}, {c['store']}", c["candidates"],
         *(f"{c['cpu_ms_per_call'].get(n, 0.0):.1f} ({c['cpu_share'].get(n, 0.0):.0%})" for n in names)]
        for c in cells
    ]  # fmt: skip
    console = Console(width=160)
    console.print(table("CPU milliseconds a call (share), background work included", ["call, store", "candidates", *names], shares))
    result: dict[str, Any] = {"benchmark": "Rank and GetUserState over real processes; p50 by round; hops are medians", "cells": cells}
    settings = {name: getattr(options, name) for name in ("qps", "seconds", "rounds", "seed", "surface")}
    finish(result | settings, out=options.json, columns=columns, rows=rows)


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
