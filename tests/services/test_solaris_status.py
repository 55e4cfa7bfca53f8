from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from feature_store.online import OnlineStore, open_store
from feature_store.streams import open_stream
from services.solaris import ledger
from services.solaris.ledger import (
    CANDIDATES,
    DROPPED,
    REFUSED,
    USED_OF,
    WORKED,
    WRITTEN_IN,
    Ledger,
)
from services.solaris.lifetimes import HOUR_MS, Lifetimes, status_key
from services.solaris.status import SolarisStatus, read_status

SPACE = b"space-01"
T0 = 1_700_000_400_000 // HOUR_MS * HOUR_MS


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'online.sqlite'}"


@pytest.fixture
def store(url: str) -> Iterator[OnlineStore]:
    opened = open_store(url)
    yield opened
    opened.close()


def status(store: OnlineStore, url: str, *, now_ms: int = T0) -> SolarisStatus:
    stream = open_stream(url, "speculation")
    try:
        return read_status(store, stream, space_id=SPACE, now_ms=now_ms)
    finally:
        stream.close()


def test_a_new_store_has_no_coverage_and_no_precision_rather_than_zero(
    store: OnlineStore, url: str
) -> None:
    got = status(store, url)
    assert (got.backlog_tasks, got.coverage, got.usable_coverage, got.precision) == (
        0,
        {},
        None,
        None,
    )


def test_totals_of_all_processes_add_up_and_shares_to_one(store: OnlineStore, url: str) -> None:
    for name, exact, default in (("server:a", 3, 1), ("server:b", 2, 4)):
        book = Ledger(CollectorRegistry())
        book.add(CANDIDATES, "exact", exact)
        book.add(CANDIDATES, "default", default)
        book.add(REFUSED, "expired", 1)
        store.hset_many(status_key(SPACE), {name: book.encoded()})
    worker = Ledger(CollectorRegistry())
    worker.add_all(DROPPED, {"fresh": 7, "expired": 0})
    worker.add(WORKED, "forwards", 2)
    store.hset_many(status_key(SPACE), {"worker:w": worker.encoded()})
    got = status(store, url)
    assert got.coverage == {
        "exact": 0.5,
        "ad_group": 0,
        "similar_users": 0,
        "user": 0,
        "default": 0.5,
    }
    assert got.usable_coverage == 0.5
    assert (dict(got.refused), dict(got.dropped), dict(got.worked)) == (
        {"expired": 2}, {"fresh": 7}, {"forwards": 2},
    )  # fmt: skip


def test_precision_counts_pairs_only_once_they_can_no_longer_be_read(
    store: OnlineStore, url: str
) -> None:
    book = Ledger(CollectorRegistry())
    book.add_in_hour(WRITTEN_IN, [T0, T0 + 1, T0 + 2, T0 + 3, T0 + HOUR_MS])
    book.add_in_hour(USED_OF, [T0, T0 + HOUR_MS])
    store.hset_many(status_key(SPACE), {"worker:w": book.encoded()})
    settled_at = T0 + HOUR_MS + Lifetimes().pair.hard_ms
    before, after = (status(store, url, now_ms=settled_at + d) for d in (-1, 0))
    assert (before.settled_pairs, before.precision) == (0, None)
    assert (after.settled_pairs, after.precision, after.waste) == (4, 0.25, 0.75)


def test_the_backlog_is_the_streams_lag(store: OnlineStore, url: str) -> None:
    stream = open_stream(url, "speculation")
    stream.append([b"x", b"y"])
    stream.close()
    assert status(store, url).backlog_tasks == 2


def test_totals_survive_their_encoding_and_hours_never_become_metric_labels() -> None:
    registry = CollectorRegistry()
    book = Ledger(registry)
    book.add(CANDIDATES, "exact", 3)
    book.add_in_hour(WRITTEN_IN, [T0])
    assert ledger.decode(book.encoded()) == book.totals()
    shown = generate_latest(registry).decode()
    assert 'gem_solaris_candidates_total{kind="exact"} 3.0' in shown
    assert str(T0 // HOUR_MS) not in shown
