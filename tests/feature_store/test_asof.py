"""As-of reads: the definition, its vectorized twin, and what may never change a read."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.asof import (
    NEVER,
    Caps,
    Entry,
    Queries,
    Segments,
    asof_sequence_reference,
    asof_windows,
    before,
    expand,
    known_bits,
    label_bits,
    most_known,
    newest_known,
)

NUM_OBJECTIVES = 2
SMALL = Caps(impressions=2, positives=2, retention_ms=40)


def entry(number: int, event_ms: int, **changes: object) -> Entry:
    base = Entry(
        number.to_bytes(16, "big"), f"r{number}", event_ms, event_ms, False, (NEVER, NEVER)
    )
    return base._replace(**changes)


@st.composite
def entries(draw: st.DrawFn, max_size: int = 14) -> list[Entry]:
    made = []
    for number in range(draw(st.integers(0, max_size))):
        event_ms = draw(st.integers(0, 30))
        known = tuple(
            draw(st.one_of(st.just(NEVER), st.integers(event_ms, 45)))
            for _ in range(NUM_OBJECTIVES)
        )
        made.append(
            entry(
                number,
                event_ms,
                request_id=f"r{draw(st.integers(0, 5))}",
                available_ms=event_ms + draw(st.sampled_from([0, 0, 1, 9])),
                self_label_seen=draw(st.sampled_from([False, False, False, True])),
                label_available_ms=known,
            )
        )
    return made


caps = st.builds(
    Caps,
    impressions=st.integers(0, 4),
    positives=st.integers(0, 3),
    retention_ms=st.sampled_from([5, 1000]),
)
instants = st.integers(0, 50)


def read(
    found: list[Entry], at_ms: int, caps: Caps = SMALL, request_id: str = "own"
) -> list[tuple[Entry, int]]:
    return asof_sequence_reference(found, at_ms=at_ms, request_id=request_id, caps=caps)


def test_a_window_holds_what_the_definition_says_value_by_value() -> None:
    log = [
        entry(1, 1, label_available_ms=(5, NEVER)),  # an old positive outlives newer impressions
        entry(2, 2),  # pushed out by 4 and 5
        entry(3, 3, label_available_ms=(NEVER, 99)),  # its outcome is not known yet; pushed out too
        entry(4, 4),
        entry(5, 5),
        entry(6, 6, available_ms=30),  # not available yet
        entry(7, 7, request_id="own"),  # the request itself
        entry(8, 8, self_label_seen=True),
        entry(9, 20),  # happens at the instant of the read, hence not before it
    ]
    seen = read(log, 20)
    assert [(found.event_ms, bits) for found, bits in seen] == [(1, 0b01), (4, 0), (5, 0)]


def test_a_positive_that_its_window_cannot_hold_competes_as_any_entry() -> None:
    log = [entry(n, n, label_available_ms=(n, NEVER)) for n in range(1, 6)]
    assert [found.event_ms for found, _ in read(log, 9)] == [2, 3, 4, 5]
    assert [bits for _, bits in read(log, 9)] == [1, 1, 1, 1]


def test_equal_times_order_by_id_and_never_by_label() -> None:
    log = [entry(2, 5, label_available_ms=(5, NEVER)), entry(1, 5), entry(3, 5)]
    assert [found.example_id[-1] for found, _ in read(log, 6)] == [1, 2, 3]
    assert read(log, 5) == []


@given(entries(), instants, instants, caps)
def test_what_is_seen_stays_seen_until_it_is_pushed_out(
    found: list[Entry], a: int, b: int, caps: Caps
) -> None:
    roomy = Caps(impressions=99, positives=99, retention_ms=1000)
    early, late = (dict(read(found, when, roomy)) for when in sorted((a, b)))
    assert early.keys() <= late.keys()
    assert all(bits & late[seen] == bits for seen, bits in early.items()), "a label bit turned off"
    assert {seen for seen, _ in read(found, a, caps)} <= dict(read(found, a, roomy)).keys()


@given(entries(), entries(), instants, caps)
def test_what_comes_later_changes_nothing(
    found: list[Entry], later: list[Entry], at_ms: int, caps: Caps
) -> None:
    planted = [
        item._replace(
            example_id=bytes([255]) + item.example_id[1:],
            event_ms=item.event_ms + (0 if number % 2 else at_ms),
            available_ms=at_ms + 1 + item.available_ms,
        )
        for number, item in enumerate(later)
    ]
    assert read(found + planted, at_ms, caps) == read(found, at_ms, caps)


@given(entries(), instants, caps)
def test_a_future_outcome_is_a_canary_that_must_not_sing(
    found: list[Entry], at_ms: int, caps: Caps
) -> None:
    def planted(item: Entry) -> Entry:
        return item._replace(
            label_available_ms=tuple(
                at_ms + 1 if when > at_ms else when for when in item.label_available_ms
            )
        )

    clean = [(item.example_id, bits) for item, bits in read(found, at_ms, caps)]
    sung = [
        (item.example_id, bits)
        for item, bits in read([planted(item) for item in found], at_ms, caps)
    ]
    assert sung == clean


@given(entries(), instants, caps, st.randoms())
def test_order_of_insertion_and_repeats_change_nothing(
    found: list[Entry], at_ms: int, caps: Caps, random
) -> None:
    shuffled = found + found[: len(found) // 2]
    random.shuffle(shuffled)
    assert read(shuffled, at_ms, caps) == read(found, at_ms, caps)


def columns(
    users: list[list[Entry]], requests: dict[str, int]
) -> tuple[Segments, np.ndarray, np.ndarray, list[Entry]]:
    """Users' entries as sorted columns."""
    ordered = [sorted(own, key=lambda item: (item.event_ms, item.example_id)) for own in users]
    flat = [item for own in ordered for item in own]
    stop = np.cumsum([len(own) for own in ordered], dtype=np.int64)

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    segments = Segments(
        start=stop - [len(own) for own in ordered],
        stop=stop,
        event_ms=ints([item.event_ms for item in flat]),
        available_ms=ints([item.available_ms for item in flat]),
        request=ints([requests[item.request_id] for item in flat]),
    )
    labels = ints([when for item in flat for when in item.label_available_ms]).reshape(
        -1, NUM_OBJECTIVES
    )
    return segments, labels, np.array([item.self_label_seen for item in flat], dtype=bool), flat


