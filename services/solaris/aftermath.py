"""What a read leaves to be done once it has been answered: refreshes, notes of first use, totals.

Knows that nobody waits for it. Does not know how pairs are resolved.

One thread takes finished reads from a bounded queue: a full queue drops the note and counts it, and never makes a read wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gem.solaris.v1 import task_pb2

from feature_store.errors import GemError
from services.solaris.ledger import AFTERMATH, USED_OF, Ledger
from services.solaris.lifetimes import Lifetimes, ad_field, read_key, status_key
from services.solaris.reader import PairRead
from services.solaris.writer import WideRowStore

log = logging.getLogger(__name__)

MAX_WAITING_READS = 4_096
MAX_REMEMBERED = 100_000
ASK_AGAIN_SECONDS = 60.0
"""A stale pair is asked for at most this often by one process."""
FLUSH_SECONDS = 2.0


class Tasks(Protocol):
    """The stream that refreshes are offered to."""

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items at the end."""


class FinishedRead(NamedTuple):
    """A read that has been answered."""

    user_id: str
    user_key: int
    ad_ids: Sequence[str]
    ad_keys: Sequence[int]
    as_of_ms: int
    space_id: bytes
    read: PairRead
    traceparent: str


class Aftermath:
    """Runs from `start` to `close`."""

    def __init__(
        self,
        store: WideRowStore,
        tasks: Tasks,
        ledger: Ledger,
        lifetimes: Lifetimes,
        *,
        surfaces: Sequence[str],
        instance: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._tasks, self._ledger = store, tasks, ledger
        self._lifetimes, self._surfaces, self._instance = lifetimes, surfaces, instance
        self._clock = clock
        self._queue: queue.Queue[FinishedRead | None] = queue.Queue(MAX_WAITING_READS)
        self._asked = _Remembered()
        self._noted = _Remembered()
        self._spaces: set[bytes] = set()
        self._thread = threading.Thread(target=self._work, name="aftermath", daemon=True)

    def start(self) -> None:
        """Begin to take reads."""
        self._thread.start()

    def close(self) -> None:
        """Finish what is queued, write the totals and stop."""
        self._queue.put(None)
        self._thread.join()

    def offer(self, finished: FinishedRead) -> None:
        """Leave a read to be followed up; never waits."""
        try:
            self._queue.put_nowait(finished)
        except queue.Full:
            self._ledger.add(AFTERMATH, "dropped")

    def settle(self) -> None:
        """Wait until every read offered so far has been followed up."""
        self._queue.join()

    def _work(self) -> None:
        flushed = self._clock()
        open_ = True
        while open_:
            try:
                finished = self._queue.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                finished = None
            else:
                open_ = finished is not None
                self._follow(finished)
                self._queue.task_done()
            if not open_ or self._clock() - flushed >= FLUSH_SECONDS:
                flushed = self._clock()
                self._flush()

    def _follow(self, finished: FinishedRead | None) -> None:
        if finished is None:
            return
        self._spaces.add(finished.space_id)
        try:
            self._ask_anew(finished)
            self._note_first_use(finished)
        except (GemError, OSError) as error:
            self._ledger.add(AFTERMATH, "failed")
            log.warning("a read was not followed up: %s", error)

    def _ask_anew(self, finished: FinishedRead) -> None:
        by_surface: dict[int, list[str]] = defaultdict(list)
        now = self._clock()
        for position, surface in finished.read.stale:
            pair = (finished.user_key, finished.ad_keys[position])
            asked = self._asked.get(pair)
            if asked is None or now - asked >= ASK_AGAIN_SECONDS:
                self._asked.put(pair, now)
                by_surface[surface].append(finished.ad_ids[position])
        tasks = [
            self._refresh(finished, self._surfaces[surface], ad_ids).SerializeToString()
            for surface, ad_ids in by_surface.items()
            if 0 <= surface < len(self._surfaces)
        ]
        if tasks:
            self._tasks.append(tasks)
            self._ledger.add(AFTERMATH, "refreshes", sum(map(len, by_surface.values())))

    def _refresh(
        self, finished: FinishedRead, surface: str, ad_ids: list[str]
    ) -> task_pb2.SpeculationTask:
        return task_pb2.SpeculationTask(
            user_id=finished.user_id,
            surface=surface,
            request_ms=finished.as_of_ms,
            ad_ids=ad_ids,
            expires_ms=finished.as_of_ms + self._lifetimes.pair.hard_ms,
            traceparent=finished.traceparent,
        )

    def _note_first_use(self, finished: FinishedRead) -> None:
        """Marks pairs that were read for the first time, in the store: other processes read the same rows."""
        used: dict[str, int] = {}
        for ad_key, computed_ms in zip(
            finished.ad_keys, finished.read.computed_ms_N.tolist(), strict=True
        ):
            pair = (finished.user_key, ad_key)
            if computed_ms and self._noted.get(pair) != computed_ms:
                self._noted.put(pair, computed_ms)
                used[ad_field(ad_key)] = computed_ms
        if not used:
            return
        key = read_key(finished.space_id, finished.user_key)
        marks = self._store.hget_many(key, list(used))
        first = {
            field: computed_ms
            for (field, computed_ms), mark in zip(used.items(), marks, strict=True)
            if mark is None or int(mark) != computed_ms
        }
        if first:
            values = {field: str(computed_ms).encode() for field, computed_ms in first.items()}
            self._store.hset_many(key, values, ttl_ms=self._lifetimes.pair.hard_ms)
            self._ledger.add_in_hour(USED_OF, first.values())

    def _flush(self) -> None:
        for space_id in self._spaces:
            try:
                self._store.hset_many(
                    status_key(space_id), {f"server:{self._instance}": self._ledger.encoded()}
                )
            except (GemError, OSError) as error:
                log.warning("totals were not written: %s", error)


class _Remembered:
    """The latest value of the most recent pairs."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[int, int], float] = OrderedDict()

    def get(self, pair: tuple[int, int]) -> float | None:
        return self._values.get(pair)

    def put(self, pair: tuple[int, int], value: float) -> None:
        self._values[pair] = value
        self._values.move_to_end(pair)
        if len(self._values) > MAX_REMEMBERED:
            self._values.popitem(last=False)
