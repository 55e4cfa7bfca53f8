"""Reads what is known of one user's pairs with N ads, from one wide row.

Knows the order of levels and ages. Does not know models: nothing here can run one. Does not know transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from feature_store.batch import Array
from services.solaris.lifetimes import (
    USER_FIELD,
    Level,
    Lifetime,
    Lifetimes,
    ad_field,
    group_field,
    row_key,
)
from services.solaris.rows import Ints, Table, mean_table, pair_table, quantize

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
NUM_LEVELS = len(Level)
META = 3
"""Columns of pair_meta: age in seconds, vectors averaged, similarity."""


class WideRows(Protocol):
    """The part of the online store that is read here."""

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of fields of one row."""


class Refused(NamedTuple):
    """Rows that were there and were not used, by reason."""

    space: int = 0
    """Of another coordinate system."""
    future: int = 0
    """Written after the instant of the read."""
    expired: int = 0
    """Past their hard age."""
    unreadable: int = 0
    """Of another format or width."""

    def plus(self, other: Refused) -> Refused:
        """Counts of both."""
        return Refused(*(a + b for a, b in zip(self, other, strict=True)))


class PairRead(NamedTuple):
    """One embedding an ad, and where it came from."""

    vectors_ND: npt.NDArray[np.int8]
    scales_N: npt.NDArray[np.float32]
    levels_N: npt.NDArray[np.int32]
    meta_N3: npt.NDArray[np.float32]
    computed_ms_N: npt.NDArray[np.int64]
    """Instant of the pair's own row where the level is exact, else 0."""
    stale: tuple[tuple[int, int], ...]
    """Position and surface index of each ad whose own row is past its soft age: used, and worth computing anew."""
    model_version: str
    """Version that wrote the newest row used; empty if none."""
    refused: Refused

    @property
    def level_counts(self) -> tuple[int, ...]:
        """Ads at each level; they add up to N."""
        return tuple(np.bincount(self.levels_N, minlength=NUM_LEVELS).tolist())

    def tensors(self) -> dict[str, Array]:
        """By their names in the feature batch."""
        return {
            "pair_q": self.vectors_ND,
            "pair_scale": self.scales_N,
            "pair_level": self.levels_N,
            "pair_meta": self.meta_N3,
        }


def nothing(count: int, dim: int) -> PairRead:
    """What is known when the store says nothing: the default level for all."""
    return PairRead(
        vectors_ND=np.zeros((count, dim), dtype=np.int8),
        scales_N=np.zeros(count, dtype=np.float32),
        levels_N=np.full(count, Level.DEFAULT, dtype=np.int32),
        meta_N3=np.zeros((count, META), dtype=np.float32),
        computed_ms_N=np.zeros(count, dtype=np.int64),
        stale=(),
        model_version="",
        refused=Refused(),
    )


class PairReader:
    """Resolves pairs exact → ad group → user → default."""

    def __init__(self, store: WideRows, lifetimes: Lifetimes) -> None:
        self._store = store
        self._lifetimes = lifetimes

    def read(
        self,
        user_key: int,
        ad_keys: Sequence[int],
        group_keys: Sequence[int | None],
        *,
        as_of_ms: int,
        space_id: bytes,
        dim: int,
    ) -> PairRead:
        """One read of the store for all ads.

        A row counts only if it was available by `as_of_ms`, bears `space_id` and `dim`, and is younger than its hard age.

        Args:
            user_key: key of the user.
            ad_keys: keys of N ads.
            group_keys: their ad groups, None where unknown.
            as_of_ms: instant of the read.
            space_id: coordinate system of the reader's model, 8 bytes.
            dim: width of an embedding.
        """
        if not ad_keys:
            return nothing(0, dim)
        groups = sorted({group for group in group_keys if group is not None})
        fields = [*map(ad_field, ad_keys), *map(group_field, groups), USER_FIELD]
        values = self._store.hget_many(row_key(space_id, user_key), fields)
        sieve, n, life = Sieve(as_of_ms, space_id), len(ad_keys), self._lifetimes
        pairs, exact_N = pair_table(values[:n], dim=dim)
        exact_N = sieve.usable(pairs, exact_N, life.pair)
        means, known = mean_table(values[n:], dim=dim)
        group_ok = sieve.usable(means[:-1], known[:-1], life.ad_group)
        user_ok = sieve.usable(means[-1:], known[-1:], life.user)
        unreadable = sum(v is not None for v in values) - sieve.known
        usable = np.concatenate([group_ok, user_ok]) & (means["count"] >= life.min_count)
        position: dict[int | None, int] = {group: i for i, group in enumerate(groups)}
        group_N = np.array([position.get(group, -1) for group in group_keys], dtype=np.int64)
        return self._read(
            pairs, exact_N, means, StandIn.of(group_N, (group_N >= 0) & usable[group_N], len(groups), usable[-1]),
            as_of_ms, sieve.refused._replace(unreadable=unreadable),
        )  # fmt: skip

    def _read(
        self, pairs: Table, exact_N: Bools, means: Table, standin: StandIn, as_of_ms: int, refused: Refused
    ) -> PairRead:  # fmt: skip
        vectors, scales, levels, meta = laid_over(pairs, exact_N, means, standin, as_of_ms)
        stale_N = exact_N & (as_of_ms - pairs["computed_ms"] >= self._lifetimes.pair.soft_ms)
        averaged_N = standin.usable_N & ~exact_N
        return PairRead(
            vectors_ND=vectors,
            scales_N=scales,
            levels_N=levels,
            meta_N3=meta,
            computed_ms_N=np.where(exact_N, pairs["computed_ms"], 0),
            stale=tuple((int(i), int(pairs["surface"][i])) for i in np.flatnonzero(stale_N)),
            model_version=_newest(pairs[exact_N], means[np.unique(standin.source_N[averaged_N])]),
            refused=refused,
        )


