"""What one forward says of impressions, as rows of the annotation and pair tables and as entries of memories.

Knows tables and codes. Does not know where impressions come from, nor how a forward is made.

n impressions, K objectives, D width of the representation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash

from feature_store.history import Entries, Shape
from feature_store.tables import ANNOTATIONS, PAIRS
from model.loopfm.compressor import quantize_int4
from model.solaris.pair import pair_space_id, quantize_int8
from model.training.published import LoadedFoundation
from model.training.teacher import Annotation, Teacher

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """The snapshot that annotates."""

    teacher: Teacher
    family: str
    """Name of the foundation model: part of the coordinate system."""
    model_version: str
    watermark_ms: int
    """Newest event whose label had entered its weights."""
    seen: npt.NDArray[np.bool_] | None = None
    """[impressions of the log] any label had entered: its offset log. None: every event up to the watermark counts as seen."""

    @staticmethod
    def of(loaded: LoadedFoundation) -> Pinned:
        """A published snapshot."""
        manifest = loaded.manifest
        return Pinned(
            teacher=loaded.teacher,
            family=manifest.name,
            model_version=loaded.model_version,
            watermark_ms=manifest.train_watermark_ms,
        )

    @property
    def space_id(self) -> bytes:
        """Coordinate system of its representation, 8 bytes."""
        return self.teacher.space_id(self.family)

    def self_label_seen(self, rows: Ints, event_ms: Ints) -> npt.NDArray[np.bool_]:
        """[n] whether a label of impressions `rows` had entered."""
        seen: npt.NDArray[np.bool_] = event_ms <= self.watermark_ms if self.seen is None else self.seen[rows]
        return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """How long after an impression its annotation could be read; simulated in a backfill, where it is never 0."""

    median_ms: int = 60_000
    sigma: float = 0.9
    """Of the logarithm: 95 in 100 within about four and a half minutes."""
    pair_ms: int = 2_000
    """Of pair embeddings, which are offered at the request."""

    def __post_init__(self) -> None:
        if self.median_ms < 1 or self.pair_ms < 1 or self.sigma < 0:
            raise ValueError(f"delays {self.median_ms} and {self.pair_ms} must be at least 1 ms, sigma {self.sigma} not negative")

    def sample(self, names: npt.NDArray[np.void]) -> Ints:
        """[n] milliseconds, log-normal; the same for the same example."""
        halves = np.frombuffer(names.tobytes(), dtype="<u8").reshape(-1, 2).astype(np.float64)
        u, v = (halves[:, 0] + 1) / 2.0**64, halves[:, 1] / 2.0**64
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        delays: Ints = np.maximum(1, self.median_ms * np.exp(self.sigma * normal)).astype(np.int64)
        return delays


class Impressions(NamedTuple):
    """Shown ads, in columns [n]."""

    example_id: npt.NDArray[np.void]
    """16 bytes each (V16)."""
    request_id: Sequence[str]
    user_key: Ints
    ad_key: Ints
    ad_group_key: Ints
    """ABSENT where there is none."""
    surface: npt.NDArray[np.int32]
    event_ms: Ints
    label_ms: Ints
    """[n, K] when each positive outcome became known; NEVER where none is."""

    def take(self, rows: npt.NDArray[np.bool_]) -> Impressions:
        """Some of them."""
        ids = [name for name, kept in zip(self.request_id, rows, strict=True) if kept]
        return Impressions(
            example_id=self.example_id[rows],
            request_id=ids,
            user_key=self.user_key[rows],
            ad_key=self.ad_key[rows],
            ad_group_key=self.ad_group_key[rows],
            surface=self.surface[rows],
            event_ms=self.event_ms[rows],
            label_ms=self.label_ms[rows],
        )


class Said(NamedTuple):
    """What one forward said of some impressions."""

    impressions: Impressions
    forward_id: bytes
    row_in_forward: Ints
    logits_NK: npt.NDArray[np.float32]
    z_ND: npt.NDArray[np.float32]
    self_label_seen: npt.NDArray[np.bool_]
    available_ms: Ints


def forward_name(model_version: str, example_id: npt.NDArray[np.void]) -> bytes:
    """16 bytes that name a forward: its model and its rows."""
    return xxhash.xxh128_digest(model_version.encode() + b"\0" + example_id.tobytes())


def said_of(annotation: Annotation, keep: npt.NDArray[np.bool_], impressions: Impressions, **rest: object) -> Said:
    """The rows `keep` [rows of the forward] of a forward, which are the given impressions."""
    return Said(
        impressions=impressions,
        row_in_forward=np.flatnonzero(keep),
        logits_NK=annotation.logits_NK[keep],
        z_ND=annotation.z_ND[keep],
        **rest,  # type: ignore[arg-type]  # the remaining fields, by name
    )


def annotation_rows(said: Said, pinned: Pinned, space_id: bytes, surfaces: Sequence[str]) -> pa.Table:
    """Rows of the `annotations` table."""
    rows, n = said.impressions, len(said.logits_NK)
    packed = quantize_int4(torch.from_numpy(said.z_ND)).numpy()
    columns = {
        "example_id": _bytes(rows.example_id),
        "request_id": list(rows.request_id),
        "user_key": rows.user_key,
        "ad_key": rows.ad_key,
        "ad_group_key": rows.ad_group_key,
        "surface": [surfaces[index] for index in rows.surface],
        "event_ms": rows.event_ms,
        "model_version": [pinned.model_version] * n,
        "train_watermark_ms": np.full(n, pinned.watermark_ms),
        "self_label_seen": said.self_label_seen,
        "space_id": [space_id] * n,
        "logits": list(said.logits_NK),
        "z_q": _bytes(packed),
        "forward_id": [said.forward_id] * n,
        "row_in_forward": said.row_in_forward.astype(np.int32),
        "produced_ms": said.available_ms,
        "available_ms": said.available_ms,
    }
    return pa.table(columns, schema=ANNOTATIONS)


def pair_rows(said: Said, pinned: Pinned, space_id: bytes, *, lag_ms: int) -> pa.Table:
    """Rows of the `pairs` table: the same representation in int8, as if a worker had computed it at the request."""
    rows, n = said.impressions, len(said.logits_NK)
    codes, scale = quantize_int8(torch.from_numpy(said.z_ND))
    columns = {
        "user_key": rows.user_key,
        "ad_key": rows.ad_key,
        "ad_group_key": rows.ad_group_key,
        "space_id": [pair_space_id(space_id)] * n,
        "computed_ms": rows.event_ms,
        "available_ms": rows.event_ms + lag_ms,
        "q": _bytes(codes.numpy()),
        "scale": scale.numpy(),
        "model_version": [pinned.model_version] * n,
    }
    return pa.table(columns, schema=PAIRS)


def memory_entries(said: Said, shape: Shape) -> tuple[Ints, Entries]:
    """Users [m] and entries [m] for their memories: none of a row whose own label had been seen."""
    keep = ~said.self_label_seen
    rows = said.impressions.take(keep)
    entries = shape.entries(
        _bytes(rows.example_id),
        requests=rows.request_id,
        event_ms=rows.event_ms,
        available_ms=said.available_ms[keep],
        source=0,
        surface=rows.surface,
        q=quantize_int4(torch.from_numpy(said.z_ND[keep])).numpy(),
    )
    entries["label_ms"] = rows.label_ms
    return rows.user_key, entries


RESTORED = ("example_id", "request_id", "user_key", "surface", "event_ms", "available_ms", "z_q")
"""Columns of an annotation that make a memory entry."""


def restored_entries(rows: Sequence[dict[str, Any]], shape: Shape, surfaces: Sequence[str]) -> Entries:
    """Memory entries [n] of rows of the `annotations` table."""
    codes = np.frombuffer(b"".join(row["z_q"] for row in rows), dtype=np.uint8)
    return shape.entries(
        [row["example_id"] for row in rows],
        requests=[row["request_id"] for row in rows],
        event_ms=[row["event_ms"] for row in rows],
        available_ms=[row["available_ms"] for row in rows],
        source=0,
        surface=[surfaces.index(row["surface"]) for row in rows],
        q=codes.reshape(len(rows), -1),
    )


def _bytes(rows: npt.NDArray[np.generic]) -> list[bytes]:
    return [row.tobytes() for row in rows]
