"""One suite for both stores: whatever holds for a row in SQLite holds for it in Redis."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from feature_store.errors import DeadlineExceeded, GemError, InvalidInput, NotReady
from feature_store.online import NO_ROW, Change, OnlineStore, open_store
from feature_store.sqlite import Database

KINDS = {
    "user row": "u/-9223372036854775807",
    "user features": "up/7",
    "ad row": "a/0",
    "counters": "c/1f/ad+surface/-12",
    "event mark": "x/7/00ff",
    "LoopFM memory": "lf/0102030405060708/7",
}
BYTES = b"\x00\xff\r\n" + bytes(range(256)) * 40


@pytest.fixture
def store(store_url: str) -> Iterator[OnlineStore]:
    with open_store(store_url) as opened:
        yield opened


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("key", KINDS.values(), ids=KINDS)
def test_a_row_of_every_kind_comes_back_byte_for_byte_and_can_be_empty(store: OnlineStore, key: str) -> None:
    store.put_many({key: BYTES, f"{key}9": b""})
    assert store.get_many([key, "nothing", f"{key}9", key]) == [BYTES, None, b"", BYTES]


def test_solaris_rows_keep_fields_apart_and_leave_others_alone(store: OnlineStore) -> None:
    row = "sol/0102030405060708/p/7"
    store.hset_many(row, {"ad:1": b"a", "g:-5": BYTES, "u": b""})
    store.hset_many(row, {"ad:1": b"b"})
    assert store.hget_many(row, ["u", "ad:2", "ad:1", "g:-5"]) == [b"", None, b"b", BYTES]
    assert store.hget_all(row) == {"ad:1": b"b", "g:-5": BYTES, "u": b""}
    assert store.hget_all("sol/0102030405060708/p/77") == {}


def test_nothing_asked_and_nothing_written_is_no_error(store: OnlineStore) -> None:
    store.put_many({})
    store.hset_many("h", {})
    assert store.get_many([]) == store.hget_many("h", []) == []
    assert store.compare_and_set({})
    assert store.delete([]) == 0


def test_ten_thousand_keys_come_in_the_order_asked(store: OnlineStore) -> None:
    store.put_many({f"a/{n}": str(n).encode() for n in range(0, 10_000, 2)})
    keys = [f"a/{n}" for n in reversed(range(10_000))]
    want = [str(n).encode() if n % 2 == 0 else None for n in reversed(range(10_000))]
    assert store.get_many(keys) == want


def test_a_row_is_written_back_only_if_nobody_wrote_it_since(store: OnlineStore) -> None:
    assert store.compare_and_set({"u/1": Change(b"first", NO_ROW)})
    (read,) = store.get_versioned(["u/1"])
    assert store.compare_and_set({"u/1": Change(b"second", read.version)})
    assert not store.compare_and_set({"u/1": Change(b"lost", read.version)})
    assert not store.compare_and_set({"u/1": Change(b"lost", NO_ROW)})
    store.put_many({"u/1": b"second"})
    (again,) = store.get_versioned(["u/1"])
    assert again.value == b"second"
    assert again.version not in (read.version, NO_ROW)


def test_of_several_rows_either_all_are_written_or_none(store: OnlineStore) -> None:
    store.put_many({"c/1": b"1", "c/2": b"2"})
    one, two = store.get_versioned(["c/1", "c/2"])
    store.put_many({"c/2": b"other"})
    assert not store.compare_and_set({"c/1": Change(b"x", one.version), "c/2": Change(b"x", two.version)})
    assert store.get_many(["c/1", "c/2"]) == [b"1", b"other"]


def test_a_row_that_has_expired_is_gone_and_can_be_made_anew(store: OnlineStore) -> None:
    store.put_many({"x/1": b"short"}, ttl_ms=30)
    store.put_many({"x/2": b"long"}, ttl_ms=60_000)
    assert eventually(lambda: store.get_many(["x/1", "x/2"]) == [None, b"long"])
    assert store.compare_and_set({"x/1": Change(b"anew", NO_ROW, ttl_ms=60_000)})
    assert store.get_many(["x/1"]) == [b"anew"]


def test_a_wide_row_lives_as_long_as_its_longest_wish_and_then_goes_whole(store: OnlineStore) -> None:
    store.hset_many("sol/a", {"one": b"1"}, ttl_ms=60_000)
    store.hset_many("sol/a", {"two": b"2"}, ttl_ms=20)
    store.hset_many("sol/b", {"one": b"1"}, ttl_ms=20)
    store.hset_many("sol/b", {"two": b"2"})
    assert eventually(lambda: store.hget_all("sol/b") == {})
    assert store.hget_all("sol/a") == {"one": b"1", "two": b"2"}
    store.hset_many("sol/b", {"three": b"3"}, ttl_ms=60_000)
    assert store.hget_all("sol/b") == {"three": b"3"}


def test_rows_of_both_kinds_are_found_by_pattern_and_removed_by_prefix_or_key(store: OnlineStore) -> None:
    store.put_many({"x/1/a": b"", "x/1/b": b"", "x/12/a": b"", "lf/ab/1": b""})
    store.hset_many("x/1/wide", {"f": b""})
    assert sorted(store.keys("*/1")) == ["lf/ab/1"]
    assert store.delete_prefix("x/1/") == 3
    assert sorted(store.keys("*")) == ["lf/ab/1", "x/12/a"]
    assert store.delete(["lf/ab/1", "lf/ab/2"]) == 1
    assert store.hget_all("x/1/wide") == {}


def add(store: OnlineStore, key: str, times: int) -> None:
    for _ in range(times):
        while True:
            (row,) = store.get_versioned([key])
            if store.compare_and_set({key: Change(str(int(row.value or b"0") + 1).encode(), row.version)}):
                break


def add_from_elsewhere(url: str, key: str, times: int) -> None:
    with open_store(url, timeout_seconds=20) as store:
        add(store, key, times)


def test_threads_and_processes_that_add_to_one_row_lose_no_addition(store_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    with open_store(store_url, timeout_seconds=20) as store:
        others = [context.Process(target=add_from_elsewhere, args=(store_url, "c/0", 50)) for _ in range(2)]
        threads = [threading.Thread(target=add, args=(store, "c/0", 50)) for _ in range(2)]
        for worker in [*others, *threads]:
            worker.start()
        for worker in [*others, *threads]:
            worker.join()
        assert [other.exitcode for other in others] == [0, 0]
        assert store.get_many(["c/0"]) == [b"200"]


def test_what_one_connection_wrote_another_reads_at_once(store: OnlineStore, store_url: str) -> None:
    with open_store(store_url) as other:
        for number in range(20):
            store.put_many({"u/1": str(number).encode()})
            assert other.get_many(["u/1"]) == [str(number).encode()]


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "sqlite:////proc/no/such/folder/online.sqlite"])
def test_a_store_that_is_not_there_is_not_ready_whatever_is_asked(url: str) -> None:
    with open_store(url) as store:
        for ask in (
            store.ping,
            lambda: store.get_many(["a"]),
            lambda: store.put_many({"a": b""}),
            lambda: store.compare_and_set({"a": Change(b"", NO_ROW)}),
            lambda: store.hset_many("a", {"f": b""}),
            lambda: list(store.keys("*")),
        ):
            with pytest.raises(NotReady, match="does not answer"):
                ask()


def test_a_writer_waits_for_a_busy_file_no_longer_than_its_timeout(tmp_path: Path) -> None:
    path = str(tmp_path / "online.sqlite")
    holder = Database(path, "", timeout_seconds=1)
    with open_store(f"sqlite:///{path}", timeout_seconds=0.05) as store:
        store.put_many({"a": b"1"})
        with holder.writing():
            with pytest.raises(DeadlineExceeded, match="busy"):
                store.put_many({"a": b"2"})
            assert store.get_many(["a"]) == [b"1"]
    holder.close()


def test_expired_rows_leave_the_file(tmp_path: Path) -> None:
    from feature_store.sqlite import SqliteStore

    now = [1000.0]
    with SqliteStore(str(tmp_path / "o.sqlite"), clock=lambda: now[0]) as store:
        store.put_many({f"x/{n}": b"x" for n in range(100)}, ttl_ms=1000)
        store.hset_many("sol/1", {"f": b"x"}, ttl_ms=1000)
        now[0] += 3600
        store.put_many({"u/1": b""})
        with store._database.reading() as connection:
            sizes = [connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("rows", "wide", "fields")]
    assert sizes == [1, 0, 0]


@pytest.mark.parametrize("url", ["", "sqlite:/x", "sqlite://", "mysql://h/d", "online.sqlite", "sqlite:///"])
def test_another_kind_of_url_is_refused_and_told_how_to_write_one(url: str) -> None:
    with pytest.raises(InvalidInput, match="sqlite:///PATH"):
        open_store(url)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'o.sqlite'}")
    store.put_many({"a": b""})
    store.close()
    with pytest.raises(GemError):
        store.get_many(["a"])
