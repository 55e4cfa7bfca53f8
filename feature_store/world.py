"""Generates a world of users, ads and outcomes whose true probabilities are known.

Two-tier by design: a foundation model sees every surface and the searches; a vertical model sees its own surface.
Knows the laws of the world and the tables. Does not know models.

The functional form is ours; what it shows must be confirmed on real logs.

logit P(click) = b_s + slope_s · (interest·(w_s ⊙ v) + intent·(w_s ⊙ v) + quality + profile + sequence), with
interest and intent Ornstein-Uhlenbeck processes (half-lives 60 days and, unless chosen, 3), w_s the surface's response
(a shared part and a private one), sequence = Σ over the last 20 impressions of action weight · exp(−k/6) · v_k·v_i.
Outcomes after a click have vectors of their own that share a subspace with the click's, and log-normal delays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from feature_store.errors import FailedPrecondition, InvalidInput
from feature_store.ids import example_ids
from feature_store.importing.staging import write_whole
from feature_store.tables import Tables
from feature_store.world_ads import Ads, make_ads

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
START_MS = 1_767_225_600_000
"""1 January 2026, 00:00 UTC: the world's first day."""
SURFACES = ("feed", "reels", "stories", "search", "offsite")
_CHUNK_USERS = 1024
_MEMORY = 20
_BUSIEST = 40
"""Requests a day that nobody exceeds."""
_TABLES = ("catalogue", "users", "events", "impressions", "outcomes")


