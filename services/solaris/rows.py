"""The bytes of pair rows: one vector of one (user, ad) pair, or a decayed mean of several.

Knows layouts and the decayed mean. Does not know keys, stores, clocks or models.

A user's pairs lie in one wide row; a field holds one pair (`ad:<ad key>`) or one mean (`g:<ad group key>`, `u`).
Little-endian, fixed width for a given dimension D, so that a thousand fields decode in one `frombuffer`:

    format u8 | dim u16 | space 8s | model version 48s | surface i16 | computed_ms i64 | available_ms i64 | …
    pair: … | scale f32 | vector i8[D]
    mean: … | count i64 | weight f64 | reference_ms i64 | mean f32[D]

A mean's computed_ms, available_ms and version are those of the newest vector in it; weight is
Σ 2^(-(reference_ms - t) / half-life) over its vectors, and reference_ms the newest instant in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from feature_store.errors import InvalidInput

Table = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
PAIR_FORMAT = 1
MEAN_FORMAT = 2
VERSION_BYTES = 48
SPACE_BYTES = 8
NO_SURFACE = -1
_HEADER = [
    ("format", "u1"),
    ("dim", "<u2"),
    ("space", f"V{SPACE_BYTES}"),
    ("version", f"S{VERSION_BYTES}"),
    ("surface", "<i2"),
    ("computed_ms", "<i8"),
    ("available_ms", "<i8"),
]
MAX_STEPS = 127
"""Largest absolute int8 value used: the code is symmetric, -128 is never written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """What the foundation model knew of one pair at one instant."""

    space_id: bytes
    """Coordinate system, 8 bytes."""
    model_version: str
    """Version of the foundation model, at most 48 bytes of UTF-8."""
    surface: int
    """Index of the surface whose request asked for it; -1 if none did."""
    computed_ms: int
    """Instant as of which the user's state was read."""
    available_ms: int
    """When a reader could first see it."""
    scale: float
    """Value of one int8 step."""
    vector: npt.NDArray[np.int8]
    """[D]"""

    def __post_init__(self) -> None:
        check_stamp(self.space_id, self.model_version)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """[D] the vector as numbers."""
        return self.vector.astype(np.float32) * np.float32(self.scale)


