"""Sizes, channels and switches of a vertical model.

Knows what fits together. Does not know data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class VerticalConfig:
    """Shape of one surface's small model; every channel of knowledge can be switched off."""

    surface: str = ""
    """The surface it serves; its own events are the only raw history it reads."""
    width: int = 32
    heads: int = 2
    hidden: int = 64
    id_width: int = 8
    bins: int = 16
    history_events: int = 20
    """Newest events of the surface that are read."""
    kd: bool = True
    """C1: an auxiliary head learns the foundation model's soft labels."""
    loopfm: bool = True
    """C2: the user's LoopFM window is read."""
    solaris: bool = True
    """C3: the pair's embedding is read."""
    loopfm_dim: int = 64
    loopfm_encoder: Literal["attention", "mean", "sum"] = "attention"
    loopfm_labels: bool = True
    """Entries carry their outcome bits as known."""
    solaris_dim: int = 64
    solaris_meta: bool = True
    """Age, count and similarity of the pair embedding are read beside it."""
    kd_gradient_scale: float = 1.0
    """β: of the gradient that the auxiliary head sends into the shared backbone."""
    memory_dropout: float = 0.05
    """Share of requests whose window is hidden in training, so that an empty one is familiar."""
    level_dropout: float = 0.15
    """Share of pairs demoted to the default level in training, so that every level is familiar."""
    pair_dropout: float = 0.1
    id_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        for name in ("memory_dropout", "level_dropout", "pair_dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")
        if self.history_events < 1:
            raise ValueError(f"history_events is {self.history_events}; it must be at least 1")
