"""Reads the change log of pairs as of any instant: the pair features of training rows that no server ever answered.

Knows the `pairs` table. Does not know models. What was written is applied in the order in which it became available, by the
arithmetic of the writer and the reader that serve, for all users at once: replay and serving agree to the byte, and no row is
seen before it was available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from feature_store.asof import expand
from feature_store.errors import InvalidInput
from feature_store.ids import ABSENT
from feature_store.layout import column_index
from feature_store.replay import Replay
from feature_store.transfer import Pairs
from services.solaris.lifetimes import USER_FIELD, Lifetimes, ad_field, group_field, row_key
from services.solaris.reader import Sieve, StandIn, laid_over, nothing
from services.solaris.rows import Table, blank_means, blank_pairs, check_stamp, grow, values_of
from services.solaris.writer import WideRowStore

Keys = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
NO_GROUP = np.int64(ABSENT)
"""In place of an ad group: the user's own mean."""
PORTION = 100_000
"""Written pairs of whole users that are worked on at once: bounds memory, at about 1 KiB each."""


class Written(NamedTuple):
    """Pairs that a store took, by user and then in the order in which they became available."""

    user_key: Keys
    ad_key: Keys
    group_key: Keys
    """NO_GROUP where unknown."""
    rows: Table

    def at(self, rows: Keys | slice | npt.NDArray[np.bool_]) -> Written:
        """Some of them."""
        return Written(self.user_key[rows], self.ad_key[rows], self.group_key[rows], self.rows[rows])

    def portions(self, size: int) -> Iterator[Written]:
        """Whole users, together about `size` pairs at a time."""
        firsts = np.flatnonzero(_begins(self.user_key))
        # The first user of every portion: the one whose pairs pass another multiple of the size.
        firsts = firsts[_begins(firsts // size)]
        for first, end in zip(firsts, np.append(firsts, len(self.user_key))[1:], strict=True):
            yield self.at(slice(first, end))


class PairReplay:
    """One coordinate system's log."""

    def __init__(
        self, log: pa.Table, *, space_id: bytes, dim: int, lifetimes: Lifetimes | None = None, portion: int = PORTION
    ) -> None:
        """Takes rows of the `pairs` table, in any order; rows of other spaces are left out, repeated ones count once.

        `portion` is how many written pairs are worked on at once.

        Raises:
            InvalidInput: a vector of the space is of another width, or a version does not fit.
        """
        self._space_id, self._dim, self._portion = space_id, dim, portion
        self._lifetimes = lifetimes or Lifetimes()
        self._written = _taken(_decoded(log, space_id, dim))

    def read(self, user_key: Keys, ad_key: Keys, group_key: Keys, as_of_ms: Keys) -> Pairs:
        """Pair embeddings of n rows.

        Args:
            user_key: [n] users.
            ad_key: [n] ads.
            group_key: [n] their ad groups, ABSENT where there is none.
            as_of_ms: [n] instants of the reads; in any order.
        """
        out = _blank(len(user_key), self._dim)
        last_ms = as_of_ms.max(initial=0)
        wanted = np.isin(self._written.user_key, user_key) & (self._written.rows["available_ms"] <= last_ms)
        for written in self._written.at(wanted).portions(self._portion):
            rows = np.flatnonzero(np.isin(user_key, written.user_key))
            read = self._read(written, user_key[rows], ad_key[rows], group_key[rows], as_of_ms[rows])
            out.q[rows], out.scale[rows], out.level[rows], out.meta[rows] = read
        return out

    def materialize(
        self, store: WideRowStore, *, until_ms: int, progress: Progress = lambda done, total: None
    ) -> int:
        """Writes every user's row as it stood at an instant into an online store, which then serves on from there.

        Returns:
            Users written.
        """
        seen = self._written.at(self._written.rows["available_ms"] <= until_ms)
        total, done = len(np.unique(seen.user_key)), 0
        for written in seen.portions(self._portion):
            for user_key, row in self._last_rows(written):
                store.hset_many(row_key(self._space_id, user_key), row, ttl_ms=self._lifetimes.row_ms)
                done += 1
                progress(done, total)
        return done

    def _read(
        self, written: Written, user_key: Keys, ad_key: Keys, group_key: Keys, as_of_ms: Keys
    ) -> Pairs:
        life, sieve = self._lifetimes, Sieve(as_of_ms, self._space_id)
        pairs = written.at(np.lexsort((written.rows["available_ms"], written.ad_key, written.user_key)))
        means = _means(written, life)
        pair = _newest((pairs.user_key, pairs.ad_key), pairs.rows, (user_key, ad_key), as_of_ms)
        group = _newest((means.user_key, means.group_key), means.rows, (user_key, group_key), as_of_ms)
        group = np.where(group_key == NO_GROUP, -1, group)
        nobody = np.full(len(user_key), NO_GROUP)
        user = _newest((means.user_key, means.group_key), means.rows, (user_key, nobody), as_of_ms)
        exact = sieve.usable(pairs.rows[pair], pair >= 0, life.pair)
        stocked = means.rows["count"] >= life.min_count
        group_ok = sieve.usable(means.rows[group], group >= 0, life.ad_group) & stocked[group]
        user_ok = sieve.usable(means.rows[user], user >= 0, life.user) & stocked[user]
        standin = StandIn.of(group, group_ok, user, user_ok)
        used, source = np.unique(standin.source_N, return_inverse=True)
        read = laid_over(pairs.rows[pair], exact, means.rows[used], standin._replace(source_N=source), as_of_ms)
        return Pairs(*read)

    def _last_rows(self, written: Written) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Users, with all fields of their rows once everything is written."""
        pairs = written.at(np.lexsort((written.rows["available_ms"], written.ad_key, written.user_key)))
        pairs = pairs.at(_ends(pairs.user_key, pairs.ad_key))
        means = _means(written, self._lifetimes)
        means = means.at(_ends(means.user_key, means.group_key))
        fields = [ad_field(key) for key in pairs.ad_key.tolist()]
        fields += [USER_FIELD if key == NO_GROUP else group_field(key) for key in means.group_key.tolist()]
        values = values_of(pairs.rows) + values_of(means.rows)
        rows: dict[int, dict[str, bytes]] = {}
        for user, field, value in zip([*pairs.user_key.tolist(), *means.user_key.tolist()], fields, values, strict=True):
            rows.setdefault(user, {})[field] = value
        yield from rows.items()


class Means(NamedTuple):
    """Each mean after each write that it grew by: by user and group, then in the order of the writes."""

    user_key: Keys
    group_key: Keys
    """NO_GROUP for the user's own."""
    rows: Table

    def at(self, rows: Keys | npt.NDArray[np.bool_]) -> Means:
        """Some of them."""
        return Means(self.user_key[rows], self.group_key[rows], self.rows[rows])


def _means(written: Written, lifetimes: Lifetimes) -> Means:
    """One write for each instant of availability, as it was: a mean counts every vector that ever was in the row."""
    grouped = np.flatnonzero(written.group_key != NO_GROUP)
    member = np.concatenate([np.arange(len(written.rows)), grouped])
    group = np.concatenate([np.full(len(written.rows), NO_GROUP), written.group_key[grouped]])
    # Stable: members of one write stay in the order in which a writer adds them.
    order = np.lexsort((member, group, written.user_key[member]))
    member, group = member[order], group[order]
    user, available_ms = written.user_key[member], written.rows["available_ms"][member]
    starts = np.flatnonzero(_begins(user, group, available_ms))
    ends = np.append(starts[1:], len(member))
    begins = _begins(user[starts], group[starts])
    half_life_ms = np.where(group[starts] == NO_GROUP, lifetimes.user_half_life_ms, lifetimes.ad_group_half_life_ms)
    states = blank_means(len(starts), dim=written.rows["vector"].shape[1])
    for steps in _rounds(begins):
        query, at = expand(starts[steps], ends[steps])
        before = blank_means(len(steps), dim=written.rows["vector"].shape[1]) if begins[steps[0]] else states[steps - 1]
        states[steps] = grow(
            before, written.rows[member[at]], np.searchsorted(query, np.arange(len(steps))), half_life_ms=half_life_ms[steps]
        )
    return Means(user[starts], group[starts], states)


def _rounds(begins: npt.NDArray[np.bool_]) -> list[Keys]:
    """The first step of every mean, then the second of every mean that has one, …; steps of a mean lie side by side."""
    firsts = np.flatnonzero(begins)
    number = np.arange(len(begins)) - np.repeat(firsts, np.diff(firsts, append=len(begins)))
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number))[:-1])


