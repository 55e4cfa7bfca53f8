"""Writes computed pairs into a user's wide row, and keeps the means over them.

Knows rows and ages. Does not know models, streams or clocks.

Writing the same (pair, computed_ms) again, or an older one over a newer one, changes nothing: a task that was delivered
twice counts once in every mean. One write of the store carries a user's pairs and means together. Two workers that write
one user at the same moment keep every pair, but the share of one of them in the means may be lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from services.solaris import rows
from services.solaris.lifetimes import USER_FIELD, Lifetimes, ad_field, group_field, row_key
from services.solaris.rows import Pair, Table


class WideRowStore(Protocol):
    """The part of the online store that is written here."""

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of fields of one row."""

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        """Write fields of one row at once."""


class NewPair(NamedTuple):
    """A pair that was computed."""

    user_key: int
    ad_key: int
    group_key: int | None
    """Ad group; None where unknown: such a pair counts in the user's mean only."""
    pair: Pair


class PairWriter:
    """Writes one coordinate system's pairs."""

    def __init__(
        self, store: WideRowStore, lifetimes: Lifetimes, *, space_id: bytes, dim: int
    ) -> None:
        self._store = store
        self._lifetimes = lifetimes
        self._space_id = space_id
        self._dim = dim

    def write(self, pairs: Iterable[NewPair]) -> list[NewPair]:
        """Writes pairs, one read and one write a user.

        Returns:
            Those that were new; the others had been written before, or a newer one had.
        """
        by_user: dict[int, list[NewPair]] = defaultdict(list)
        for new in pairs:
            by_user[new.user_key].append(new)
        return [
            new for user_key, mine in by_user.items() for new in self._write_user(user_key, mine)
        ]

    def fresh(
        self, user_key: int, ad_keys: Sequence[int], *, now_ms: int, model_version: str
    ) -> list[bool]:
        """Which pairs need no computing: the same model wrote them, and they are not past their soft age."""
        stored, known = self._stored(user_key, ad_keys)
        same = known & (stored["version"] == model_version.encode())
        young = now_ms - stored["computed_ms"] < self._lifetimes.pair.soft_ms
        return [bool(is_fresh) for is_fresh in same & young]

    def _write_user(self, user_key: int, pairs: list[NewPair]) -> list[NewPair]:
        newest = _newest_of_each(pairs)
        stored, known = self._stored(user_key, [new.ad_key for new in newest])
        computed_ms = np.array([new.pair.computed_ms for new in newest])
        fresh = np.flatnonzero(~known | (stored["computed_ms"] < computed_ms))
        if not len(fresh):
            return []
        added = [newest[i] for i in fresh]
        table = rows.pair_rows([new.pair for new in added], dim=self._dim)
        fields = [ad_field(new.ad_key) for new in added]
        values = dict(zip(fields, rows.values_of(table), strict=True))
        values |= self._means(user_key, [new.group_key for new in added], table)
        self._store.hset_many(
            row_key(self._space_id, user_key), values, ttl_ms=self._lifetimes.row_ms
        )
        return added

    def _means(
        self, user_key: int, group_keys: Sequence[int | None], table: Table
    ) -> dict[str, bytes]:
        life = self._lifetimes
        members: dict[str, list[int]] = {USER_FIELD: list(range(len(table)))}
        for i, group in enumerate(group_keys):
            if group is not None:
                members.setdefault(group_field(group), []).append(i)
        stored = self._store.hget_many(row_key(self._space_id, user_key), list(members))
        means, _ = rows.mean_table(stored, dim=self._dim)
        half_life_ms = np.full(len(members), life.ad_group_half_life_ms, dtype=np.float64)
        half_life_ms[0] = life.user_half_life_ms
        starts = np.cumsum([0, *map(len, members.values())])[:-1]
        order = [i for mine in members.values() for i in mine]
        grown = rows.grow(means, table[order], starts, half_life_ms=half_life_ms)
        return dict(zip(members, rows.values_of(grown), strict=True))

    def _stored(self, user_key: int, ad_keys: Sequence[int]) -> tuple[Table, npt.NDArray[np.bool_]]:
        fields = [ad_field(ad_key) for ad_key in ad_keys]
        values = self._store.hget_many(row_key(self._space_id, user_key), fields)
        stored, known = rows.pair_table(values, dim=self._dim)
        return stored, known & (stored["space"] == np.void(self._space_id))


def _newest_of_each(pairs: list[NewPair]) -> list[NewPair]:
    """One pair an ad: the newest, so that a row never goes back in time within one write.

    In an order of its own, so that sums round alike however a batch was put together.
    """
    best: dict[int, NewPair] = {}
    for new in pairs:
        held = best.get(new.ad_key)
        if held is None or new.pair.computed_ms > held.pair.computed_ms:
            best[new.ad_key] = new
    return sorted(best.values(), key=lambda new: (new.pair.computed_ms, new.ad_key))
