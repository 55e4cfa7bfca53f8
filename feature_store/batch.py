"""The columnar, jagged batch that training reads and serving sends: one set of names for both.

Knows names, dtypes and leading axes. Does not know where values come from, nor what a model does with them.

Axes: R requests, N candidates, T events, M memory entries, U/UD user id/dense columns, A/AD candidate id/dense columns,
E/ED event id/dense columns, Z bytes of a packed LoopFM vector, D width of a pair embedding, K objectives.
On the wire a message holds one request (R = 1), so its offsets are implied and not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from feature_store.errors import InvalidInput

Array = npt.NDArray[np.generic]
Axis = Literal["request", "event", "candidate", "memory"]


class FeatureBatch(NamedTuple):
    """What is known of R requests and their N candidates at request time."""

    user_key: npt.NDArray[np.int64]
    """[R] key of the user."""
    surface: npt.NDArray[np.int32]
    """[R] index into the spec's surfaces."""
    request_ms: npt.NDArray[np.int64]
    """[R] request time, milliseconds since the epoch."""
    user_ids: npt.NDArray[np.int64]
    """[R, U] keys of user and request id features; ABSENT where there is no value."""
    user_dense: npt.NDArray[np.float32]
    """[R, UD] user and request dense features, then user-side aggregates; NaN where there is no value."""

    event_offsets: npt.NDArray[np.int64]
    """[R+1] history of request r is events event_offsets[r]:event_offsets[r+1], oldest first."""
    event_ms: npt.NDArray[np.int64]
    """[T] time of the event."""
    event_source: npt.NDArray[np.int32]
    """[T] index into the spec's event sources."""
    event_surface: npt.NDArray[np.int32]
    """[T] index into the spec's surfaces; -1 where the event has none."""
    event_labels: npt.NDArray[np.int32]
    """[T] bit k set iff objective k's outcome was known, and positive, at request time."""
    event_ids: npt.NDArray[np.int64]
    """[T, E]"""
    event_dense: npt.NDArray[np.float32]
    """[T, ED]"""

    candidate_offsets: npt.NDArray[np.int64]
    """[R+1] candidates of request r."""
    ad_ids: npt.NDArray[np.int64]
    """[N, A] keys of ad id features."""
    ad_dense: npt.NDArray[np.float32]
    """[N, AD] ad dense features, ages, then candidate-side aggregates."""

    memory_offsets: npt.NDArray[np.int64]
    """[R+1] LoopFM window of request r, oldest first."""
    memory_ms: npt.NDArray[np.int64]
    """[M]"""
    memory_surface: npt.NDArray[np.int32]
    """[M]"""
    memory_labels: npt.NDArray[np.int32]
    """[M] label bits as known at request time."""
    memory_q: npt.NDArray[np.uint8]
    """[M, Z] int4 pairs, low nibble first."""

    pair_q: npt.NDArray[np.int8]
    """[N, D] Solaris embedding, int8; zeros at level default."""
    pair_scale: npt.NDArray[np.float32]
    """[N] value of one int8 step."""
    pair_level: npt.NDArray[np.int32]
    """[N] 0 exact, 1 ad group, 2 similar users, 3 user, 4 default."""
    pair_meta: npt.NDArray[np.float32]
    """[N, 3] age in seconds, number of vectors averaged, similarity; zeros at level default."""

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.request_ms)

    @property
    def num_candidates(self) -> int:
        """N."""
        return len(self.ad_ids)


class Targets(NamedTuple):
    """What a training row is compared with; never a feature."""

    example_id: npt.NDArray[np.void]
    """[N] 16 bytes each (V16: S16 would drop trailing zero bytes)."""
    user_key: npt.NDArray[np.int64]
    """[N]"""
    labels: npt.NDArray[np.float32]
    """[N, K] value where the mask is set, else 0."""
    label_mask: npt.NDArray[np.bool_]
    """[N, K] the outcome is settled: positive, or its attribution window has closed, and its parent is positive if it has one."""
    teacher_logits: npt.NDArray[np.float32]
    """[N, K] foundation model logits; 0 where absent."""
    teacher_mask: npt.NDArray[np.bool_]
    """[N]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One tensor of the batch: its axis, dtype and number of axes."""

    axis: Axis
    dtype: type[np.generic]
    ndim: int = 1


