"""Reads the next items while the last one is worked on, on threads of their own: batches are gathered on the other core.

Knows order. Does not know what is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


def read_ahead(read: Callable[[Key], Item], keys: Iterable[Key], *, at_once: int = 1) -> Iterator[tuple[Key, Item]]:
    """Every key with what `read` says of it, in order, at most `at_once` items ahead; an error of `read` is raised at its key."""
    coming: deque[tuple[Key, Future[Item]]] = deque()
    with ThreadPoolExecutor(at_once, thread_name_prefix="read-ahead") as pool:
        for key in keys:
            coming.append((key, pool.submit(read, key)))
            if len(coming) > at_once:
                yield _next(coming)
        while coming:
            yield _next(coming)


def _next(coming: deque[tuple[Key, Future[Item]]]) -> tuple[Key, Item]:
    key, item = coming.popleft()
    return key, item.result()
