"""A thread that works through what is offered to it, from a queue that never makes anybody wait.

Knows a queue and batches. Does not know what the work is.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Work = TypeVar("Work")


class Background(Generic[Work]):
    """One worker thread behind a bounded queue."""

    def __init__(
        self,
        name: str,
        handle: Callable[[Sequence[Work]], None],
        *,
        max_waiting: int,
        max_batch: int,
        on_lost: Callable[[str, int], None],
    ) -> None:
        """Begin.

        Args:
            name: of the thread.
            handle: does a batch of 1 to `max_batch`; what it raises costs that batch only.
            max_waiting: work that may wait; more is refused.
            max_batch: work done at a time.
            on_lost: told why work was lost, and how much: `full`, `bug` or `stopped`.
        """
        self._handle = handle
        self._max_batch = max_batch
        self._on_lost = on_lost
        self._queue: queue.Queue[Work] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Work that waits."""
        return self._queue.qsize()

    def offer(self, work: Work) -> bool:
        """Queue it, or lose and count it; never waits."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._on_lost("full", 1)
            return False
        return True

    def close(self, *, timeout: float) -> None:
        """Work through what waits; what is left after `timeout` seconds is lost and counted."""
        self._closing.set()
        self._thread.join(timeout)
        left = len(self._take(self._queue.maxsize))
        if left:
            self._on_lost("stopped", left)

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._handle(batch)
            except Exception:  # a bug costs its batch, not the thread
                log.exception("%d pieces of work were not done", len(batch))
                self._on_lost("bug", len(batch))

    def _next(self) -> list[Work]:
        """What waits, up to a batch; empty only when closing and nothing is left."""
        while True:
            try:
                first = self._queue.get(timeout=0.05)
            except queue.Empty:
                if self._closing.is_set():
                    return []
                continue
            return [first, *self._take(self._max_batch - 1)]

    def _take(self, limit: int) -> list[Work]:
        taken: list[Work] = []
        while len(taken) < limit:
            try:
                taken.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return taken
