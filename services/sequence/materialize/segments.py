"""Cuts columns that are sorted by user into users.

Knows order. Does not know what the columns mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]


def spans(users: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct users [u] of sorted ones [n], and where each begins and ends."""
    names, start = np.unique(users, return_index=True)
    return names, start, np.append(start[1:], len(users)).astype(np.int64)


def by_user(users: Ints, rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Each user of sorted ones [n], and their rows."""
    bounds = zip(*(column.tolist() for column in spans(users)), strict=True)
    return ((user, rows[start:stop]) for user, start, stop in bounds)


def newest(users: Ints, limit: int) -> Bools:
    """[n] the last `limit` rows of each user of sorted ones."""
    _, start, stop = spans(users)
    return np.repeat(stop, stop - start) - np.arange(len(users)) <= limit


def distinct(*columns: npt.NDArray[np.generic]) -> Bools:
    """[n] rows that do not equal the one before in all columns."""
    fresh = np.ones(len(columns[0]), dtype=bool)
    fresh[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return fresh


def halves(names: Rows) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """High and low half of 16-byte names [n]: they order as the bytes do."""
    both = np.ascontiguousarray(names).view(">u8").reshape(-1, 2).astype(np.uint64)
    return both[:, 0], both[:, 1]
