"""What the sequence service is told at its start.

Knows names and defaults. Does not read the environment: `__main__` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.runtime.server import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSettings:
    """Settings of `python -m services.sequence`."""

    spec: Path
    """Dataset spec."""
    store: str
    """URL of the online store."""
    server: ServerSettings
    memory_bytes: int = 32
    """Bytes of a LoopFM vector where no memory is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaterializeSettings:
    """Settings of `python -m services.sequence.materialize`."""

    spec: Path
    """Dataset spec."""
    store: str
    """URL of the online store."""
    tables: Path
    """Root of the log tables."""
