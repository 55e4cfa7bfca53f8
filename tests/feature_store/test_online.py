"""Every store keeps every kind of row alike."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from feature_store.errors import Aborted, InvalidInput, NotReady
from feature_store.online import OnlineStore, Versioned, open_store, update, update_many
from feature_store.sqlite import SqliteStore

PLAIN = {"ad": "a/0", "user's profile": "u/-9223372036854775807/profile", "pair mean": "sol/x"}
VERSIONED = {"user's past": "u/7/past", "counters": "c/3/-12", "LoopFM memory": "lf/0102030405060708/7"}
BYTES = b"\x00\xff\r\n" + bytes(range(256)) * 400


@pytest.fixture
def store(store_url: str) -> Iterator[OnlineStore]:
    with open_store(store_url) as opened:
        yield opened


@pytest.mark.parametrize("key", PLAIN.values(), ids=PLAIN)
def test_a_plain_row_of_every_kind_comes_back_byte_for_byte(store: OnlineStore, key: str) -> None:
    store.put_many({key: b"old"})
    store.put_many({key: BYTES, f"{key}9": b""})
    assert store.get_many([key, f"{key}9", key]) == [BYTES, b"", BYTES]


@pytest.mark.parametrize("key", VERSIONED.values(), ids=VERSIONED)
def test_a_versioned_row_of_every_kind_comes_back_byte_for_byte(store: OnlineStore, key: str) -> None:
    assert update(store, key, lambda held: held + BYTES) == 1
    assert update(store, key, lambda held: held + BYTES, ttl_ms=60_000) == 2
    assert store.read_versioned([f"{key}9", key]) == [Versioned(b"", 0), Versioned(BYTES + BYTES, 2)]


def test_a_solaris_row_holds_a_thousand_pairs(store: OnlineStore) -> None:
    pairs = {f"ad:{ad}": ad.to_bytes(8, "big", signed=True) * 16 for ad in range(-500, 500)}
    store.hset_many("sol/0102030405060708/p/7", pairs, ttl_ms=60_000)
    assert store.hget_many("sol/0102030405060708/p/7", list(pairs)) == list(pairs.values())
    assert store.hget_all("sol/0102030405060708/p/77") == {}


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


def test_of_several_rows_either_all_are_written_or_none(store: OnlineStore) -> None:
    assert store.compare_and_set_many({})
    assert store.compare_and_set_many({"c/1": Versioned(b"1", 0), "c/2": Versioned(b"", 0)})
    assert not store.compare_and_set_many({"c/1": Versioned(b"x", 1), "c/2": Versioned(b"x", 0)})
    assert not store.compare_and_set_many({"c/3": Versioned(b"x", 0), "c/2": Versioned(b"x", 9)})
    assert store.compare_and_set_many({"c/2": Versioned(b"2", 1), "c/3": Versioned(b"3", 0)})
    want = [Versioned(b"1", 1), Versioned(b"2", 2), Versioned(b"3", 1)]
    assert store.read_versioned(["c/1", "c/2", "c/3"]) == want


def test_an_update_of_several_rows_starts_anew_when_one_of_them_changed(store: OnlineStore) -> None:
    tries = []

    def change(held: dict[str, bytes], more: object) -> dict[str, bytes]:
        assert callable(more)
        other = more(["c/9"])["c/9"]
        tries.append((held["u/1"], other))
        if len(tries) == 1:
            update(store, "c/9", lambda old: b"meanwhile")
        return {"u/1": held["u/1"] + b"u", "c/9": other + b"c"}

    update_many(store, ["u/1"], change)
    assert tries == [(b"", b""), (b"", b"meanwhile")]
    assert [row.value for row in store.read_versioned(["u/1", "c/9"])] == [b"u", b"meanwhilec"]


def test_rows_of_both_kinds_are_found_by_pattern_and_deleted_by_name(store: OnlineStore) -> None:
    store.put_many({"lf/ab/7": b"", "lf/ab/17": b"", "lf/[cd]/7": b"", "u/7/past": b"", "lf/gone/7": b""})
    store.put_many({"lf/gone/7": b""}, ttl_ms=1)
    store.hset_many("sol/ab/p/7", {"u": b""})
    time.sleep(0.01)
    assert sorted(store.find("lf/*/7")) == ["lf/[cd]/7", "lf/ab/7"]
    assert store.find("lf/[cd]/*") == ["lf/[cd]/7"]
    assert store.find("sol/*/7") == ["sol/ab/p/7"]
    assert store.delete(["sol/ab/p/7", "lf/ab/7", "nobody"]) == 2
    assert store.hget_all("sol/ab/p/7") == {}
    assert store.delete([]) == 0


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


def add_from_elsewhere(url: str, times: int) -> None:
    with open_store(url, timeout_seconds=20) as store:
        for _ in range(times):
            while True:
                try:
                    update(store, "c/0/0", lambda held: (int.from_bytes(held, "big") + 1).to_bytes(4, "big"))
                    break
                except Aborted:
                    continue


def test_no_update_is_lost_among_processes(store: OnlineStore, store_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=add_from_elsewhere, args=(store_url, 50)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert store.read_versioned(["c/0/0"]) == [Versioned((100).to_bytes(4, "big"), 100)]


def test_what_one_process_wrote_another_reads_at_once(store: OnlineStore, store_url: str) -> None:
    with open_store(store_url) as other:
        for number in range(20):
            store.put_many({"u/1": str(number).encode()})
            assert other.get_many(["u/1"]) == [str(number).encode()]


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
        begun = time.monotonic()
        with pytest.raises(NotReady) as caught:
            store.ping()
        assert time.monotonic() - begun < 0.5, "one attempt, no back-off: the caller has a deadline"
        assert "secret" not in str(caught.value)


def test_a_server_that_accepts_and_says_nothing_costs_no_more_than_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with open_store(url, timeout_seconds=0.1) as store:
            begun = time.monotonic()
            with pytest.raises(NotReady):
                store.get_many(["a"])
            assert time.monotonic() - begun < 1


def test_a_file_that_cannot_be_opened_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a database, though long enough to look at" * 100)
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(NotReady, match="does not answer"):
            open_store(f"sqlite:///{path}").ping()


def test_a_writer_waits_for_a_locked_file_no_longer_than_its_timeout_and_readers_go_on(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'o.sqlite'}"
    with SqliteStore(url.removeprefix("sqlite:///")) as holder, open_store(url, timeout_seconds=0.05) as store:
        store.put_many({"a": b"1"})
        with holder._file.writing():
            with pytest.raises(NotReady, match="locked"):
                store.put_many({"a": b"2"})
            assert store.get_many(["a"]) == [b"1"]


def test_expired_rows_leave_the_file(tmp_path: Path) -> None:
    with SqliteStore(str(tmp_path / "o.sqlite")) as store:
        store.put_many({f"x/{n}": b"x" for n in range(100)}, ttl_ms=-1)
        store.hset_many("sol/1", {"f": b"x"}, ttl_ms=-1)
        store._file._purge_at = 0.0
        store.put_many({"u/1": b""})
        with store._file.reading() as db:
            sizes = [db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("row", "wide", "wide_expiry")]
    assert sizes == [1, 0, 0]


def test_a_closed_store_says_so_on_every_thread(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'o.sqlite'}")
    store.close()
    caught: list[Exception] = []

    def ask() -> None:
        try:
            store.ping()
        except NotReady as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ask()
    assert len(caught) == 2


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="sqlite:///PATH"):
        open_store("mysql://x")
