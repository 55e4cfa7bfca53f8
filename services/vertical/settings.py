"""What a vertical process is told at its start.

Knows names and defaults. Does not read the environment: `__main__` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from services.runtime.limits import Limits
from services.runtime.metrics import split_address
from services.runtime.telemetry import TelemetrySettings
from services.runtime.tls import TlsSettings


class ModelSource(NamedTuple):
    """A model and where its artefact lies."""

    name: str
    """Name on the protocol, as route tables and InferenceServices call it."""
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class VerticalSettings:
    """Settings of `python -m services.vertical`."""

    models: tuple[str, ...]
    """`name=folder` for each model served; a folder is an immutable version, or a pointer to one."""
    spec: Path
    """The dataset spec that the models must have been built for."""
    listen: str = "127.0.0.1:8081"
    """host:port of gRPC."""
    http_listen: str = ""
    """host:port of REST; empty for none."""
    metrics_listen: str = ""
    """host:port of /metrics; empty for none. REST has it as well."""
    loopfm_space: str = ""
    """Coordinate system in hex that models must read from LoopFM, if they read any; empty accepts what they name."""
    solaris_space: str = ""
    """Coordinate system in hex that models must read from Solaris, if they read any; empty accepts what they name."""
    torch_threads: int = 1
    """Threads of one forward."""
    forwards: int = 1
    """Forwards at once, over all models."""
    max_in_flight: int = 64
    """Requests taken on by one model at a time; more are shed."""
    drain_seconds: float = 1.0
    grace_seconds: float = 10.0
    log_level: str = "INFO"
    limits: Limits = field(default_factory=Limits)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    tls: TlsSettings = field(default_factory=TlsSettings)

    def __post_init__(self) -> None:
        split_address(self.listen)
        for address in (self.http_listen, self.metrics_listen):
            if address:
                split_address(address)
        for name in ("torch_threads", "forwards", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        sources(self.models)


def sources(models: Sequence[str]) -> list[ModelSource]:
    """The models of a list of `name=folder`.

    Raises:
        ValueError: there is none, one is written otherwise, or a name is there twice.
    """
    found: list[ModelSource] = []
    for text in models:
        name, separator, folder = text.partition("=")
        if not separator or not name or not folder:
            raise ValueError(f"model {text!r} must be written name=folder")
        if name in {source.name for source in found}:
            raise ValueError(f"model {name!r} is there twice; give each a name of its own")
        found.append(ModelSource(name, Path(folder)))
    if not found:
        raise ValueError("there is no model; set GEM_MODELS to name=folder,name=folder")
    return found
