"""Annotates the impressions of a log: ONE forward of the foundation model gives soft labels, memories and pair embeddings.

Knows a replayed log, a pinned snapshot, two tables and the memory. Does not know how the snapshot was trained.

A stretch of time is annotated by exactly one snapshot. A row whose own label had entered the snapshot's weights says so
(`self_label_seen`): it is never distilled, and never enters a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from feature_store.asof import NEVER
from feature_store.batch import FeatureBatch
from feature_store.errors import FailedPrecondition
from feature_store.ids import ABSENT
from feature_store.layout import column_index
from feature_store.replay import Examples, Replay, Requests
from feature_store.tables import Tables, between
from model.training.ahead import read_ahead
from model.training.teacher import Annotation
from services.loopfm.memory import Label, MemoryWriter
from services.loopfm.metrics import ANNOTATION, LoopFmMetrics
from services.loopfm.records import (
    RESTORED,
    Delay,
    Impressions,
    Pinned,
    Said,
    annotation_rows,
    forward_name,
    memory_entries,
    pair_rows,
    restored_entries,
    said_of,
)

Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


class Annotated(NamedTuple):
    """What one stretch brought."""

    rows: int
    forwards: int
    memories: int
    self_label_seen: int
    skipped: int
    """Impressions that had been annotated before."""


class Sink:
    """Where annotations go: memories first, so that whatever the tables say is available can be read."""

    def __init__(
        self,
        tables: Tables,
        pinned: Pinned,
        metrics: LoopFmMetrics,
        *,
        surfaces: tuple[str, ...],
        memory: MemoryWriter | None,
        delay: Delay,
        expected_space: bytes = b"",
    ) -> None:
        """Raises FailedPrecondition if the snapshot writes another space than the memory's or the `expected_space`."""
        self.space_id = pinned.space_id
        for space_id in (expected_space, memory.space_id if memory else b""):
            if space_id and space_id != self.space_id:
                raise FailedPrecondition(
                    f"snapshot {pinned.model_version} writes space {self.space_id.hex()}, {space_id.hex()} is expected; "
                    "spaces are never mixed: annotate with a snapshot of that space, or move every reader to the new one"
                )
        self._tables, self._pinned, self._metrics = tables, pinned, metrics
        self._surfaces, self._memory, self._delay = surfaces, memory, delay

    def known(self, from_ms: int, to_ms: int, *, alone: npt.NDArray[np.void] | None = None) -> npt.NDArray[np.void]:
        """Example ids [n] (V16) of the stretch that the space already has.

        A request that begins before a stretch may end in it: its impressions belong to the stretch it began in.

        Raises:
            FailedPrecondition: another snapshot of the same space has annotated one of the examples `alone`.
        """
        if not self._tables.exists("annotations"):
            return np.zeros(0, dtype="V16")
        where = (ds.field("space_id") == self.space_id) & between("event_ms", from_ms, to_ms)
        table = self._tables.read("annotations", columns=["example_id", "model_version"], where=where)
        names = table["example_id"].to_pylist()
        own = frozenset(bytes(name) for name in alone) if alone is not None else frozenset()
        versions = table["model_version"].to_pylist()
        others = {v for name, v in zip(names, versions, strict=True) if name in own} - {self._pinned.model_version}
        if others:
            raise FailedPrecondition(
                f"{from_ms} to {to_ms} holds annotations by {sorted(others)} in space {self.space_id.hex()}; "
                f"a stretch is annotated by one snapshot: begin {self._pinned.model_version} after them"
            )
        return np.frombuffer(b"".join(names), dtype="V16")

    def restore(self, names: set[bytes], from_ms: int, to_ms: int) -> None:
        """Makes sure that memories hold what the table says of some examples of a stretch, without a forward."""
        if self._memory is None or not names:
            return
        where = (ds.field("space_id") == self.space_id) & between("event_ms", from_ms, to_ms)
        table = self._tables.read("annotations", columns=RESTORED, where=where & ~ds.field("self_label_seen"))
        rows = [row for row in table.to_pylist() if row["example_id"] in names]
        if rows:
            users = np.array([row["user_key"] for row in rows], dtype=np.int64)
            self._memory.append(users, restored_entries(rows, self._memory.shape, self._surfaces))

    def write(self, parts: list[Said]) -> int:
        """Writes what some forwards said; returns memories written."""
        if not parts:
            return 0
        memories = self._remember(parts)
        rows = [annotation_rows(part, self._pinned, self.space_id, self._surfaces) for part in parts]
        pairs = [pair_rows(part, self._pinned, self.space_id, lag_ms=self._delay.pair_ms) for part in parts]
        self._tables.append("annotations", pa.concat_tables(rows))
        self._tables.append("pairs", pa.concat_tables(pairs))
        self._metrics.rows.inc(sum(len(part.logits_NK) for part in parts))
        self._metrics.memory_rows.inc(memories)
        return memories

    def _remember(self, parts: list[Said]) -> int:
        if self._memory is None:
            return 0
        users, entries = zip(*(memory_entries(part, self._memory.shape) for part in parts), strict=True)
        return self._memory.append(np.concatenate(users), np.concatenate(entries))


