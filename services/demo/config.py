"""How large a demo is, and which stretch of its log each stage uses.

Knows days. Does not know what stages do.
"""

from __future__ import annotations

from dataclasses import dataclass

from feature_store.world import DAY_MS, WorldConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Size of a demo."""

    world: WorldConfig
    preset: str = "model.gem.presets:tiny"
    requests: int = 3000
    """Rank requests replayed on the last day."""
    annotated_days: int = 8
    """Days before the last that the foundation model annotates for the vertical models."""
    batch_candidates: int = 256
    """Candidates of a training step, about: few, because a demo's log is small and steps are what it lacks."""
    vertical_candidates: int = 128
    """The same for vertical models: a surface's log is smaller still."""
    vertical_epochs: int = 1
    """Passes over the annotated days. Real logs overfit from the second on; the generated world does not."""
    lifetime_factor: float = 8.0
    """Pair embeddings live this much longer than by default: the world's users return once a day, not every few hours."""
    train_share: float = 1.0
    """Share of the days before the annotated ones that is trained on, newest first."""


SIZES = {
    "small": DemoConfig(
        world=WorldConfig(users=120, ads=150, days=7, requests_per_user=8, dim=4), requests=120, annotated_days=4
    ),
    "default": DemoConfig(world=WorldConfig(users=1200, ads=500, days=12, requests_per_user=10, dim=4), requests=2000),
    "large": DemoConfig(
        world=WorldConfig(users=8000, ads=2000, days=16, requests_per_user=14),
        preset="model.gem.presets:public_s",
        requests=10_000,
    ),
}
"""Sizes by name: small ends in about a minute and a half, default in less than 8 on two cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Days:
    """Boundaries of the stages, milliseconds since the epoch."""

    first_ms: int
    """Training begins."""
    annotate_ms: int
    """The first snapshot is done; from here on, each day is annotated before it is trained on."""
    test_ms: int
    """The vertical models are done; the last day begins."""
    end_ms: int

    def __post_init__(self) -> None:
        if not self.first_ms < self.annotate_ms < self.test_ms < self.end_ms:
            raise ValueError(
                f"days {self.first_ms}, {self.annotate_ms}, {self.test_ms}, {self.end_ms} must grow; the log is too short, "
                "it needs at least three days"
            )


def days_of(config: DemoConfig, from_ms: int, to_ms: int) -> Days:
    """Stages of a log from its first to one past its last millisecond, in whole days."""
    days = max(3, -(-(to_ms - from_ms) // DAY_MS))
    end_ms = from_ms + days * DAY_MS
    annotated = min(config.annotated_days, days - 2)
    annotate_ms = end_ms - (annotated + 1) * DAY_MS
    kept = max(1, round((days - annotated - 1) * config.train_share))
    return Days(
        first_ms=annotate_ms - kept * DAY_MS, annotate_ms=annotate_ms, test_ms=end_ms - DAY_MS, end_ms=end_ms
    )
