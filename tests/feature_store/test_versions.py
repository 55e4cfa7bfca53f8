"""Which version was in force: against a search through all rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_store.versions import VersionIndex, positions

rows = st.lists(
    st.tuples(st.integers(-1, 2), st.integers(0, 9), st.integers(0, 9)),
    max_size=12,
    unique_by=lambda row: row[:2],
)
asked = st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 20)), max_size=8)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def index_of(found: list[tuple[int, int, int]]) -> VersionIndex:
    """Versions (key, valid from, delay)."""
    return VersionIndex(
        ints([key for key, _, _ in found]),
        ints([valid for _, valid, _ in found]),
        ints([valid + delay for _, valid, delay in found]),
    )


@given(rows, asked)
def test_the_version_in_force_is_the_latest_valid_one_that_was_available(
    found: list[tuple[int, int, int]], asked: list[tuple[int, int]]
) -> None:
    got = index_of(found).at(ints([key for key, _ in asked]), ints([when for _, when in asked]))
    for (key, when), row in zip(asked, got.tolist(), strict=True):
        known = [
            (valid, number)
            for number, (own, valid, delay) in enumerate(found)
            if own == key and valid + delay <= when
        ]
        assert row == (max(known)[1] if known else -1)


def test_a_version_that_arrives_after_a_newer_one_is_never_in_force() -> None:
    index = index_of([(1, 10, 40), (1, 20, 0)])
    assert index.at(ints([1, 1, 1]), ints([19, 20, 60])).tolist() == [-1, 1, 1]


def test_a_version_is_in_force_from_its_first_millisecond() -> None:
    index = index_of([(1, 10, 0), (1, 20, 5)])
    assert index.at(ints([1] * 4), ints([9, 10, 24, 25])).tolist() == [-1, 0, 0, 1]


def test_keys_are_found_or_not_among_sorted_ones() -> None:
    assert positions(ints([3, 5, 9]), ints([5, 4, 9, 99, -1])).tolist() == [1, -1, 2, -1, -1]
    assert positions(ints([]), ints([1])).tolist() == [-1]
