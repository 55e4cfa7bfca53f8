"""Turns the time a caller gives us into the time we give to those we call.

Knows seconds. Does not know which hop is called, nor how a missed read is made up for.
"""

from __future__ import annotations

from typing import Protocol

from feature_store.errors import DeadlineExceeded, InvalidInput

NO_DEADLINE_SECONDS = 30 * 24 * 3600.0
"""gRPC reports a call without a deadline as one that is centuries away; no caller waits a month."""


class Deadlined(Protocol):
    """The side of a servicer context that knows how long the caller waits."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller gives up."""


class NoDeadline(InvalidInput):
    """The call came without a deadline."""

    reason = "NO_DEADLINE"


def remaining(context: Deadlined) -> float:
    """Seconds the caller still waits.

    Raises:
        NoDeadline: it would wait for ever.
    """
    seconds = context.time_remaining()
    if seconds is None or seconds > NO_DEADLINE_SECONDS:
        raise NoDeadline("the call has no deadline; set one, for example timeout=0.2 seconds")
    return seconds


def budget(context: Deadlined, *, reserve: float = 0.005) -> float:
    """Seconds that a call made on behalf of this one may take.

    Args:
        context: the call being answered.
        reserve: seconds that this hop needs for itself afterwards.

    Raises:
        NoDeadline: the caller set no deadline.
        DeadlineExceeded: nothing is left to give.
    """
    left = remaining(context) - reserve
    if left <= 0:
        raise DeadlineExceeded(
            f"{left + reserve:.3f} s are left and {reserve:.3f} s are reserved; allow more time"
        )
    return left