FIELDS: Mapping[str, Field] = {
    "user_key": Field(axis="request", dtype=np.int64),
    "surface": Field(axis="request", dtype=np.int32),
    "request_ms": Field(axis="request", dtype=np.int64),
    "user_ids": Field(axis="request", dtype=np.int64, ndim=2),
    "user_dense": Field(axis="request", dtype=np.float32, ndim=2),
    "event_ms": Field(axis="event", dtype=np.int64),
    "event_source": Field(axis="event", dtype=np.int32),
    "event_surface": Field(axis="event", dtype=np.int32),
    "event_labels": Field(axis="event", dtype=np.int32),
    "event_ids": Field(axis="event", dtype=np.int64, ndim=2),
    "event_dense": Field(axis="event", dtype=np.float32, ndim=2),
    "ad_ids": Field(axis="candidate", dtype=np.int64, ndim=2),
    "ad_dense": Field(axis="candidate", dtype=np.float32, ndim=2),
    "memory_ms": Field(axis="memory", dtype=np.int64),
    "memory_surface": Field(axis="memory", dtype=np.int32),
    "memory_labels": Field(axis="memory", dtype=np.int32),
    "memory_q": Field(axis="memory", dtype=np.uint8, ndim=2),
    "pair_q": Field(axis="candidate", dtype=np.int8, ndim=2),
    "pair_scale": Field(axis="candidate", dtype=np.float32),
    "pair_level": Field(axis="candidate", dtype=np.int32),
    "pair_meta": Field(axis="candidate", dtype=np.float32, ndim=2),
}
"""Tensor name → contract; these are also the names on the Open Inference Protocol."""

OFFSETS: Mapping[Axis, str] = {
    "event": "event_offsets",
    "candidate": "candidate_offsets",
    "memory": "memory_offsets",
}
DEFAULT_LEVEL = 4


def to_tensors(batch: FeatureBatch) -> dict[str, Array]:
    """The named tensors of a batch of one request.

    Raises:
        InvalidInput: the batch does not hold exactly one request.
    """
    if batch.num_requests != 1:
        raise InvalidInput(
            f"a message carries one request, this batch holds {batch.num_requests}; send them one by one"
        )
    return {name: getattr(batch, name) for name in FIELDS}


def from_tensors(tensors: Mapping[str, Array]) -> FeatureBatch:
    """The batch of one request from its named tensors, checked.

    Raises:
        InvalidInput: a tensor is missing, has another dtype or rank, or leading dimensions disagree.
    """
    sizes: dict[Axis, int] = {}
    for name, field in FIELDS.items():
        _check(name, tensors.get(name), field, sizes)
    if sizes["request"] != 1:
        raise InvalidInput(f"user tensors must lead with 1, not {sizes['request']}")
    offsets = {
        offset_name: np.array([0, sizes[axis]], dtype=np.int64)
        for axis, offset_name in OFFSETS.items()
    }
    return FeatureBatch(**{name: tensors[name] for name in FIELDS}, **offsets)  # type: ignore[arg-type]  # dtypes were checked above


def _check(name: str, tensor: Array | None, field: Field, sizes: dict[Axis, int]) -> None:
    if tensor is None:
        raise InvalidInput(f"tensor {name!r} is missing; the batch needs {sorted(FIELDS)}")
    if tensor.dtype != field.dtype or tensor.ndim != field.ndim:
        raise InvalidInput(
            f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}; "
            f"it must be {np.dtype(field.dtype).name} with {field.ndim} axes"
        )
    if sizes.setdefault(field.axis, len(tensor)) != len(tensor):
        raise InvalidInput(
            f"tensor {name!r} leads with {len(tensor)}, other {field.axis} tensors with {sizes[field.axis]}"
        )
