"""Makes the tensors that stand for an input that is not there.

Knows the layout of a batch and what "no value" is in each tensor. Does not know why anything is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from gem.common.v1.tensor_pb2 import Tensor

from feature_store.batch import DEFAULT_LEVEL, FIELDS, Array
from feature_store.ids import ABSENT
from feature_store.layout import Column, Layout
from feature_store.wire import pack_tensor
from services.router.asked import Asked

Tensors = Mapping[str, Tensor]

MEMORY = tuple(name for name, field in FIELDS.items() if field.axis == "memory")
PAIRS = tuple(name for name in FIELDS if name.startswith("pair_"))
STATE = tuple(name for name in FIELDS if name not in PAIRS)


class Absent:
    """Neutral tensors for one dataset spec."""

    def __init__(self, layout: Layout, surfaces: Sequence[str]) -> None:
        self._layout = layout
        self._surfaces = tuple(surfaces)

    def state(self, asked: Asked, *, memory_bytes: int) -> Tensors:
        """User, event, ad and memory tensors of a user and ads of whom only the ids are known."""
        layout = self._layout
        widths = {
            "event_ids": _width(layout.event_ids),
            "event_dense": _width(layout.event_dense),
            "memory_q": memory_bytes,
        }
        known: dict[str, Array] = {
            "user_key": np.array([asked.user_key], dtype=np.int64),
            "surface": np.array([self._surfaces.index(asked.surface)], dtype=np.int32),
            "request_ms": np.array([asked.request_ms], dtype=np.int64),
            "user_ids": _ids(layout.user_ids, "user", [asked.user_key]),
            "user_dense": np.full((1, _width(layout.user_dense)), np.nan, dtype=np.float32),
            "ad_ids": _ids(layout.ad_ids, "ad", asked.ad_keys),
            "ad_dense": np.full(
                (len(asked.ad_ids), _width(layout.ad_dense)), np.nan, dtype=np.float32
            ),
        }
        empty = {name: _zeros(name, 0, widths.get(name, 0)) for name in STATE if name not in known}
        return {name: pack_tensor(array) for name, array in {**known, **empty}.items()}

    @staticmethod
    def memory(*, memory_bytes: int) -> Tensors:
        """An empty LoopFM window."""
        return {name: pack_tensor(_zeros(name, 0, memory_bytes)) for name in MEMORY}

    @staticmethod
    def pairs(num_candidates: int, *, dim: int) -> Tensors:
        """Pair embeddings of which none is known: every level is default."""
        widths = {"pair_q": dim, "pair_meta": 3}
        arrays = {name: _zeros(name, num_candidates, widths.get(name, 0)) for name in PAIRS}
        arrays["pair_level"] = np.full(num_candidates, DEFAULT_LEVEL, dtype=np.int32)
        return {name: pack_tensor(array) for name, array in arrays.items()}


def _zeros(name: str, rows: int, width: int) -> Array:
    field = FIELDS[name]
    return np.zeros((rows, width) if field.ndim == 2 else rows, dtype=field.dtype)


def _ids(columns: Sequence[Column], own: str, keys: Sequence[int]) -> Array:
    """[len(keys), A] absent everywhere but in the entity's own column."""
    ids = np.full((len(keys), _width(columns)), ABSENT, dtype=np.int64)
    offset = 0
    for column in columns:
        if column.name == own:
            ids[:, offset] = keys
        offset += column.width
    return ids


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns)
