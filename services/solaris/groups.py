"""Knows the ad group of each ad: asks the online store once in a while and remembers.

Knows ads' rows. Does not know users or pairs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

MAX_ADS = 1_000_000
KEEP_SECONDS = 300.0
"""An ad that moves to another group is found within this time; one that is unknown, within `UNKNOWN_SECONDS`."""
UNKNOWN_SECONDS = 5.0


class Rows(Protocol):
    """The part of the online store that is read here."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of rows."""


class _Known(NamedTuple):
    group: int | None
    until: float


class AdGroups:
    """Ad key → ad group key, in one multi-get for those not remembered."""

    def __init__(
        self,
        store: Rows,
        *,
        row_key: Callable[[int], str],
        group_of: Callable[[bytes], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._row_key, self._group_of = store, row_key, group_of
        self._clock = clock
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, ad_keys: Sequence[int]) -> list[int | None]:
        """The group of each ad, None where it has none or is unknown."""
        now = self._clock()
        with self._lock:
            found = {
                ad: known for ad in ad_keys if (known := self._known.get(ad)) and known.until > now
            }
        missing = [ad for ad in dict.fromkeys(ad_keys) if ad not in found]
        if missing:
            found |= self._fetch(missing, now)
        return [found[ad].group for ad in ad_keys]

    def _fetch(self, ad_keys: Sequence[int], now: float) -> dict[int, _Known]:
        values = self._store.get_many([self._row_key(ad) for ad in ad_keys])
        fetched: dict[int, _Known] = {}
        for ad, value in zip(ad_keys, values, strict=True):
            group = None if value is None else self._group_of(value)
            keep = UNKNOWN_SECONDS if value is None else KEEP_SECONDS
            fetched[ad] = _Known(group, now + keep)
        with self._lock:
            self._known |= fetched
            while len(self._known) > MAX_ADS:
                self._known.popitem(last=False)
        return fetched
