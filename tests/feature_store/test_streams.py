"""Every store keeps streams alike: nothing acknowledged is lost, nothing unacknowledged is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from feature_store.streams import Stream, open_stream


@pytest.fixture
def stream(store_url: str) -> Iterator[Stream]:
    with open_stream(store_url, "tasks") as opened:
        yield opened


def test_items_are_claimed_once_a_group_in_order(stream: Stream) -> None:
    stream.append([b"a", b"b"])
    stream.append([b"c"])
    assert [item.data for item in stream.claim("g", "one", 2, 0)] == [b"a", b"b"]
    assert [item.data for item in stream.claim("g", "two", 9, 0)] == [b"c"]
    assert stream.claim("g", "one", 9, 0) == []
    assert [item.data for item in stream.claim("other", "one", 9, 0)] == [b"a", b"b", b"c"]


def test_lag_counts_what_is_not_acknowledged(stream: Stream) -> None:
    stream.append([b"a", b"b", b"c"])
    assert stream.lag("g") == 3
    claimed = stream.claim("g", "one", 2, 0)
    assert stream.lag("g") == 3
    stream.ack("g", [item.id for item in claimed])
    assert stream.lag("g") == 1


def test_what_a_dead_consumer_held_goes_to_another(stream: Stream) -> None:
    stream.append([b"a", b"b"])
    held = stream.claim("g", "dead", 9, 0)
    assert stream.claim("g", "alive", 9, 0) == []
    again = stream.claim("g", "alive", 9, 0, reclaim_idle_ms=0)
    assert [item.id for item in again] == [item.id for item in held]
    stream.ack("g", [item.id for item in again])
    assert stream.claim("g", "alive", 9, 0, reclaim_idle_ms=0) == []
    assert stream.lag("g") == 0


def test_a_waiting_consumer_wakes_for_an_item(stream: Stream, store_url: str) -> None:
    timer = threading.Timer(0.1, lambda: stream.append([b"late"]))
    timer.start()
    with open_stream(store_url, "tasks") as waiting:
        assert [item.data for item in waiting.claim("g", "one", 1, 3000)] == [b"late"]
    timer.join()


def test_a_stream_without_a_reader_stays_bounded(store_url: str) -> None:
    with open_stream(store_url, "bounded", max_length=100) as stream:
        for start in range(0, 1000, 50):
            stream.append([str(start + i).encode() for i in range(50)])
        kept = stream.claim("g", "one", 10_000, 0)
    assert kept[-1].data == b"999"
    assert 100 <= len(kept) <= 300  # Redis trims whole nodes


def test_two_streams_of_a_store_do_not_mix(store_url: str) -> None:
    with open_stream(store_url, "one") as one, open_stream(store_url, "two") as two:
        one.append([b"x"])
        assert two.claim("g", "c", 9, 0) == []
        assert two.append([]) == []
