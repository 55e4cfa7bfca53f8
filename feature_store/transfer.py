"""What the foundation model left behind, as training rows see it: soft labels, LoopFM windows, pair embeddings.

Knows the annotation table and as-of windows. Does not know models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds

from feature_store.asof import Caps, Queries, Segments, asof_windows
from feature_store.batch import FeatureBatch
from feature_store.errors import FailedPrecondition
from feature_store.log import Impressions, ints
from feature_store.tables import Tables
from feature_store.versions import positions

Ints = npt.NDArray[np.int64]


class Pairs(NamedTuple):
    """Pair embeddings as they stood when each impression's request was read, a row an impression of the log."""

    q: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    level: npt.NDArray[np.int32]
    meta: npt.NDArray[np.float32]

    def of(self, shown: Ints) -> dict[str, Any]:
        """Pair tensors of some impressions."""
        return {
            "pair_q": self.q[shown],
            "pair_scale": self.scale[shown],
            "pair_level": self.level[shown],
            "pair_meta": self.meta[shown],
        }


class Annotations:
    """Annotated impressions of one coordinate system, sorted by (user, event_ms, example id).

    Raises:
        FailedPrecondition: vectors of different widths share the space.
    """

    def __init__(
        self, tables: Tables, impressions: Impressions, *, space_id: bytes, caps: Caps | None = None
    ) -> None:
        names = ["example_id", "available_ms", "self_label_seen", "space_id", "logits", "z_q"]
        table = tables.read("annotations", columns=names, where=ds.field("space_id") == space_id)
        table = table.sort_by("available_ms")
        self._caps = caps or Caps()
        digests = _digests(table["example_id"].to_pylist())
        by_name = np.argsort(impressions.example_id)
        at = _search(impressions.example_id[by_name], digests)
        known = at >= 0
        row = by_name[at[known]]
        row, first = np.unique(
            row, return_index=True
        )  # an impression annotated twice counts once, as it came first
        taken = np.flatnonzero(known)[first]
        order = np.argsort(impressions.user_key[row], kind="stable")
        self.row, taken = row[order], taken[order]
        self.q = _matrix([value for value in table["z_q"].take(taken).to_pylist()], space_id)
        logits = table["logits"].take(taken).to_pylist()
        self.logits = np.array(logits, dtype=np.float32).reshape(len(taken), -1)
        self.available_ms = ints(table, "available_ms")[taken]
        self.seen = table["self_label_seen"].to_numpy(zero_copy_only=False).astype(bool)[taken]
        self._users, start = np.unique(impressions.user_key[self.row], return_index=True)
        stop = np.append(start[1:], len(self.row)).astype(np.int64)
        when, request = impressions.event_ms[self.row], impressions.request[self.row]
        self._segments = Segments(start.astype(np.int64), stop, when, self.available_ms, request)
        # Gathered once: a batch must cost what it holds, not what the log holds.
        self._label_ms, self._surface = impressions.label_ms[self.row], impressions.surface[self.row]
        self._place = np.full(len(impressions), -1, dtype=np.int64)
        self._place[self.row] = np.arange(len(self.row))

    def windows(self, batch: FeatureBatch, request: Ints) -> dict[str, Any]:
        """Memory tensors of some requests, whose numbers in the log are `request` [R]."""
        queries = Queries(positions(self._users, batch.user_key), batch.request_ms, request)
        windows, bits = asof_windows(self._segments, self._label_ms, self.seen, queries, caps=self._caps)
        rows = windows.rows
        return {
            "memory_offsets": windows.offsets,
            "memory_ms": self._segments.event_ms[rows],
            "memory_surface": self._surface[rows],
            "memory_labels": bits,
            "memory_q": self.q[rows],
        }

    def teacher(
        self, shown: Ints, num_objectives: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Logits [N, K] for impressions of the log, and whether there are any [N]: never from a snapshot that saw the label."""
        at = self._place[shown]
        taught = at >= 0
        taught[taught] = ~self.seen[at[taught]]
        logits = np.zeros((len(shown), num_objectives), dtype=np.float32)
        logits[taught] = self.logits[at[taught]]
        return logits, taught


def _digests(values: list[bytes]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(values), dtype="V16")


def _search(sorted_names: npt.NDArray[np.void], names: npt.NDArray[np.void]) -> Ints:
    if not len(sorted_names):
        return np.full(len(names), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(sorted_names, names), len(sorted_names) - 1)
    return np.where(sorted_names[at] == names, at, -1)


def _matrix(values: list[bytes], space_id: bytes) -> npt.NDArray[np.uint8]:
    widths = {len(value) for value in values}
    if len(widths) > 1:
        raise FailedPrecondition(
            f"space {space_id.hex()} holds vectors of {sorted(widths)} bytes; annotate it anew"
        )
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(
        len(values), widths.pop() if widths else 0
    )
