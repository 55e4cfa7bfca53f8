"""Replay against an oracle, against a log that was cut, and at the edges of what a log can hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from feature_store.asof import NEVER
from feature_store.batch import FeatureBatch
from feature_store.errors import FailedPrecondition
from feature_store.ids import ABSENT
from feature_store.replay import Replay, Requests
from feature_store.tables import Tables, schema
from feature_store.transfer import Annotations, Pairs
from tests.feature_store.replay_oracle import Oracle, check_request, check_shapes, same
from tests.feature_store.small_log import CAPS, SPACE, Log, Row, small_spec


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


@pytest.mark.parametrize("requests", ["request", "impression"])
def test_lengths_are_known_before_a_batch_is_gathered(requests: Requests, tmp_path: Path) -> None:
    """Of events at most: what happened before and was not known yet counts, too."""
    log = Log(0)
    replay = Replay(log.spec, log.write(tmp_path))
    examples = replay.examples(0, 10**9, requests=requests)
    rows = np.random.default_rng(0).permutation(len(examples))
    batch, _ = replay.batch(examples, rows)
    events, candidates = np.diff(batch.event_offsets), np.diff(batch.candidate_offsets)
    most = replay.lengths(examples, rows)
    assert (candidates == most[:, 1]).all()
    assert (events <= most[:, 0]).all()
    assert 0.5 < (events == most[:, 0]).mean() < 1.0


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
