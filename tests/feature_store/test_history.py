"""The packed row of a user's past: it reads what the as-of definition says, and survives being bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store import history
from feature_store.asof import NEVER, Caps, Entry, asof_sequence_reference
from feature_store.errors import CorruptArtefact, FailedPrecondition
from feature_store.history import (
    Entries,
    History,
    Shape,
    Window,
    event_shape,
    memory_shape,
    request_number,
)
from feature_store.spec import Spec, parse_yaml

SPEC = """
name: small
surfaces: [{ name: feed }]
objectives:
  - { name: click, attribution_window_seconds: 60 }
  - { name: buy, attribution_window_seconds: 60 }
entities: { user: { id_type: int64 }, ad: { id_type: int64 } }
features:
  - { name: ad, owner: ad, id: { rows: 64 } }
  - { name: price, owner: ad, dense: {} }
event_sources:
  - { name: search, features: [ad], max_length: 2, priority: 5 }
  - { name: impression, features: [ad, price], max_length: 3, priority: 1 }
"""
CAPS = Caps(impressions=2, positives=1, retention_ms=1_000)
MEMORY = memory_shape(2, num_bytes=4, caps=CAPS)
EVENTS = event_shape(Spec(parse_yaml(SPEC, pb.DatasetSpec)))
SEARCH, IMPRESSION = 0, 1


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def remembered(
    number: int, event_ms: int, *, available_ms: int | None = None, request: str = ""
) -> Entries:
    return MEMORY.entries(
        [name(number)],
        requests=[request],
        event_ms=event_ms,
        available_ms=event_ms if available_ms is None else available_ms,
        source=0,
        surface=0,
        q=number % 256,
    )


def happened(number: int, event_ms: int, source: int = IMPRESSION, request: str = "") -> Entries:
    return EVENTS.entries(
        [name(number)],
        requests=[request],
        event_ms=event_ms,
        available_ms=event_ms,
        source=source,
        surface=0,
        ids=number,
        dense=number / 2,
    )


def numbers(entries: Entries) -> list[int]:
    return [int(low) for low in entries["low"]]


def test_a_history_keeps_the_newest_of_every_source_in_order_of_time_then_priority_then_id() -> (
    None
):
    row = History(EVENTS)
    for number, (when, source) in enumerate(
        [
            (1, IMPRESSION),
            (9, SEARCH),
            (9, IMPRESSION),
            (3, SEARCH),
            (9, IMPRESSION),
            (5, IMPRESSION),
            (2, SEARCH),
        ]
    ):
        row.append(happened(number, when, source))
    entries, bits = row.read(10)
    assert numbers(entries) == [3, 5, 2, 4, 1]
    assert entries["event_ms"].tolist() == [3, 5, 9, 9, 9]
    assert entries["ids"][:, 0].tolist() == [3, 5, 2, 4, 1]
    assert entries["dense"][:, 0].tolist() == [1.5, 2.5, 1.0, 2.0, 0.5]
    assert bits.tolist() == [0] * 5
    assert numbers(row.read(9)[0]) == [0, 6, 3, 5], (
        "an event of the instant itself is not before it"
    )


def test_outcome_bits_turn_on_when_they_are_available() -> None:
    row = History(EVENTS)
    row.append(happened(1, 10))
    assert row.label(name(1), source=IMPRESSION, objective=1, available_ms=50)
    assert row.label(name(1), source=IMPRESSION, objective=0, available_ms=30)
    assert row.label(name(1), source=IMPRESSION, objective=0, available_ms=40), (
        "a repeat changes nothing"
    )
    assert [int(row.read(when)[1][0]) for when in (29, 30, 49, 50)] == [0, 0b01, 0b01, 0b11]


def test_a_repeated_entry_is_ignored_but_the_same_id_of_another_source_is_not() -> None:
    row = History(EVENTS)
    assert row.append(np.concatenate([happened(1, 10), happened(1, 99), happened(2, 11)])) == 2
    assert row.append(happened(1, 10)) == 0
    assert row.append(happened(1, 12, SEARCH)) == 1
    assert row.read(100)[0]["event_ms"].tolist() == [10, 11, 12]


def test_impressions_of_the_request_itself_do_not_push_its_past_out() -> None:
    row = History(EVENTS)
    row.append(np.concatenate([happened(n, n) for n in (1, 2, 3)]))
    row.append(np.concatenate([happened(n, n, request="r") for n in range(4, 9)]))
    assert numbers(row.read(100, request_id="r")[0]) == [1, 2, 3]
    assert numbers(row.read(100, request_id="other")[0]) == [6, 7, 8]
    assert numbers(row.read(100)[0]) == [6, 7, 8]


def test_a_late_positive_moves_into_the_window_of_positives_and_frees_a_place() -> None:
    row = History(MEMORY)
    for number in (1, 2, 3, 4):
        row.append(remembered(number, number))
    assert numbers(row.read(9)[0]) == [3, 4]
    row.label(name(1), source=0, objective=0, available_ms=6)
    assert numbers(row.read(9)[0]) == [1, 3, 4]
    row.label(name(4), source=0, objective=0, available_ms=7)
    assert numbers(row.read(9)[0]) == [2, 3, 4], (
        "4 takes the place of 1 among positives and leaves one to 2"
    )
    assert numbers(row.read(6)[0]) == [1, 3, 4]


def test_a_positive_outlives_any_number_of_newer_impressions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "SPARE", 0)
    row = History(MEMORY)
    row.append(remembered(1, 1))
    row.label(name(1), source=0, objective=0, available_ms=2)
    for number in range(2, 50):
        row.append(remembered(number, number))
    assert numbers(row.read(99)[0]) == [1, 48, 49]
    assert row.late_positive_dropped == 0


def test_a_positive_that_comes_after_its_entry_was_dropped_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "SPARE", 0)
    row = History(MEMORY)
    row.append(np.concatenate([remembered(n, n) for n in range(1, 9)]))
    assert not row.label(name(1), source=0, objective=0, available_ms=9)
    assert row.late_positive_dropped == 1
    assert History.from_bytes(MEMORY, row.to_bytes()).late_positive_dropped == 1


def test_an_outcome_that_was_known_before_its_entry_waits_for_it_and_takes_one_place() -> None:
    row = History(MEMORY)
    for when in (9, 7, 8):
        assert not row.label(name(1), source=0, objective=0, available_ms=when)
    assert len(row.waiting) == row.late_positive_dropped == 1
    row = History.from_bytes(MEMORY, row.to_bytes())
    row.append(np.concatenate([remembered(1, 1), remembered(2, 2)]))
    assert row.waiting == []
    assert row.late_positive_dropped == 0
    assert [row.read(at)[1].tolist() for at in (7, 6)] == [[1, 0], [0, 0]]


def test_no_more_outcomes_wait_than_a_row_has_room_for_and_the_oldest_is_counted() -> None:
    row = History(MEMORY)
    for number in range(history.MAX_WAITING + 2):
        row.label(name(number), source=0, objective=0, available_ms=9)
    row = History.from_bytes(MEMORY, row.to_bytes())
    assert (len(row.waiting), row.given_up) == (history.MAX_WAITING, 2)
    row.append(np.concatenate([remembered(n, 1 + n) for n in (1, 2)]))
    assert row.read(99)[1].tolist() == [0, 1], "1 gave way, 2 did not"


def test_entries_older_than_the_retention_are_not_read() -> None:
    row = History(MEMORY)
    row.append(np.concatenate([remembered(1, 1_000), remembered(2, 1_001)]))
    assert numbers(row.read(2_000)[0]) == [1, 2]
    assert numbers(row.read(2_001)[0]) == [2]


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[Entry], list[tuple[int, Entry, int]]]:
    """Entries, and in the order they become available: (-1 entry | objective outcome, when)."""
    entries = []
    for number in range(draw(st.integers(0, 12))):
        event_ms = draw(st.integers(0, 30))
        available = event_ms + draw(st.sampled_from([0, 0, 2, 11]))
        known = tuple(draw(st.one_of(st.just(NEVER), st.integers(event_ms, 50))) for _ in range(2))
        entries.append(
            Entry(name(number), f"r{draw(st.integers(0, 4))}", event_ms, available, False, known)
        )
    feed = [(-1, entry, entry.available_ms) for entry in entries]
    feed += [
        (k, entry, when)
        for entry in entries
        for k, when in enumerate(entry.label_available_ms)
        if when != NEVER
    ]
    feed.sort(key=lambda step: (step[2], step[1].event_ms, step[0], step[1].example_id))
    return entries, feed


caps = st.builds(
    Caps,
    impressions=st.integers(0, 4),
    positives=st.integers(0, 3),
    retention_ms=st.sampled_from([9, 1_000]),
)


def feed_until(shape: Shape, feed: list[tuple[int, Entry, int]], at_ms: int) -> History:
    """The row after everything known at an instant came, each step through bytes."""
    data = b""
    for objective, entry, when in feed:
        if (when, entry.event_ms) >= (at_ms, at_ms):
            break
        row = History.from_bytes(shape, data)
        if objective >= 0:
            row.label(entry.example_id, source=0, objective=objective, available_ms=when)
        else:
            row.append(entry_of(shape, entry))
        data = row.to_bytes()
    return History.from_bytes(shape, data)


def entry_of(shape: Shape, entry: Entry) -> Entries:
    return shape.entries(
        [entry.example_id],
        requests=[entry.request_id],
        event_ms=entry.event_ms,
        available_ms=entry.available_ms,
        source=0,
        surface=0,
        q=0,
    )


def assert_reads(row: History, entries: list[Entry], at_ms: int, request: str, caps: Caps) -> None:
    got, bits = row.read(at_ms, request_id=request)
    expected = asof_sequence_reference(entries, at_ms=at_ms, request_id=request, caps=caps)
    assert numbers(got) == [int.from_bytes(entry.example_id) for entry, _ in expected]
    assert bits.tolist() == [known for _, known in expected]


@settings(max_examples=150)
@given(deliveries(), caps, st.integers(0, 60), st.sampled_from(["r0", "r1", "own"]))
def test_fed_in_order_of_availability_it_reads_what_the_definition_says(
    delivered: tuple[list[Entry], list[tuple[int, Entry, int]]],
    caps: Caps,
    at_ms: int,
    request: str,
) -> None:
    entries, feed = delivered
    row = feed_until(memory_shape(2, num_bytes=4, caps=caps), feed, at_ms)
    assert_reads(row, entries, at_ms, request, caps)


@settings(max_examples=150)
@given(deliveries(), caps, st.integers(0, 60))
def test_a_row_without_a_spare_entry_still_reads_it_unless_it_counted_a_loss(
    delivered: tuple[list[Entry], list[tuple[int, Entry, int]]], caps: Caps, at_ms: int
) -> None:
    entries, feed = delivered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "SPARE", 0)
        row = feed_until(memory_shape(2, num_bytes=4, caps=caps), feed, at_ms)
    if not row.late_positive_dropped:
        assert_reads(row, entries, at_ms, "own", caps)


@settings(max_examples=100)
@given(deliveries(), caps, st.integers(0, 60), st.randoms())
def test_whatever_else_has_come_since_a_read_of_the_past_is_unchanged(
    delivered: tuple[list[Entry], list[tuple[int, Entry, int]]], caps: Caps, at_ms: int, random
) -> None:
    entries, _ = delivered
    shape = memory_shape(2, num_bytes=1, caps=caps)
    shuffled = entries.copy()
    random.shuffle(shuffled)
    row = History(shape)
    for entry in shuffled:
        row.append(entry_of(shape, entry))
        for objective, when in enumerate(entry.label_available_ms):
            if when != NEVER:
                row.label(entry.example_id, source=0, objective=objective, available_ms=when)
    assert_reads(row, entries, at_ms, "", caps)


def test_a_row_is_the_same_after_it_was_bytes() -> None:
    row = History(EVENTS)
    row.append(np.concatenate([happened(1, 10, request="r"), happened(2, 20, SEARCH)]))
    row.label(name(1), source=IMPRESSION, objective=1, available_ms=11)
    again = History.from_bytes(EVENTS, row.to_bytes())
    assert again.rows.tobytes() == row.rows.tobytes()
    assert again.to_bytes() == row.to_bytes()
    again.append(happened(3, 30))
    assert again.label(name(2), source=SEARCH, objective=0, available_ms=40), (
        "a row from bytes can be changed"
    )
    assert len(History.from_bytes(EVENTS, b"").read(99)[0]) == 0


def test_damaged_and_foreign_rows_are_refused() -> None:
    row = History(EVENTS)
    row.append(happened(1, 10))
    data = row.to_bytes()
    for damaged in (
        data[:-1],
        data[:10],
        b"gem2",
        data[:-1] + bytes([data[-1] ^ 1]),
        b"x" + data[1:],
    ):
        with pytest.raises(CorruptArtefact):
            History.from_bytes(EVENTS, damaged)
    with pytest.raises(FailedPrecondition, match="rebuild"):
        History.from_bytes(MEMORY, data)


def test_entries_name_what_is_wrong_with_them() -> None:
    with pytest.raises(ValueError, match="16"):
        MEMORY.entries([b"short"], event_ms=1, available_ms=1, source=0, surface=0, q=0)
    with pytest.raises(ValueError, match="surface"):
        MEMORY.entries([name(1)], event_ms=1, available_ms=1, source=0, q=0)
    with pytest.raises(ValueError, match="negative"):
        Window(impressions=-1)


def test_requests_are_told_apart_and_no_request_is_none() -> None:
    assert request_number("") == history.NO_REQUEST
    assert len({request_number(f"r{n}") for n in range(100)}) == 100
    assert all(-(2**63) <= request_number(f"r{n}") < 2**63 for n in range(100))


def test_a_full_row_of_a_generous_shape_stays_small_and_is_quick_to_read() -> None:
    shape = Shape(
        windows=(Window(impressions=128, positives=72),),
        num_objectives=3,
        payload=(("q", "u1", (32,)),),
    )
    row = History(shape)
    ids = [name(n) for n in range(1_000)]
    row.append(
        shape.entries(
            ids, event_ms=np.arange(1_000), available_ms=np.arange(1_000), source=0, surface=0, q=0
        )
    )
    assert len(row.rows) == 200 + history.SPARE
    assert len(row.to_bytes()) < 30_000
    assert len(row.read(5_000)[0]) == 128
