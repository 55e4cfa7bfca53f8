"""Adds events and outcomes to users' rows and to the counters that users share.

Knows packed rows and counters. Does not know transports.

All rows that one call touches change in one compare-and-set: a fact counts everywhere or nowhere, and once however often it
is sent. Facts of a call are counted in the order (available_ms, event_ms, priority, id) in which replay counts them; calls
count in the order they come, so a sender appends what has become available, not what will.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from gem.common.v1.event_pb2 import Event, Outcome

from feature_store.aggregates import AggregateSet, Fact, Slots
from feature_store.asof import Caps
from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput
from feature_store.history import Entries, History, Shape, event_shape, memory_shape
from feature_store.ids import ABSENT, example_id, key_of
from feature_store.layout import Layout
from feature_store.log import copied_dense, copied_ids
from feature_store.online import OnlineStore, update, update_many
from feature_store.packing import (
    MEMORY_SPACES_KEY,
    ad_key,
    ad_shape,
    counter_key,
    counters_digest,
    ledger_key,
    memory_key,
    past_key,
)
from feature_store.spec import IMPRESSION, Spec
from services.sequence.ledger import LATENESS_MS, Happening, Ledger
from services.sequence.past import Past, decode, encode

log = logging.getLogger(__name__)

Read = Callable[[Iterable[str]], dict[str, bytes]]


class Appended(NamedTuple):
    """What one call added."""

    events: int
    outcomes: int
    duplicates: int
    unknown: int
    """Outcomes without a recent impression, too late for their attribution window, or not positive: none was counted."""
    waiting: int
    """Outcomes that came before their entry of a LoopFM memory, which takes them when it comes."""


class _Event(NamedTuple):
    """An event in keys, with its ad's features as they were."""

    user_key: int
    source: int
    name: bytes
    request_id: str
    surface: int
    event_ms: int
    available_ms: int
    ad_ids: list[int]
    copied_ids: list[int]
    copied_dense: list[float]


class _Outcome(NamedTuple):
    """An outcome in keys."""

    user_key: int
    objective: int
    name: bytes
    occurred_ms: int
    available_ms: int
    positive: bool


@dataclass(slots=True)
class _Attempt:
    """One try at a call: rows as they were read and are being changed, and what was found to be new."""

    pasts: dict[int, Past]
    ledgers: dict[int, Ledger]
    facts: list[tuple[tuple[int, int, int, bytes], Fact]] = field(default_factory=list)
    labels: dict[int, list[_Outcome]] = field(default_factory=lambda: defaultdict(list))
    events: int = 0
    outcomes: int = 0
    duplicates: int = 0
    unknown: int = 0
    waiting: int = 0


