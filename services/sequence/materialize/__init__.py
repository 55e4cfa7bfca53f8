"""Fills online rows from the log tables: profiles, the catalogue, and the past of every user as of an instant.

Knows tables and packed rows. Does not know transports. The same histories and counters would be there had every event been
appended when it became known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from feature_store.aggregates import AggregateSet
from feature_store.asof import known_bits
from feature_store.counting import counted_until
from feature_store.history import Entries, History, event_shape
from feature_store.ids import ABSENT
from feature_store.log import Entities
from feature_store.online import OnlineStore, with_version
from feature_store.packing import (
    RowShape,
    ad_key,
    ad_shape,
    counter_key,
    counters_digest,
    ledger_key,
    past_key,
    profile_key,
    user_shape,
)
from feature_store.replay import Replay
from feature_store.spec import IMPRESSION
from services.sequence.appender import horizon_ms
from services.sequence.ledger import Happening, Ledger
from services.sequence.past import Past, encode

Ints = npt.NDArray[np.int64]
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
    aggregates, shape = AggregateSet(replay.spec), event_shape(replay.spec)
    rows = counted_until(replay.spec, replay.impressions, replay.events, until_ms)
    histories, ledgers = _histories(replay, until_ms), _ledgers(replay, until_ms)
    users = sorted({*rows.users, *histories, *ledgers})
    for first in range(0, len(users), _CHUNK):
        values = {}
        for user in users[first : first + _CHUNK]:
            past = Past(History(shape), rows.of(user))
            for entries in histories.get(user, ()):
                past.history.append(entries)
            values[past_key(user)] = with_version(encode(past, aggregates), 1)
            if user in ledgers:
                values[ledger_key(user)] = with_version(ledgers[user].to_bytes(), 1)
        store.put_many(values)
        progress(min(first + _CHUNK, len(users)), len(users))
    digest = counters_digest(aggregates)
    shared = {
        counter_key(digest, group, key): with_version(np.array(slots, dtype=np.float64).tobytes(), 1)
        for group, states in zip(aggregates.groups, rows.shared, strict=True)
        for key, slots in states.items()
    }
    for names in _parts(list(shared)):
        store.put_many({name: shared[name] for name in names})
    return {**counts, "pasts": len(users), "counters": len(shared)}


def _entities(
    store: OnlineStore, entities: Entities, shape: RowShape, name: Callable[[int], str], until_ms: int
) -> int:
    """The version of every entity that is in force at an instant, and all later ones that the table already holds."""
    versions = entities.versions
    start, stop = versions.spans
    values: dict[str, bytes] = {}
    for key, first, end in zip(versions.keys.tolist(), start.tolist(), stop.tolist(), strict=True):
        since = versions.since_ms[first:end]
        begin = first + max(0, int(np.searchsorted(since, until_ms, side="right")) - 1)
        packed = shape.encode(entities, versions.order[begin:end], versions.since_ms[begin:end])
        values[name(key)] = b"".join(packed)
    for names in _parts(list(values)):
        store.put_many({each: values[each] for each in names})
    return len(values)


def _parts(names: list[str]) -> Iterator[list[str]]:
    return (names[first : first + _CHUNK] for first in range(0, len(names), _CHUNK))


def _ledgers(replay: Replay, until_ms: int) -> dict[int, Ledger]:
    """Every user's recent facts known at an instant, with the outcomes that were counted."""
    log, events, spec = replay.impressions, replay.events, replay.spec
    horizon, width = horizon_ms(spec), len(replay.layout.ad_ids)
    found: dict[int, Ledger] = {}

    def add(source: int, user: int, name: bytes, fact: Happening) -> None:
        found.setdefault(user, Ledger(width, horizon_ms=horizon)).add(source, name, fact)

    if IMPRESSION in spec.event_sources:
        source = spec.event_sources.index(IMPRESSION)
        bits = known_bits(log.label_ms, np.full(len(log), until_ms, dtype=np.int64))
        for row in _recent(log.event_ms, log.available_ms, until_ms, horizon):
            fact = Happening(
                int(log.event_ms[row]), int(log.surface[row]), log.ad_ids[row].tolist(), int(bits[row])
            )
            add(source, int(log.user_key[row]), log.example_id[row].tobytes(), fact)
    for row in _recent(events.event_ms, events.available_ms, until_ms, horizon):
        fact = Happening(int(events.event_ms[row]), int(events.surface[row]), events.ad_ids[row].tolist())
        add(int(events.source[row]), int(events.user_key[row]), events.event_id[row].tobytes(), fact)
    return found


def _recent(event_ms: Ints, available_ms: Ints, until_ms: int, horizon: int) -> list[int]:
    known = (event_ms < until_ms) & (available_ms <= until_ms) & (event_ms >= until_ms - horizon)
    rows: list[int] = np.flatnonzero(known).tolist()
    return rows


def _histories(replay: Replay, until_ms: int) -> dict[int, list[Entries]]:
    """Every user's entries known before an instant, a source at a time."""
    found: dict[int, list[Entries]] = {}
    for source in range(len(replay.histories)):
        for user, entries in _source_entries(replay, source, until_ms):
            found.setdefault(user, []).append(entries)
    return found


def _source_entries(replay: Replay, source: int, until_ms: int) -> Iterator[tuple[int, Entries]]:
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
