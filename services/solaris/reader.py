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
from services.solaris.rows import mean_table, pair_table, quantize

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
        sieve = _Sieve(as_of_ms, space_id)
        n = len(ad_keys)
        pairs, exact_N = sieve.usable(
            *pair_table(values[:n], dim=dim), values[:n], self._lifetimes.pair
        )
        means, known = mean_table(values[n:], dim=dim)
        life = self._lifetimes
        _, group_ok = sieve.usable(means[:-1], known[:-1], values[n:-1], life.ad_group)
        _, user_ok = sieve.usable(means[-1:], known[-1:], values[-1:], life.user)
        usable = np.concatenate([group_ok, user_ok]) & (means["count"] >= life.min_count)
        position = {group: i for i, group in enumerate(groups)}
        group_N = np.array([position.get(g, -1) if g is not None else -1 for g in group_keys])
        source_N = np.where((group_N >= 0) & usable[group_N], group_N, len(groups))
        return self._assembled(pairs, exact_N, means, usable, source_N, as_of_ms, sieve.refused)

    def _assembled(
        self,
        pairs: npt.NDArray[np.void],
        exact_N: npt.NDArray[np.bool_],
        means: npt.NDArray[np.void],
        usable: npt.NDArray[np.bool_],
        source_N: npt.NDArray[np.int64],
        as_of_ms: int,
        refused: Refused,
    ) -> PairRead:
        """Lays the pair's own row over the mean that stands in for it; `source_N` points into `means`, the user's last."""
        averaged_N = usable[source_N] & ~exact_N
        default_N = ~averaged_N & ~exact_N
        mean_level_N = np.where(source_N == len(means) - 1, Level.USER, Level.AD_GROUP)
        levels_N = np.select([exact_N, averaged_N], [Level.EXACT, mean_level_N], Level.DEFAULT)
        steps, scales = quantize(means["mean"])
        stamp_N = np.where(exact_N, pairs["computed_ms"], means["computed_ms"][source_N])
        count_N = np.where(exact_N, 1, means["count"][source_N])
        meta_N3 = np.stack([(as_of_ms - stamp_N) / 1000.0, count_N, np.zeros(len(stamp_N))], axis=1)
        vectors_ND = np.where(exact_N[:, None], pairs["vector"], steps[source_N])
        scales_N = np.where(exact_N, pairs["scale"], scales[source_N])
        vectors_ND[default_N], scales_N[default_N], meta_N3[default_N] = 0, 0.0, 0.0
        stale_N = exact_N & (as_of_ms - pairs["computed_ms"] >= self._lifetimes.pair.soft_ms)
        return PairRead(
            vectors_ND=vectors_ND.astype(np.int8),
            scales_N=scales_N.astype(np.float32),
            levels_N=levels_N.astype(np.int32),
            meta_N3=meta_N3.astype(np.float32),
            computed_ms_N=np.where(exact_N, pairs["computed_ms"], 0),
            stale=tuple((int(i), int(pairs["surface"][i])) for i in np.flatnonzero(stale_N)),
            model_version=_newest(pairs[exact_N], means[np.unique(source_N[averaged_N])]),
            refused=refused,
        )


class _Sieve:
    """Lets through the rows that may be used, and counts the others."""

    def __init__(self, as_of_ms: int, space_id: bytes) -> None:
        self._as_of_ms = as_of_ms
        self._space = np.void(space_id)
        self.refused = Refused()

    def usable(
        self,
        rows: npt.NDArray[np.void],
        known: npt.NDArray[np.bool_],
        values: Sequence[bytes | None],
        lifetime: Lifetime,
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
        foreign = known & (rows["space"] != self._space)
        future = known & ~foreign & (rows["available_ms"] > self._as_of_ms)
        old = self._as_of_ms - rows["computed_ms"] >= lifetime.hard_ms
        expired = known & ~foreign & ~future & old
        present = sum(value is not None for value in values)
        counts = Refused(
            space=int(foreign.sum()),
            future=int(future.sum()),
            expired=int(expired.sum()),
            unreadable=present - int(known.sum()),
        )
        self.refused = self.refused.plus(counts)
        return rows, known & ~foreign & ~future & ~expired


def _newest(pairs: npt.NDArray[np.void], means: npt.NDArray[np.void]) -> str:
    newest, version = -1, b""
    for rows in (pairs, means):
        if len(rows):
            row = rows[int(np.argmax(rows["computed_ms"]))]
            if int(row["computed_ms"]) > newest:
                newest, version = int(row["computed_ms"]), bytes(row["version"])
    return version.decode()
