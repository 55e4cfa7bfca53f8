"""How one statistic's slots change with a fact, and what they say at an instant.

Knows counts, rates, recencies and fading. Does not know keys, groups or where slots are kept.

Slots: a count holds its weight and the time it was brought to; a rate holds trials, successes and that time; a recency
holds the newest time. Times are milliseconds; 0 stands for never.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gem.schema.v1 import dataset_spec_pb2 as pb

WIDTH = {pb.STATISTIC_COUNT: 2, pb.STATISTIC_RATE: 3, pb.STATISTIC_RECENCY: 1}
"""Slots of a statistic."""
Update = Callable[[list[float], int, int, float], None]
"""Changes slots from a place on, for a fact of a time, with a half-life in milliseconds (0 never fades)."""


def _age(slots: list[float], first: int, last: int, event_ms: int, half_life_ms: float) -> float:
    """Lets slots first … last-1 fade to the event's time if it is later than slots[last]; returns the event's weight.

    Of a slot that never fades every event weighs one.
    """
    if not half_life_ms:
        return 1.0
    gap = event_ms - slots[last]
    if gap <= 0:
        return float(2.0 ** (gap / half_life_ms))
    keep = 2.0 ** (-gap / half_life_ms)
    for index in range(first, last):
        slots[index] *= keep
    slots[last] = float(event_ms)
    return 1.0


def count(slots: list[float], at: int, event_ms: int, half_life_ms: float) -> None:
    """An event of a count."""
    weight = _age(slots, at, at + 1, event_ms, half_life_ms)
    slots[at] += weight


def add_trial(slots: list[float], at: int, event_ms: int, half_life_ms: float) -> None:
    """An impression of a rate."""
    weight = _age(slots, at, at + 2, event_ms, half_life_ms)
    slots[at] += weight


def add_success(slots: list[float], at: int, event_ms: int, half_life_ms: float) -> None:
    """A positive outcome of a rate."""
    weight = _age(slots, at, at + 2, event_ms, half_life_ms)
    slots[at + 1] += weight


def touch(slots: list[float], at: int, event_ms: int, half_life_ms: float) -> None:
    """An event of a recency."""
    slots[at] = max(slots[at], float(event_ms))


COUNTED_IN: dict[Update, int] = {count: 0, add_trial: 0, add_success: 1}
"""Updates that add an event's weight, and to which of the aggregate's slots."""


def statistic(
    aggregate: pb.Aggregate,
    slots: npt.NDArray[np.float64],
    at: int,
    prior_at: int,
    now_ms: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """What an aggregate says [n] at instants [n], from rows of slots [n, ·].

    A count is log1p of its weight. A rate is (successes + strength · prior) / (trials + strength), where the prior is the
    running global rate (s + 1) / (t + 2). A recency is log1p of the seconds since the newest, NaN if there was none.

    Args:
        aggregate: statistic, half-life and prior strength.
        slots: rows in which the aggregate's slots begin at `at`, and the global rate's at `prior_at`.
        at: first slot of the aggregate.
        prior_at: first slot of the running global rate; unused unless the aggregate is a rate.
        now_ms: instants of the reads.
    """
    if aggregate.statistic == pb.STATISTIC_RECENCY:
        seconds = np.maximum(0.0, (now_ms - slots[:, at]) / 1000.0)
        return np.where(slots[:, at] > 0, np.log1p(seconds), np.nan)
    if aggregate.statistic == pb.STATISTIC_COUNT:
        return np.log1p(slots[:, at] * _keep(aggregate, slots[:, at + 1], now_ms))
    keep = _keep(aggregate, slots[:, at + 2], now_ms)
    prior = (slots[:, prior_at + 1] + 1.0) / (slots[:, prior_at] + 2.0)
    strength = aggregate.prior_strength
    trials = slots[:, at] * keep + strength
    successes = slots[:, at + 1] * keep + strength * prior
    return np.where(trials > 0, successes / np.where(trials > 0, trials, 1.0), prior)


def _keep(
    aggregate: pb.Aggregate, last_ms: npt.NDArray[np.float64], now_ms: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    if not aggregate.half_life_seconds:
        return np.ones(len(last_ms))
    gap = np.maximum(0.0, now_ms - last_ms) / (aggregate.half_life_seconds * 1000.0)
    return np.exp2(-gap)
