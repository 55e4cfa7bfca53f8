"""Says as of which instant a task's pairs are computed, and from when they may be seen.

Knows wall time and the simulated time of a replay. Does not know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gem.solaris.v1 import task_pb2


class Clock(Protocol):
    """The instants of a worker."""

    def now_ms(self, tasks: Iterable[task_pb2.SpeculationTask]) -> int:
        """Instant against which expiry is held."""

    def computed_ms(self, task: task_pb2.SpeculationTask) -> int:
        """Instant as of which the task's user is read."""

    def available_ms(self, computed_ms: int) -> int:
        """When a pair computed as of `computed_ms`, about to be written, can first be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WallClock:
    """Live operation: a pair is computed now and can be seen once it is written."""

    read_ms: Callable[[], int]
    """Milliseconds since the epoch."""

    def now_ms(self, tasks: Iterable[task_pb2.SpeculationTask]) -> int:
        """Now."""
        return self.read_ms()

    def computed_ms(self, task: task_pb2.SpeculationTask) -> int:
        """Now."""
        return self.read_ms()

    def available_ms(self, computed_ms: int) -> int:
        """Now: the moment of writing."""
        return max(computed_ms, self.read_ms())


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestClock:
    """Replay: the request's own time drives the worker, so that what is written is right as of that time.

    A task offered at t is computed as of t + lag and seen from then on, however fast or slow the replay runs. The lag
    stands for the wait in the queue and the computing that a live worker would need. A result is a function of the task:
    a task that is delivered twice writes the same row.
    """

    lag_ms: int
    """Simulated milliseconds from request to availability."""

    def __post_init__(self) -> None:
        if self.lag_ms < 1:
            raise ValueError(
                f"lag_ms is {self.lag_ms}; a pair is never there before its request ends"
            )

    def now_ms(self, tasks: Iterable[task_pb2.SpeculationTask]) -> int:
        """The newest request's time, with the lag."""
        return max((task.request_ms for task in tasks), default=0) + self.lag_ms

    def computed_ms(self, task: task_pb2.SpeculationTask) -> int:
        """The request's time, with the lag."""
        return task.request_ms + self.lag_ms

    def available_ms(self, computed_ms: int) -> int:
        """At once: the lag has passed."""
        return computed_ms
