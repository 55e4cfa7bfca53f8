"""Annotates what is being served: takes served requests from their stream, before any outcome exists.

Knows the stream, the served message and the clock. Does not know how requests were ranked.

Items are acknowledged after memories and tables are written: a kill repeats work, and what was written is told by its
example id and not written again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gem.router.v1.router_service_pb2 import DEGRADED_INPUT_SEQUENCE, ServedRequest
from google.protobuf.message import DecodeError

from feature_store.asof import NEVER
from feature_store.batch import FIELDS, OFFSETS, Array, FeatureBatch, from_tensors
from feature_store.errors import GemError, InvalidInput
from feature_store.ids import ABSENT, example_ids, key_of, to_keys
from feature_store.layout import Layout, column_index
from feature_store.replay import no_memory, no_pairs
from feature_store.spec import Spec
from feature_store.streams import Item, Stream
from feature_store.wire import unpack_tensor
from model.training.teacher import Annotation
from services.loopfm.metrics import ANNOTATION, LoopFmMetrics
from services.loopfm.records import Delay, Impressions, Pinned, Said, forward_name, said_of
from services.loopfm.writer import Sink

log = logging.getLogger(__name__)
GROUP = "loopfm"


class _Served(NamedTuple):
    """One request that can be annotated."""

    request: ServedRequest
    batch: FeatureBatch


class Follower:
    """Annotates served requests until told to stop."""

    def __init__(
        self,
        stream: Stream,
        spec: Spec,
        pinned: Pinned,
        sink: Sink,
        metrics: LoopFmMetrics,
        *,
        consumer: str,
        now_ms: Callable[[], int] | None,
        delay: Delay | None = None,
        batch_requests: int = 32,
    ) -> None:
        """`now_ms` is the clock; None makes annotations available a simulated delay after their request, for a replay."""
        self._stream, self._spec, self._layout = stream, spec, Layout(spec)
        self._pinned, self._sink, self._metrics = pinned, sink, metrics
        self._consumer, self._now_ms, self._delay = consumer, now_ms, delay or Delay()
        self._batch_requests = batch_requests

    def run(self, stopping: threading.Event, *, block_ms: int = 500, pause_seconds: float = 0.0) -> None:
        """Turns until told to stop; the turn that was begun is ended.

        A pause after every batch that is not full lets the next one grow: a forward, two transactions and their files cost
        much the same for one request as for dozens.

        Raises:
            GemError: the store or the tables cannot be written; nothing was acknowledged that is not written.
        """
        while not stopping.is_set():
            if 0 < self.turn(block_ms=block_ms) < self._batch_requests:
                stopping.wait(pause_seconds)

    def turn(self, *, block_ms: int = 0) -> int:
        """Annotates up to a batch of requests with one forward; returns the items taken."""
        items = self._stream.claim(GROUP, self._consumer, self._batch_requests, block_ms)
        self._metrics.lag.set(self._stream.lag(GROUP))
        served = [one for one in map(self._parsed, items) if one is not None]
        if served:
            self._annotate(served)
        if items:
            self._stream.ack(GROUP, [item.id for item in items])
        return len(items)

    def _parsed(self, item: Item) -> _Served | None:
        """What can be annotated; the rest is counted by its reason and left."""
        try:
            request = ServedRequest.FromString(item.data)
            reason = self._unfit(request)
            if reason:
                self._metrics.skipped.labels(reason).inc(max(1, len(request.ad_ids)))
                return None
            return _Served(request, self._batch(request))
        except (DecodeError, GemError) as error:
            log.warning("served item %s cannot be annotated: %s", item.id, error)
            self._metrics.skipped.labels("malformed").inc()
            return None

    def _unfit(self, request: ServedRequest) -> str:
        if request.shadow:
            return "shadow"
        if request.spec_hash != self._spec.hash:
            return "other_spec"
        if DEGRADED_INPUT_SEQUENCE in request.degraded:
            return "degraded"
        return "" if request.ad_ids else "no_ads"

    def _batch(self, request: ServedRequest) -> FeatureBatch:
        """The request as the model got it, without memory and pairs: the foundation model reads neither."""
        tensors = {name: unpack_tensor(tensor) for name, tensor in request.tensors.items()}
        absent = {**no_memory(1), **no_pairs(len(request.ad_ids))}
        batch = from_tensors({**tensors, **{name: absent[name] for name in FIELDS if name in absent}})
        if batch.num_candidates != len(request.ad_ids):
            raise InvalidInput(
                f"request {request.request_id!r} has {len(request.ad_ids)} ads and {batch.num_candidates} rows"
            )
        return batch

    def _annotate(self, served: Sequence[_Served]) -> None:
        batch, impressions = _joined([one.batch for one in served]), self._impressions(served)
        # While snapshots take turns two may serve the same minutes; each forward is still of one.
        first_ms, last_ms = int(impressions.event_ms.min()), int(impressions.event_ms.max())
        known = self._sink.known(first_ms, last_ms + 1)
        held = {bytes(name) for name in known}
        # A backfill may have written the table alone: what serving reads must not lack what training has.
        self._sink.restore(held & set(map(bytes, impressions.example_id)), first_ms, last_ms + 1)
        keep = np.zeros(len(impressions.event_ms), dtype=np.bool_)
        for row, name in enumerate(map(bytes, impressions.example_id)):
            keep[row] = name not in held
            held.add(name)
        self._metrics.skipped.labels("annotated_before").inc(int((~keep).sum()))
        if not keep.any():
            return
        annotation = self._pinned.teacher.annotate(batch)
        self._metrics.forwards.labels(ANNOTATION).inc()
        self._sink.write([self._said(annotation, keep, impressions)])

    def _said(self, annotation: Annotation, keep: npt.NDArray[np.bool_], impressions: Impressions) -> Said:
        kept = impressions.take(keep)
        simulated = kept.event_ms + self._delay.sample(kept.example_id)
        available = simulated if self._now_ms is None else np.full(len(kept.event_ms), self._now_ms(), dtype=np.int64)
        return said_of(
            annotation, keep, kept,
            forward_id=forward_name(self._pinned.model_version, impressions.example_id),
            # Served after the newest label that the snapshot knows: its own cannot be among them.
            self_label_seen=kept.event_ms <= self._pinned.watermark_ms,
            available_ms=np.maximum(available, kept.event_ms),
        )  # fmt: skip

    def _impressions(self, served: Sequence[_Served]) -> Impressions:
        group = column_index(self._layout.ad_ids, "ad_group")
        parts = [self._of(one, group) for one in served]
        request_ids = [name for part in parts for name in part.request_id]
        arrays = [np.concatenate(columns) for columns in zip(*([p[0], *p[2:]] for p in parts), strict=True)]
        return Impressions(arrays[0], request_ids, *arrays[1:])

    def _of(self, one: _Served, group: int | None) -> Impressions:
        request, n, spec = one.request, len(one.request.ad_ids), self._spec
        ad_key = to_keys(list(request.ad_ids), spec.id_type("ad"))
        user_key = key_of(request.user_id, spec.id_type("user"))
        names = example_ids([request.request_id] * n, ad_key, [request.surface] * n, [request.request_ms] * n)
        return Impressions(
            example_id=np.frombuffer(b"".join(names), dtype="V16"),
            request_id=[request.request_id] * n,
            user_key=np.full(n, user_key, dtype=np.int64),
            ad_key=ad_key,
            ad_group_key=one.batch.ad_ids[:, group] if group is not None else np.full(n, ABSENT, dtype=np.int64),
            surface=np.full(n, spec.surface_index(request.surface), dtype=np.int32),
            event_ms=np.full(n, request.request_ms, dtype=np.int64),
            label_ms=np.full((n, len(spec.objectives)), NEVER, dtype=np.int64),
        )


def _joined(batches: Sequence[FeatureBatch]) -> FeatureBatch:
    """One batch of all requests, in order, so that one forward serves them all."""
    columns: dict[str, Array] = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in FIELDS}
    offsets = {
        name: np.concatenate([[0], np.cumsum(np.concatenate([np.diff(getattr(b, name)) for b in batches]))])
        for name in OFFSETS.values()
    }
    return FeatureBatch(**columns, **offsets)  # type: ignore[arg-type]  # dtypes are kept
