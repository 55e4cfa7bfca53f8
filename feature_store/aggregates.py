"""Keeps the running statistics of a spec: one incremental implementation, used online and in replay.

Knows counts, rates and recencies, and in what order facts count. Does not know where states are kept.

A state is a short row of float64 a (group, key), where a group is a set of keys that aggregates share (`by`). Facts are
applied in the order (available_ms, event_ms, source priority, id); what is known at t is a prefix of it. Equal facts in
equal order make equal bits, wherever the rows are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.ids import ABSENT
from feature_store.layout import Column, Layout
from feature_store.mixing import mix, mix_many
from feature_store.spec import IMPRESSION, Spec
from feature_store.statistics import (
    COUNTED_IN,
    WIDTH,
    Update,
    add_success,
    add_trial,
    count,
    statistic,
    touch,
)

Slots = list[float]
MAX_USER_KEYS = 1024
"""Keys kept a user and group; the one that was first seen longest ago is dropped."""


class Fact(NamedTuple):
    """Something that statistics count: an event, or an outcome of an impression.

    `source` is the index of the event source, `objective` that of the outcome's objective; the other is -1.
    """

    source: int
    objective: int
    user_key: int
    surface: int
    ad_ids: Sequence[int]
    """Keys of the ad's id features, in layout order."""
    event_ms: int
    """Time of the event, or of the outcome's impression."""


@dataclass(frozen=True, slots=True)
class Group:
    """Aggregates that share their keys, and where each lies in the group's state row."""

    by: tuple[str, ...]
    aggregates: tuple[pb.Aggregate, ...]
    offsets: tuple[int, ...]
    width: int
    per_user: bool
    """The user is one of the keys: rows live with the user."""
    parts: tuple[int, ...]
    """Where the other keys come from: -1 the surface, else a column of the ad's ids."""