_LATER = ("intent_half_life_days",)
"""Laws that worlds had before they could be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WorldConfig:
    """Size and laws of a world."""

    users: int = 2000
    ads: int = 600
    days: int = 12
    requests_per_user: float = 10.0
    """Median number of requests of a user over all days; activity is log-normal."""
    shown: int = 8
    """Ads shown a request."""
    seed: int = 7
    sequence_strength: float = 1.0
    """0 removes all that a history could teach beyond interests."""
    feature_gap: float = 1.0
    """0 … 1: how much of the intent only searches reveal."""
    cross_surface: float = 0.7
    """0 … 1: how much of the response is shared between surfaces."""
    returning: float = 0.3
    """0 … 1: how many slots go to an ad that the user was shown lately, if it is still live."""
    dim: int = 8
    intent_half_life_days: float = 3.0
    """How fast intents change; if slowly, old events say as much of them as new ones."""

    def __repr__(self) -> str:
        """What a kept world is known by: a law that was fixed once is left out while it is as it was then."""
        said = [own for own in fields(self) if own.name not in _LATER or getattr(self, own.name) != own.default]
        return f"WorldConfig({', '.join(f'{own.name}={getattr(self, own.name)!r}' for own in said)})"

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("ads", 1), ("days", 1), ("shown", 1), ("dim", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidInput(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if self.ads < 2 * self.shown:
            raise InvalidInput(f"{self.ads} ads cannot fill requests of {self.shown}; take at least {2 * self.shown}")
        if not 0 < self.requests_per_user <= _BUSIEST * self.days:
            raise InvalidInput(
                f"requests_per_user is {self.requests_per_user}; it must be above 0, and at most {_BUSIEST} a day: "
                f"{_BUSIEST * self.days} in {self.days} days"
            )
        if not 0 < self.intent_half_life_days < float("inf"):
            raise InvalidInput(f"intent_half_life_days is {self.intent_half_life_days}; it must be positive and finite")
        for name, most in (("feature_gap", 1), ("cross_surface", 1), ("returning", 1), ("sequence_strength", 100)):
            if not 0 <= getattr(self, name) <= most:  # neither holds for NaN
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must lie between 0 and {most}")

    @property
    def end_ms(self) -> int:
        """First millisecond after the last day."""
        return START_MS + self.days * DAY_MS


@dataclass(frozen=True, slots=True)
class _Surfaces:
    bias: Floats
    slope: Floats
    response: Floats  # [S, d]


def generate(config: WorldConfig, tables: Tables, progress: Progress = lambda done, total: None) -> dict[str, int]:
    """Writes catalogue, users, events, impressions and outcomes; returns rows a table.

    Memory follows the chunk of users, not the world. Equal configurations give equal tables. A world that is killed
    leaves no rows, or all of them as soon as the same world is generated again.

    Raises:
        FailedPrecondition: the tables hold rows already; a world cannot be mixed with another log.
    """
    return write_whole(tables, repr(config), lambda aside: _write(config, tables, aside, progress))


def _write(config: WorldConfig, tables: Tables, aside: Tables, progress: Progress) -> dict[str, int]:
    held = [name for name in _TABLES if tables.exists(name)]
    if held:
        raise FailedPrecondition(f"{tables.root} holds {held} already; give another folder for this world, or remove that one")
    rng = np.random.default_rng([config.seed, 0])
    ads, surfaces = make_ads(config, rng), _make_surfaces(config, rng)
    aside.append("catalogue", _catalogue(ads))
    counts = {"catalogue": config.ads}
    for first in range(0, config.users, _CHUNK_USERS):
        size = min(_CHUNK_USERS, config.users - first)
        chunk: dict[str, list[pa.Table]] = {}
        for name, table in _simulate(config, ads, surfaces, first=first, size=size):
            chunk.setdefault(name, []).append(table)
        for name, parts in chunk.items():
            aside.append(name, pa.concat_tables(parts))
            counts[name] = counts.get(name, 0) + sum(part.num_rows for part in parts)
        progress(first + size, config.users)
    return counts


def _make_surfaces(config: WorldConfig, rng: np.random.Generator) -> _Surfaces:
    shared = 1 + 0.3 * rng.normal(size=config.dim)
    private = 1 + 0.9 * rng.normal(size=(len(SURFACES), config.dim))
    return _Surfaces(
        bias=np.array([-1.0, -0.4, -1.6, -0.8, -1.3]),
        slope=np.array([1.0, 1.1, 0.9, 1.2, 0.8]),
        response=config.cross_surface * shared + (1 - config.cross_surface) * private,
    )


def _catalogue(ads: Ads) -> pa.Table:
    keys = np.arange(len(ads.group), dtype=np.int64)
    valid_from = START_MS + ads.from_day * DAY_MS
    return pa.table(
        {
            "ad_id": pa.array(keys.astype(str)),
            "ad_key": keys,
            "valid_from_ms": valid_from,
            "available_ms": valid_from,
            "ad": keys,
            "ad_group": ads.group,
            "campaign": ads.campaign,
            "account": ads.account,
            "tag": ads.tag,
            "bid_floor": ads.bid_floor,
            "truth_until_ms": START_MS + ads.until_day * DAY_MS,
        }
    )


class _Users:
    """A chunk of users: what they want, and the last things they saw."""

    def __init__(self, config: WorldConfig, rng: np.random.Generator, size: int) -> None:
        self.rng, self.half_lives = rng, (60.0, config.intent_half_life_days)
        self.interest = rng.normal(size=(size, config.dim))
        self.intent = rng.normal(size=(size, config.dim))
        self.profile = np.stack(
            [
                np.digitize(self.interest[:, i % config.dim] + 0.6 * rng.normal(size=size), [-1.0, 0.0, 1.0])
                for i in range(4)
            ],
            axis=1,
        )
        self.home = rng.choice(len(SURFACES), size=size, p=[0.45, 0.25, 0.1, 0.12, 0.08])
        self.seen = np.zeros((size, _MEMORY, config.dim))
        self.weight = np.zeros((size, _MEMORY))
        self.ads = np.full((size, _MEMORY), -1, dtype=np.int64)
        self.clock = np.full(size, START_MS, dtype=np.int64)

    def advance(self, active: Ints, now: Ints) -> None:
        """Lets interests and intents of the active users drift until `now`."""
        days = (now - self.clock[active]) / DAY_MS
        for state, half_life in zip((self.interest, self.intent), self.half_lives, strict=True):
            keep = 0.5 ** (days / half_life)[:, None]
            noise = self.rng.normal(size=(len(active), state.shape[1]))
            state[active] = keep * state[active] + np.sqrt(1 - keep**2) * noise
        self.clock[active] = now

    def remember(self, active: Ints, ads: Ints, vectors: Floats, weights: Floats) -> None:
        """Appends impressions of ads [n, K] with vectors [n, K, d] and action weights [n, K], newest last."""
        k = min(weights.shape[1], _MEMORY)
        self.ads[active] = np.concatenate([self.ads[active][:, k:], ads[:, -k:]], axis=1)
        self.seen[active] = np.concatenate([self.seen[active][:, k:], vectors[:, -k:]], axis=1)
        self.weight[active] = np.concatenate([self.weight[active][:, k:], weights[:, -k:]], axis=1)

    def recall(self, active: Ints, slots: int, share: float) -> Ints:
        """For a share of the slots [n, K] one of the ads that were just seen; −1 for the others."""
        drawn = np.take_along_axis(self.ads[active], self.rng.integers(0, _MEMORY, (len(active), slots)), axis=1)
        return np.where(self.rng.random(drawn.shape) < share, drawn, -1)

    def sequence(self, active: Ints, vectors: Floats) -> Floats:
        """Affinity [n, K] of what was just seen to candidate vectors [n, K, d]."""
        decay = np.exp(-np.arange(_MEMORY)[::-1] / 6)
        affinity = np.einsum("nm,nmd,nkd->nk", self.weight[active] * decay, self.seen[active], vectors)
        return np.asarray(affinity, dtype=np.float64)


def _simulate(
    config: WorldConfig, ads: Ads, surfaces: _Surfaces, *, first: int, size: int
) -> Iterator[tuple[str, pa.Table]]:
    rng = np.random.default_rng([config.seed, 1 + first])
    users = _Users(config, rng, size)
    yield "users", _profiles(users, first)
    times = _request_times(config, rng, users.home)
    for turn in range(max(map(len, times))):
        active = np.array([u for u in range(size) if turn < len(times[u])], dtype=np.int64)
        now = np.array([times[u][turn] for u in active], dtype=np.int64)
        users.advance(active, now)
        yield "events", _searches(config, ads, users, active, now, first=first, turn=turn)
        yield from _requests(config, ads, surfaces, users, active, now, first=first, turn=turn)


def _profiles(users: _Users, first: int) -> pa.Table:
    keys = first + np.arange(len(users.home), dtype=np.int64)
    columns = {f"u{i}": users.profile[:, i].astype(np.int64) for i in range(4)}
    zeros = np.zeros(len(keys), dtype=np.int64)
    ids = pa.array(keys.astype(str))
    return pa.table({"user_id": ids, "user_key": keys, "valid_from_ms": zeros, "available_ms": zeros, "user": keys, **columns})


def _request_times(config: WorldConfig, rng: np.random.Generator, home: Ints) -> list[Ints]:
    counts = 1 + rng.poisson(config.requests_per_user * rng.lognormal(sigma=0.8, size=len(home)))
    times = []
    for user, count in enumerate(np.minimum(counts, _BUSIEST * config.days)):
        day = rng.integers(0, config.days, count)
        hour = (rng.normal(loc=13 + 2 * home[user], scale=4.5, size=count)) % 24
        jitter = rng.integers(0, 1000, count)
        times.append(np.sort(START_MS + day * DAY_MS + (hour * HOUR_MS).astype(np.int64) // 1000 * 1000 + jitter))
    return times


def _searches(
    config: WorldConfig, ads: Ads, users: _Users, active: Ints, now: Ints, *, first: int, turn: int
) -> pa.Table:
    """Some users searched minutes before: the ad they found is close to their intent."""
    searching = users.rng.random(len(active)) < 0.5
    who, ago = active[searching], users.rng.integers(60_000, 30 * 60_000, searching.sum())
    when = np.maximum(now[searching] - ago, START_MS)
    wish = config.feature_gap * users.intent[who] + (1 - config.feature_gap) * users.interest[who]
    taste = 2.5 * wish @ ads.vector.T + users.rng.gumbel(size=(len(who), config.ads))
    day = ((when - START_MS) // DAY_MS)[:, None]
    found = np.where((ads.from_day <= day) & (day < ads.until_day), taste, -np.inf).argmax(1)
    keys = first + who
    ids = [f"s{key}-{turn}".encode().ljust(16, b"\0") for key in keys]
    return pa.table(
        {
            "event_id": pa.array(ids, pa.binary(16)),
            "source": pa.array(["search"] * len(who), pa.string()),
            "user_id": pa.array(keys.astype(str), pa.string()),
            "user_key": keys,
            "ad_key": found,
            "surface": pa.nulls(len(who), pa.string()),
            "event_ms": when,
            "available_ms": when,
        }
    )


def _requests(
    config: WorldConfig,
    ads: Ads,
    surfaces: _Surfaces,
    users: _Users,
    active: Ints,
    now: Ints,
    *,
    first: int,
    turn: int,
) -> Iterator[tuple[str, pa.Table]]:
    rng, n, k = users.rng, len(active), config.shown
    away = rng.random(n) >= 0.8
    surface = np.where(away, rng.integers(0, len(SURFACES), n), users.home[active])
    day = np.minimum((now - START_MS) // DAY_MS, config.days - 1)
    slot = (np.arange(k) + rng.random((n, k))) / k
    place = np.minimum(day[:, None] + slot, np.nextafter(day[:, None] + 1.0, 0))  # a sum may be rounded up to the next day
    shown = np.searchsorted(ads.day_cdf, place, side="right") % config.ads
    again = users.recall(active, k, config.returning)
    shown = np.where((again >= 0) & (day[:, None] < ads.until_day[again]), again, shown)
    logits = _click_logits(config, ads, surfaces, users, active, surface, day, shown)
    truth = {"click": _sigmoid(logits), **_after_click(config, ads, users, active, shown)}
    outcome = {name: rng.random((n, k)) < p for name, p in truth.items()}
    for name in ("conversion", "purchase"):
        outcome[name] &= outcome["click"]
    action = np.where(outcome["click"], np.where(outcome["conversion"], 1.6, 0.6), -0.25)
    users.remember(active, shown, ads.vector[shown], action)
    first_of_ad = np.array([np.isin(np.arange(k), np.unique(row, return_index=True)[1]) for row in shown])
    rows = np.nonzero(first_of_ad)
    impressions = _impressions(first + active, surface, now, shown, rows, turn, truth)
    yield "impressions", impressions
    yield "outcomes", _outcomes(rng, impressions, {name: hit[rows] for name, hit in outcome.items()})


def _click_logits(
    config: WorldConfig,
    ads: Ads,
    surfaces: _Surfaces,
    users: _Users,
    active: Ints,
    surface: Ints,
    day: Ints,
    shown: Ints,
) -> Floats:
    v = ads.vector[shown]
    felt = v * surfaces.response[surface][:, None, :]
    interest = np.einsum("nd,nkd->nk", users.interest[active], felt)
    intent = np.einsum("nd,nkd->nk", users.intent[active], felt)
    profile = 0.15 * (users.profile[active, 0][:, None] - 1.5) * (ads.tag[shown] % 3 - 1)
    sequence = 0.35 * config.sequence_strength * users.sequence(active, v)
    score = 0.9 * interest + 0.9 * intent + ads.quality[day[:, None], shown] + profile + sequence
    logits = surfaces.bias[surface][:, None] + surfaces.slope[surface][:, None] * score
    return np.asarray(logits, dtype=np.float64)


def _after_click(config: WorldConfig, ads: Ads, users: _Users, active: Ints, shown: Ints) -> dict[str, Floats]:
    """True probabilities [n, K] of what follows a click, given the click."""
    wish = users.interest[active] + users.intent[active]
    fit = np.einsum("nd,nkd->nk", wish, ads.conversion[shown])
    price = 0.3 * np.log(ads.bid_floor[shown])
    return {"conversion": _sigmoid(-0.9 + 0.8 * fit), "purchase": _sigmoid(-2.2 + 0.8 * fit - price)}


def _impressions(
    user: Ints, surface: Ints, now: Ints, shown: Ints, rows: tuple[Ints, ...], turn: int, truth: dict[str, Floats]
) -> pa.Table:
    request, position = rows
    keys, ads, when = user[request], shown[rows], now[request]
    names = np.array(SURFACES)[surface[request]]
    request_ids = np.char.add(np.char.add("r", keys.astype(str)), f"-{turn}")
    columns = {
        "example_id": pa.array(example_ids(request_ids.tolist(), ads, names.tolist(), when), pa.binary(16)),
        "request_id": pa.array(request_ids),
        "user_id": pa.array(keys.astype(str)),
        "user_key": keys,
        "ad_id": pa.array(ads.astype(str)),
        "ad_key": ads,
        "surface": pa.array(names),
        "event_ms": when,
        "available_ms": when,
        "position": position.astype(np.int32),
    }
    return pa.table({**columns, **{f"truth_{name}": p[rows] for name, p in truth.items()}})


_DELAY_HOURS = {"click": (0.01, 0.5), "conversion": (3.0, 1.0), "purchase": (10.0, 1.0)}
"""Objective → median hours and log standard deviation of the delay."""


def _outcomes(rng: np.random.Generator, impressions: pa.Table, hits: dict[str, npt.NDArray[np.bool_]]) -> pa.Table:
    when = impressions["event_ms"].to_numpy()
    parts = []
    for name, hit in hits.items():
        median, sigma = _DELAY_HOURS[name]
        hours = median * rng.lognormal(sigma=sigma, size=int(hit.sum()))
        at = when[hit] + np.maximum(1, (hours * HOUR_MS).astype(np.int64))
        parts.append(
            pa.table(
                {
                    "example_id": impressions["example_id"].filter(pa.array(hit)),
                    "objective": pa.array([name] * len(at), pa.string()),
                    "occurred_ms": at,
                    "available_ms": at,
                    "value": np.ones(len(at)),
                }
            )
        )
    return pa.concat_tables(parts)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float64)
