"""What the read server and the worker are told at their start.

Knows names and defaults. Does not read the environment: `__main__` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.limits import Limits
from services.runtime.server import ServerSettings
from services.runtime.telemetry import TelemetrySettings
from services.runtime.tls import TlsSettings
from services.solaris.lifetimes import Lifetimes

WALL, REQUEST = "wall", "request"


@dataclass(frozen=True, kw_only=True, slots=True)
class SolarisSettings:
    """Settings of `python -m services.solaris`."""

    spec: Path
    """Dataset spec."""
    store: str
    """URL of the online store, which also holds the stream of offered pairs."""
    server: ServerSettings
    read_ms: float = 20.0
    """Longest wait for the store; then every level is default. 8 is enough for a Redis nearby; SQLite shares its cores."""
    readers: int = 8
    """Reads of the store at once."""
    lifetime_factor: float = 1.0
    """Stretches every age and half-life, for data whose users return less often than every few hours."""
    instance: str = field(default="solaris", metadata={"env": "HOSTNAME"})
    """Name of this process among the totals in the store."""

    def __post_init__(self) -> None:
        if self.read_ms <= 0 or self.readers < 1:
            raise ValueError(
                f"read_ms {self.read_ms} and readers {self.readers} must both be positive"
            )
        Lifetimes().stretched(self.lifetime_factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProcessSettings:
    """Settings of `python -m services.solaris.worker`."""

    spec: Path
    """Dataset spec."""
    store: str
    """URL of the online store, which also holds the stream of offered pairs."""
    tables: Path
    """Root of the log tables."""
    foundation: Path
    """Folder of the foundation model's artefact."""
    sequence: str
    """Address of the sequence service."""
    consumer: str = field(default="worker", metadata={"env": "HOSTNAME"})
    """Name of this process in the consumer group; two that run at once need two names."""
    clock: str = WALL
    """`wall` for live operation, `request` for a replay: requests' own time drives the worker."""
    lag_ms: int = 2_000
    """With clock `request`: simulated milliseconds from a request to its pairs' availability."""
    batch_tasks: int = 16
    pause_ms: int = 250
    """Pause after a turn that leaves no full batch, in which the next one grows; 0 for none."""
    max_backlog_tasks: int = 512
    lifetime_factor: float = 1.0
    """Must be the read server's."""
    torch_threads: int = 1
    metrics_listen: str = ""
    log_level: str = "INFO"
    limits: Limits = field(default_factory=Limits)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    tls: TlsSettings = field(default_factory=TlsSettings)

    def __post_init__(self) -> None:
        if self.clock not in (WALL, REQUEST):
            raise ValueError(f"clock is {self.clock!r}; it must be {WALL!r} or {REQUEST!r}")
        if self.lag_ms < 1:
            raise ValueError(f"lag_ms is {self.lag_ms}; it must be at least 1")
        Lifetimes().stretched(self.lifetime_factor)