class Appender:
    """Writes to an online store."""

    def __init__(self, store: OnlineStore, spec: Spec, *, caps: Caps | None = None) -> None:
        self._store, self._spec, self._layout = store, spec, Layout(spec)
        self._aggregates, self._history = AggregateSet(spec), event_shape(spec)
        self._ads, self._caps = ad_shape(self._layout), caps or Caps()
        self._digest = counters_digest(self._aggregates)
        self._priorities = [source.priority for source in spec.message.event_sources]
        self._windows_ms = [o.attribution_window_seconds * 1000 for o in spec.message.objectives]
        self._horizon_ms = horizon_ms(spec)
        self._impression = (
            spec.event_sources.index(IMPRESSION) if IMPRESSION in spec.event_sources else -1
        )
        self._lock = threading.Lock()

    def append(self, events: Sequence[Event], outcomes: Sequence[Outcome]) -> Appended:
        """Adds events and outcomes.

        Raises:
            InvalidInput: an event or outcome is malformed; nothing was written.
            Aborted: other processes kept changing the same rows; nothing was written.
            NotReady: the store does not answer.
        """
        news, came = self._events(events), [self._outcome(outcome) for outcome in outcomes]
        users = sorted({*(each.user_key for each in news), *(each.user_key for each in came)})
        attempt = _Attempt({}, {})

        def change(held: dict[str, bytes], read: Read) -> dict[str, bytes]:
            nonlocal attempt
            attempt = self._attempt(users, held)
            self._add_events(attempt, news)
            self._add_outcomes(attempt, came)
            written = self._count(attempt, read)
            attempt.waiting = self._label_memories(attempt.labels)
            return written

        if users:
            # One at a time in this process: attempts that lose to each other would only be repeated.
            with self._lock:
                keys = [key(user) for user in users for key in (past_key, ledger_key)]
                update_many(self._store, keys, change)
        return Appended(attempt.events, attempt.outcomes, attempt.duplicates, attempt.unknown, attempt.waiting)

    def _events(self, events: Sequence[Event]) -> list[_Event]:
        for event in events:
            self._check(event)
        keys = [self._key("ad", event.ad_id) if event.ad_id else ABSENT for event in events]
        rows = self._store.get_many([ad_key(key) for key in keys])
        when = np.array([event.event_ms for event in events], dtype=np.int64)
        ids, dense, _ = self._ads.decode(rows, np.array(keys, dtype=np.int64), when)
        made = []
        for at, event in enumerate(events):
            source = self._spec.event_sources.index(event.source)
            copied = set(self._spec.message.event_sources[source].features)
            user_key = self._key("user", event.user_id)
            made.append(
                _Event(
                    user_key=user_key,
                    source=source,
                    name=_name(event, user_key, keys[at]),
                    request_id=event.request_id,
                    surface=self._spec.surface_index(event.surface) if event.surface else -1,
                    event_ms=event.event_ms,
                    available_ms=event.available_ms or event.event_ms,
                    ad_ids=ids[at].tolist(),
                    copied_ids=copied_ids(self._layout, ids[at : at + 1], copied)[0].tolist(),
                    copied_dense=copied_dense(self._layout, dense[at : at + 1], copied)[0].tolist(),
                )
            )
        return made

    def _check(self, event: Event) -> None:
        if event.source not in self._spec.event_sources:
            raise InvalidInput(
                f"source {event.source!r} is not in the spec; use one of {list(self._spec.event_sources)}"
            )
        if event.event_ms <= 0 or (event.available_ms and event.available_ms < event.event_ms):
            raise InvalidInput(
                f"event {event.event_id!r} has event_ms {event.event_ms}, available_ms {event.available_ms}; "
                "both must be positive and the second not smaller"
            )
        if event.source == IMPRESSION and not (event.ad_id and event.surface and event.request_id):
            raise InvalidInput(
                f"impression {event.event_id!r} needs an ad_id, a surface and a request_id; it has "
                f"{event.ad_id!r}, {event.surface!r} and {event.request_id!r}"
            )

    def _outcome(self, outcome: Outcome) -> _Outcome:
        objectives = self._spec.objectives
        if outcome.objective not in objectives:
            raise InvalidInput(
                f"objective {outcome.objective!r} is not in the spec; use one of {list(objectives)}"
            )
        if len(outcome.example_id) != 16:
            raise InvalidInput(f"example_id has {len(outcome.example_id)} bytes; it must have 16")
        if outcome.occurred_ms <= 0:
            raise InvalidInput(f"occurred_ms is {outcome.occurred_ms}; give milliseconds since the epoch")
        return _Outcome(
            user_key=self._key("user", outcome.user_id),
            objective=objectives.index(outcome.objective),
            name=outcome.example_id,
            occurred_ms=outcome.occurred_ms,
            available_ms=outcome.available_ms or outcome.occurred_ms,
            positive=outcome.value > 0,
        )

    def _attempt(self, users: Sequence[int], held: Mapping[str, bytes]) -> _Attempt:
        width, horizon = len(self._layout.ad_ids), self._horizon_ms
        return _Attempt(
            pasts={
                user: decode(held[past_key(user)], self._history, self._aggregates, key=past_key(user))
                for user in users
            },
            ledgers={
                user: Ledger.from_bytes(held[key], width, horizon_ms=horizon, key=key)
                for user, key in ((user, ledger_key(user)) for user in users)
            },
        )

    def _add_events(self, attempt: _Attempt, events: Sequence[_Event]) -> None:
        new: dict[int, list[_Event]] = defaultdict(list)
        for event in events:
            fact = Happening(event.event_ms, event.surface, event.ad_ids)
            if attempt.ledgers[event.user_key].add(event.source, event.name, fact):
                new[event.user_key].append(event)
                rank = self._priorities[event.source]
                order = (event.available_ms, event.event_ms, rank, event.name)
                counted = Fact(event.source, -1, event.user_key, event.surface, event.ad_ids, event.event_ms)
                attempt.facts.append((order, counted))
            else:
                attempt.duplicates += 1
        for user, own in new.items():
            attempt.pasts[user].history.append(self._entries(own))
            attempt.events += len(own)

    def _entries(self, events: Sequence[_Event]) -> Entries:
        return self._history.entries(
            [event.name for event in events],
            requests=[event.request_id for event in events],
            event_ms=[event.event_ms for event in events],
            available_ms=[event.available_ms for event in events],
            source=[event.source for event in events],
            surface=[event.surface for event in events],
            ids=np.array([event.copied_ids for event in events], dtype=np.int64),
            dense=np.array([event.copied_dense for event in events], dtype=np.float32),
        )

    def _add_outcomes(self, attempt: _Attempt, outcomes: Sequence[_Outcome]) -> None:
        for outcome in outcomes:
            shown = attempt.ledgers[outcome.user_key].facts.get((self._impression, outcome.name))
            window_ms = self._windows_ms[outcome.objective]
            if shown is None or not outcome.positive or outcome.occurred_ms - shown.event_ms > window_ms:
                attempt.unknown += 1
            elif shown.labels >> outcome.objective & 1:
                attempt.duplicates += 1
            else:
                shown.labels |= 1 << outcome.objective
                attempt.outcomes += 1
                self._add_outcome(attempt, outcome, shown)

    def _add_outcome(self, attempt: _Attempt, outcome: _Outcome, shown: Happening) -> None:
        attempt.pasts[outcome.user_key].history.label(
            outcome.name,
            source=self._impression,
            objective=outcome.objective,
            available_ms=outcome.available_ms,
        )
        attempt.labels[outcome.user_key].append(outcome)
        rank = max(self._priorities) + 1 + outcome.objective
        order = (outcome.available_ms, shown.event_ms, rank, outcome.name)
        fact = Fact(-1, outcome.objective, outcome.user_key, shown.surface, shown.ad_ids, shown.event_ms)
        attempt.facts.append((order, fact))

    def _count(self, attempt: _Attempt, read: Read) -> dict[str, bytes]:
        """Applies new facts in order; the rows to write."""
        attempt.facts.sort(key=lambda each: each[0])
        facts = [fact for _, fact in attempt.facts]
        if not facts:
            return {}
        groups = self._aggregates.groups
        touched = {
            (index, key): counter_key(self._digest, groups[index], key)
            for surface in {fact.surface for fact in facts}
            for index, key in self._aggregates.shared_keys_of_all(
                surface, np.array([fact.ad_ids for fact in facts if fact.surface == surface], dtype=np.int64)
            )
            if groups[index].width
        }
        held = read(touched.values())
        shared: list[dict[int, Slots]] = [{} for _ in groups]
        for (index, key), name in touched.items():
            if held[name]:
                shared[index][key] = np.frombuffer(held[name], dtype=np.float64).tolist()
        for fact in facts:
            self._aggregates.apply(fact, attempt.pasts[fact.user_key].counters, shared)
        users = {fact.user_key for fact in facts}
        return {
            **{past_key(user): encode(attempt.pasts[user], self._aggregates) for user in users},
            **{ledger_key(user): attempt.ledgers[user].to_bytes() for user in users},
            **{
                name: np.array(shared[index][key], dtype=np.float64).tobytes()
                for (index, key), name in touched.items()
                if key in shared[index]
            },
        }

    def _label_memories(self, labels: Mapping[int, Sequence[_Outcome]]) -> int:
        """Outcome bits of LoopFM entries, in every space that has memories; returns how many wait for their entry.

        Harmless to repeat, so it comes before the write.
        """
        waiting = 0
        spaces = self._store.hget_all(MEMORY_SPACES_KEY) if labels else {}
        for space, width in spaces.items():
            shape = memory_shape(len(self._spec.objectives), num_bytes=int(width), caps=self._caps)
            for user, outcomes in labels.items():
                mark = _Mark(shape, outcomes)
                update(self._store, memory_key(bytes.fromhex(space), user), mark, ttl_ms=self._caps.retention_ms)
                waiting += mark.waiting
        return waiting

    def _key(self, entity: str, value: str) -> int:
        return key_of(value, self._spec.id_type(entity))


