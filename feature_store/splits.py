"""Cuts a log into training, validation and test parts at instants.

Knows time. Does not know rows. There is no random split: what is tested always comes after what was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from feature_store.errors import InvalidInput

_LONGEST_DATE = len("20260110")
"""Digits of a day without dashes, which are no milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """Three adjacent parts of time; each begins where the one before it ends. All in ms since the epoch."""

    train_from_ms: int
    train_to_ms: int
    valid_to_ms: int
    test_to_ms: int

    def __post_init__(self) -> None:
        edges = (self.train_from_ms, self.train_to_ms, self.valid_to_ms, self.test_to_ms)
        if any(low >= high for low, high in pairwise(edges)):
            raise InvalidInput(f"split boundaries {edges} do not increase; order them train, validation, test")

    @property
    def train(self) -> tuple[int, int]:
        """First millisecond, and the one after the last."""
        return self.train_from_ms, self.train_to_ms

    @property
    def valid(self) -> tuple[int, int]:
        """First millisecond, and the one after the last."""
        return self.train_to_ms, self.valid_to_ms

    @property
    def test(self) -> tuple[int, int]:
        """First millisecond, and the one after the last."""
        return self.valid_to_ms, self.test_to_ms

    def rows(self, event_ms_N: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        """Positions of the rows of each part, in their given order; rows outside all parts are in none."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: np.flatnonzero((event_ms_N >= low) & (event_ms_N < high)) for name, (low, high) in parts.items()}


def splits_of_days(train_from: str, train_end: str, valid_end: str, test_end: str, *, zone: str = "UTC") -> Splits:
    """Splits from calendar days in a time zone; each end day is the last one of its part, whole.

    Raises:
        InvalidInput: a day is not YYYY-MM-DD, the zone is not known, or the days do not increase.
    """
    return Splits(
        train_from_ms=day_ms(train_from, zone=zone),
        train_to_ms=day_ms(train_end, zone=zone, later=1),
        valid_to_ms=day_ms(valid_end, zone=zone, later=1),
        test_to_ms=day_ms(test_end, zone=zone, later=1),
    )


def day_ms(day: str, *, zone: str = "UTC", later: int = 0) -> int:
    """The first millisecond of the calendar day `later` days after `day`, in a time zone.

    Raises:
        InvalidInput: the day is not YYYY-MM-DD, or the zone is not known.
    """
    where = _zone(zone)
    try:
        start = date.fromordinal(date.fromisoformat(day).toordinal() + later)
    except ValueError as error:
        raise InvalidInput(f"day {day!r} cannot be read; write the day as YYYY-MM-DD") from error
    return round(datetime(start.year, start.month, start.day, tzinfo=where).timestamp() * 1000)


def instant(text: str, *, zone: str = "UTC") -> int:
    """Milliseconds of a calendar day's begin, of a time in ISO 8601 (of the zone unless it says otherwise), or of milliseconds.

    Raises:
        InvalidInput: it is none of them, or the zone is not known.
    """
    if len(text) > _LONGEST_DATE and text.lstrip("-").isdigit():
        return int(text)
    if len(text) == len("2026-01-10"):
        return day_ms(text, zone=zone)
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no time; write 2026-01-10, 2026-01-10T12:00+08:00, or milliseconds") from error
    return round((when if when.tzinfo else when.replace(tzinfo=_zone(zone))).timestamp() * 1000)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, IsADirectoryError, ValueError) as error:
        raise InvalidInput(f"time zone {name!r} is not known; use one like Asia/Shanghai") from error
