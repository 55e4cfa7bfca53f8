"""Replay against an oracle: a loop over every row of a small random log, written from the rules alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.asof import NEVER, Caps, Entry, asof_sequence_reference
from feature_store.batch import FIELDS, FeatureBatch, Targets
from feature_store.errors import FailedPrecondition
from feature_store.ids import ABSENT
from feature_store.layout import Layout
from feature_store.replay import Replay
from feature_store.spec import Spec, parse_yaml
from feature_store.tables import ANNOTATIONS, Tables, schema
from feature_store.transfer import Annotations, Pairs

SPEC = """
name: small
surfaces: [{ name: feed }, { name: reels }]
objectives:
  - { name: click, attribution_window_seconds: 6 }
  - { name: buy, attribution_window_seconds: 20, parent: click }
entities: { user: { id_type: int64 }, ad: { id_type: int64 }, ad_group: { id_type: int64 } }
features:
  - { name: user, owner: user, id: { rows: 64 } }
  - { name: city, owner: user, id: { rows: 64, id_type: int64 } }
  - { name: income, owner: user, dense: {} }
  - { name: hour, owner: request, id: { rows: 64, id_type: int64 } }
  - { name: depth, owner: request, dense: {} }
  - { name: tag, owner: ad, id: { rows: 64, id_type: int64 } }
  - { name: ad, owner: ad, id: { rows: 64 } }
  - { name: ad_group, owner: ad, id: { rows: 64 } }
  - { name: price, owner: ad, dense: {} }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: look, owner: ad, embedding: { dim: 2 } }
event_sources:
  - { name: impression, features: [ad, tag, born], max_length: 3, priority: 1 }
  - { name: search, features: [ad, ad_group, look], max_length: 2, priority: 0 }
  - { name: visit, features: [tag], max_length: 2, priority: 1 }
aggregates:
  - { name: a, by: [user], source: impression, statistic: count }
  - { name: b, by: [ad], source: impression, statistic: count, half_life_seconds: 5 }
  - { name: c, by: [user, tag], objective: click, statistic: rate, prior_strength: 3 }
  - { name: d, by: [ad_group, surface], objective: click, statistic: rate, prior_strength: 2, half_life_seconds: 8 }
  - { name: e, by: [user, surface], objective: buy, statistic: count }
  - { name: f, by: [user], source: search, statistic: recency }
  - { name: g, by: [tag], objective: click, statistic: recency }
