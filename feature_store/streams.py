"""Hands items from those that make them to those that work on them: at least once, to one consumer of each group.

Knows claims, acknowledgements and idleness. Does not know what an item says, nor in which store it lies.

An item that was claimed and not acknowledged is claimed again once it has been idle: a consumer that dies loses nothing.
So an item may come twice; a consumer that must act once does so by the item's id or by a key inside it. A stream holds
its newest `max_length` items; the oldest are dropped, acknowledged or not: give consumers room to be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from feature_store.online import TIMEOUT_SECONDS, sqlite_path

MAX_LENGTH = 100_000
"""Items a stream holds unless told otherwise."""
RECLAIM_IDLE_MS = 30_000
"""Claimed this long ago and not acknowledged: its consumer is taken for dead."""


class Item(NamedTuple):
    """One item of a stream."""

    id: str
    """Grows along the stream."""
    payload: bytes


class Stream(Protocol):
    """One stream. Every method may be called from any thread.

    Every method raises NotReady if the store does not answer and DeadlineExceeded if it takes too long.
    """

    def append(self, items: Sequence[bytes]) -> list[str]:
        """Adds items at the end, durably; their ids."""

    def claim(
        self,
        group: str,
        consumer: str,
        limit: int,
        block_ms: int,
        *,
        reclaim_idle_ms: int = RECLAIM_IDLE_MS,
    ) -> list[Item]:
        """Takes up to `limit` items that no consumer of the group holds, oldest first; first those left idle by others.

        A new group begins at the stream's beginning. Waits up to `block_ms` if there is nothing; 0 does not wait.
        """

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Says that items are done; they do not come again to the group."""

    def lag(self, group: str) -> int:
        """Items that the group has not acknowledged, claimed or not."""

    def close(self) -> None:
        """Gives up connections."""

    def __enter__(self) -> Self:
        """The stream; closed on leaving."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""


def open_stream(
    url: str, name: str, *, max_length: int = MAX_LENGTH, timeout_seconds: float = TIMEOUT_SECONDS
) -> Stream:
    """The stream `name` in the store at `sqlite:///PATH` or `redis://host:port/db`.

    Raises:
        InvalidInput: the URL is of another kind.
    """
    path = sqlite_path(url)
    if path is not None:
        from feature_store.sqlite_stream import SqliteStream

        return SqliteStream(path, name, max_length=max_length, timeout_seconds=timeout_seconds)
    from feature_store.redis_stream import RedisStream

    return RedisStream(url, name, max_length=max_length, timeout_seconds=timeout_seconds)