REQUESTS = {f"r{number}": number for number in range(6)} | {"own": 6}
reads = st.lists(
    st.tuples(st.integers(-1, 2), instants, st.sampled_from(sorted(REQUESTS))), max_size=12
)


def queries(asked: list[tuple[int, int, str]]) -> Queries:
    return Queries(
        np.array([user for user, _, _ in asked], dtype=np.int64),
        np.array([when for _, when, _ in asked], dtype=np.int64),
        np.array([REQUESTS[name] for _, _, name in asked], dtype=np.int64),
    )


@settings(max_examples=120)
@given(st.lists(entries(), min_size=3, max_size=3), reads, caps)
def test_many_reads_at_once_equal_the_definition_one_by_one(
    users: list[list[Entry]], asked: list[tuple[int, int, str]], caps: Caps
) -> None:
    segments, labels, seen, flat = columns(users, REQUESTS)
    windows, bits = asof_windows(segments, labels, seen, queries(asked), caps=caps)
    assert len(windows.offsets) == len(asked) + 1
    for number, (user, when, name) in enumerate(asked):
        mine = slice(windows.offsets[number], windows.offsets[number + 1])
        got = [
            (flat[row], int(bit)) for row, bit in zip(windows.rows[mine], bits[mine], strict=True)
        ]
        assert got == (read(users[user], when, caps, name) if user >= 0 else [])


@settings(max_examples=60)
@given(st.lists(entries(20), min_size=3, max_size=3), reads, st.integers(0, 5))
def test_the_newest_known_rows_are_found_however_many_newer_ones_are_not_known(
    users: list[list[Entry]], asked: list[tuple[int, int, str]], limit: int
) -> None:
    segments, _, _, flat = columns(users, REQUESTS)
    windows = newest_known(segments, queries(asked), limit=limit)
    roomy = Caps(impressions=limit, positives=0, retention_ms=1000)
    for number, (user, when, name) in enumerate(asked):
        mine = windows.rows[windows.offsets[number] : windows.offsets[number + 1]]
        unseen = [item._replace(self_label_seen=False) for item in users[user]]
        expected = [item for item, _ in read(unseen, when, roomy, name)] if user >= 0 else []
        assert [flat[row].example_id for row in mine] == [item.example_id for item in expected]


@settings(max_examples=60)
@given(st.lists(entries(20), min_size=3, max_size=3), reads, st.integers(0, 5))
def test_no_more_rows_are_known_than_lie_before_the_instant(
    users: list[list[Entry]], asked: list[tuple[int, int, str]], limit: int
) -> None:
    segments, _, _, _ = columns(users, REQUESTS)
    most = most_known(segments, queries(asked), limit=limit)
    earlier = [sum(item.event_ms < when for item in users[user]) if user >= 0 else 0 for user, when, _ in asked]
    assert most.tolist() == [min(limit, count) for count in earlier]
    assert (np.diff(newest_known(segments, queries(asked), limit=limit).offsets) <= most).all()


def test_nothing_to_read_and_nobody_to_read_are_fine() -> None:
    none = np.zeros(0, dtype=np.int64)
    empty = Segments(none, none, none, none, none)
    windows = newest_known(
        empty, Queries(np.array([-1, -1]), np.array([5, 6]), np.array([0, 0])), limit=3
    )
    assert windows.offsets.tolist() == [0, 0, 0]
    windows, bits = asof_windows(
        empty, none.reshape(0, 2), none.astype(bool), Queries(none, none, none), caps=Caps()
    )
    assert (windows.offsets.tolist(), len(windows.rows), len(bits)) == ([0], 0, 0)


def test_rows_before_an_instant_are_those_strictly_before_it() -> None:
    times = np.array([1, 3, 3, 7, 2, 9], dtype=np.int64)
    segments = Segments(np.array([0, 4]), np.array([4, 6]), times, times, np.full(6, -1))
    asked = Queries(
        np.array([0, 0, 0, 1, 1, -1]), np.array([3, 4, 99, 2, 3, 5]), np.zeros(6, np.int64)
    )
    assert before(segments, asked).tolist() == [1, 3, 4, 4, 5, 0]


def test_ranges_expand_to_their_rows() -> None:
    query, row = expand(np.array([4, 9, 0]), np.array([6, 9, 1]))
    assert (query.tolist(), row.tolist()) == ([0, 0, 2], [4, 5, 0])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), st.integers(0, 9))
def test_label_bits_at_once_equal_one_by_one(times: list[tuple[int, int]], at_ms: int) -> None:
    matrix = np.array(times, dtype=np.int64).reshape(-1, 2)
    got = known_bits(matrix, np.full(len(times), at_ms, dtype=np.int64))
    assert got.tolist() == [label_bits(row, at_ms) for row in times]
