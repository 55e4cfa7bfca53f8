"""One suite for streams in both stores: nothing is lost, and what a dead consumer held comes again."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import pytest

from feature_store.errors import InvalidInput, NotReady
from feature_store.streams import Item, Stream, open_stream


@pytest.fixture
def stream(store_url: str) -> Iterator[Stream]:
    with open_stream(store_url, "speculation") as opened:
        yield opened


def payloads(items: list[Item]) -> list[bytes]:
    return [item.payload for item in items]


def test_items_come_in_order_once_to_each_group_and_byte_for_byte(stream: Stream) -> None:
    sent = [b"", b"\x00\xff\n", b"x" * 100_000]
    ids = stream.append(sent)
    first = stream.claim("solaris", "a", 2, 0)
    second = stream.claim("solaris", "b", 9, 0)
    assert payloads(first) + payloads(second) == sent
    assert [item.id for item in [*first, *second]] == ids
    assert stream.claim("solaris", "a", 9, 0) == []
    assert payloads(stream.claim("audit", "a", 9, 0)) == sent


def test_streams_of_one_store_do_not_mix(stream: Stream, store_url: str) -> None:
    with open_stream(store_url, "served") as other:
        stream.append([b"task"])
        other.append([b"served"])
        assert payloads(other.claim("sink", "a", 9, 0)) == [b"served"]
        assert payloads(stream.claim("sink", "a", 9, 0)) == [b"task"]


def test_lag_counts_what_is_not_acknowledged_claimed_or_not(stream: Stream) -> None:
    assert stream.lag("solaris") == 0
    stream.append([b"1", b"2", b"3"])
    assert stream.lag("solaris") == 3
    taken = stream.claim("solaris", "a", 2, 0)
    assert stream.lag("solaris") == 3
    stream.ack("solaris", [item.id for item in taken])
    stream.ack("solaris", [item.id for item in taken])
    stream.ack("solaris", [])
    assert stream.lag("solaris") == 1
    assert stream.lag("other") == 3


def claim_and_die(url: str) -> None:
    stream = open_stream(url, "speculation", timeout_seconds=10)
    assert payloads(stream.claim("solaris", "dies", 2, 5_000)) == [b"1", b"2"]
    os._exit(9)


def test_what_a_killed_consumer_held_comes_again_to_another_and_is_not_lost(
    stream: Stream, store_url: str
) -> None:
    stream.append([b"1", b"2", b"3"])
    victim = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(store_url,))
    victim.start()
    victim.join()
    assert victim.exitcode == 9
    assert payloads(stream.claim("solaris", "b", 9, 0)) == [b"3"]
    assert stream.lag("solaris") == 3
    again = stream.claim("solaris", "b", 9, 0, reclaim_idle_ms=0)
    assert payloads(again) == [b"1", b"2", b"3"]
    stream.ack("solaris", [item.id for item in again])
    assert stream.claim("solaris", "c", 9, 0, reclaim_idle_ms=0) == []
    assert stream.lag("solaris") == 0


def test_an_item_held_by_a_living_consumer_is_not_taken_from_it(stream: Stream) -> None:
    stream.append([b"1"])
    stream.claim("solaris", "a", 1, 0)
    assert stream.claim("solaris", "b", 1, 0, reclaim_idle_ms=60_000) == []


def test_consumers_that_work_at_once_share_the_items_and_double_none(store_url: str) -> None:
    seen: list[bytes] = []
    with open_stream(store_url, "speculation", timeout_seconds=20) as stream:
        sent = [str(number).encode() for number in range(300)]

        def work(name: str) -> None:
            while items := stream.claim("solaris", name, 7, 0):
                seen.extend(payloads(items))
                stream.ack("solaris", [item.id for item in items])

        stream.append(sent)
        workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sorted(seen) == sorted(sent)
        assert stream.lag("solaris") == 0


def test_a_waiting_consumer_is_served_as_soon_as_there_is_something(stream: Stream) -> None:
    later = threading.Timer(0.1, stream.append, ([b"late"],))
    later.start()
    begun = time.monotonic()
    assert payloads(stream.claim("solaris", "a", 9, 5_000)) == [b"late"]
    assert time.monotonic() - begun < 3
    later.join()


def test_waiting_ends_when_its_time_is_up_even_beyond_the_sockets_own(store_url: str) -> None:
    with open_stream(store_url, "speculation", timeout_seconds=0.2) as stream:
        begun = time.monotonic()
        assert stream.claim("solaris", "a", 9, 450) == []
        assert 0.4 < time.monotonic() - begun < 3


def test_a_stream_is_bounded_and_what_was_dropped_is_no_ones_lag(store_url: str) -> None:
    with open_stream(store_url, "speculation", max_length=100) as stream:
        stream.append([b"old"] * 50)
        stream.claim("solaris", "a", 10, 0)
        for _ in range(20):
            stream.append([b"new"] * 50)
        assert 100 <= stream.lag("audit") <= 200  # Redis drops whole nodes of a hundred
        held = stream.claim("solaris", "b", 9_999, 0, reclaim_idle_ms=0)
        assert set(payloads(held)) == {b"new"}
        assert stream.lag("solaris") == len(held) == stream.lag("audit")


def test_a_store_that_is_not_there_is_not_ready() -> None:
    with open_stream("redis://127.0.0.1:1/0", "s") as stream, pytest.raises(NotReady):
        stream.append([b""])
    with pytest.raises(InvalidInput, match="redis://host"):
        open_stream("kafka://x", "s")


def test_a_redis_that_was_emptied_is_used_again(redis_port: int) -> None:
    import redis

    with open_stream(f"redis://127.0.0.1:{redis_port}/1", "s") as stream, redis.Redis(port=redis_port) as client:
        stream.claim("g", "a", 1, 0)
        client.flushall()
        with pytest.raises(NotReady, match="NOGROUP"):
            stream.claim("g", "a", 1, 0)
        stream.append([b"after"])
        assert payloads(stream.claim("g", "a", 1, 0)) == [b"after"]
