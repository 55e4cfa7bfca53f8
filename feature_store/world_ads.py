"""Makes the ads of a generated world: what they are like, when they live and how often they are shown.

Knows the laws of ads. Does not know users or tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the world imports its ads
    from feature_store.world import WorldConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_TOPICS = 12


@dataclass(frozen=True, slots=True)
class Ads:
    """What is shown: A ads over D days; group, campaign, account and tag are numbers from 0."""

    vector: Floats  # [A, d]
    conversion: Floats  # [A, d]
    quality: Floats  # [D, A], drifts by day
    group: Ints
    campaign: Ints
    account: Ints
    tag: Ints
    from_day: Ints
    until_day: Ints
    bid_floor: Floats
    day_cdf: Floats  # flattened [D, A]: day + cumulative share of exposure among live ads


def make_ads(config: WorldConfig, rng: np.random.Generator) -> Ads:
    """The ads of a world, equal for equal generators."""
    groups = max(4, config.ads // 10)
    topic = rng.normal(size=(_TOPICS, config.dim))
    group_tag = rng.integers(0, _TOPICS, groups)
    group_vector = 0.8 * topic[group_tag] + 0.6 * rng.normal(size=(groups, config.dim))
    group = rng.integers(0, groups, config.ads)
    vector = (group_vector[group] + 0.5 * rng.normal(size=(config.ads, config.dim))) / np.sqrt(config.dim)
    conversion = 0.6 * vector + 0.8 * rng.normal(size=vector.shape) / np.sqrt(config.dim)
    drift = np.cumsum(rng.normal(scale=0.08, size=(config.days, config.ads)), axis=0)
    from_day, until_day = _lives(config, rng)
    return Ads(
        vector=vector,
        conversion=conversion,
        quality=0.6 * rng.normal(size=config.ads) + drift,
        group=group,
        campaign=group // 2,
        account=group // 6,
        tag=group_tag[group],
        from_day=from_day,
        until_day=until_day,
        bid_floor=np.exp(rng.normal(size=config.ads)),
        day_cdf=_exposure(config, rng, from_day, until_day),
    )


def _lives(config: WorldConfig, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """First days of ads and those of their retirement; lives that end or begin nearest fill days with too few ads."""
    from_day = np.where(rng.random(config.ads) < 0.6, 0, rng.integers(0, config.days, config.ads))
    until_day = from_day + 2 + rng.geometric(1 / max(2, config.days), config.ads)
    for day in range(config.days):
        distance = np.maximum(from_day - day, day - until_day + 1)  # not above 0: live
        nearest = np.argsort(distance, kind="stable")[: 2 * config.shown]
        from_day[nearest] = np.minimum(from_day[nearest], day)
        until_day[nearest] = np.maximum(until_day[nearest], day + 1)
    return from_day, until_day


def _exposure(config: WorldConfig, rng: np.random.Generator, from_day: Ints, until_day: Ints) -> Floats:
    popularity = rng.permutation(np.arange(1, config.ads + 1, dtype=np.float64) ** -0.8)
    day = np.arange(config.days)[:, None]
    live = np.where((from_day <= day) & (day < until_day), popularity, 0.0)
    share = np.cumsum(live, axis=1)
    share /= share[:, -1:]  # exactly 1 from the last live ad on: those behind it have no share
    return np.asarray((day + share).ravel(), dtype=np.float64)
