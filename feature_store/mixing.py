"""Makes one 64-bit key from two.

Knows arithmetic modulo 2**64. Does not know what the keys stand for.

The mix is splitmix64's finalizer over a · 0x9E3779B97F4A7C15 + b; it depends on the order of its parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_ODD, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def mix(a: int, b: int) -> int:
    """A signed 64-bit key from two."""
    z = (a * _ODD + b) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def mix_many(a: Ints, b: Ints) -> Ints:
    """`mix` of each pair [n]: unsigned 64-bit arithmetic wraps as the mask does."""
    z = a.astype(np.uint64) * np.uint64(_ODD) + b.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return (z ^ (z >> np.uint64(31))).astype(np.int64)