@dataclass(slots=True)
class Rows:
    """States in memory: of every user a dictionary a group, and shared ones. The online store keeps the same as bytes."""

    num_groups: int
    users: dict[int, list[dict[int, Slots]]] = field(default_factory=dict)
    shared: list[dict[int, Slots]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = self.shared or [{} for _ in range(self.num_groups)]

    def of(self, user_key: int) -> list[dict[int, Slots]]:
        """A user's states, made if there are none."""
        found = self.users.get(user_key)
        if found is None:
            found = self.users[user_key] = [{} for _ in range(self.num_groups)]
        return found


class AggregateSet:
    """The aggregates of a spec, compiled.

    `groups[0]` is the global one: no keys, the running rates that priors lean on.
    """

    def __init__(self, spec: Spec) -> None:
        layout = Layout(spec)
        self._ad_columns = [column.name for column in layout.ad_ids]
        self._sources = spec.event_sources
        self._objectives = spec.objectives
        self._impression = self._sources.index(IMPRESSION) if IMPRESSION in self._sources else -2
        self.groups = self._compile(spec)
        self.on_source = [self._plan_source(index) for index in range(len(self._sources))]
        self.on_objective = [self._plan_objective(name) for name in self._objectives]
        self._user_plan = self._plan_read(layout.user_aggregates)
        self._ad_plan = self._plan_read(layout.ad_aggregates)
        self.starts = list(np.cumsum([0, *(group.width for group in self.groups)]))
        """Where each group's slots begin in a row of all slots."""

    @property
    def num_slots(self) -> int:
        """Width of a row of all groups' slots."""
        return int(self.starts[-1])

    @property
    def num_user_columns(self) -> int:
        """User-side aggregates."""
        return len(self._user_plan)

    @property
    def num_ad_columns(self) -> int:
        """Candidate-side aggregates."""
        return len(self._ad_plan)

    def key(self, group: Group, surface: int, ad_ids: Sequence[int]) -> int | None:
        """Key of a row below its user (or of a shared row); None if a part has no value."""
        key = 0
        for number, part in enumerate(group.parts):
            value = ad_ids[part] if part >= 0 else surface if surface >= 0 else ABSENT
            if value == ABSENT:
                return None
            key = mix(key, value) if number else value
        return key

    def shared_keys(self, surface: int, ad_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(group, key) of every shared row that a fact or a candidate touches: what an online store must fetch."""
        return [
            (index, key)
            for index, group in enumerate(self.groups)
            if not group.per_user and (key := self.key(group, surface, ad_ids)) is not None
        ]

    def shared_keys_of_all(
        self, surface: int, ad_ids: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Distinct `shared_keys` of N candidates [N, A]."""
        return [
            (index, key)
            for index, group in enumerate(self.groups)
            if not group.per_user
            for key in dict.fromkeys(keys_of_all(group, surface, ad_ids).tolist())
            if key != ABSENT
        ]

    def apply(
        self, fact: Fact, user_rows: list[dict[int, Slots]], shared: list[dict[int, Slots]]
    ) -> None:
        """Counts one fact; rows that it needs are made."""
        plan = (
            self.on_source[fact.source] if fact.source >= 0 else self.on_objective[fact.objective]
        )
        event_ms = fact.event_ms
        for index, ones, updates in plan:
            group = self.groups[index]
            key = self.key(group, fact.surface, fact.ad_ids)
            if key is None:
                continue
            rows = user_rows[index] if group.per_user else shared[index]
            slots = rows.get(key)
            if slots is None:
                slots = self._new_row(group, rows, key)
            for slot in ones:
                slots[slot] += 1.0
            for update, offset, half_life_ms in updates:
                update(slots, offset, event_ms, half_life_ms)

    def _new_row(self, group: Group, rows: dict[int, Slots], key: int) -> Slots:
        if group.per_user and len(rows) >= MAX_USER_KEYS:
            del rows[next(iter(rows))]
        slots = rows[key] = [0.0] * group.width
        return slots

    def snapshot(
        self,
        surface: int,
        ad_ids: Sequence[int],
        user_rows: list[dict[int, Slots]] | None,
        shared: list[dict[int, Slots]],
        out: list[float],
    ) -> None:
        """Appends the slots of all groups for one candidate to `out`; zeros where there is no row."""
        for index, group in enumerate(self.groups):
            rows = (user_rows[index] if user_rows else {}) if group.per_user else shared[index]
            key = self.key(group, surface, ad_ids) if rows else None
            slots = rows.get(key) if key is not None else None
            out.extend(slots if slots is not None else _zeros(group.width))

    def snapshots(
        self,
        surface: int,
        ad_ids: npt.NDArray[np.int64],
        user_rows: list[dict[int, Slots]] | None,
        shared: list[dict[int, Slots]],
    ) -> npt.NDArray[np.float64]:
        """Slots [N, num_slots] of N candidates, with ids [N, A], of one user: `snapshot` of each, a group at a time."""
        out = np.zeros((len(ad_ids), self.num_slots))
        for index, group in enumerate(self.groups):
            rows = (user_rows[index] if user_rows else {}) if group.per_user else shared[index]
            if not rows or not group.width:
                continue
            asked = ad_ids if any(part >= 0 for part in group.parts) else ad_ids[:1]
            absent = _zeros(group.width)
            found = chain.from_iterable(
                rows.get(key, absent) for key in keys_of_all(group, surface, asked).tolist()
            )
            slots = np.fromiter(found, dtype=np.float64, count=len(asked) * group.width)
            out[:, self.starts[index] : self.starts[index + 1]] = slots.reshape(-1, group.width)
        return out

    def user_statistics(
        self, slots: npt.NDArray[np.float64], now_ms: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """User-side aggregates [n, columns in layout order] from slots [n, num_slots] as of `now_ms` [n]."""
        return self._statistics(self._user_plan, slots, now_ms)

    def ad_statistics(
        self, slots: npt.NDArray[np.float64], now_ms: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Candidate-side aggregates [n, columns in layout order] from slots [n, num_slots] as of `now_ms` [n]."""
        return self._statistics(self._ad_plan, slots, now_ms)

    def _statistics(
        self,
        plan: list[tuple[pb.Aggregate, int, int]],
        slots: npt.NDArray[np.float64],
        now_ms: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        out = np.empty((len(slots), len(plan)), dtype=np.float32)
        for column, (aggregate, at, prior_at) in enumerate(plan):
            out[:, column] = statistic(aggregate, slots, at, prior_at, now_ms)
        return out

    def _compile(self, spec: Spec) -> tuple[Group, ...]:
        rates = sorted(
            {a.objective for a in spec.message.aggregates if a.statistic == pb.STATISTIC_RATE}
        )
        running = [
            pb.Aggregate(name=f"global:{name}", objective=name, statistic=pb.STATISTIC_RATE)
            for name in rates
        ]
        by: dict[tuple[str, ...], list[pb.Aggregate]] = {(): running}
        for aggregate in spec.message.aggregates:
            by.setdefault(tuple(aggregate.by), []).append(aggregate)
        return tuple(self._group(keys, aggregates) for keys, aggregates in by.items())

    def _group(self, by: tuple[str, ...], aggregates: list[pb.Aggregate]) -> Group:
        widths = [WIDTH[aggregate.statistic] for aggregate in aggregates]
        return Group(
            by=by,
            aggregates=tuple(aggregates),
            offsets=tuple(int(offset) for offset in np.cumsum([0, *widths])[:-1]),
            width=sum(widths),
            per_user="user" in by,
            parts=tuple(
                -1 if name == "surface" else self._ad_columns.index(name)
                for name in by
                if name != "user"
            ),
        )

    def _plan_source(self, source: int) -> Plan:
        name = self._sources[source]

        def update_of(aggregate: pb.Aggregate) -> Update | None:
            if aggregate.statistic == pb.STATISTIC_RATE:
                return add_trial if source == self._impression else None
            if aggregate.source == name:
                return count if aggregate.statistic == pb.STATISTIC_COUNT else touch
            return None

        return self._plan(update_of)

    def _plan_objective(self, name: str) -> Plan:
        def update_of(aggregate: pb.Aggregate) -> Update | None:
            if aggregate.objective != name:
                return None
            return {
                pb.STATISTIC_RATE: add_success,
                pb.STATISTIC_COUNT: count,
                pb.STATISTIC_RECENCY: touch,
            }[aggregate.statistic]

        return self._plan(update_of)

    def _plan(self, update_of: Callable[[pb.Aggregate], Update | None]) -> Plan:
        plan = []
        for index, group in enumerate(self.groups):
            updates = [
                (update, offset, aggregate.half_life_seconds * 1000.0)
                for aggregate, offset in zip(group.aggregates, group.offsets, strict=True)
                if (update := update_of(aggregate)) is not None
            ]
            ones = [
                offset + COUNTED_IN[update]
                for update, offset, half_life_ms in updates
                if not half_life_ms and update in COUNTED_IN
            ]
            others = [step for step in updates if step[2] or step[0] not in COUNTED_IN]
            if updates:
                plan.append((index, ones, others))
        return plan

    def _plan_read(self, columns: Iterable[Column]) -> list[tuple[pb.Aggregate, int, int]]:
        """Aggregate, its first slot, and the first slot of the running global rate it leans on."""
        starts = np.cumsum([0, *(group.width for group in self.groups)])
        places = {
            aggregate.name: int(start) + offset
            for group, start in zip(self.groups, starts, strict=False)
            for aggregate, offset in zip(group.aggregates, group.offsets, strict=True)
        }
        plan = []
        for column in columns:
            aggregate = column.aggregate
            assert aggregate is not None
            plan.append(
                (aggregate, places[aggregate.name], places.get(f"global:{aggregate.objective}", -1))
            )
        return plan


Plan = list[tuple[int, list[int], list[tuple[Update, int, float]]]]
"""Group, slots that grow by one, and updates that are more than that."""


_ZEROS: dict[int, Slots] = {}


def _zeros(width: int) -> Slots:
    return _ZEROS.setdefault(width, [0.0] * width)


def keys_of_all(
    group: Group, surface: int | npt.NDArray[np.int64], ad_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Keys [N] of N candidates or facts with ids [N, A], on one surface or one each, as `AggregateSet.key` makes them.

    ABSENT, which no row has, where a part has no value.
    """
    keys = np.zeros(len(ad_ids), dtype=np.int64)
    absent = np.zeros(len(ad_ids), dtype=bool)
    for number, part in enumerate(group.parts):
        if part >= 0:
            values = ad_ids[:, part]
        else:
            known = np.where(np.asarray(surface) >= 0, surface, ABSENT)
            values = np.broadcast_to(known.astype(np.int64), len(ad_ids))
        absent |= values == ABSENT
        keys = mix_many(keys, values) if number else values
    return np.where(absent, np.int64(ABSENT), keys)


def pack_user(rows: list[dict[int, Slots]], groups: Sequence[Group]) -> bytes:
    """A user's states as bytes: for every per-user group a count, then keys and slots in order of first use."""
    parts = []
    for group, states in zip(groups, rows, strict=True):
        if group.per_user:
            parts.append(np.int64(len(states)).tobytes())
            parts.append(np.fromiter(states, dtype=np.int64, count=len(states)).tobytes())
            parts.append(np.array(list(states.values()), dtype=np.float64).tobytes())
    return b"".join(parts)


def unpack_user(data: bytes, groups: Sequence[Group]) -> list[dict[int, Slots]]:
    """The states that `pack_user` wrote; empty bytes are a new user."""
    rows: list[dict[int, Slots]] = [{} for _ in groups]
    at = 0
    for index, group in enumerate(groups):
        if not group.per_user or not data:
            continue
        count = int(np.frombuffer(data, np.int64, 1, at)[0])
        keys = np.frombuffer(data, np.int64, count, at + 8).tolist()
        at += 8 + 8 * count
        values = (
            np.frombuffer(data, np.float64, count * group.width, at)
            .reshape(count, group.width)
            .tolist()
        )
        at += 8 * count * group.width
        rows[index] = dict(zip(keys, values, strict=True))
    return rows
