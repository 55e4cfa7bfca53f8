from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake.exceptions import DeltaError
from gem.router.v1.router_service_pb2 import ServedRequest
from prometheus_client import CollectorRegistry

from feature_store.streams import open_stream
from feature_store.tables import Tables
from services.router.sink.drain import GROUP, Drain, SinkMetrics, insert_once
from tests.integration.processes import Process, Processes, processes
from tests.services.faulty_peers import until

SINK = "services.router.sink"


def served(number: int, *, arm: str = "A0") -> ServedRequest:
    return ServedRequest(
        request_id=f"r{number}",
        surface="feed",
        user_id="é",
        request_ms=1_700_000_000_000 + number,
        ad_ids=["1", "2"],
        values=[0.5, 0.25],
        arm=arm,
        shadow=arm != "A0",
    )


def write(store: str, messages: list[ServedRequest]) -> None:
    with open_stream(store, "served") as stream:
        stream.append([each.SerializeToString() for each in messages])


def rows(tables: Tables) -> Counter[tuple[str, str]]:
    if not tables.exists("served"):
        return Counter()
    table = tables.read("served", columns=["request_id", "arm"])
    return Counter(zip(table["request_id"].to_pylist(), table["arm"].to_pylist(), strict=True))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/gem.db"


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as group:
        yield group


def drained(store: str, tables: Tables, registry: CollectorRegistry, *, batch: int = 100) -> None:
    with open_stream(store, "served") as stream:
        metrics = SinkMetrics(registry)
        drain = Drain(
            stream, tables, consumer="test", batch=batch, reclaim_seconds=60.0, metrics=metrics
        )
        while drain.once():
            pass
        assert stream.lag(GROUP) == 0


def test_what_was_served_lies_in_the_table_to_the_byte(store: str, tables: Tables) -> None:
    messages = [served(number) for number in range(250)] + [served(1, arm="shadow")]
    write(store, messages)
    drained(store, tables, CollectorRegistry())
    table = tables.read("served")
    assert sorted(table["served"].to_pylist()) == sorted(m.SerializeToString() for m in messages)
    assert set(table["surface"].to_pylist()) == {"feed"}
    assert sorted(table["event_ms"].to_pylist()) == sorted(m.request_ms for m in messages)


def test_a_repeated_message_is_written_once_within_a_batch_and_across_batches(
    store: str, tables: Tables
) -> None:
    registry = CollectorRegistry()
    write(store, [served(number % 10) for number in range(45)])
    drained(store, tables, registry, batch=20)
    assert rows(tables) == Counter({(f"r{number}", "A0"): 1 for number in range(10)})
    assert registry.get_sample_value("gem_sink_written_total") == 10
    assert registry.get_sample_value("gem_sink_repeated_total") == 35


def test_a_batch_that_was_written_but_not_acknowledged_is_not_written_again(
    store: str, tables: Tables
) -> None:
    messages = [served(number) for number in range(20)]
    write(store, messages)
    assert insert_once(tables, messages[:15]) == 15  # the sink died here, before it acknowledged
    drained(store, tables, CollectorRegistry())
    assert rows(tables) == Counter({(f"r{number}", "A0"): 1 for number in range(20)})


def test_sinks_that_write_the_same_batch_at_once_write_it_once(tables: Tables) -> None:
    messages = [served(number) for number in range(50)]
    insert_once(tables, [served(1_000)])

    def write_until_done() -> int:
        while True:
            try:
                return insert_once(tables, messages)
            except DeltaError:
                continue  # the other was first: look again

    with ThreadPoolExecutor(3) as pool:
        inserted = list(pool.map(lambda _: write_until_done(), range(3)))
    assert sorted(inserted) == [0, 0, 50]
    assert set(rows(tables).values()) == {1}
    assert len(rows(tables)) == 51


def test_a_message_that_is_no_served_request_is_counted_and_left_out(
    store: str, tables: Tables
) -> None:
    registry = CollectorRegistry()
    with open_stream(store, "served") as stream:
        stream.append([b"\xff\xff\xff", served(1).SerializeToString()])
    drained(store, tables, registry)
    assert rows(tables) == Counter({("r1", "A0"): 1})
    assert registry.get_sample_value("gem_sink_rejected_total") == 1


def start_sink(started: Processes, store: str, tables: Tables) -> Process:
    env = {"GEM_STORE": store, "GEM_TABLES": str(tables.root), "GEM_SINK_BATCH": "50"}
    env |= {
        "GEM_DRAIN_SECONDS": "0",
        "GEM_SINK_PAUSE_SECONDS": "0.05",
        "GEM_SINK_RECLAIM_SECONDS": "2",
    }
    return started.start(SINK, env)


def test_killed_and_restarted_sinks_lose_nothing_and_double_nothing(
    started: Processes, store: str, tables: Tables
) -> None:
    write(store, [served(number) for number in range(1_500)])
    sinks = [start_sink(started, store, tables) for _ in range(2)]
    until(lambda: len(rows(tables)) > 100, seconds=20)
    sinks[0].kill()
    write(store, [served(number) for number in range(1_500, 2_000)])
    sinks[0] = started.restart(sinks[0])
    for sink in sinks:
        sink.wait_ready()
    until(lambda: len(rows(tables)) == 2_000, seconds=60)
    assert set(rows(tables).values()) == {1}


def test_a_sink_that_is_told_to_stop_drains_what_is_left(
    started: Processes, store: str, tables: Tables
) -> None:
    sink = start_sink(started, store, tables)
    sink.wait_ready()
    write(store, [served(number) for number in range(300)])
    assert sink.terminate() == 0
    assert len(rows(tables)) == 300
