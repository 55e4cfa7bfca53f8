"""Splits by time: adjacent, ordered, in the calendar of a zone."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import InvalidInput
from feature_store.splits import Splits, day_ms, instant, splits_of_days

KUAIRAND = Path(os.environ.get("GEM_DATA", "../shared/data")) / "kuairand"


@given(times=st.lists(st.integers(-(10**15), 10**15)), edges=st.sets(st.integers(-(10**15), 10**15), min_size=4, max_size=4))
def test_every_row_between_the_edges_is_in_one_part_and_parts_follow_each_other(times: list[int], edges: set[int]) -> None:
    begin, train, valid, test = sorted(edges)
    splits = Splits(train_from_ms=begin, train_to_ms=train, valid_to_ms=valid, test_to_ms=test)
    at = np.array(times, dtype=np.int64)
    parts = splits.rows(at)
    together = np.concatenate(list(parts.values()))
    assert sorted(together) == [row for row, when in enumerate(times) if begin <= when < test]
    ends = [at[rows].max() for rows in parts.values() if len(rows)]
    begins = [at[rows].min() for rows in parts.values() if len(rows)]
    assert all(end < later for end, later in zip(ends, begins[1:], strict=False))


def test_a_boundary_belongs_to_the_later_part() -> None:
    parts = Splits(train_from_ms=0, train_to_ms=10, valid_to_ms=20, test_to_ms=30).rows(np.array([0, 9, 10, 19, 20, 29, 30]))
    assert [list(rows) for rows in parts.values()] == [[0, 1], [2, 3], [4, 5]]


def test_boundaries_that_do_not_increase_are_refused() -> None:
    with pytest.raises(InvalidInput, match="do not increase"):
        Splits(train_from_ms=0, train_to_ms=10, valid_to_ms=10, test_to_ms=30)


def test_a_day_begins_where_its_zone_says() -> None:
    assert day_ms("2022-05-02", zone="Asia/Shanghai") == round(datetime(2022, 5, 1, 16, tzinfo=UTC).timestamp() * 1000)


def test_a_day_of_a_clock_change_is_as_long_as_it_was() -> None:
    assert day_ms("2022-03-27", zone="Europe/Berlin", later=1) - day_ms("2022-03-27", zone="Europe/Berlin") == 23 * 3_600_000


@pytest.mark.parametrize("day", ["2022-13-01", "yesterday", ""])
def test_a_day_that_is_none_is_refused(day: str) -> None:
    with pytest.raises(InvalidInput, match="YYYY-MM-DD"):
        day_ms(day)


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="time zone 'Mars/Base'"):
        day_ms("2022-05-02", zone="Mars/Base")


@pytest.mark.parametrize(
    ("text", "zone", "expected"),
    [
        ("2026-01-10", "UTC", 1_768_003_200_000),
        ("2026-01-10", "Asia/Shanghai", 1_767_974_400_000),
        ("2026-01-10T12:00", "UTC", 1_768_046_400_000),
        ("2026-01-10T12:00", "Asia/Shanghai", 1_768_017_600_000),
        ("2026-01-10T12:00+08:00", "UTC", 1_768_017_600_000),
        ("20260110", "UTC", 1_768_003_200_000),
        ("1768003200000", "Asia/Shanghai", 1_768_003_200_000),
    ],
)
def test_an_instant_is_a_day_a_time_or_milliseconds(text: str, zone: str, expected: int) -> None:
    assert instant(text, zone=zone) == expected


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "12", "2026-01-10 25:00"])
def test_an_instant_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no time; write 2026-01-10|write the day as YYYY-MM-DD"):
        instant(text)


@pytest.mark.parametrize("zone", ["Mars/Base", "", "../etc", "Europe"])
@pytest.mark.parametrize("text", ["2026-01-10", "2026-01-10T12:00"])
def test_an_instant_of_an_unknown_zone_is_refused(text: str, zone: str) -> None:
    with pytest.raises(InvalidInput, match="is not known; use one like Asia/Shanghai"):
        instant(text, zone=zone)


@pytest.mark.skipif(not KUAIRAND.is_dir(), reason=f"KuaiRand is not at {KUAIRAND}; set GEM_DATA")
def test_the_published_days_of_kuairand_have_their_published_rows() -> None:
    (path,) = KUAIRAND.glob("log_*.parquet")
    at = pq.read_table(path, columns=["time_ms"])["time_ms"].to_numpy()
    parts = splits_of_days("2022-04-25", "2022-05-02", "2022-05-04", "2022-05-06", zone="Asia/Shanghai").rows(at)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 131_211, "valid": 35_703, "test": 26_640}
