"""Every store keeps every kind of row alike."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from feature_store.errors import Aborted, InvalidInput, NotReady
from feature_store.online import OnlineStore, Versioned, open_store, update


@pytest.fixture
def store(store_url: str) -> Iterator[OnlineStore]:
    with open_store(store_url) as opened:
        yield opened


def test_values_come_back_in_the_order_of_the_keys(store: OnlineStore) -> None:
    store.put_many({"a/1": b"one", "a/é\0": b"\x00\xff", "a/3": b""})
    assert store.get_many(["a/3", "nobody", "a/1", "a/é\0"]) == [b"", None, b"one", b"\x00\xff"]
    assert store.get_many([]) == []


def test_ten_thousand_rows_in_one_call(store: OnlineStore) -> None:
    rows = {f"a/{i}": i.to_bytes(4, "little") for i in range(10_000)}
    store.put_many(rows)
    assert store.get_many(list(rows)) == list(rows.values())


def test_a_row_is_gone_when_its_time_is_up(store: OnlineStore) -> None:
    store.put_many({"short": b"x"}, ttl_ms=60)
    store.put_many({"long": b"y"}, ttl_ms=60_000)
    assert store.get_many(["short", "long"]) == [b"x", b"y"]
    time.sleep(0.1)
    assert store.get_many(["short", "long"]) == [None, b"y"]


def test_compare_and_set_lets_only_the_first_writer_through(store: OnlineStore) -> None:
    assert store.read_versioned(["u/1"]) == [Versioned(b"", 0)]
    assert store.compare_and_set("u/1", 0, b"first")
    assert not store.compare_and_set("u/1", 0, b"late")
    assert store.compare_and_set("u/1", 1, b"second")
    assert store.read_versioned(["u/1", "u/2"]) == [Versioned(b"second", 2), Versioned(b"", 0)]


def test_no_update_is_lost_among_threads(store: OnlineStore) -> None:
    def add() -> None:
        for _ in range(20):
            while True:
                try:
                    update(store, "u/1", lambda held: bytes([(held or b"\0")[0] + 1]))
                    break
                except (Aborted, NotReady):
                    continue

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read_versioned(["u/1"]) == [Versioned(bytes([80]), 80)]


def test_wide_rows_have_fields(store: OnlineStore) -> None:
    store.hset_many("sol/1", {"ad:1": b"a", "u": b"b"})
    store.hset_many("sol/1", {"ad:2": b"c", "ad:1": b"d"}, ttl_ms=60_000)
    assert store.hget_many("sol/1", ["u", "ad:3", "ad:1"]) == [b"b", None, b"d"]
    assert store.hget_all("sol/1") == {"ad:1": b"d", "ad:2": b"c", "u": b"b"}
    assert store.hget_many("sol/2", ["u"]) == [None]
    assert store.hget_all("sol/2") == {}


def test_a_wide_row_expires_whole_and_a_later_write_never_shortens_its_life(store: OnlineStore) -> None:
    store.hset_many("short", {"a": b"1"}, ttl_ms=60)
    store.hset_many("long", {"a": b"1"}, ttl_ms=60_000)
    store.hset_many("long", {"b": b"2"}, ttl_ms=60)
    time.sleep(0.1)
    assert store.hget_all("short") == {}
    assert store.hget_all("long") == {"a": b"1", "b": b"2"}
    store.hset_many("short", {"b": b"2"})
    assert store.hget_all("short") == {"b": b"2"}


def test_erasure_removes_what_begins_with_a_prefix_and_nothing_else(store: OnlineStore) -> None:
    store.put_many({"u/1": b"x", "u/11": b"x", "u/1*": b"x", "v/1": b"x"})
    store.hset_many("u/1/wide", {"a": b"x"})
    assert store.delete_prefix("u/1*") == 1
    assert store.delete_prefix("u/1") == 3
    assert store.get_many(["u/1", "u/11", "v/1"]) == [None, None, b"x"]
    with pytest.raises(InvalidInput, match="empty prefix"):
        store.delete_prefix("")


def test_a_store_that_is_not_there_says_so_in_time() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open_store(f"redis://:secret@127.0.0.1:{port}/0", timeout_seconds=0.2) as store:
        with pytest.raises(NotReady) as caught:
            store.ping()
        assert "secret" not in str(caught.value)


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="sqlite:///PATH"):
        open_store("mysql://x")