class StandIn(NamedTuple):
    """The mean that stands in for each of N pairs whose own row is not usable."""

    source_N: Ints
    """Row of the table of means."""
    usable_N: Bools
    level_N: npt.NDArray[np.int32]
    """Level, where usable."""

    @classmethod
    def of(cls, group: Ints, group_ok: Bools, user: Ints | int, user_ok: Bools | np.bool_) -> StandIn:
        """The ad group's mean where it is usable, else the user's: rows of the table of means, and whether usable."""
        return cls(
            np.where(group_ok, group, user),
            group_ok | user_ok,
            np.where(group_ok, Level.AD_GROUP, Level.USER).astype(np.int32),
        )


def laid_over(
    pairs: Table, exact_N: Bools, means: Table, standin: StandIn, as_of_ms: Ints | int
) -> tuple[npt.NDArray[np.int8], Floats, npt.NDArray[np.int32], Floats]:
    """Lays the pairs' own rows [N], where exact, over the means that stand in for them: vectors, scales, levels, meta.

    The bits of a row depend on the row alone: a replay lays millions over at once and gets what was served.
    """
    steps, scales = quantize(means["mean"])
    source_N = standin.source_N
    vectors_ND, scales_N = steps[source_N], scales[source_N]
    vectors_ND[exact_N], scales_N[exact_N] = pairs["vector"][exact_N], pairs["scale"][exact_N]
    stamp_N = np.where(exact_N, pairs["computed_ms"], means["computed_ms"][source_N])
    meta_N3 = np.zeros((len(exact_N), META), dtype=np.float32)
    meta_N3[:, 0] = (as_of_ms - stamp_N) / 1000.0
    meta_N3[:, 1] = np.where(exact_N, 1, means["count"][source_N])
    levels_N = np.where(exact_N, np.int32(Level.EXACT), standin.level_N)
    default_N = ~(exact_N | standin.usable_N)
    vectors_ND[default_N], scales_N[default_N] = 0, 0.0
    levels_N[default_N], meta_N3[default_N] = Level.DEFAULT, 0.0
    return vectors_ND, scales_N, levels_N, meta_N3


class Sieve:
    """Lets through the rows that may be used, and counts the others."""

    def __init__(self, as_of_ms: Ints | int, space_id: bytes) -> None:
        """`as_of_ms` is the instant of the read, one for all rows or one each."""
        self._as_of_ms = as_of_ms
        self._space = np.void(space_id)
        self.refused = Refused()
        self.known = 0
        """Readable rows seen."""

    def usable(self, rows: Table, known: Bools, lifetime: Lifetime) -> Bools:
        """Which rows may be used, of those that are readable."""
        foreign: Bools = known & (rows["space"] != self._space)
        future = known & ~foreign & (rows["available_ms"] > self._as_of_ms)
        old = self._as_of_ms - rows["computed_ms"] >= lifetime.hard_ms
        expired = known & ~foreign & ~future & old
        counts = Refused(
            space=int(foreign.sum()), future=int(future.sum()), expired=int(expired.sum())
        )
        self.refused = self.refused.plus(counts)
        self.known += int(known.sum())
        return np.asarray(known & ~foreign & ~future & ~expired)


def _newest(pairs: Table, means: Table) -> str:
    newest, version = -1, b""
    for rows in (pairs, means):
        if len(rows):
            row = rows[int(np.argmax(rows["computed_ms"]))]
            if int(row["computed_ms"]) > newest:
                newest, version = int(row["computed_ms"]), bytes(row["version"])
    return version.decode()
