"""Starts real processes of the platform for tests, finds them ready by the health protocol, and stops or kills them.

Knows command lines, environments and ports. Does not know what the processes do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(kw_only=True)
class Process:
    """One running `python -m MODULE`."""

    module: str
    env: Mapping[str, str]
    log: Path
    port: int
    popen: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def terminate(self, *, seconds: float = 15.0) -> int:
        """SIGTERM, and wait for the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)

    def wait_ready(self, *, service: str = "readiness", seconds: float = START_SECONDS) -> None:
        """Wait until its health says SERVING; shows its log if it exits instead."""
        deadline = time.monotonic() + seconds
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            while time.monotonic() < deadline:
                if self.popen.poll() is not None:
                    raise AssertionError(f"{self.module} exited:\n{self.log.read_text()}")
                if _serving(stub, request):
                    return
                time.sleep(0.02)
        raise AssertionError(
            f"{self.module} is not ready after {seconds} s:\n{self.log.read_text()}"
        )


class Processes:
    """The processes of one test; whatever still runs at its end is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    def start(
        self, module: str, env: Mapping[str, str], *, port: int | None = None, name: str = ""
    ) -> Process:
        """Start `python -m module` with GEM_LISTEN on a loopback port; returns at once."""
        port = port or free_port()
        own = {"GEM_LISTEN": f"127.0.0.1:{port}", "OTEL_SERVICE_NAME": name or module}
        env = {**env, **{key: value for key, value in own.items() if not env.get(key)}}
        log = self._folder / f"{len(self._started)}-{name or module}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**_inherited(), **env},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        process = Process(module=module, env=env, log=log, port=port, popen=popen)
        self._started.append(process)
        return process

    def restart(self, process: Process) -> Process:
        """The same process again, on the same port."""
        return self.start(process.module, process.env, port=process.port)

    def stop_all(self) -> None:
        """Kill whatever still runs."""
        with ExitStack() as stack:
            for process in self._started:
                if process.popen.poll() is None:
                    stack.callback(process.kill)


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Processes that end with the context."""
    started = Processes(folder)
    try:
        yield started
    finally:
        started.stop_all()


def _serving(stub: health_pb2_grpc.HealthStub, request: health_pb2.HealthCheckRequest) -> bool:
    try:
        response = stub.Check(request, timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _inherited() -> dict[str, str]:
    """This environment without settings of the platform or of telemetry, on one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GEM_", "OTEL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
