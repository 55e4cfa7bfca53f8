"""What the router must be told to run.

Knows names and units. Does not know where they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.runtime.server import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Peers, files and shares of time of a router."""

    server: ServerSettings
    spec: Path
    """Dataset spec."""
    routes: Path
    """Route table, watched for changes."""
    store: str
    """URL of the store that holds the streams."""
    sequence: str
    """gRPC target of the sequence service."""
    solaris: str
    """gRPC target of the solaris service."""
    verticals: tuple[str, ...]
    """`model=target` for each vertical model, or one target that serves all that are not named."""
    routes_poll_seconds: float = 0.5
    """Seconds between looks at the route table."""
    reserve_seconds: float = 0.005
    """What the router itself needs of a caller's time."""
    read_share: float = 0.4
    """Share of the caller's time after which a read is given up."""
    first_score_share: float = 0.6
    """Share of the time left for scoring that an arm's model gets if another arm could answer in its place."""
    max_waiting: int = 1_024
    """Answers whose logging may wait; more are dropped and counted."""
    speculation_seconds: float = 900.0
    """Seconds after which an offered pair is no longer worth computing."""

    def __post_init__(self) -> None:
        for name in ("read_share", "first_score_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting is {self.max_waiting}; it must be at least 1")
        targets_by_model(self.verticals)


def targets_by_model(verticals: tuple[str, ...]) -> Mapping[str, str]:
    """Model name → target; the name "" holds the target of models that are not named.

    Raises:
        ValueError: no target, an empty part, or a model that is named twice.
    """
    targets: dict[str, str] = {}
    for entry in verticals:
        model, separator, target = entry.partition("=")
        name, target = (model, target) if separator else ("", entry)
        if not target or (separator and not name) or name in targets:
            raise ValueError(
                f"verticals holds {entry!r}; write model=host:port once for each model, or one host:port"
            )
        targets[name] = target
    if not targets:
        raise ValueError("verticals is empty; write model=host:port,… or one host:port")
    return targets
