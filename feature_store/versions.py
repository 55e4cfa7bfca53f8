"""Looks up the version of a user or an ad that was in force at an instant.

Knows keys and times. Does not know what a version says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from feature_store.asof import Queries, Segments, before

Ints = npt.NDArray[np.int64]


class VersionIndex:
    """Rows of a versioned table, sorted by (key, when they came into force).

    In force at t is, of the rows that are valid and available by t, the one that is valid from the latest instant. So a
    row comes into force at the later of its two times, unless one that is valid from later was known before: then never.
    """

    def __init__(self, keys: Ints, valid_from_ms: Ints, available_ms: Ints) -> None:
        since = np.maximum(valid_from_ms, available_ms)
        order = np.lexsort((valid_from_ms, since, keys))
        self.order = order[_not_outdated(keys[order], valid_from_ms[order])]
        """Table rows that are ever in force, in index order."""
        self.keys: Ints
        """[k] sorted keys that ever have a version."""
        self.keys, start = np.unique(keys[self.order], return_index=True)
        stop = np.append(start[1:], len(self.order)).astype(np.int64)
        none = np.full(len(self.order), -1, dtype=np.int64)
        self._segments = Segments(
            start.astype(np.int64), stop, since[self.order], since[self.order], none
        )

    @property
    def spans(self) -> tuple[Ints, Ints]:
        """[k] first place and end of each key's versions in `order`."""
        return self._segments.start, self._segments.stop

    @property
    def since_ms(self) -> Ints:
        """When each version of `order` comes into force; ascending within a key."""
        return self._segments.event_ms

    def at(self, keys: Ints, at_ms: Ints) -> Ints:
        """[q] table row in force for each key at each instant; -1 where there is none."""
        segment = positions(self.keys, keys)
        found = before(self._segments, Queries(segment, at_ms + 1, segment)) - 1
        first = (
            self._segments.start[np.maximum(segment, 0)]
            if len(self.keys)
            else np.zeros(len(keys), np.int64)
        )
        known = (segment >= 0) & (found >= first)
        return np.where(known, self.order[np.maximum(found, 0)] if len(self.order) else -1, -1)


def _not_outdated(keys: Ints, valid_from_ms: Ints) -> npt.NDArray[np.bool_]:
    """Of rows sorted by key: no earlier row of the key is valid from later."""
    _, key_rank = np.unique(keys, return_inverse=True)
    _, time_rank = np.unique(valid_from_ms, return_inverse=True)
    place = key_rank.astype(np.int64) * (len(keys) + 1) + time_rank
    return (
        np.asarray(place == np.maximum.accumulate(place)) if len(keys) else np.zeros(0, dtype=bool)
    )


def positions(sorted_keys: Ints, keys: Ints) -> Ints:
    """[q] where each key lies among sorted unique keys; -1 where it does not."""
    if not len(sorted_keys):
        return np.full(len(keys), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == keys, at, -1)
