"""Every store keeps streams alike: nothing acknowledged is lost, nothing unacknowledged is forgotten."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import pytest

from feature_store.errors import NotReady
from feature_store.online import open_store
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


def claim_and_die(url: str) -> None:
    stream = open_stream(url, "tasks")
    assert [item.data for item in stream.claim("g", "dies", 2, 5_000)] == [b"1", b"2"]
    os._exit(9)


def test_a_consumer_killed_between_claim_and_acknowledgement_loses_nothing(
    stream: Stream, store_url: str
) -> None:
    stream.append([b"1", b"2", b"3"])
    victim = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(store_url,))
    victim.start()
    victim.join()
    assert victim.exitcode == 9
    assert [item.data for item in stream.claim("g", "alive", 9, 0)] == [b"3"]
    assert stream.lag("g") == 3
    again = stream.claim("g", "alive", 9, 0, reclaim_idle_ms=0)
    assert [item.data for item in again] == [b"1", b"2", b"3"]
    stream.ack("g", [item.id for item in again])
    assert stream.lag("g") == 0


def test_consumers_that_work_at_once_share_the_items_and_double_none(stream: Stream) -> None:
    sent, seen = [str(number).encode() for number in range(300)], []

    def work(name: str) -> None:
        while items := stream.claim("g", name, 7, 0):
            seen.extend(item.data for item in items)
            stream.ack("g", [item.id for item in items])

    stream.append(sent)
    workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(seen) == sorted(sent)
    assert stream.lag("g") == 0


def test_waiting_ends_when_its_time_is_up(stream: Stream) -> None:
    begun = time.monotonic()
    assert stream.claim("g", "one", 9, 150) == []
    assert 0.1 < time.monotonic() - begun < 3


def test_what_was_dropped_unread_is_nobodys_lag(store_url: str) -> None:
    with open_stream(store_url, "bounded", max_length=100) as stream:
        stream.append([b"old"] * 50)
        stream.claim("g", "one", 10, 0)
        for _ in range(20):
            stream.append([b"new"] * 50)
        held = stream.claim("g", "two", 9_999, 0, reclaim_idle_ms=0)
        assert {item.data for item in held} == {b"new"}
        assert stream.lag("g") == len(held) == stream.lag("another")
        stream.ack("g", [item.id for item in held])
        assert stream.lag("g") == 0


def test_a_stream_whose_server_was_emptied_is_used_again(redis_server: str) -> None:
    with open_stream(redis_server, "tasks") as stream, open_store(redis_server) as store:
        stream.claim("g", "one", 1, 0)
        store.delete_prefix("stream/")
        with pytest.raises(NotReady, match="NOGROUP"):
            stream.claim("g", "one", 1, 0)
        stream.append([b"after"])
        assert [item.data for item in stream.claim("g", "one", 1, 0)] == [b"after"]


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