"""
SPACE = b"space-01"
DAY_MS = 86_400_000
CAPS = Caps(impressions=2, positives=1, retention_ms=15_000)
Row = dict[str, Any]


def small_spec() -> Spec:
    return Spec(parse_yaml(SPEC, pb.DatasetSpec))


class Log:
    """A small random log, kept as plain rows and written as tables: few users, many ties, delays and gaps."""

    def __init__(self, seed: int) -> None:
        self.spec = small_spec()
        self.random = np.random.default_rng(seed)
        self.catalogue = self._versions("ad", lambda: self._ad_features())
        self.users = self._versions(
            "user", lambda: {"city": self._maybe(self._int(5)), "income": float(self._int(9))}
        )
        self.impressions = [self._impression() for _ in range(12 + self._int(40))]
        self.outcomes = [
            outcome
            for shown in self.impressions
            for name in self.spec.objectives
            for outcome in self._outcomes(shown, name)
        ]
        self.events = [self._event() for _ in range(self._int(40))]
        self.annotations = [
            note for shown in self.impressions for note in self._annotations(shown) if self._int(4)
        ]

    def _int(self, stop: int) -> int:
        return int(self.random.integers(stop))

    def _maybe(self, value: Any) -> Any:
        return value if self._int(5) else None

    def _time(self) -> int:
        return 1_000 + 1_000 * self._int(30)

    def _name(self) -> bytes:
        return self.random.bytes(16)

    def _ad_features(self) -> Row:
        return {
            "tag": self._maybe(self._int(3)),
            "ad_group": self._int(2),
            "price": self._maybe(float(self._int(7))),
            "born": self._maybe(self._time() - 3 * DAY_MS),
            "look": self._maybe([float(self._int(4)), 0.5]),
        }

    def _versions(self, entity: str, features: Callable[[], Row]) -> list[Row]:
        """Of entities 0 to 3, up to three versions each, no two of which begin in the same millisecond."""
        rows = []
        for key in range(4):
            for number in range(self._int(4)):
                since = self._time() + number
                late = since + self._int(2) * 7_000 + 10 * number
                own = {f"{entity}_id": str(key), f"{entity}_key": key, entity: key}
                rows.append({**own, "valid_from_ms": since, "available_ms": late, **features()})
        return rows

    def _impression(self) -> Row:
        user, surface, when = self._int(4), self._int(2), self._time()
        return {
            "example_id": self._name(),
            "request_id": f"{user}-{surface}-{when // 10_000}",
            "user_id": str(user),
            "user_key": user,
            "ad_id": "",
            "ad_key": self._int(6),
            "surface": self.spec.surfaces[surface],
            "event_ms": when,
            "available_ms": when + self._int(2) * self._int(3) * 500,
            "position": 0,
            "hour": self._maybe(self._int(24)),
            "depth": self._maybe(float(self._int(9))),
        }

    def _outcomes(self, shown: Row, objective: str) -> list[Row]:
        """None, one or two of an objective; some of value 0, some too late to count."""
        rows = []
        for _ in range(self._int(3)):
            occurred = shown["event_ms"] + 1_000 * self._int(9)
            rows.append(
                {
                    "example_id": shown["example_id"],
                    "objective": objective,
                    "occurred_ms": occurred,
                    "available_ms": occurred + 700 * self._int(4) + self._int(3),
                    "value": float(self._int(4) > 0),
                }
            )
        return rows

    def _event(self) -> Row:
        when = self._time()
        return {
            "event_id": self._name(),
            "source": self.spec.event_sources[1 + self._int(2)],
            "user_id": "",
            "user_key": self._int(4),
            "ad_key": self._maybe(self._int(6)),
            "surface": self._maybe(self.spec.surfaces[self._int(2)]),
            "event_ms": when,
            "available_ms": when + self._int(2) * 5_000,
        }

    def _annotations(self, shown: Row) -> list[Row]:
        rows = []
        for number in range(1 + self._int(2)):
            rows.append(
                {
                    **{
                        name: shown[name]
                        for name in ("example_id", "request_id", "user_key", "ad_key", "surface")
                    },
                    "event_ms": shown["event_ms"],
                    "self_label_seen": self._int(5) == 0,
                    "space_id": SPACE if self._int(6) else b"another0",
                    "logits": [float(self._int(9)), float(number)],
                    "z_q": self.random.bytes(4),
                    "available_ms": shown["event_ms"] + self._int(4_000) + 10_000 * number,
                }
            )
        return rows

    def write(self, root: Path) -> Tables:
        tables = Tables(root)
        for name in ("catalogue", "users", "impressions", "outcomes", "events"):
            columns = schema(name, self.spec)
            rows = list(getattr(self, name))
            self.random.shuffle(rows)
            if rows or name == "impressions":
                tables.append(name, pa.Table.from_pylist(rows, schema=columns))
        self.random.shuffle(self.annotations)
        tables.append("annotations", pa.Table.from_pylist(self.annotations, schema=ANNOTATIONS))
        return tables


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


def annotated(log: Log, tables: Tables) -> Replay:
    replay = Replay(log.spec, tables)
    replay.with_annotations(Annotations(tables, replay.impressions, space_id=SPACE, caps=CAPS))
    return replay


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_whole_requests_equal_the_oracle(seed: int, tmp_path: Path) -> None:
    log = Log(seed)
    oracle, replay = Oracle(log), annotated(log, log.write(tmp_path))
    grouped: dict[str, list[Row]] = {}
    for row in sorted(log.impressions, key=lambda row: (row["event_ms"], row["example_id"])):
        grouped.setdefault(row["request_id"], []).append(row)
    wanted = sorted(
        (rows for rows in grouped.values() if 5_000 <= rows[0]["event_ms"] < 26_000),
        key=lambda rows: (rows[0]["event_ms"], rows[0]["request_id"]),
    )
    examples = replay.examples(5_000, 26_000, requests="request", known_by_ms=27_000)
    assert (len(examples), examples.num_candidates) == (len(wanted), sum(map(len, wanted)))
    chosen = np.random.default_rng(seed).permutation(len(wanted))
    batch, targets = replay.batch(examples, chosen)
    check_shapes(batch)
    for r, number in enumerate(chosen):
        rows = wanted[number]
        assert batch.request_ms[r] == rows[0]["event_ms"]
        check_request(oracle, batch, targets, r, rows, rows[0]["request_id"], 27_000)


@pytest.mark.parametrize("seed", range(8, 16))
def test_batches_of_single_impressions_equal_the_oracle(seed: int, tmp_path: Path) -> None:
    log = Log(seed)
    oracle, replay = Oracle(log), annotated(log, log.write(tmp_path))
    wanted = sorted(log.impressions, key=lambda row: (row["event_ms"], row["example_id"]))
    examples = replay.examples(0, 10**9, requests="impression")
    assert len(examples) == examples.num_candidates == len(wanted)
    batch, targets = replay.batch(examples, np.arange(len(wanted)))
    check_shapes(batch)
    for r, row in enumerate(wanted):
        assert batch.request_ms[r] == row["event_ms"]
        check_request(oracle, batch, targets, r, [row], "its own", NEVER - 1)


def test_soft_labels_come_from_the_first_annotation_and_never_from_one_that_saw_the_label(
    tmp_path: Path,
) -> None:
    log = Log(3)
    replay = annotated(log, log.write(tmp_path))
    examples = replay.examples(0, 10**9, requests="impression")
    _, targets = replay.batch(examples, np.arange(len(examples)))
    first: dict[bytes, Row] = {}
    for note in sorted(log.annotations, key=lambda note: -note["available_ms"]):
        if note["space_id"] == SPACE:
            first[note["example_id"]] = note
    assert 0 < targets.teacher_mask.sum() < len(log.impressions)
    for row, name in enumerate(targets.example_id):
        note = first.get(name.tobytes())
        taught = note is not None and not note["self_label_seen"]
        assert targets.teacher_mask[row] == taught
        assert targets.teacher_logits[row].tolist() == (
            note["logits"] if note and taught else [0.0, 0.0]
        )


def test_a_stretch_of_time_a_surface_and_no_rows_at_all(tmp_path: Path) -> None:
    log = Log(5)
    replay = annotated(log, log.write(tmp_path))
    feed = replay.examples(0, 10**9, requests="impression", surface="feed")
    assert feed.num_candidates == sum(row["surface"] == "feed" for row in log.impressions)
    for examples in (feed, replay.examples(10**9, 2 * 10**9)):
        batch, targets = replay.batch(examples, np.zeros(0, dtype=np.int64))
        check_shapes(batch)
        assert (batch.num_requests, batch.num_candidates, len(targets.labels)) == (0, 0, 0)
        assert batch.event_offsets.tolist() == batch.candidate_offsets.tolist() == [0]


def test_a_log_without_impressions_events_users_and_ads_is_empty_and_not_an_error(
    tmp_path: Path,
) -> None:
    spec, tables = small_spec(), Tables(tmp_path)
    tables.append("impressions", schema("impressions", spec).empty_table())
    replay = Replay(spec, tables)
    for requests in ("impression", "request"):
        examples = replay.examples(0, 10**9, requests=requests)
        batch, _ = replay.batch(examples, np.zeros(0, dtype=np.int64))
        check_shapes(batch)
        assert len(examples) == 0


def test_the_first_impression_of_an_unknown_user_of_an_unknown_ad_is_scored_from_nothing(
    tmp_path: Path,
) -> None:
    log = Log(0)
    log.impressions, log.outcomes, log.events = log.impressions[:1], [], []
    log.users, log.catalogue, log.annotations = [], [], []
    row = {**log.impressions[0], "user_key": 77, "ad_key": 99, "hour": None, "depth": None}
    log.impressions = [row]
    replay = Replay(log.spec, log.write(tmp_path))
    batch, targets = replay.batch(replay.examples(0, 10**9), np.array([0]))
    assert batch.user_ids.tolist() == [[77, ABSENT, ABSENT]]
    assert batch.ad_ids.tolist() == [[99, ABSENT, ABSENT]]
    same(batch.user_dense, [[math.nan, math.nan, 0.0, 0.0, math.nan]])
    same(batch.ad_dense, [[math.nan] * 4 + [0.0, 0.5, 0.5, math.nan]])
    assert batch.event_offsets.tolist() == batch.memory_offsets.tolist() == [0, 0]
    assert batch.pair_level.tolist() == [4]
    assert targets.labels.tolist() == [[0.0, 0.0]]
    assert targets.label_mask.tolist() == [[True, False]], (
        "no click: nobody can say whether it would have sold"
    )


def test_pair_embeddings_follow_their_impressions(tmp_path: Path) -> None:
    log = Log(6)
    replay = Replay(log.spec, log.write(tmp_path))
    n = len(replay.impressions)
    numbers = np.arange(n)
    pairs = Pairs(
        q=np.repeat(numbers[:, None], 3, axis=1).astype(np.int8),
        scale=numbers.astype(np.float32),
        level=(numbers % 5).astype(np.int32),
        meta=np.zeros((n, 3), dtype=np.float32),
    )
    replay.with_pairs(pairs)
    examples = replay.examples(0, 10**9, requests="request")
    batch, targets = replay.batch(examples, np.arange(len(examples))[::-1])
    check_shapes(batch)
    names = [name.tobytes() for name in replay.impressions.example_id]
    rows = [names.index(name.tobytes()) for name in targets.example_id]
    assert batch.pair_scale.tolist() == rows
    assert batch.pair_level.tolist() == [row % 5 for row in rows]
    assert batch.pair_q[:, 0].tolist() == rows


def test_vectors_of_two_widths_in_one_space_are_refused(tmp_path: Path) -> None:
    log = Log(3)
    kept = [note for note in log.annotations if note["space_id"] == SPACE]
    kept[0]["z_q"] = b"short"
    log.annotations = kept
    tables = log.write(tmp_path)
    with pytest.raises(FailedPrecondition, match="annotate"):
        Annotations(tables, Replay(log.spec, tables).impressions, space_id=SPACE)


@pytest.mark.parametrize("seed", range(16, 20))
def test_nothing_that_came_later_reaches_an_earlier_request(seed: int, tmp_path: Path) -> None:
    """The same log, cut at an instant: requests up to it read the same bytes."""
    cut = 16_000
    whole, past = Log(seed), Log(seed)
    past.impressions = [row for row in past.impressions if row["event_ms"] <= cut]
    for name in ("outcomes", "events", "catalogue", "users", "annotations"):
        setattr(past, name, [row for row in getattr(past, name) if row["available_ms"] <= cut])
    kept = {row["example_id"] for row in past.impressions}
    past.outcomes = [row for row in past.outcomes if row["example_id"] in kept]
    read = []
    for log, folder in ((whole, "whole"), (past, "past")):
        replay = annotated(log, log.write(tmp_path / folder))
        examples = replay.examples(0, cut + 1, requests="impression")
        read.append(replay.batch(examples, np.arange(len(examples)))[0])
    assert read[0].num_requests > 2
    for name in FeatureBatch._fields:
        assert getattr(read[0], name).tobytes() == getattr(read[1], name).tobytes(), name