class Annotator:
    """Annotates a log with one snapshot."""

    def __init__(
        self,
        replay: Replay,
        pinned: Pinned,
        metrics: LoopFmMetrics,
        *,
        memory: MemoryWriter | None,
        requests: Requests = "request",
        delay: Delay | None = None,
        batch_requests: int = 256,
        at_once: int = 1,
        expected_space: bytes = b"",
    ) -> None:
        """Batches are computed `at_once`, each on a thread of its own.

        Raises:
            FailedPrecondition: the snapshot writes another space than the memory's or the `expected_space`.
        """
        self._replay, self._pinned, self._metrics = replay, pinned, metrics
        self._requests, self._delay = requests, delay or Delay()
        self._batch_requests, self._at_once = batch_requests, at_once
        self._sink = Sink(
            replay.tables, pinned, metrics,
            surfaces=replay.spec.surfaces, memory=memory, delay=self._delay, expected_space=expected_space,
        )  # fmt: skip

    @property
    def space_id(self) -> bytes:
        """Coordinate system that is written, 8 bytes."""
        return self._sink.space_id

    def annotate(self, from_ms: int, to_ms: int, *, on_progress: Progress = lambda done, total: None) -> Annotated:
        """Annotates the impressions of requests with from_ms ≤ time < to_ms; those that were are left as they are.

        Raises:
            FailedPrecondition: another snapshot of the same space has annotated a part of the stretch.
        """
        examples = self._replay.examples(from_ms, to_ms, requests=self._requests)
        last_ms = int(self._replay.impressions.event_ms[examples.impression].max(initial=from_ms)) + 1
        own = self._replay.impressions.example_id[examples.impression]
        done = self._done(self._sink.known(from_ms, max(to_ms, last_ms), alone=own))
        parts = list(self._forwards(examples, done, on_progress))
        memories = self._sink.write(parts)
        rows = sum(len(part.logits_NK) for part in parts)
        skipped = len(examples.impression) - rows
        self._metrics.skipped.labels("annotated_before").inc(skipped)
        return Annotated(
            rows=rows,
            forwards=len(parts),
            memories=memories,
            self_label_seen=sum(int(part.self_label_seen.sum()) for part in parts),
            skipped=skipped,
        )

    def _done(self, known: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """[impressions of the log] which the space already has."""
        names = self._replay.impressions.example_id
        if not len(known):
            return np.zeros(len(names), dtype=np.bool_)
        held = {bytes(name) for name in known}
        return np.fromiter((bytes(name) in held for name in names), dtype=np.bool_, count=len(names))

    def _forwards(self, examples: Examples, done: npt.NDArray[np.bool_], on_progress: Progress) -> Iterator[Said]:
        """One forward for each batch of requests that have an impression to annotate."""
        todo = np.append(0, np.cumsum(~done[examples.impression]))
        pending = np.flatnonzero(np.diff(todo[examples.offsets]))
        steps = [pending[start : start + self._batch_requests] for start in range(0, len(pending), self._batch_requests)]
        finished = 0
        for rows, (batch, said) in read_ahead(lambda rows: self._forward(examples, rows), steps, at_once=self._at_once):
            self._metrics.forwards.labels(ANNOTATION).inc()
            shown = np.concatenate([examples.impression[examples.offsets[r] : examples.offsets[r + 1]] for r in rows])
            impressions, keep = self._impressions(batch, shown), ~done[shown]
            kept = impressions.take(keep)
            yield said_of(
                said, keep, kept,
                forward_id=forward_name(self._pinned.model_version, impressions.example_id),
                self_label_seen=self._pinned.self_label_seen(shown[keep], kept.event_ms),
                available_ms=kept.event_ms + self._delay.sample(kept.example_id),
            )  # fmt: skip
            finished += len(rows)
            on_progress(finished, len(pending))

    def _forward(self, examples: Examples, rows: Ints) -> tuple[FeatureBatch, Annotation]:
        batch, _ = self._replay.batch(examples, rows)
        return batch, self._pinned.teacher.annotate(batch)

    def _impressions(self, batch: FeatureBatch, shown: Ints) -> Impressions:
        log = self._replay.impressions
        group = column_index(self._replay.layout.ad_ids, "ad_group")
        return Impressions(
            example_id=log.example_id[shown],
            request_id=[str(name) for name in log.request_ids[log.request[shown]]],
            user_key=log.user_key[shown],
            ad_key=log.ad_key[shown],
            ad_group_key=batch.ad_ids[:, group] if group is not None else np.full(len(shown), ABSENT, dtype=np.int64),
            surface=log.surface[shown],
            event_ms=log.event_ms[shown],
            label_ms=log.label_ms[shown],
        )


def labels_since(replay: Replay, from_ms: int) -> list[Label]:
    """Positive outcomes of the log that became known at `from_ms` or later, as updates of memories."""
    log = replay.impressions
    rows, objectives = np.nonzero((log.label_ms >= from_ms) & (log.label_ms != NEVER))
    return [
        Label(int(log.user_key[row]), bytes(log.example_id[row]), int(k), int(log.label_ms[row, k]))
        for row, k in zip(rows, objectives, strict=True)
    ]
