"""Runs the six services as processes of this machine, and stops them together.

Knows entry points, ports and environment names. Does not know what services say to each other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from feature_store.errors import InvalidInput, NotReady
from services.cli.home import Home

_SPAN = 20
_LAST_BASE = 65_536 - _SPAN
READY_SECONDS = 90.0
STOP_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Where the services of one platform listen, from one base port."""

    base: int = 7100

    def __post_init__(self) -> None:
        if not 1024 <= self.base <= _LAST_BASE:
            raise InvalidInput(f"base port {self.base} must lie between 1024 and {_LAST_BASE}: {_SPAN} ports follow from it")

    @property
    def router(self) -> str:
        """Clients call this."""
        return f"127.0.0.1:{self.base}"

    @property
    def sequence(self) -> str:
        """User state."""
        return f"127.0.0.1:{self.base + 1}"

    @property
    def solaris(self) -> str:
        """Pair embeddings."""
        return f"127.0.0.1:{self.base + 2}"

    @property
    def vertical(self) -> str:
        """Open Inference Protocol over gRPC."""
        return f"127.0.0.1:{self.base + 3}"

    @property
    def vertical_http(self) -> int:
        """The same over REST."""
        return self.base + 4

    @property
    def sink(self) -> str:
        """Health of the process that drains the served log."""
        return f"127.0.0.1:{self.base + 5}"

    def metrics(self, index: int) -> str:
        """Where process number `index` answers /metrics."""
        return f"127.0.0.1:{self.base + 10 + index}"


@dataclass(slots=True)
class Process:
    """One service: how it starts, where it answers its health, and the running process."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    running: subprocess.Popen[bytes] | None = None

    def start(self, log_folder: Path) -> None:
        """Starts it; its output goes to a file of its own."""
        log_folder.mkdir(parents=True, exist_ok=True)
        own = [f"{name}={value}" for name, value in self.environment.items()]  # beside what it inherits
        with (log_folder / f"{self.name}.log").open("ab") as log:
            self.running = subprocess.Popen(
                ["env", *own, sys.executable, "-m", self.module, *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL: what a node failure looks like."""
        if self.running:
            self.running.kill()
            self.running.wait()

    def dead(self) -> bool:
        """It was started and has ended."""
        return self.running is not None and self.running.poll() is not None


@dataclass(slots=True)
class Platform:
    """The processes of one home, started in the order of their dependencies and stopped in reverse."""

    home: Home
    processes: list[Process]

    def __enter__(self) -> Platform:
        for process in self.processes:
            process.start(self.home.root / "logs")
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __getitem__(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Returns once every service with a health address is ready.

        Raises:
            NotReady: one died or took too long; says which and where its log is.
        """
        deadline = time.monotonic() + seconds
        for process in self.processes:
            if process.health:
                self._wait(process, process.health, deadline)
        self._require_life()

    def watch(self) -> None:
        """Returns never, unless a process ends by itself.

        Raises:
            NotReady: one did; says which and why.
        """
        while True:
            self._require_life()
            time.sleep(0.5)

    def _require_life(self) -> None:
        for process in self.processes:
            if process.dead():
                log = self.home.root / "logs" / f"{process.name}.log"
                raise NotReady(f"{process.name} ended by itself; see {log}:\n{_tail(log)}")

    def stop(self) -> None:
        """SIGTERM to all, clients' side first; SIGKILL for those that do not end in time."""
        for process in reversed(self.processes):
            if process.running and process.running.poll() is None:
                process.running.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            if process.running:
                try:
                    process.running.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()

    def _wait(self, process: Process, address: str, deadline: float) -> None:
        log = self.home.root / "logs" / f"{process.name}.log"
        while not is_ready(address):
            if process.dead():
                raise NotReady(f"{process.name} ended while starting; see {log}:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise NotReady(f"{process.name} is not ready at {address} in time; see {log}:\n{_tail(log)}")
            time.sleep(0.1)


def is_ready(address: str) -> bool:
    """Whether the stock health service at an address says SERVING to `readiness`."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def free_base_port(span: int = _SPAN) -> int:
    """A base from which `span` ports are free on loopback right now."""
    for base in range(7100, 60000, 100):
        if all(_is_free(base + offset) for offset in range(span)):
            return base
    raise NotReady(f"no {span} free ports in a row on loopback; stop something that listens")


def platform(
    home: Home,
    ports: Ports,
    models: Iterable[str],
    *,
    foundation: Path,
    clock: str = "wall",
    lifetime_factor: float = 1.0,
    store_url: str = "",
) -> Platform:
    """The six services over a home's folder.

    Args:
        home: spec, tables, store and route table.
        ports: where they listen.
        models: vertical models as `name=folder of the artefact`.
        foundation: folder of the foundation model's artefact.
        clock: `request` lets the times of requests drive the workers, for a replay.
        lifetime_factor: stretches how long pair embeddings live.
        store_url: the online store; empty for the home's own.
    """
    shared = {
        "GEM_SPEC": str(home.spec_path),
        "GEM_STORE": store_url or home.store_url,
        "GEM_TABLES": str(home.tables_root),
        "GEM_ROUTES": str(home.routes_path),
        "GEM_SEQUENCE": ports.sequence,
        "GEM_SOLARIS": ports.solaris,
        "GEM_VERTICALS": ports.vertical,
        "GEM_FOUNDATION": str(foundation),
        "GEM_MODELS": ",".join(models),
        "GEM_CLOCK": clock,
        "GEM_LIFETIME_FACTOR": str(lifetime_factor),
        "OMP_NUM_THREADS": "1",
    }
    home.trace_path.mkdir(parents=True, exist_ok=True)
    # A replay's days pass in minutes: what is written a second late is hours late by the log's clock.
    replaying = clock == "request"
    worker_pause, follower_pause = ("0", "200") if replaying else ("250", "1000")

    def process(name: str, *arguments: str, listen: str | None = None, **extra: str) -> Process:
        own = {
            "OTEL_SERVICE_NAME": name.partition("-")[0],
            "HOSTNAME": f"{name}-{os.getpid()}",
            "GEM_TRACE_FILE": str(home.trace_path / f"{name}.jsonl"),
            "GEM_METRICS_LISTEN": ports.metrics(len(made)),
            **({"GEM_LISTEN": listen} if listen else {}),
            **extra,
        }
        return Process(name, "services." + name.replace("-", "."), arguments, {**shared, **own}, listen)

    made: list[Process] = []
    made.append(process("sequence", listen=ports.sequence))
    made.append(process("solaris", listen=ports.solaris))
    made.append(process("vertical", listen=ports.vertical, GEM_HTTP_LISTEN=f"127.0.0.1:{ports.vertical_http}"))
    made.append(process("router", listen=ports.router))
    made.append(process("solaris-worker", GEM_PAUSE_MS=worker_pause))
    made.append(process("router-sink", listen=ports.sink))
    made.append(process("loopfm", "--follow", GEM_PAUSE_MS=follower_pause))
    return Platform(home, made)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
