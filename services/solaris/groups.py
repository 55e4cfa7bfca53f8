"""Knows the ad group of each ad: asks the online store once in a while and remembers.

Knows ads' rows. Does not know users or pairs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from feature_store.ids import ABSENT
from feature_store.layout import Layout, column_index
from feature_store.packing import ad_key, ad_shape

NEWEST = 2**62
"""Later than any version: an ad's group is that of its newest row."""
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
        self, store: Rows, layout: Layout, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._shape, self._clock = store, ad_shape(layout), clock
        self._column = column_index(layout.ad_ids, "ad_group")
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, ad_keys: Sequence[int]) -> list[int | None]:
        """The group of each ad, None where it has none or is unknown."""
        if self._column is None:
            return [None] * len(ad_keys)
        now = self._clock()
        with self._lock:
            held = list(map(self._known.get, ad_keys))
        if all([known is not None and known.until > now for known in held]):
            return [known.group for known in held if known is not None]
        found = dict(zip(ad_keys, held, strict=True))
        missing = [ad for ad, known in found.items() if known is None or known.until <= now]
        found |= self._fetch(missing, now)
        return [known.group if (known := found[ad]) is not None else None for ad in ad_keys]

    def _fetch(self, ad_keys: Sequence[int], now: float) -> dict[int, _Known]:
        values = self._store.get_many([ad_key(ad) for ad in ad_keys])
        ids, _, known = self._shape.decode(values, np.array(ad_keys, dtype=np.int64), NEWEST)
        fetched = {
            ad: _Known(
                None if group == ABSENT else group,
                now + (KEEP_SECONDS if is_known else UNKNOWN_SECONDS),
            )
            for ad, group, is_known in zip(
                ad_keys, ids[:, self._column].tolist(), known.tolist(), strict=True
            )
        }
        with self._lock:
            self._known |= fetched
            while len(self._known) > MAX_ADS:
                self._known.popitem(last=False)
        return fetched