def quantize(
    values: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes vectors [N, D] as symmetric int8 with one scale each [N].

    A vector of zeros has scale 0. The largest element of a vector keeps its value to rounding.

    Raises:
        InvalidInput: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise InvalidInput("a pair vector holds NaN or infinity; drop it rather than store it")
    scales = (np.abs(values).max(axis=1, initial=0.0) / MAX_STEPS).astype(np.float32)
    steps = np.divide(values, scales[:, None], out=np.zeros_like(values), where=scales[:, None] > 0)
    return np.clip(np.rint(steps), -MAX_STEPS, MAX_STEPS).astype(np.int8), scales


def quantize_finite(
    values: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """`quantize`, and which vectors [N] are finite; the others are coded as zeros, not to be stored."""
    finite_N = np.asarray(np.isfinite(values).all(axis=1))
    steps, scales = quantize(np.where(finite_N[:, None], values, 0.0).astype(np.float32))
    return steps, scales, finite_N


def grow(means: Table, pairs: Table, starts: Ints, *, half_life_ms: Floats) -> Table:
    """Time-decayed means with one or more vectors added to each: costs O(D) a vector, however many a mean holds.

    Equals Σ w·e / Σ w with w = 2^(-age / half-life) over all vectors ever added to a mean, in any order and in any
    portions, to float32 rounding. The bits of a mean depend on its own rows alone, not on what else is grown with it. A
    mean that is unreadable or of another space is not continued: it starts anew.

    Args:
        means: [M] as they stood, of `mean_table`.
        pairs: [P] vectors to add, those of one mean side by side.
        starts: [M] where each mean's vectors start; each has at least one.
        half_life_ms: [M] a vector this much older counts half.
    """
    counts = np.append(starts[1:], len(pairs)) - starts
    of_P = np.repeat(np.arange(len(starts)), counts)
    newest = pairs[_first_newest(pairs["computed_ms"], starts, of_P)]
    old = _begun(means, newest)
    reference_ms = np.maximum(old["reference_ms"], newest["computed_ms"])
    share_P = _decay(pairs["computed_ms"] - reference_ms[of_P], half_life_ms[of_P])
    kept = old["weight"] * _decay(old["reference_ms"] - reference_ms, half_life_ms)
    # Not a matrix product: its order of addition is the library's own, and differs with the number of rows.
    scaled = (share_P * pairs["scale"])[:, None] * pairs["vector"]
    total = np.add.reduceat(scaled, starts, axis=0)
    weight = kept + np.add.reduceat(share_P, starts)
    grown = old.copy()
    grown["mean"] = (old["mean"] * kept[:, None] + total) / weight[:, None]
    grown["weight"], grown["reference_ms"] = weight, reference_ms
    grown["count"] += counts
    later = newest["computed_ms"] >= old["computed_ms"]
    grown["version"] = np.where(later, newest["version"], old["version"])
    grown["computed_ms"] = np.maximum(old["computed_ms"], newest["computed_ms"])
    available_ms = np.maximum.reduceat(pairs["available_ms"], starts)
    grown["available_ms"] = np.maximum(old["available_ms"], available_ms)
    return grown


def pair_rows(pairs: Sequence[Pair], *, dim: int) -> Table:
    """Pairs as a table [N].

    Raises:
        InvalidInput: a vector is of another width.
    """
    if odd := {len(pair.vector) for pair in pairs} - {dim}:
        raise InvalidInput(f"a pair vector has {odd.pop()} values; rows of this space have {dim}")
    table = blank_pairs(len(pairs), dim=dim)
    for name in ("surface", "computed_ms", "available_ms", "scale", "vector"):
        table[name] = [getattr(pair, name) for pair in pairs]
    table["space"] = [np.void(pair.space_id) for pair in pairs]
    table["version"] = [pair.model_version.encode() for pair in pairs]
    return table


def blank_pairs(count: int, *, dim: int) -> Table:
    """[count] pairs of the current format that nobody asked for, to be filled in."""
    table = np.zeros(count, dtype=_pair_dtype(dim))
    table["format"], table["dim"], table["surface"] = PAIR_FORMAT, dim, NO_SURFACE
    return table


def blank_means(count: int, *, dim: int) -> Table:
    """[count] unreadable means: each starts anew when it grows."""
    return np.zeros(count, dtype=_mean_dtype(dim))


def values_of(table: Table) -> list[bytes]:
    """Rows of a table as values of fields."""
    width, joined = table.dtype.itemsize, table.tobytes()
    return [joined[at : at + width] for at in range(0, len(joined), width)]


def pair_table(
    values: Sequence[bytes | None], *, dim: int
) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Pairs as one structured array [N], and which of them are readable [N]; the others are zeros."""
    return _table(values, _pair_dtype(dim), PAIR_FORMAT, dim)


def mean_table(
    values: Sequence[bytes | None], *, dim: int
) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Means as one structured array [N], and which of them are readable [N]; the others are zeros."""
    return _table(values, _mean_dtype(dim), MEAN_FORMAT, dim)


def _table(
    values: Sequence[bytes | None], dtype: np.dtype[np.void], number: int, dim: int
) -> tuple[Table, npt.NDArray[np.bool_]]:
    blank = bytes(dtype.itemsize)
    fitting = [v if v is not None and len(v) == dtype.itemsize else blank for v in values]
    rows = np.frombuffer(b"".join(fitting), dtype=dtype)
    return rows, (rows["format"] == number) & (rows["dim"] == dim)


def _first_newest(computed_ms: Ints, starts: Ints, of_P: Ints) -> Ints:
    """Of each mean's vectors, the newest; the first among equals."""
    newest = np.flatnonzero(computed_ms == np.maximum.reduceat(computed_ms, starts)[of_P])
    return newest[np.searchsorted(of_P[newest], np.arange(len(starts)))]


def _begun(means: Table, newest: Table) -> Table:
    """The means to go on from: those that cannot be continued hold nothing, in the space of their newest vector."""
    anew = (means["format"] != MEAN_FORMAT) | (means["space"] != newest["space"])
    if not anew.any():
        return means
    empty = np.zeros(len(means), dtype=means.dtype)
    for name in ("dim", "space", "version", "computed_ms", "available_ms"):
        empty[name] = newest[name]
    empty["format"], empty["surface"] = MEAN_FORMAT, NO_SURFACE
    empty["reference_ms"] = newest["computed_ms"]
    return np.where(anew, empty, means)


def _decay(age_ms: Ints, half_life_ms: Floats) -> Floats:
    return np.asarray(np.exp2(age_ms / half_life_ms), dtype=np.float64)


def check_stamp(space_id: bytes, model_version: str) -> None:
    """Refuses, with InvalidInput, what a row's header cannot hold."""
    if len(space_id) != SPACE_BYTES:
        raise InvalidInput(f"space id {space_id.hex()!r} has {len(space_id)} bytes; it must have 8")
    if len(model_version.encode()) > VERSION_BYTES:
        raise InvalidInput(
            f"model version {model_version!r} is longer than {VERSION_BYTES} bytes; publish under a shorter one"
        )


@lru_cache(maxsize=16)
def _pair_dtype(dim: int) -> np.dtype[np.void]:
    return np.dtype([*_HEADER, ("scale", "<f4"), ("vector", "i1", (dim,))])


@lru_cache(maxsize=16)
def _mean_dtype(dim: int) -> np.dtype[np.void]:
    tail = [("count", "<i8"), ("weight", "<f8"), ("reference_ms", "<i8"), ("mean", "<f4", (dim,))]
    return np.dtype([*_HEADER, *tail])
