"""What a request knows, found by loops over plain rows: written from the rules, sharing no code with what it checks.

Of the platform's own code only the reference of the as-of read is used; it has tests of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.asof import NEVER, Entry, asof_sequence_reference
from feature_store.batch import FIELDS, FeatureBatch, Targets
from feature_store.ids import ABSENT
from feature_store.layout import Layout
from tests.feature_store.small_log import CAPS, DAY_MS, SPACE, Log, Row


class Oracle:
    """What a request knows, by the rules and one row at a time."""

    def __init__(self, log: Log) -> None:
        self.log, self.spec, self.layout = log, log.spec, Layout(log.spec)
        self.positives: dict[tuple[bytes, str], tuple[int, float]] = {}
        windows = {
            o.name: 1_000 * o.attribution_window_seconds for o in self.spec.message.objectives
        }
        times = {shown["example_id"]: shown["event_ms"] for shown in log.impressions}
        for row in sorted(log.outcomes, key=lambda row: -row["available_ms"]):
            if (
                row["value"] > 0
                and row["occurred_ms"] <= times[row["example_id"]] + windows[row["objective"]]
            ):
                self.positives[row["example_id"], row["objective"]] = (
                    row["available_ms"],
                    row["value"],
                )

    def version(self, rows: list[Row], key_name: str, key: int | None, at_ms: int) -> Row:
        known = [
            row
            for row in rows
            if row[key_name] == key and max(row["valid_from_ms"], row["available_ms"]) <= at_ms
        ]
        return max(known, key=lambda row: row["valid_from_ms"], default={})

    def ad_ids(self, key: int | None, at_ms: int) -> dict[str, int]:
        row = self.version(self.log.catalogue, "ad_key", key, at_ms)
        found = {name: row.get(name) for name in ("ad_group", "tag")} | {"ad": key}
        return {name: ABSENT if value is None else value for name, value in found.items()}

    def ad_dense(self, key: int | None, at_ms: int) -> dict[str, list[float]]:
        row = self.version(self.log.catalogue, "ad_key", key, at_ms)
        born, price = row.get("born"), row.get("price")
        return {
            "price": [math.nan if price is None else price],
            "born": [math.nan if born is None else (at_ms - born) / DAY_MS],
            "look": row.get("look") or [math.nan, math.nan],
        }

    def label_bits(self, example: bytes, at_ms: int) -> int:
        return sum(
            1 << k
            for k, name in enumerate(self.spec.objectives)
            if self.positives.get((example, name), (NEVER, 0.0))[0] <= at_ms
        )

    def past(self, user: int, at_ms: int, request: str) -> list[tuple[Row, int]]:
        """Known events of a user with their sources, in order."""
        shown = [
            {**row, "source": "impression", "event_id": row["example_id"]}
            for row in self.log.impressions
        ]
        own = [
            row
            for row in shown + self.log.events
            if row["user_key"] == user
            and row["event_ms"] < at_ms
            and row["available_ms"] <= at_ms
            and row.get("request_id") != request
        ]
        order = {source.name: source.priority for source in self.spec.message.event_sources}
        own.sort(key=lambda row: (row["event_ms"], order[row["source"]], row["event_id"]))
        kept = []
        for index, source in enumerate(self.spec.message.event_sources):
            kept += [(row, index) for row in own if row["source"] == source.name][
                -source.max_length :
            ]
        return sorted(kept, key=lambda item: own.index(item[0]))

    def event_features(self, row: Row, index: int) -> tuple[list[int], list[float]]:
        copied = self.spec.message.event_sources[index].features
        ids = self.ad_ids(row["ad_key"], row["event_ms"])
        dense = self.ad_dense(row["ad_key"], row["event_ms"])
        return (
            [
                ids[column.name] if column.name in copied else ABSENT
                for column in self.layout.event_ids
            ],
            [
                value
                for column in self.layout.event_dense
                for value in (
                    dense[column.name] if column.name in copied else [math.nan] * column.width
                )
            ],
        )

    def statistic(
        self, aggregate: pb.Aggregate, user: int, surface: str, ad_ids: dict[str, int], at_ms: int
    ) -> float:
        """By its definition, over every fact known at the instant."""

        def keys(row: Row, ids: dict[str, int]) -> list[Any]:
            return [
                {"user": row["user_key"], "surface": row["surface"], **ids}[name]
                for name in aggregate.by
            ]

        mine = keys({"user_key": user, "surface": surface}, ad_ids)
        halves = aggregate.half_life_seconds * 1_000

        def total(rows: list[Row], *, everywhere: bool = False) -> float:
            weights = [
                1.0 if everywhere or not halves else 0.5 ** ((at_ms - row["event_ms"]) / halves)
                for row in rows
                if everywhere
                or (
                    ABSENT not in mine
                    and keys(row, self.ad_ids(row["ad_key"], row["event_ms"])) == mine
                )
            ]
            return sum(weights)

        if aggregate.statistic == pb.STATISTIC_RATE:
            trials, hits = (
                self.facts("impression", "", at_ms),
                self.facts("", aggregate.objective, at_ms),
            )
            prior = (total(hits, everywhere=True) + 1) / (total(trials, everywhere=True) + 2)
            strength = aggregate.prior_strength
            return (total(hits) + strength * prior) / (total(trials) + strength)
        facts = self.facts(aggregate.source, aggregate.objective, at_ms)
        if aggregate.statistic == pb.STATISTIC_COUNT:
            return math.log1p(total(facts))
        own = [row["event_ms"] for row in facts if total([row])]
        return math.log1p((at_ms - max(own)) / 1_000) if own else math.nan

    def facts(self, source: str, objective: str, at_ms: int) -> list[Row]:
        """Events of a source, or impressions with a known positive outcome of an objective."""
        if objective:
            return [
                row
                for row in self.log.impressions
                if row["event_ms"] < at_ms
                and self.positives.get((row["example_id"], objective), (NEVER, 0.0))[0] <= at_ms
            ]
        rows = (
            self.log.impressions
            if source == "impression"
            else [r for r in self.log.events if r["source"] == source]
        )
        return [row for row in rows if row["event_ms"] < at_ms and row["available_ms"] <= at_ms]

    def counters(
        self, columns: Any, user: int, surface: str, ad_ids: dict[str, int], at_ms: int
    ) -> list[float]:
        return [
            self.statistic(column.aggregate, user, surface, ad_ids, at_ms) for column in columns
        ]

    def target(self, shown: Row, known_by_ms: int) -> tuple[list[float], list[bool]]:
        labels, mask, positive = [], [], {}
        for objective in self.spec.message.objectives:
            available, value = self.positives.get(
                (shown["example_id"], objective.name), (NEVER, 0.0)
            )
            positive[objective.name] = available <= known_by_ms
            closed = shown["event_ms"] + 1_000 * objective.attribution_window_seconds <= known_by_ms
            settled = (positive[objective.name] or closed) and positive.get(objective.parent, True)
            labels.append(value if positive[objective.name] and settled else 0.0)
            mask.append(settled)
        return labels, mask

    def memory(self, user: int, at_ms: int, request: str) -> list[tuple[Row, int]]:
        notes = {}
        for note in sorted(self.log.annotations, key=lambda note: -note["available_ms"]):
            if note["space_id"] == SPACE and note["user_key"] == user:
                notes[note["example_id"]] = note
        entries = [
            Entry(
                name,
                note["request_id"],
                note["event_ms"],
                note["available_ms"],
                note["self_label_seen"],
                tuple(
                    self.positives.get((name, objective), (NEVER, 0.0))[0]
                    for objective in self.spec.objectives
                ),
            )
            for name, note in notes.items()
        ]
        found = asof_sequence_reference(entries, at_ms=at_ms, request_id=request, caps=CAPS)
        return [(notes[entry.example_id], bits) for entry, bits in found]


def same(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(got, dtype=float), np.asarray(expected, dtype=float), rtol=2e-6
    )


def check_request(
    oracle: Oracle,
    batch: FeatureBatch,
    targets: Targets,
    r: int,
    shown: list[Row],
    own: str,
    known_by_ms: int,
) -> None:
    """One request of a batch, tensor by tensor."""
    layout, first, now = oracle.layout, shown[0], int(batch.request_ms[r])
    user, surface = first["user_key"], first["surface"]
    assert (batch.user_key[r], batch.surface[r]) == (user, oracle.spec.surface_index(surface))
    stored = oracle.version(oracle.log.users, "user_key", user, now)
    ids = [user, stored.get("city"), first["hour"]]
    assert batch.user_ids[r].tolist() == [ABSENT if value is None else value for value in ids]
    dense = [stored.get("income"), first["depth"]]
    counters = oracle.counters(layout.user_aggregates, user, surface, {}, now)
    same(batch.user_dense[r], [math.nan if value is None else value for value in dense] + counters)
    check_events(oracle, batch, r, oracle.past(user, now, own))
    window = slice(batch.memory_offsets[r], batch.memory_offsets[r + 1])
    memory = oracle.memory(user, now, own)
    assert [q.tobytes() for q in batch.memory_q[window]] == [note["z_q"] for note, _ in memory]
    assert batch.memory_ms[window].tolist() == [note["event_ms"] for note, _ in memory]
    assert batch.memory_labels[window].tolist() == [bits for _, bits in memory]
    for at, row in enumerate(shown, start=int(batch.candidate_offsets[r])):
        found = oracle.ad_ids(row["ad_key"], now)
        assert batch.ad_ids[at].tolist() == [found[column.name] for column in layout.ad_ids]
        stored_dense = oracle.ad_dense(row["ad_key"], now)
        flat = [value for column in layout.stored_ad_dense for value in stored_dense[column.name]]
        same(
            batch.ad_dense[at],
            flat + oracle.counters(layout.ad_aggregates, user, surface, found, now),
        )
        labels, mask = oracle.target(row, known_by_ms)
        assert (targets.labels[at].tolist(), targets.label_mask[at].tolist()) == (labels, mask)
        assert targets.example_id[at].tobytes() == row["example_id"]


def check_events(oracle: Oracle, batch: FeatureBatch, r: int, past: list[tuple[Row, int]]) -> None:
    window, now = (
        slice(batch.event_offsets[r], batch.event_offsets[r + 1]),
        int(batch.request_ms[r]),
    )
    assert batch.event_ms[window].tolist() == [row["event_ms"] for row, _ in past]
    assert batch.event_source[window].tolist() == [index for _, index in past]
    surfaces = [
        oracle.spec.surface_index(row["surface"]) if row["surface"] else -1 for row, _ in past
    ]
    assert batch.event_surface[window].tolist() == surfaces
    bits = [oracle.label_bits(row["event_id"], now) if index == 0 else 0 for row, index in past]
    assert batch.event_labels[window].tolist() == bits
    features = [oracle.event_features(row, index) for row, index in past]
    assert batch.event_ids[window].tolist() == [ids for ids, _ in features]
    if past:
        same(batch.event_dense[window], [dense for _, dense in features])


def check_shapes(batch: FeatureBatch) -> None:
    sizes = {
        "request": batch.num_requests,
        "event": len(batch.event_ms),
        "candidate": batch.num_candidates,
        "memory": len(batch.memory_ms),
    }
    for name, field in FIELDS.items():
        tensor = getattr(batch, name)
        assert (tensor.dtype, tensor.ndim, len(tensor)) == (
            field.dtype,
            field.ndim,
            sizes[field.axis],
        ), name