class _Mark:
    """Marks outcomes in a memory's bytes, and counts those without an entry, afresh at every attempt."""

    def __init__(self, shape: Shape, outcomes: Sequence[_Outcome]) -> None:
        self._shape, self._outcomes = shape, outcomes
        self.waiting = 0

    def __call__(self, row: bytes) -> bytes:
        try:
            memory = History.from_bytes(self._shape, row)
        except (CorruptArtefact, FailedPrecondition) as error:
            log.error("a LoopFM memory cannot be marked and is left as it is: %s", error)
            return row
        found = [
            memory.label(each.name, source=0, objective=each.objective, available_ms=each.available_ms)
            for each in self._outcomes
        ]
        self.waiting = len(found) - sum(found)
        return memory.to_bytes()


def horizon_ms(spec: Spec) -> int:
    """How long a fact may matter after it happened."""
    windows = [objective.attribution_window_seconds * 1000 for objective in spec.message.objectives]
    return max(windows, default=0) + LATENESS_MS


def _name(event: Event, user_key: int, key: int) -> bytes:
    """16 bytes that name an event: those whose hex it gives, else derived as an import derives them."""
    try:
        given = bytes.fromhex(event.event_id)
    except ValueError:
        given = b""
    if len(given) == 16:
        return given
    if event.source == IMPRESSION:
        return example_id(event.request_id, key, event.surface, event.event_ms)
    if not event.event_id:
        raise InvalidInput(
            f"an event of source {event.source!r} has no event_id; every event but an impression needs one"
        )
    return example_id(event.event_id, user_key, event.source, event.event_ms)
