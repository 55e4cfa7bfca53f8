"""Measures Rank over real processes: latency by number of candidates, and where the time and the CPU go.

    python -m benchmarks.serving --home .demo --json OUT

Open loop: requests are sent at their own times whether or not earlier ones have been answered, and latency counts from
the time a request was due, so that a slow answer cannot hide the wait of those behind it. Knows a demo's home folder. Does
not know how services answer.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from gem.router.v1 import router_service_pb2 as messages
from gem.router.v1 import router_service_pb2_grpc

from benchmarks.measure import finish, parser
from feature_store.replay import Replay
from services.cli.home import Home
from services.cli.processes import Platform, Ports, free_base_port, platform
from services.cli.routes import published_verticals

SIZES = (1, 200, 1000)
_SECONDS = 10.0


def main() -> None:
    """Starts the services of a home, sends requests, and prints the table."""
    options = _options()
    home = Home(options.home)
    replay = Replay(home.spec(), home.tables())
    ports = Ports(base=free_base_port())
    models = [f"{name}={folder}" for name, folder in published_verticals(home, replay.spec).items()]
    sizes = SIZES[:2] if options.quick else SIZES
    cells = []
    with platform(home, ports, models, foundation=home.models_root / "foundation") as running:
        for size in sizes:
            cells.append(_measure(running, replay, ports, size, options))
    hops = sorted({hop for cell in cells for hop in cell["cpu_share"]})
    columns = ["candidates", "p50 ms", "p99 ms", "sent", "errors", *(f"CPU {hop}" for hop in hops)]
    rows = [
        [cell["candidates"], cell["p50"], cell["p99"], cell["sent"], cell["errors"], *(cell["cpu_share"].get(h, 0.0) for h in hops)]
        for cell in cells
    ]
    finish({"benchmark": "Rank over six processes", "cells": cells, "qps": options.qps}, out=options.json, columns=columns, rows=rows)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--home", type=Path, default=Path(".demo"), help="folder of a finished demo")
    made.add_argument("--qps", type=float, default=4.0, help="requests a second")
    made.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    return made.parse_args()


def _measure(running: Platform, replay: Replay, ports: Ports, size: int, options: argparse.Namespace) -> dict[str, Any]:
    seconds = 3.0 if options.quick else options.seconds
    requests = _requests(replay, size, count=int(seconds * options.qps))
    with grpc.insecure_channel(ports.router) as channel, ThreadPoolExecutor(32) as pool:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        for request in requests[:3]:
            stub.Rank(request, timeout=_SECONDS)
        before, start = _cpu(running), time.perf_counter()
        due = [start + index / options.qps for index in range(len(requests))]
        pending = []
        for when, request in zip(due, requests, strict=True):
            time.sleep(max(0.0, when - time.perf_counter()))
            pending.append(pool.submit(_one, stub, request, when))
        taken = [each.result() for each in pending]
        spent = {name: after - before[name] for name, after in _cpu(running).items()}
    good = [ms for ms in taken if ms is not None]
    total = sum(spent.values()) or 1.0
    return {
        "candidates": size,
        "sent": len(requests),
        "errors": len(taken) - len(good),
        "p50": float(np.percentile(good, 50)),
        "p99": float(np.percentile(good, 99)),
        "cpu_seconds": spent,
        "cpu_share": {name: value / total for name, value in spent.items()},
    }


def _one(stub: router_service_pb2_grpc.RankingServiceStub, request: messages.RankRequest, due: float) -> float | None:
    """Milliseconds from when the request was due; None if it failed."""
    try:
        stub.Rank(request, timeout=_SECONDS)
    except grpc.RpcError:
        return None
    return (time.perf_counter() - due) * 1000


def _requests(replay: Replay, size: int, *, count: int) -> list[messages.RankRequest]:
    log, rng = replay.impressions, np.random.default_rng(0)
    ads = replay.ads.versions.keys
    at = int(log.event_ms.max()) + 1000
    made = []
    for row in rng.integers(0, len(log), count).tolist():
        shown = rng.choice(ads, min(size, len(ads)), replace=False).tolist()
        shown += [int(ads.max()) + 1 + extra for extra in range(size - len(shown))]
        made.append(
            messages.RankRequest(
                surface=replay.spec.surfaces[log.surface[row]], user_id=str(log.user_key[row]), request_ms=at,
                candidates=[messages.Candidate(ad_id=str(ad), bid=1.0) for ad in shown],
            )
        )  # fmt: skip
    return made


def _cpu(running: Platform) -> dict[str, float]:
    """CPU seconds of every process so far."""
    spent = {}
    for process in running.processes:
        assert process.running is not None
        times = psutil.Process(process.running.pid).cpu_times()
        spent[process.name] = times.user + times.system
    return spent


if __name__ == "__main__":
    main()
