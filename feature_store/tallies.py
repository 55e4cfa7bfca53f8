"""Counts a whole log at once, a group of counters at a time: the bits of counting fact by fact, in a fraction of the time.

Knows facts in their order and which slots they change. Does not know stores.

Facts that add one are added up, recencies are maxima; only slots that fade are walked fact by fact, with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feature_store import aggregates as limits
from feature_store.aggregates import AggregateSet, Group, Plan, Rows, keys_of_all
from feature_store.counting import Facts, facts_of
from feature_store.ids import ABSENT
from feature_store.log import Events, Impressions
from feature_store.spec import Spec
from feature_store.statistics import Update, touch

Ints = npt.NDArray[np.int64]
Slots = npt.NDArray[np.float64]


class Tally(NamedTuple):
    """All states of one group; a user's lie side by side, in order of first use."""

    users: Ints
    """[r] sorted; all zero if users share the group."""
    keys: Ints
    """[r]"""
    slots: Slots
    """[r, width]"""


class _Change(NamedTuple):
    """What facts of one kind do to a group's slots."""

    ones: list[int]
    updates: list[tuple[Update, int, float]]


def tallied(spec: Spec, impressions: Impressions, events: Events, until_ms: int) -> list[Tally]:
    """The states of every group once each fact known at an instant has been applied."""
    aggregates = AggregateSet(spec)
    facts = facts_of(spec, impressions, events)
    unknown = np.flatnonzero((facts.available_ms > until_ms) | (facts.event_ms >= until_ms))
    facts = facts.take(slice(0, unknown[0] if len(unknown) else len(facts)))
    tallies = [_tally(aggregates, at, facts) for at in range(len(aggregates.groups))]
    crowded = np.unique(np.concatenate([_crowded(*each) for each in zip(tallies, aggregates.groups, strict=True)]))
    return _with_crowded(aggregates, facts, tallies, crowded) if len(crowded) else tallies


def _tally(aggregates: AggregateSet, at: int, facts: Facts) -> Tally:
    """One group's states, as if users kept any number of keys."""
    group = aggregates.groups[at]
    kinds = [_change(at, plan) for plan in (*aggregates.on_source, *aggregates.on_objective)]
    kind = np.where(facts.source >= 0, facts.source, len(aggregates.on_source) + facts.objective)
    facts_of_group = np.flatnonzero(np.array([change is not None for change in kinds], dtype=bool)[kind])
    facts, kind = facts.take(facts_of_group), kind[facts_of_group]
    keys = keys_of_all(group, facts.surface, facts.ad_ids)
    facts, kind, keys = facts.take(keys != ABSENT), kind[keys != ABSENT], keys[keys != ABSENT]
    users = facts.user_key if group.per_user else np.zeros(len(keys), dtype=np.int64)
    row, first = _rows(users, keys)
    slots = np.zeros((len(first), group.width))
    for number, change in enumerate(kinds):
        if change is not None:
            _add(slots, row[kind == number], facts.event_ms[kind == number], change)
    _fade(slots, row, kind, facts.event_ms, kinds)
    return Tally(users[first], keys[first], slots)


def _change(at: int, plan: Plan) -> _Change | None:
    """What a plan does to group `at`."""
    return next((_Change(ones, updates) for index, ones, updates in plan if index == at), None)


def _rows(users: Ints, keys: Ints) -> tuple[Ints, Ints]:
    """The state row of each fact [n], and the first fact of each row [r]; rows go by user, then by first use."""
    order = np.lexsort((keys, users))
    user, key = users[order], keys[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (user[1:] != user[:-1]) | (key[1:] != key[:-1])
    first = order[begins]  # the sort is stable: the first of equals is the earliest
    by_use = np.lexsort((first, users[first]))
    place = np.empty(len(first), dtype=np.int64)
    place[by_use] = np.arange(len(first))
    row = np.empty(len(order), dtype=np.int64)
    row[order] = place[np.cumsum(begins) - 1]
    return row, first[by_use]


def _add(slots: Slots, row: Ints, event_ms: Ints, change: _Change) -> None:
    """Changes whose order does not matter: ones, which are exact in float64, and newest times."""
    for slot in change.ones:
        slots[:, slot] += np.bincount(row, minlength=len(slots))
    for update, slot, _ in change.updates:
        if update is touch:
            np.maximum.at(slots[:, slot], row, event_ms.astype(np.float64))


def _fade(slots: Slots, row: Ints, kind: Ints, event_ms: Ints, kinds: list[_Change | None]) -> None:
    """Changes of slots that fade: in the order of facts."""
    fading = [[step for step in (change.updates if change else []) if step[0] is not touch] for change in kinds]
    chosen = np.flatnonzero(np.array([bool(steps) for steps in fading], dtype=bool)[kind])
    if not len(chosen):
        return
    values: list[list[float]] = slots.tolist()
    for at, number, when in zip(row[chosen].tolist(), kind[chosen].tolist(), event_ms[chosen].tolist(), strict=True):
        for update, slot, half_life_ms in fading[number]:
            update(values[at], slot, when, half_life_ms)
    slots[:] = values


def _crowded(tally: Tally, group: Group) -> Ints:
    """Users with more keys than are kept."""
    users, counts = np.unique(tally.users, return_counts=True)
    return users[counts > limits.MAX_USER_KEYS] if group.per_user else users[:0]


def _with_crowded(aggregates: AggregateSet, facts: Facts, tallies: list[Tally], crowded: Ints) -> list[Tally]:
    """The tallies with what users who have too many keys keep: for them alone facts are applied one by one."""
    rows = Rows(len(aggregates.groups))
    for fact in facts.take(np.isin(facts.user_key, crowded)).each():
        aggregates.apply(fact, rows.of(fact.user_key), rows.shared)
    return [
        _replaced(tally, crowded, lambda user, at=at: rows.of(user)[at]) if group.per_user else tally  # type: ignore[misc]
        for at, (tally, group) in enumerate(zip(tallies, aggregates.groups, strict=True))
    ]


def _replaced(tally: Tally, crowded: Ints, states: Callable[[int], dict[int, list[float]]]) -> Tally:
    others = ~np.isin(tally.users, crowded)
    own = [(user, key, slots) for user in crowded.tolist() for key, slots in states(user).items()]
    users = np.concatenate([tally.users[others], np.array([user for user, _, _ in own], dtype=np.int64)])
    keys = np.concatenate([tally.keys[others], np.array([key for _, key, _ in own], dtype=np.int64)])
    width = tally.slots.shape[1]
    slots = np.concatenate([tally.slots[others], np.array([s for _, _, s in own]).reshape(-1, width)])
    order = np.argsort(users, kind="stable")
    return Tally(users[order], keys[order], slots[order])
