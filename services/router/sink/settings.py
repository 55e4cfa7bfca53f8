"""What the sink must be told to run.

Knows names and units. Does not know where they are written.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.runtime.server import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkSettings:
    """Stream, tables and batches of a sink."""

    server: ServerSettings
    """Where its health and metrics are; it serves nothing else."""
    store: str
    """URL of the store that holds the stream."""
    tables: str
    """Root of the log tables."""
    sink_batch: int = 512
    """Served requests of one transaction; the table gets one file for each."""
    sink_pause_seconds: float = 5.0
    """Seconds from a batch that was not full to the next one."""
    sink_reclaim_seconds: float = 60.0
    """Seconds after which a batch that a sink holds counts as lost with it; longer than any transaction takes."""

    def __post_init__(self) -> None:
        if self.sink_batch < 1:
            raise ValueError(f"sink_batch is {self.sink_batch}; it must be at least 1")
