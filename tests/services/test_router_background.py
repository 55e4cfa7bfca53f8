from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from gem.router.v1.router_service_pb2 import ServedRequest
from prometheus_client import CollectorRegistry

from services.router.afterwards import Afterwards, Entry
from services.router.background import Background
from services.router.metrics import RouterMetrics


class FlakyStream:
    """A fault: a store that fails a number of times before it takes anything."""

    def __init__(self, *, failures: int) -> None:
        self.failures, self.items = failures, []

    def append(self, items: Sequence[bytes]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the store is away")
        self.items += items


def afterwards(served: FlakyStream, registry: CollectorRegistry) -> Afterwards:
    def never(*_: object) -> ServedRequest:
        raise AssertionError("there is no shadow arm")

    return Afterwards(
        served=served,
        speculation=FlakyStream(failures=0),
        score_shadow=never,
        metrics=RouterMetrics(registry),
        max_waiting=8,
    )


def test_work_is_done_in_order_in_batches_and_finished_at_the_close() -> None:
    batches: list[list[int]] = []
    lost = Counter[str]()
    first = threading.Event()

    def handle(batch: Sequence[int]) -> None:
        first.wait(5)
        batches.append(list(batch))

    worker = Background(
        "test", handle, max_waiting=100, max_batch=10, on_lost=lambda w, n: lost.update({w: n})
    )
    for number in range(35):
        assert worker.offer(number)
    first.set()
    worker.close(timeout=5.0)
    assert [number for batch in batches for number in batch] == list(range(35))
    assert max(map(len, batches)) <= 10
    assert lost == {}


def test_a_full_queue_loses_and_counts_without_making_anybody_wait() -> None:
    release, entered = threading.Event(), threading.Event()
    lost = Counter[str]()

    def stuck(batch: Sequence[int]) -> None:
        entered.set()
        release.wait(10)

    worker = Background(
        "test", stuck, max_waiting=4, max_batch=1, on_lost=lambda w, n: lost.update({w: n})
    )
    worker.offer(0)
    assert entered.wait(5)
    begun = time.perf_counter()
    taken = [worker.offer(number) for number in range(1, 11)]
    assert time.perf_counter() - begun < 0.5
    assert taken == [True] * 4 + [False] * 6
    worker.close(timeout=0.05)
    assert lost == {"full": 6, "stopped": 4}
    release.set()


def test_a_bug_costs_its_batch_and_not_the_thread() -> None:
    done: list[int] = []
    lost = Counter[str]()

    def handle(batch: Sequence[int]) -> None:
        if batch[0] == 1:
            raise KeyError("a bug")
        done.extend(batch)

    worker = Background(
        "test", handle, max_waiting=10, max_batch=1, on_lost=lambda w, n: lost.update({w: n})
    )
    for number in range(3):
        worker.offer(number)
    worker.close(timeout=5.0)
    assert (done, lost) == ([0, 2], {"bug": 1})


def test_an_append_that_fails_is_tried_again_and_given_up_after_three_times() -> None:
    for failures, logged, given_up in ((2, 1, 0), (3, 0, 1)):
        registry = CollectorRegistry()
        stream = FlakyStream(failures=failures)
        work = afterwards(stream, registry)
        work._write([Entry(ServedRequest(request_id="r"), None, "")])
        work.close()
        assert len(stream.items) == logged
        failed = registry.get_sample_value("gem_unlogged_total", {"reason": "served_failed"}) or 0
        assert failed == given_up
