"""Reads the change log of pairs as of any instant: the pair features of training rows that no server ever answered.

Knows the `pairs` table. Does not know models. What was written is applied in the order in which it became available, by the
very writer and reader that serve: replay and serving agree to the byte, and no row is seen before it was available.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from feature_store.ids import ABSENT
from feature_store.layout import column_index
from feature_store.replay import Replay
from feature_store.transfer import Pairs
from services.solaris.lifetimes import Lifetimes, row_key
from services.solaris.reader import PairRead, PairReader, nothing
from services.solaris.rows import NO_SURFACE, Pair
from services.solaris.writer import NewPair, PairWriter, WideRowStore

Keys = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


class MemoryRows:
    """Wide rows of one user at a time, in memory."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, bytes]] = {}

    def hget_many(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Values of fields of one row."""
        row = self._rows.get(key, {})
        return [row.get(field) for field in fields]

    def of(self, key: str) -> Mapping[str, bytes]:
        """All fields of one row."""
        return self._rows.get(key, {})

    def hset_many(
        self, key: str, values: Mapping[str, bytes], *, ttl_ms: int | None = None
    ) -> None:
        """Write fields of one row; nothing expires by itself: readers judge ages."""
        self._rows.setdefault(key, {}).update(values)


class PairReplay:
    """One coordinate system's log."""

    def __init__(
        self, log: pa.Table, *, space_id: bytes, dim: int, lifetimes: Lifetimes | None = None
    ) -> None:
        """Takes rows of the `pairs` table, in any order; rows of other spaces are left out, repeated ones count once."""
        self._space_id, self._dim = space_id, dim
        self._lifetimes = lifetimes or Lifetimes()
        self._written: dict[int, list[NewPair]] = defaultdict(list)
        for row in log.to_pylist():
            if row["space_id"] == space_id:
                self._written[row["user_key"]].append(_new_pair(row))
        for pairs in self._written.values():
            pairs.sort(key=_availability)

    def read(self, user_key: Keys, ad_key: Keys, group_key: Keys, as_of_ms: Keys) -> Pairs:
        """Pair embeddings of n rows.

        Args:
            user_key: [n] users.
            ad_key: [n] ads.
            group_key: [n] their ad groups, ABSENT where there is none.
            as_of_ms: [n] instants of the reads; in any order.
        """
        out = nothing(len(user_key), self._dim).tensors()
        for rows, read in self._reads(user_key, ad_key, group_key, as_of_ms):
            for name, values in read.tensors().items():
                out[name][rows] = values
        return Pairs(out["pair_q"], out["pair_scale"], out["pair_level"], out["pair_meta"])  # type: ignore[arg-type]  # dtypes are those of `nothing`

    def materialize(
        self, store: WideRowStore, *, until_ms: int, progress: Progress = lambda done, total: None
    ) -> int:
        """Writes every user's row as it stood at an instant into an online store, which then serves on from there.

        Returns:
            Users written.
        """
        written = 0
        for done, user_key in enumerate(self._written):
            mine = self._of_user(user_key)
            mine.at(until_ms)
            key = row_key(self._space_id, user_key)
            if row := mine.rows.of(key):
                store.hset_many(key, row, ttl_ms=self._lifetimes.row_ms)
                written += 1
            progress(done + 1, len(self._written))
        return written

    def _reads(
        self, user_key: Keys, ad_key: Keys, group_key: Keys, as_of_ms: Keys
    ) -> Iterator[tuple[Keys, PairRead]]:
        """Rows that ask for the same user and instant, with what they get."""
        order = np.lexsort((as_of_ms, user_key))
        asked = np.stack([user_key[order], as_of_ms[order]])
        starts = np.flatnonzero(np.diff(asked, axis=1, prepend=asked[:, :1] - 1).any(axis=0))
        user, mine = None, None
        for rows in np.split(order, starts[1:]) if len(order) else []:
            key, at = int(user_key[rows[0]]), int(as_of_ms[rows[0]])
            if key not in self._written:
                continue
            if mine is None or key != user:
                user, mine = key, self._of_user(key)
            groups = [None if g == ABSENT else int(g) for g in group_key[rows]]
            yield rows, mine.at(at).read(
                key, ad_key[rows].tolist(), groups,
                as_of_ms=at, space_id=self._space_id, dim=self._dim,
            )  # fmt: skip

    def _of_user(self, user_key: int) -> _OfUser:
        rows = MemoryRows()
        writer = PairWriter(rows, self._lifetimes, space_id=self._space_id, dim=self._dim)
        return _OfUser(self._written[user_key], rows, writer, PairReader(rows, self._lifetimes))


class _OfUser:
    """A user's rows as they grow."""

    def __init__(
        self, written: list[NewPair], rows: MemoryRows, writer: PairWriter, reader: PairReader
    ) -> None:
        self.rows = rows
        self._written, self._writer, self._reader = written, writer, reader
        self._applied = 0

    def at(self, as_of_ms: int) -> PairReader:
        """The reader once everything available by then is written; instants must not go back."""
        visible = bisect_right(self._written, as_of_ms, key=lambda new: new.pair.available_ms)
        # One write for each instant of availability, as it was: a mean counts every vector that ever was in the row.
        for _, pairs in groupby(
            self._written[self._applied : visible], key=lambda new: new.pair.available_ms
        ):
            self._writer.write(pairs)
        self._applied = visible
        return self._reader


def _availability(new: NewPair) -> tuple[int, int, int]:
    return new.pair.available_ms, new.pair.computed_ms, new.ad_key


def _new_pair(row: dict[str, Any]) -> NewPair:
    group = row["ad_group_key"]
    pair = Pair(
        space_id=row["space_id"],
        model_version=row["model_version"],
        surface=NO_SURFACE,
        computed_ms=row["computed_ms"],
        available_ms=row["available_ms"],
        scale=row["scale"],
        vector=np.frombuffer(row["q"], dtype=np.int8),
    )
    return NewPair(row["user_key"], row["ad_key"], None if group in (None, ABSENT) else group, pair)


def replayed_pairs(replay: Replay, space_id: bytes, *, from_ms: int, dim: int = 64, lifetimes: Lifetimes | None = None) -> Pairs:
    """Pair embeddings of every impression of a log from an instant on, as they stood when its request was read.

    Rows of the log before that are at the default level.
    """
    log = replay.impressions
    reader = PairReplay(replay.tables.read("pairs"), space_id=space_id, dim=dim, lifetimes=lifetimes)
    rows = np.flatnonzero(log.event_ms >= from_ms)
    group = column_index(replay.layout.ad_ids, "ad_group")
    groups = log.ad_ids[rows, group] if group is not None else np.full(len(rows), ABSENT, dtype=np.int64)
    read = reader.read(log.user_key[rows], log.ad_key[rows], groups, replay.read_ms("request")[rows])
    blank = nothing(len(log), dim).tensors()
    out = Pairs(blank["pair_q"], blank["pair_scale"], blank["pair_level"], blank["pair_meta"])  # type: ignore[arg-type]  # dtypes are those of `nothing`
    out.q[rows], out.scale[rows], out.level[rows], out.meta[rows] = read
    return out
