"""How long a pair embedding is good for at each level, and what a user's wide row is called.

Knows ages, half-lives and names. Does not know bytes, stores or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

SECOND_MS = 1_000
HOUR_MS = 3_600 * SECOND_MS
USER_FIELD = "u"
SPECULATION = "speculation"
"""Name of the stream of offered pairs."""


class Level(IntEnum):
    """Where an embedding came from, as the feature batch numbers it."""

    EXACT = 0
    AD_GROUP = 1
    SIMILAR_USERS = 2
    USER = 3
    DEFAULT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """Ages of one level."""

    soft_ms: int
    """From this age on a row is used, and asked for anew."""
    hard_ms: int
    """From this age on a row counts as absent."""

    def __post_init__(self) -> None:
        if not 0 < self.soft_ms <= self.hard_ms:
            raise ValueError(
                f"soft_ms {self.soft_ms} must be positive and at most hard_ms {self.hard_ms}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """Ages and half-lives of all levels."""

    pair: Lifetime = field(default=Lifetime(soft_ms=2 * HOUR_MS, hard_ms=6 * HOUR_MS))
    ad_group: Lifetime = field(default=Lifetime(soft_ms=6 * HOUR_MS, hard_ms=24 * HOUR_MS))
    user: Lifetime = field(default=Lifetime(soft_ms=24 * HOUR_MS, hard_ms=72 * HOUR_MS))
    ad_group_half_life_ms: float = 1 * HOUR_MS
    """A vector this much older counts half in its ad group's mean."""
    user_half_life_ms: float = 6 * HOUR_MS
    """A vector this much older counts half in its user's mean."""
    min_count: int = 1
    """Vectors that a mean must hold to be used."""

    @property
    def row_ms(self) -> int:
        """A user's row is worth nothing this long after its last write."""
        return max(self.pair.hard_ms, self.ad_group.hard_ms, self.user.hard_ms)

    def stretched(self, factor: float) -> Lifetimes:
        """The same shape on a slower or faster clock, for data whose users return less often.

        Raises:
            ValueError: the factor is not positive.
        """
        if factor <= 0:
            raise ValueError(f"lifetimes cannot be stretched by {factor}; give a positive factor")
        return Lifetimes(
            pair=_stretched(self.pair, factor),
            ad_group=_stretched(self.ad_group, factor),
            user=_stretched(self.user, factor),
            ad_group_half_life_ms=self.ad_group_half_life_ms * factor,
            user_half_life_ms=self.user_half_life_ms * factor,
            min_count=self.min_count,
        )


def row_key(space_id: bytes, user_key: int) -> str:
    """Name of a user's wide row: vectors of two coordinate systems never share one."""
    return f"sol/{space_id.hex()}/p/{user_key}"


def read_key(space_id: bytes, user_key: int) -> str:
    """Name of the row that remembers which of a user's pairs have been read: `ad:<ad key>` → computed_ms."""
    return f"sol/{space_id.hex()}/r/{user_key}"


def status_key(space_id: bytes) -> str:
    """Name of the row in which each process keeps its running totals, one field each."""
    return f"sol/{space_id.hex()}/status"


def ad_field(ad_key: int) -> str:
    """Field of one pair."""
    return f"ad:{ad_key}"


def group_field(group_key: int) -> str:
    """Field of one ad group's mean."""
    return f"g:{group_key}"


def _stretched(lifetime: Lifetime, factor: float) -> Lifetime:
    return Lifetime(
        soft_ms=max(1, round(lifetime.soft_ms * factor)),
        hard_ms=max(1, round(lifetime.hard_ms * factor)),
    )
