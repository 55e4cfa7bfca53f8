"""What the annotator is told at its start.

Knows names and defaults. Does not read the environment: `__main__` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.telemetry import TelemetrySettings

WALL, REQUEST = "wall", "request"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFmSettings:
    """Settings of `python -m services.loopfm`."""

    spec: Path
    """Dataset spec."""
    store: str
    """URL of the online store, which also holds the stream of served requests."""
    tables: Path
    """Root of the log tables."""
    foundation: Path
    """Folder of the foundation model's artefact."""
    consumer: str = field(default="loopfm", metadata={"env": "HOSTNAME"})
    """Name of this process in the consumer group; two that run at once need two names."""
    clock: str = WALL
    """`wall` for live operation; `request` for a replay: annotations become available a simulated delay after their request."""
    requests: str = "request"
    """What a row of a backfill is: `request`, or `impression` for logs whose requests are unknown."""
    batch_requests: int = 64
    """Requests of one forward."""
    pause_ms: int = 1_000
    """Pause of a follower after a batch that is not full, in which the next one grows; 0 for none."""
    delay_ms: int = 60_000
    """Median of the simulated delay."""
    pair_delay_ms: int = 2_000
    """Simulated delay of pair embeddings."""
    loopfm_space: str = ""
    """Coordinate system in hex that must be written; empty accepts the artefact's."""
    torch_threads: int = 1
    metrics_listen: str = ""
    log_level: str = "INFO"
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def __post_init__(self) -> None:
        if self.clock not in (WALL, REQUEST):
            raise ValueError(f"clock is {self.clock!r}; it must be {WALL!r} or {REQUEST!r}")
        if self.requests not in ("request", "impression"):
            raise ValueError(f"requests is {self.requests!r}; it must be 'request' or 'impression'")
        for name in ("batch_requests", "delay_ms", "pair_delay_ms", "torch_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.pause_ms < 0:
            raise ValueError(f"pause_ms is {self.pause_ms}; it must not be negative")
        bytes.fromhex(self.loopfm_space)