def _newest(
    keys: tuple[Keys, Keys], rows: Table, asked: tuple[Keys, Keys], as_of_ms: Keys
) -> Keys:
    """[n] the last row with the asked keys that was available by then, -1 if none; rows are sorted by keys and time."""
    if not len(rows):
        return np.full(len(as_of_ms), -1, dtype=np.int64)
    major, minor = (np.concatenate(both) for both in zip(keys, asked, strict=True))
    instant = np.concatenate([rows["available_ms"], as_of_ms])
    is_read = np.arange(len(instant)) >= len(rows)
    order = np.lexsort((is_read, instant, minor, major))
    last = np.maximum.accumulate(np.where(order < len(rows), order, -1))
    found = np.empty(len(instant), dtype=np.int64)
    found[order] = last
    found = found[len(rows) :]
    same = (found >= 0) & (keys[0][found] == asked[0]) & (keys[1][found] == asked[1])
    return np.where(same, found, -1)


def _taken(log: Written) -> Written:
    """What a writer takes: in each write the newest of each ad, if it is newer than what was written before."""
    available_ms, computed_ms = log.rows["available_ms"], log.rows["computed_ms"]
    log = log.at(np.lexsort((-computed_ms, available_ms, log.ad_key, log.user_key)))
    log = log.at(_begins(log.user_key, log.ad_key, log.rows["available_ms"]))
    begins = _begins(log.user_key, log.ad_key)
    # Instants as ranks, raised pair by pair, so that one running maximum serves all pairs.
    _, rank = np.unique(log.rows["computed_ms"], return_inverse=True)
    raised = rank + np.cumsum(begins) * (len(rank) + 1)
    before = np.maximum.accumulate(np.append(-1, raised))[:-1]
    log = log.at(begins | (raised > before))
    return log.at(np.lexsort((log.ad_key, log.rows["computed_ms"], log.rows["available_ms"], log.user_key)))


