"""Adds events and outcomes to users' rows and to the counters that users share.

Knows packed rows and counters. Does not know transports.

A user's history and counters change in one compare-and-set, so an event that is sent twice counts once. Shared counters
follow in a write each; a crash between the two loses at most one call's shared counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from gem.common.v1.event_pb2 import Event, Outcome

from feature_store.aggregates import AggregateSet, Fact, Rows
from feature_store.asof import NEVER, Caps
from feature_store.errors import InvalidInput
from feature_store.history import History, event_shape, memory_shape
from feature_store.ids import ABSENT, example_id, key_of
from feature_store.layout import Layout, column_index
from feature_store.online import OnlineStore, update
from feature_store.packing import (
    MEMORY_SPACES_KEY,
    ad_key,
    ad_shape,
    counter_key,
    memory_key,
    past_key,
)
from feature_store.spec import IMPRESSION, Spec
from services.sequence.past import Past, decode, encode


class Appended(NamedTuple):
    """What one call added."""

    events: int
    outcomes: int
    duplicates: int


class _Known(NamedTuple):
    """An event in keys, with its ad's features."""

    source: int
    name: bytes
    request_id: str
    surface: int
    event_ms: int
    available_ms: int
    ad_ids: list[int]
    ad_dense: list[float]


class Appender:
    """Writes to an online store."""

    def __init__(self, store: OnlineStore, spec: Spec, *, caps: Caps | None = None) -> None:
        self._store, self._spec, self._layout = store, spec, Layout(spec)
        self._aggregates, self._history, self._ads = AggregateSet(spec), event_shape(spec), ad_shape(self._layout)
        self._caps = caps or Caps()
        self._columns = [column.name for column in self._layout.ad_ids]

    def append(self, events: Sequence[Event], outcomes: Sequence[Outcome]) -> Appended:
        """Adds events, then outcomes, in the order (available_ms, event_ms, priority, id) that replay counts in.

        Raises:
            InvalidInput: an event or outcome is malformed; nothing was written.
            NotReady: the store does not answer.
        """
        by_user: dict[int, list[_Known]] = defaultdict(list)
        for user_key, known in self._known(events):
            by_user[user_key].append(known)
        came: dict[int, list[tuple[Outcome, int]]] = defaultdict(list)
        for outcome in outcomes:
            came[self._key("user", outcome.user_id)].append((outcome, self._objective(outcome)))
        facts: list[Fact] = []
        new_events = new_outcomes = 0
        for user_key in sorted({*by_user, *came}):
            added, labelled = self._write_user(user_key, by_user[user_key], came[user_key], facts)
            new_events, new_outcomes = new_events + added, new_outcomes + labelled
        self._write_shared(facts)
        return Appended(new_events, new_outcomes, len(events) + len(outcomes) - new_events - new_outcomes)

    def _known(self, events: Sequence[Event]) -> Iterable[tuple[int, _Known]]:
        keys = [self._key("ad", event.ad_id) if event.ad_id else ABSENT for event in events]
        rows = self._store.get_many([ad_key(key) for key in keys])
        priorities = [source.priority for source in self._spec.message.event_sources]
        made = [
            (self._key("user", event.user_id), self._one(event, key, row))
            for event, key, row in zip(events, keys, rows, strict=True)
        ]
        return sorted(made, key=lambda m: (m[1].available_ms, m[1].event_ms, priorities[m[1].source], m[1].name))

    def _one(self, event: Event, key: int, row: bytes | None) -> _Known:
        if event.source not in self._spec.event_sources:
            raise InvalidInput(f"source {event.source!r} is not in the spec; use one of {list(self._spec.event_sources)}")
        if event.event_ms <= 0 or (event.available_ms and event.available_ms < event.event_ms):
            raise InvalidInput(
                f"event {event.event_id!r} has event_ms {event.event_ms}, available_ms {event.available_ms}; both must be "
                "positive and the second not smaller"
            )
        surface = self._spec.surface_index(event.surface) if event.surface else -1
        ids, dense, _ = self._ads.decode([row], np.array([key]), event.event_ms)
        return _Known(
            source=self._spec.event_sources.index(event.source),
            name=_name(event, key),
            request_id=event.request_id,
            surface=surface,
            event_ms=event.event_ms,
            available_ms=event.available_ms or event.event_ms,
            ad_ids=ids[0].tolist(),
            ad_dense=dense[0].tolist(),
        )

    def _objective(self, outcome: Outcome) -> int:
        if outcome.objective not in self._spec.objectives:
            raise InvalidInput(
                f"objective {outcome.objective!r} is not in the spec; use one of {list(self._spec.objectives)}"
            )
        if len(outcome.example_id) != 16:
            raise InvalidInput(f"example_id has {len(outcome.example_id)} bytes; it must have 16")
        return self._spec.objectives.index(outcome.objective)

    def _write_user(
        self, user_key: int, events: list[_Known], outcomes: list[tuple[Outcome, int]], facts: list[Fact]
    ) -> tuple[int, int]:
        added: list[Fact] = []
        counts = (0, 0)

        def change(held: bytes) -> bytes:
            nonlocal counts
            added.clear()
            past = decode(held, self._history, self._aggregates)
            counts = (self._add_events(past, user_key, events, added), self._add_outcomes(past, user_key, outcomes, added))
            return encode(past, self._aggregates)

        update(self._store, past_key(user_key), change)
        self._label_memories(user_key, outcomes)
        facts.extend(added)
        return counts

    def _add_events(self, past: Past, user_key: int, events: list[_Known], added: list[Fact]) -> int:
        new = 0
        for event in events:
            entry = self._history.entries(
                [event.name],
                requests=[event.request_id],
                event_ms=event.event_ms,
                available_ms=event.available_ms,
                source=event.source,
                surface=event.surface,
                ids=self._copied_ids(event),
                dense=self._copied_dense(event),
            )
            if not past.history.append(entry):
                continue
            new += 1
            fact = Fact(event.source, -1, user_key, event.surface, event.ad_ids, event.event_ms)
            self._count(past, fact, added)
        return new

    def _add_outcomes(
        self, past: Past, user_key: int, outcomes: list[tuple[Outcome, int]], added: list[Fact]
    ) -> int:
        if IMPRESSION not in self._spec.event_sources:
            return 0
        new, source = 0, self._spec.event_sources.index(IMPRESSION)
        for outcome, objective in sorted(outcomes, key=lambda o: (_available(o[0]), o[1])):
            entry = _find(past.history, outcome.example_id, source)
            if entry is None or entry["label_ms"][objective] != NEVER or outcome.value <= 0:
                continue
            window = self._spec.message.objectives[objective].attribution_window_seconds * 1000
            if outcome.occurred_ms - int(entry["event_ms"]) > window:
                continue
            ids = self._ad_ids_of(entry)
            event_ms, surface = int(entry["event_ms"]), int(entry["surface"])
            past.history.label(
                outcome.example_id, source=source, objective=objective, available_ms=_available(outcome)
            )
            new += 1
            self._count(past, Fact(-1, objective, user_key, surface, ids, event_ms), added)
        return new

    def _count(self, past: Past, fact: Fact, added: list[Fact]) -> None:
        """Per-user counters now, within the row; shared ones later."""
        self._aggregates.apply(fact, past.counters, [{} for _ in self._aggregates.groups])
        added.append(fact)

    def _write_shared(self, facts: list[Fact]) -> None:
        """Applies facts to shared counters: every row they touch is read, changed and written once."""
        touched: dict[str, tuple[int, int, list[Fact]]] = {}
        for fact in facts:
            for index, group in enumerate(self._aggregates.groups):
                key = None if group.per_user else self._aggregates.key(group, fact.surface, fact.ad_ids)
                if key is not None:
                    touched.setdefault(counter_key(index, key), (index, key, []))[2].append(fact)
        for name, (index, key, own) in touched.items():
            update(self._store, name, lambda held, i=index, k=key, f=own: self._counted(held, i, k, f))  # type: ignore[misc]

    def _counted(self, held: bytes, index: int, key: int, facts: list[Fact]) -> bytes:
        rows = Rows(len(self._aggregates.groups))
        if held:
            rows.shared[index][key] = np.frombuffer(held, dtype=np.float64).tolist()
        for fact in facts:
            self._aggregates.apply(fact, rows.of(0), rows.shared)
        width = self._aggregates.groups[index].width
        return np.array(rows.shared[index].get(key, [0.0] * width), dtype=np.float64).tobytes()

    def _label_memories(self, user_key: int, outcomes: list[tuple[Outcome, int]]) -> None:
        """Outcome bits of the user's LoopFM entries, in every space that has memories."""
        spaces: Mapping[str, bytes] = self._store.hget_all(MEMORY_SPACES_KEY) if outcomes else {}
        for space, width in spaces.items():
            shape = memory_shape(len(self._spec.objectives), num_bytes=int(width), caps=self._caps)

            def change(held: bytes, shape: object = shape) -> bytes:
                memory = History.from_bytes(shape, held)  # type: ignore[arg-type]  # bound in the loop
                for outcome, objective in outcomes:
                    if outcome.value > 0:
                        memory.label(outcome.example_id, source=0, objective=objective, available_ms=_available(outcome))
                return memory.to_bytes()

            update(self._store, memory_key(bytes.fromhex(space), user_key), change)

    def _copied_ids(self, event: _Known) -> list[int]:
        copied = self._spec.message.event_sources[event.source].features
        return [
            event.ad_ids[self._columns.index(column.name)] if column.name in copied else ABSENT
            for column in self._layout.event_ids
        ]

    def _copied_dense(self, event: _Known) -> list[float]:
        copied = self._spec.message.event_sources[event.source].features
        out: list[float] = []
        for column in self._layout.event_dense:
            start = column_index(self._layout.stored_ad_dense, column.name) or 0
            part = event.ad_dense[start : start + column.width]
            out.extend(part if column.name in copied else [float("nan")] * column.width)
        return out

    def _ad_ids_of(self, entry: np.void) -> list[int]:
        """All id features of an entry's ad, from its row."""
        names = [column.name for column in self._layout.event_ids]
        key = int(entry["ids"][names.index("ad")]) if "ad" in names else ABSENT
        ids, _, _ = self._ads.decode(self._store.get_many([ad_key(key)]), np.array([key]), int(entry["event_ms"]))
        listed: list[int] = ids[0].tolist()
        return listed

    def _key(self, entity: str, value: str) -> int:
        return key_of(value, self._spec.id_type(entity))


def _name(event: Event, key: int) -> bytes:
    """16 bytes that name an event: its id if that is 32 hex digits, else the example id of an impression, else made of the id."""
    if len(event.event_id) == 32:
        try:
            return bytes.fromhex(event.event_id)
        except ValueError:
            pass
    if event.source == IMPRESSION:
        return example_id(event.request_id, key, event.surface, event.event_ms)
    if not event.event_id:
        raise InvalidInput(f"an event of source {event.source!r} has no event_id; every event but an impression needs one")
    return example_id(event.event_id, 0, event.source, 0)


def _available(outcome: Outcome) -> int:
    return outcome.available_ms or outcome.occurred_ms


def _find(history: History, name: bytes, source: int) -> np.void | None:
    high, low = (int.from_bytes(part, "big") for part in (name[:8], name[8:]))
    rows = history.rows
    (found,) = np.nonzero((rows["high"] == high) & (rows["low"] == low) & (rows["source"] == source))
    return rows[found[0]] if len(found) else None

