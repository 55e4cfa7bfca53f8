"""Fills online rows from the log tables: profiles, the catalogue, and the past of every user as of an instant.

Knows tables and packed rows. Does not know transports. The same histories and counters would be there had every event been
appended when it became known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from feature_store.aggregates import AggregateSet
from feature_store.counting import counted_until
from feature_store.history import History, event_shape
from feature_store.ids import ABSENT
from feature_store.log import Entities
from feature_store.online import OnlineStore, with_version
from feature_store.packing import (
    RowShape,
    ad_key,
    ad_shape,
    counter_key,
    past_key,
    profile_key,
    user_shape,
)
from feature_store.replay import Replay
from services.sequence.past import Past, encode

Progress = Callable[[int, int], None]
_CHUNK = 2000


def materialize(
    replay: Replay, store: OnlineStore, *, until_ms: int, progress: Progress = lambda done, total: None
) -> dict[str, int]:
    """Writes profiles, ads, and all that was known just before `until_ms`; returns rows a kind.

    Replaces what is there: run it before events are appended, not beside it.
    """
    layout = replay.layout
    counts = {
        "profiles": _entities(store, replay.users, user_shape(layout), profile_key, until_ms),
        "ads": _entities(store, replay.ads, ad_shape(layout), ad_key, until_ms),
    }
    aggregates = AggregateSet(replay.spec)
    rows = counted_until(replay.spec, replay.impressions, replay.events, until_ms)
    histories = _histories(replay, until_ms)
    users = sorted({*rows.users, *histories})
    shape = event_shape(replay.spec)
    for first in range(0, len(users), _CHUNK):
        values = {}
        for user in users[first : first + _CHUNK]:
            past = Past(History(shape), rows.of(user))
            for entries in histories.get(user, ()):
                past.history.append(entries)
            values[past_key(user)] = with_version(encode(past, aggregates), 1)
        store.put_many(values)
        progress(min(first + _CHUNK, len(users)), len(users))
    shared = {
        counter_key(index, key): with_version(np.array(slots, dtype=np.float64).tobytes(), 1)
        for index, states in enumerate(rows.shared)
        for key, slots in states.items()
    }
    store.put_many(shared)
    return {**counts, "pasts": len(users), "counters": len(shared)}


def _entities(
    store: OnlineStore, entities: Entities, shape: RowShape, name: Callable[[int], str], until_ms: int
) -> int:
    """The version of every entity that is in force at an instant."""
    keys = entities.versions.keys
    rows = entities.versions.at(keys, np.full(len(keys), until_ms))
    known = rows >= 0
    keys, rows = keys[known], rows[known]
    for first in range(0, len(keys), _CHUNK):
        part = slice(first, first + _CHUNK)
        packed = shape.encode(entities, rows[part], np.zeros(len(rows[part]), dtype=np.int64))
        store.put_many({name(key): value for key, value in zip(keys[part].tolist(), packed, strict=True)})
    return len(keys)


def _histories(replay: Replay, until_ms: int) -> dict[int, list[np.ndarray]]:  # type: ignore[type-arg]  # structured rows
    """Every user's entries known before an instant, a source at a time."""
    found: dict[int, list[np.ndarray]] = {}  # type: ignore[type-arg]
    for source in range(len(replay.histories)):
        for user, entries in _source_entries(replay, source, until_ms):
            found.setdefault(user, []).append(entries)
    return found


def _source_entries(replay: Replay, source: int, until_ms: int) -> Iterator[tuple[int, np.ndarray]]:  # type: ignore[type-arg]
    history, log, shape = replay.histories[source], replay.impressions, event_shape(replay.spec)
    segments = history.segments
    limit = shape.windows[source].total + 64
    for user, start, stop in zip(history.users.tolist(), segments.start, segments.stop, strict=True):
        rows = np.arange(start, stop)
        rows = rows[(segments.event_ms[rows] < until_ms) & (segments.available_ms[rows] <= until_ms)][-limit:]
        if not len(rows):
            continue
        shown = history.impression[rows]
        requests = [str(log.request_ids[log.request[i]]) if i >= 0 else "" for i in shown]
        entries = shape.entries(
            [bytes(name) for name in history.names[rows]],
            requests=requests,
            event_ms=segments.event_ms[rows],
            available_ms=segments.available_ms[rows],
            source=source,
            surface=history.surface[rows],
            ids=history.ids[rows] if history.ids.shape[1] else np.full((len(rows), 0), ABSENT),
            dense=history.dense[rows],
        )
        known = shown >= 0
        if known.any():
            labels = log.label_ms[shown[known]]
            entries["label_ms"][known] = np.where(labels <= until_ms, labels, entries["label_ms"][known])
        yield user, entries
