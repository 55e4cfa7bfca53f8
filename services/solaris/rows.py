"""The bytes of pair rows: one vector of one (user, ad) pair, or a decayed mean of several.

Knows layouts and the decayed mean. Does not know keys, stores, clocks or models.

A user's pairs lie in one wide row; a field holds one `Pair` (`ad:<ad key>`) or one `Mean` (`g:<ad group key>`, `u`).
Little-endian, fixed width for a given dimension D, so that a thousand fields decode in one `frombuffer`:

    format u8 | dim u16 | space 8s | model version 48s | surface i16 | computed_ms i64 | available_ms i64 | …
    Pair: … | scale f32 | vector i8[D]
    Mean: … | count i64 | weight f64 | reference_ms i64 | mean f32[D]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from feature_store.errors import InvalidInput

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
        _check_stamp(self.space_id, self.model_version)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """[D] the vector as numbers."""
        return self.vector.astype(np.float32) * np.float32(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mean:
    """A time-decayed mean of pair vectors, kept so that adding one costs O(D)."""

    space_id: bytes
    """Coordinate system, 8 bytes."""
    model_version: str
    """Version of the foundation model that wrote the newest vector in it."""
    computed_ms: int
    """Newest instant in it."""
    available_ms: int
    """When a reader could first see it with its newest vector."""
    count: int
    """Vectors in it."""
    weight: float
    """Σ 2^(-(reference_ms - t) / half-life) over its vectors."""
    reference_ms: int
    """Instant that `weight` refers to: the newest in it."""
    mean: npt.NDArray[np.float32]
    """[D]"""

    def __post_init__(self) -> None:
        _check_stamp(self.space_id, self.model_version)


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


def add(mean: Mean | None, pairs: Sequence[Pair], *, half_life_ms: float) -> Mean:
    """The mean with one or more vectors added to it.

    Equals Σ w·e / Σ w with w = 2^(-age / half-life) over all vectors ever added, in any order and in any portions, to
    float32 rounding. A mean of another space or width is not continued: it starts anew.

    Raises:
        ValueError: there is no vector to add.
    """
    if not pairs:
        raise ValueError("a mean grows by at least one vector")
    newest = max(pairs, key=lambda pair: pair.computed_ms)
    if mean is None or mean.space_id != newest.space_id or len(mean.mean) != len(newest.vector):
        mean = _empty(newest)
    reference_ms = max(mean.reference_ms, newest.computed_ms)
    ages = np.array([pair.computed_ms - reference_ms for pair in pairs], dtype=np.float64)
    added = 2.0 ** (ages / half_life_ms)
    kept = mean.weight * 2.0 ** ((mean.reference_ms - reference_ms) / half_life_ms)
    weight = kept + float(added.sum())
    scaled = added * np.array([pair.scale for pair in pairs])
    total = scaled @ np.stack([pair.vector for pair in pairs]).astype(np.float64)
    return Mean(
        space_id=newest.space_id,
        model_version=(newest if newest.computed_ms >= mean.computed_ms else mean).model_version,
        computed_ms=max(mean.computed_ms, newest.computed_ms),
        available_ms=max(mean.available_ms, *(pair.available_ms for pair in pairs)),
        count=mean.count + len(pairs),
        weight=weight,
        reference_ms=reference_ms,
        mean=((mean.mean * kept + total) / weight).astype(np.float32),
    )


def encode_pair(pair: Pair) -> bytes:
    """The pair as a field's value."""
    row = _stamped(_pair_dtype(len(pair.vector)), PAIR_FORMAT, pair)
    row["surface"], row["scale"], row["vector"] = pair.surface, pair.scale, pair.vector
    return row.tobytes()


def encode_mean(mean: Mean) -> bytes:
    """The mean as a field's value."""
    row = _stamped(_mean_dtype(len(mean.mean)), MEAN_FORMAT, mean)
    row["surface"], row["count"], row["weight"] = NO_SURFACE, mean.count, mean.weight
    row["reference_ms"], row["mean"] = mean.reference_ms, mean.mean
    return row.tobytes()


def decode_pair(value: bytes, *, dim: int) -> Pair | None:
    """The pair in a field's value; None if the value is of another format or width."""
    rows, known = pair_table([value], dim=dim)
    if not known[0]:
        return None
    row = rows[0]
    return Pair(
        space_id=row["space"].tobytes(),
        model_version=row["version"].decode(),
        surface=int(row["surface"]),
        computed_ms=int(row["computed_ms"]),
        available_ms=int(row["available_ms"]),
        scale=float(row["scale"]),
        vector=row["vector"].copy(),
    )


def decode_mean(value: bytes, *, dim: int) -> Mean | None:
    """The mean in a field's value; None if the value is of another format or width."""
    rows, known = mean_table([value], dim=dim)
    if not known[0]:
        return None
    row = rows[0]
    return Mean(
        space_id=row["space"].tobytes(),
        model_version=row["version"].decode(),
        computed_ms=int(row["computed_ms"]),
        available_ms=int(row["available_ms"]),
        count=int(row["count"]),
        weight=float(row["weight"]),
        reference_ms=int(row["reference_ms"]),
        mean=row["mean"].copy(),
    )


def pair_table(
    values: Sequence[bytes | None], *, dim: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    """Pairs as one structured array [N], and which of them are readable [N]; the others are zeros."""
    return _table(values, _pair_dtype(dim), PAIR_FORMAT, dim)


def mean_table(
    values: Sequence[bytes | None], *, dim: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    """Means as one structured array [N], and which of them are readable [N]; the others are zeros."""
    return _table(values, _mean_dtype(dim), MEAN_FORMAT, dim)


def _table(
    values: Sequence[bytes | None], dtype: np.dtype[np.void], number: int, dim: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    blank = bytes(dtype.itemsize)
    fitting = [v if v is not None and len(v) == dtype.itemsize else blank for v in values]
    rows = np.frombuffer(b"".join(fitting), dtype=dtype)
    return rows, (rows["format"] == number) & (rows["dim"] == dim)


def _empty(pair: Pair) -> Mean:
    """A mean of nothing, in the space and width of a vector."""
    return Mean(
        space_id=pair.space_id,
        model_version=pair.model_version,
        computed_ms=pair.computed_ms,
        available_ms=pair.available_ms,
        count=0,
        weight=0.0,
        reference_ms=pair.computed_ms,
        mean=np.zeros(len(pair.vector), dtype=np.float32),
    )


def _stamped(dtype: np.dtype[np.void], number: int, source: Pair | Mean) -> npt.NDArray[np.void]:
    row = np.zeros((), dtype=dtype)
    row["format"], row["dim"] = number, row["vector" if number == PAIR_FORMAT else "mean"].size
    row["space"] = np.void(source.space_id)
    row["version"] = source.model_version.encode()
    row["computed_ms"], row["available_ms"] = source.computed_ms, source.available_ms
    return row


def _check_stamp(space_id: bytes, model_version: str) -> None:
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
