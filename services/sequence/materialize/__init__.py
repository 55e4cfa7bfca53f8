"""Fills online rows from the log tables: profiles, the catalogue, and the past of every user as of an instant.

Knows tables and packed rows. Does not know transports. The same histories and counters would be there had every event been
appended when it became known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from feature_store.aggregates import AggregateSet, Group
from feature_store.history import Entries, History, event_shape
from feature_store.log import Entities
from feature_store.online import OnlineStore, with_version
from feature_store.packing import (
    RowShape,
    ad_key,
    ad_shape,
    counter_keys,
    counters_digest,
    ledger_key,
    past_key,
    profile_key,
    user_shape,
)
from feature_store.replay import Replay
from feature_store.tallies import Tally, tallied
from services.sequence.ledger import pack
from services.sequence.materialize.histories import histories
from services.sequence.materialize.ledgers import ledgers
from services.sequence.materialize.segments import spans
from services.sequence.past import joined

Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
Row = tuple[str, bytes]
_CHUNK = 2000


def materialize(
    replay: Replay, store: OnlineStore, *, until_ms: int, progress: Progress = lambda done, total: None
) -> dict[str, int]:
    """Writes profiles, ads, and all that was known just before `until_ms`; returns rows a kind.

    Replaces what is there: run it before events are appended, not beside it.
    """
    layout, aggregates = replay.layout, AggregateSet(replay.spec)
    tallies = tallied(replay.spec, replay.impressions, replay.events, until_ms)
    past = dict(histories(replay, until_ms))
    facts = dict(ledgers(replay, until_ms))
    counters = _Counters(aggregates, tallies)
    users = sorted({*counters.users, *past, *facts})
    return {
        "profiles": _write(store, _entities(replay.users, user_shape(layout), profile_key, until_ms)),
        "ads": _write(store, _entities(replay.ads, ad_shape(layout), ad_key, until_ms)),
        "pasts": _write(store, _pasts(replay, users, past, counters), lambda done: progress(done, len(users))),
        "ledgers": _write(store, ((ledger_key(user), with_version(pack(rows), 1)) for user, rows in facts.items())),
        "counters": _write(store, _shared(aggregates, tallies)),
    }


def _write(store: OnlineStore, rows: Iterable[Row], progress: Callable[[int], None] = lambda done: None) -> int:
    """Writes rows a part at a time; how many there were."""
    waiting, done = iter(rows), 0
    while part := dict(islice(waiting, _CHUNK)):
        store.put_many(part)
        done += len(part)
        progress(done)
    return done


def _entities(
    entities: Entities, shape: RowShape, name: Callable[[int], str], until_ms: int
) -> Iterator[Row]:
    """The version of every entity that is in force at an instant, and all later ones that the table already holds."""
    versions = entities.versions
    start, stop = versions.spans
    packed = shape.encode(entities, versions.order, versions.since_ms)
    in_force = np.append(0, np.cumsum(versions.since_ms <= until_ms))
    begin = np.maximum(start, start + in_force[stop] - in_force[start] - 1)
    for key, first, end in zip(versions.keys.tolist(), begin.tolist(), stop.tolist(), strict=True):
        yield name(key), b"".join(packed[first:end])


def _pasts(
    replay: Replay, users: Sequence[int], past: dict[int, Entries], counters: _Counters
) -> Iterator[Row]:
    """A row a user: history and counters."""
    shape = event_shape(replay.spec)
    for user in users:
        row = joined(History(shape, past.get(user)), counters.packed(user), counters.digest)
        yield past_key(user), with_version(row, 1)


def _shared(aggregates: AggregateSet, tallies: Sequence[Tally]) -> Iterator[Row]:
    """A row a counter that users share."""
    digest = counters_digest(aggregates)
    for group, tally in zip(aggregates.groups, tallies, strict=True):
        if not group.per_user:
            names = counter_keys(digest, group, tally.keys.tolist())
            for name, slots in zip(names, tally.slots, strict=True):
                yield name, with_version(slots.tobytes(), 1)


class _Counters:
    """Users' own counters, packed as `feature_store.aggregates.pack_user` does."""

    def __init__(self, aggregates: AggregateSet, tallies: Sequence[Tally]) -> None:
        own = [(group, tally) for group, tally in zip(aggregates.groups, tallies, strict=True) if group.per_user]
        self.digest = counters_digest(aggregates)
        self._groups: list[_Packed] = [_Packed(group, tally) for group, tally in own]
        self.users = {user for group in self._groups for user in group.places}

    def packed(self, user: int) -> bytes:
        """One user's counters."""
        parts: list[bytes] = [group.of(user) for group in self._groups]
        return b"".join(parts)


class _Packed:
    """One group's states of all users, as bytes."""

    def __init__(self, group: Group, tally: Tally) -> None:
        users, start, stop = spans(tally.users)
        self.places: dict[int, tuple[int, int]] = dict(zip(users.tolist(), zip(start.tolist(), stop.tolist(), strict=True), strict=True))
        self._keys: bytes = tally.keys.tobytes()
        self._slots: bytes = tally.slots.tobytes()
        self._width = 8 * group.width

    def of(self, user: int) -> bytes:
        """A count, then keys and slots."""
        start, stop = self.places.get(user, (0, 0))
        count = (stop - start).to_bytes(8, "little")
        return count + self._keys[8 * start : 8 * stop] + self._slots[self._width * start : self._width * stop]
