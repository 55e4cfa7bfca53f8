"""What a trainer process is told at its start.

Knows names and defaults; ranks and addresses are torchrun's variables. Does not read the environment: `__main__` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.telemetry import TelemetrySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Settings of `python -m services.trainer`, alone or under torchrun."""

    spec: Path
    """Dataset spec."""
    tables: Path
    """Root of the log tables."""
    models: Path
    """Root of the artefacts."""
    checkpoints: Path | None = None
    """Folder of the run's checkpoints, seen by all processes; none writes none."""
    checkpoint_steps: int = 200
    """Steps between checkpoints."""
    processes: int = 0
    """Processes that must have started, over all hosts; 0 accepts any number."""
    rank: int = field(default=0, metadata={"env": "RANK"})
    world_size: int = field(default=1, metadata={"env": "WORLD_SIZE"})
    expert_processes: int = 1
    """Neighbours who share the experts of a mixture out, of which each else holds all; must divide experts and processes."""
    table_processes: int = 1
    """Neighbours who share the rows of embedding tables out, of which each else holds all; must divide the processes."""
    torch_threads: int = 1
    requests: str = "request"
    """What a row is: `request`, or `impression` for logs whose requests are unknown."""
    batch_requests: int = 128
    """Requests of a step over all processes."""
    epochs: int = 1
    seed: int = 0
    log_level: str = "INFO"
    metrics_listen: str = ""
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def __post_init__(self) -> None:
        if self.processes and self.processes != self.world_size:
            raise ValueError(
                f"{self.world_size} processes started, {self.processes} were expected; a job's WORLD_SIZE counts pods "
                "until torchrun multiplies it: start `torchrun -m services.trainer`, with nprocPerNode set to the devices of a pod"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"RANK {self.rank} must be at least 0 and below WORLD_SIZE {self.world_size}")
        if self.requests not in ("request", "impression"):
            raise ValueError(f"requests is {self.requests!r}; it must be 'request' or 'impression'")
        for name in ("expert_processes", "table_processes"):
            if getattr(self, name) < 1 or self.world_size % getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}; it must divide WORLD_SIZE, which is {self.world_size}")
        for name in ("batch_requests", "epochs", "torch_threads", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
