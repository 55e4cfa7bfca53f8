"""The ledger of recent facts: repeats are told from news, within bounds, and damage is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import CorruptArtefact, FailedPrecondition
from services.sequence.ledger import MAX_FACTS, Happening, Ledger

HORIZON = 1_000


def empty() -> Ledger:
    return Ledger(2, horizon_ms=HORIZON)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


FACTS = st.lists(
    st.tuples(
        st.integers(0, 3), st.binary(min_size=16, max_size=16), st.integers(1, 900), st.integers(-1, 4),
        st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), st.integers(0, 2**64 - 1),
    ),
    max_size=12,
)  # fmt: skip


@given(FACTS)
def test_a_ledger_survives_being_bytes(facts: list[tuple[int, bytes, int, int, tuple[int, int], int]]) -> None:
    ledger = empty()
    for source, key, when, surface, ad_ids, labels in facts:
        ledger.add(source, key, Happening(when, surface, list(ad_ids), labels))
    again = Ledger.from_bytes(ledger.to_bytes(), 2, horizon_ms=HORIZON)
    assert again.facts == ledger.facts
    assert again.to_bytes() == ledger.to_bytes()


def test_a_fact_is_news_once_for_each_source_and_name() -> None:
    ledger = empty()
    assert ledger.add(0, name(1), Happening(10, 0, [1, 2]))
    assert not ledger.add(0, name(1), Happening(11, 0, [1, 2]))
    assert ledger.add(1, name(1), Happening(10, 0, [1, 2]))


def test_what_is_older_than_the_horizon_is_dropped_and_never_news_again() -> None:
    ledger = empty()
    ledger.add(0, name(1), Happening(10, 0, [1, 2]))
    ledger.add(0, name(2), Happening(10 + HORIZON, 0, [1, 2]))
    ledger.add(0, name(3), Happening(11 + HORIZON, 0, [1, 2]))
    again = Ledger.from_bytes(ledger.to_bytes(), 2, horizon_ms=HORIZON)
    assert [key for _, key in again.facts] == [name(2), name(3)]
    assert not again.add(0, name(1), Happening(10, 0, [1, 2]))
    assert again.add(0, name(4), Happening(11, 0, [1, 2]))


def test_ten_times_the_events_make_no_larger_row() -> None:
    ledger = empty()
    for number in range(10 * MAX_FACTS):
        ledger.add(0, name(number), Happening(5, 0, [1, 2]))
    kept = Ledger.from_bytes(ledger.to_bytes(), 2, horizon_ms=HORIZON)
    assert len(kept.facts) == MAX_FACTS


@given(st.integers(0, 200), st.integers(1, 255))
def test_damage_anywhere_is_found_and_the_row_named(at: int, change: int) -> None:
    ledger = empty()
    for number in range(3):
        ledger.add(0, name(number), Happening(5, 0, [1, 2]))
    data = bytearray(ledger.to_bytes())
    data[at % len(data)] ^= change
    with pytest.raises(CorruptArtefact, match="u/7/ledger"):
        Ledger.from_bytes(bytes(data), 2, horizon_ms=HORIZON, key="u/7/ledger")


def test_a_row_of_another_spec_is_refused() -> None:
    ledger = empty()
    ledger.add(0, name(1), Happening(5, 0, [1, 2]))
    with pytest.raises(FailedPrecondition, match="another spec"):
        Ledger.from_bytes(ledger.to_bytes(), 3, horizon_ms=HORIZON)