def _begins(*keys: Keys) -> npt.NDArray[np.bool_]:
    """[n] where a row differs from the one before in any key; the first does."""
    begins = np.zeros(len(keys[0]), dtype=bool)
    begins[:1] = True
    for key in keys:
        begins[1:] |= key[1:] != key[:-1]
    return begins


def _ends(*keys: Keys) -> npt.NDArray[np.bool_]:
    """[n] where a row differs from the one after in any key; the last does."""
    return _begins(*(key[::-1] for key in keys))[::-1]


def _decoded(log: pa.Table, space_id: bytes, dim: int) -> Written:
    log = log.filter(pc.equal(log["space_id"], pa.scalar(space_id, log.schema.field("space_id").type)))
    widths = pc.binary_length(log["q"]).to_numpy()
    if len(odd := widths[widths != dim]):
        raise InvalidInput(f"a pair of space {space_id.hex()} has {odd[0]} values, not {dim}; read it with its own width")
    rows = blank_pairs(log.num_rows, dim=dim)
    rows["space"] = np.void(space_id)
    for name in ("computed_ms", "available_ms", "scale"):
        rows[name] = log[name].to_numpy()
    rows["vector"] = np.frombuffer(b"".join(log["q"].to_pylist()), dtype=np.int8).reshape(-1, dim)
    versions = log["model_version"].combine_chunks().dictionary_encode()
    for version in versions.dictionary.to_pylist():
        check_stamp(space_id, version)
    names = np.array([name.encode() for name in versions.dictionary.to_pylist()] or [b""])
    rows["version"] = names[versions.indices.to_numpy()]
    group = pc.fill_null(log["ad_group_key"], ABSENT).to_numpy()
    return Written(log["user_key"].to_numpy(), log["ad_key"].to_numpy(), group, rows)


def _blank(count: int, dim: int) -> Pairs:
    blank = nothing(count, dim)
    return Pairs(blank.vectors_ND, blank.scales_N, blank.levels_N, blank.meta_N3)


def replayed_pairs(replay: Replay, space_id: bytes, *, from_ms: int, dim: int = 64, lifetimes: Lifetimes | None = None) -> Pairs:
    """Pair embeddings of every impression of a log from an instant on, as they stood when its request was read.

    Rows of the log before that are at the default level.
    """
    log = replay.impressions
    reader = PairReplay(replay.tables.read("pairs"), space_id=space_id, dim=dim, lifetimes=lifetimes)
    rows = np.flatnonzero(log.event_ms >= from_ms)
    group = column_index(replay.layout.ad_ids, "ad_group")
    ad_key, read_ms = log.ad_key[rows], replay.read_ms("request")[rows]
    groups = np.full(len(rows), ABSENT, dtype=np.int64)
    if group is not None:
        groups = replay.ads.gather_ids(replay.ads.versions.at(ad_key, read_ms), ad_key)[:, group]
    read = reader.read(log.user_key[rows], ad_key, groups, read_ms)
    out = _blank(len(log), dim)
    out.q[rows], out.scale[rows], out.level[rows], out.meta[rows] = read
    return out
