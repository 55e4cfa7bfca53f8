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

from services.solaris import rows
from services.solaris.lifetimes import USER_FIELD, Lifetimes, ad_field, group_field, row_key
from services.solaris.rows import Pair


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
        stored = self._pairs(user_key, ad_keys)
        soft_ms = self._lifetimes.pair.soft_ms
        return [
            pair is not None
            and pair.model_version == model_version
            and now_ms - pair.computed_ms < soft_ms
            for pair in stored
        ]

    def _write_user(self, user_key: int, pairs: list[NewPair]) -> list[NewPair]:
        newest = _newest_of_each(pairs)
        stored = self._pairs(user_key, [new.ad_key for new in newest])
        added = [
            new
            for new, old in zip(newest, stored, strict=True)
            if old is None or old.computed_ms < new.pair.computed_ms
        ]
        if not added:
            return []
        values = {ad_field(new.ad_key): rows.encode_pair(new.pair) for new in added}
        values |= self._means(user_key, added)
        self._store.hset_many(
            row_key(self._space_id, user_key), values, ttl_ms=self._lifetimes.row_ms
        )
        return added

    def _means(self, user_key: int, added: list[NewPair]) -> dict[str, bytes]:
        life = self._lifetimes
        members: dict[str, list[Pair]] = {USER_FIELD: [new.pair for new in added]}
        for new in added:
            if new.group_key is not None:
                members.setdefault(group_field(new.group_key), []).append(new.pair)
        stored = self._store.hget_many(row_key(self._space_id, user_key), list(members))
        values: dict[str, bytes] = {}
        for (field, pairs), value in zip(members.items(), stored, strict=True):
            half_life = (
                life.user_half_life_ms if field == USER_FIELD else life.ad_group_half_life_ms
            )
            mean = None if value is None else rows.decode_mean(value, dim=self._dim)
            values[field] = rows.encode_mean(rows.add(mean, pairs, half_life_ms=half_life))
        return values

    def _pairs(self, user_key: int, ad_keys: Sequence[int]) -> list[Pair | None]:
        fields = [ad_field(ad_key) for ad_key in ad_keys]
        values = self._store.hget_many(row_key(self._space_id, user_key), fields)
        found = [None if v is None else rows.decode_pair(v, dim=self._dim) for v in values]
        return [p if p is not None and p.space_id == self._space_id else None for p in found]


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
