"""Reads a log as it was known at each request: the training side of "training equals serving".

Knows requests, histories, counters and labels, by pointers into sorted columns; nothing is copied into fat rows.
Does not know models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gem.schema.v1.dataset_spec_pb2 import OWNER_USER

from feature_store.asof import NEVER, Queries, expand, known_bits, most_known, newest_known
from feature_store.batch import DEFAULT_LEVEL, FeatureBatch, Targets
from feature_store.counting import Counted, count
from feature_store.ids import ABSENT
from feature_store.layout import Layout, total_width
from feature_store.log import (
    Entities,
    Events,
    History,
    Impressions,
    histories_of,
    load_entities,
    load_events,
    load_impressions,
)
from feature_store.spec import IMPRESSION, Spec
from feature_store.tables import Tables
from feature_store.transfer import Annotations, Pairs
from feature_store.versions import positions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Requests = Literal["impression", "request"]
Progress = Callable[[int, int], None]
Columns = dict[str, Any]
"""Arrays by tensor name; their dtypes are those of `feature_store.batch.FIELDS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Requests of a stretch of time, with their shown candidates."""

    impression: Ints
    """[N] impression rows, grouped by request."""
    offsets: Ints
    """[R+1] candidates of request r are impression[offsets[r]:offsets[r+1]]."""
    request_ms: Ints
    """[R] when features are read."""
    own: Ints
    """[R] number of the request, whose impressions are not its past; -1 if every impression is its own request."""
    counted: Counted
    """Counters, a row an impression of the log."""
    known_by_ms: int
    """Labels that became known later are not settled."""

    def __len__(self) -> int:
        return len(self.request_ms)

    @property
    def num_candidates(self) -> int:
        """N."""
        return len(self.impression)


class Replay:
    """A spec's log, loaded once; batches of any rows of it."""

    def __init__(self, spec: Spec, tables: Tables, *, progress: Progress = lambda done, total: None) -> None:
        self.spec, self.tables, self.layout = spec, tables, Layout(spec)
        self._progress = progress
        self._counted: dict[Requests, Counted] = {}
        self._annotations: Annotations | None = None
        self._pairs: Pairs | None = None

    @cached_property
    def ads(self) -> Entities:
        """Catalogue versions."""
        return load_entities(self.tables, "catalogue", "ad", self.layout.ad_ids, self.layout.stored_ad_dense)

    @cached_property
    def users(self) -> Entities:
        """User versions."""
        stored = tuple(c for c in self.layout.user_ids if c.feature in self.spec.features(OWNER_USER))
        return load_entities(self.tables, "users", "user", stored, self.layout.stored_user_dense)

    @cached_property
    def impressions(self) -> Impressions:
        """Shown ads with outcomes."""
        return load_impressions(self.tables, self.spec, self.layout, self.ads)

    @cached_property
    def events(self) -> Events:
        """All other events."""
        return load_events(self.tables, self.spec, self.ads)

    @cached_property
    def histories(self) -> tuple[History, ...]:
        """One a source, in spec order."""
        return histories_of(self.spec, self.layout, self.ads, self.impressions, self.events)

    def with_annotations(self, annotations: Annotations | None) -> None:
        """From now on batches carry LoopFM windows, and targets teacher logits."""
        self._annotations = annotations

    def with_pairs(self, pairs: Pairs | None) -> None:
        """From now on batches carry pair embeddings."""
        self._pairs = pairs

    def examples(
        self,
        from_ms: int,
        to_ms: int,
        *,
        requests: Requests = "request",
        surface: str | None = None,
        known_by_ms: int = NEVER - 1,
    ) -> Examples:
        """Requests with from_ms ≤ time < to_ms, in time order; optionally of one surface.

        `impression` makes each impression a request of its own, read at its own time; `request` reads all candidates
        of a request at the time of its first. `known_by_ms` hides outcomes that became known later.
        """
        at_ms = self.read_ms(requests)
        wanted = (at_ms >= from_ms) & (at_ms < to_ms)
        if surface is not None:
            wanted &= self.impressions.surface == self.spec.surface_index(surface)
        rows = np.flatnonzero(wanted)
        number = rows if requests == "impression" else self.impressions.request[rows]
        order = np.lexsort((rows, number, at_ms[rows]))
        rows, number = rows[order], number[order]
        starts = np.flatnonzero(np.append(True, number[1:] != number[:-1])) if len(rows) else np.zeros(0, np.int64)
        return Examples(
            impression=rows,
            offsets=np.append(starts, len(rows)).astype(np.int64),
            request_ms=at_ms[rows[starts]],
            own=np.full(len(starts), -1, dtype=np.int64) if requests == "impression" else number[starts],
            counted=self._counters(requests),
            known_by_ms=known_by_ms,
        )

    def batch(self, examples: Examples, rows: Ints) -> tuple[FeatureBatch, Targets]:
        """Requests `rows` of some examples, with what was known of them, and what became of them."""
        query, at = expand(examples.offsets[rows], examples.offsets[np.asarray(rows) + 1])
        shown = examples.impression[at]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(query, minlength=len(rows)), out=offsets[1:])
        first = examples.impression[examples.offsets[rows]]
        now = examples.request_ms[rows]
        batch = self._features(examples, first, shown, offsets, now, examples.own[rows])
        return batch, self._targets(examples, shown)

    def lengths(self, examples: Examples, rows: Ints) -> Ints:
        """Events and candidates of each request [R, 2], at most: found by a search a source, nothing is gathered."""
        first, now = examples.impression[examples.offsets[rows]], examples.request_ms[rows]
        events = np.zeros(len(rows), dtype=np.int64)
        for source, history in zip(self.spec.message.event_sources, self.histories, strict=True):
            users = positions(history.users, self.impressions.user_key[first])
            queries = Queries(users, now, examples.own[rows])
            events += most_known(history.segments, queries, limit=source.max_length)
        return np.stack([events, examples.offsets[np.asarray(rows) + 1] - examples.offsets[rows]], axis=1)

    def _features(
        self, examples: Examples, first: Ints, shown: Ints, offsets: Ints, now: Ints, request: Ints
    ) -> FeatureBatch:
        log = self.impressions
        query = np.repeat(np.arange(len(first)), np.diff(offsets))
        ad_rows = self.ads.versions.at(log.ad_key[shown], now[query])
        ad_dense = self.ads.gather_dense(ad_rows, now[query])
        history = self._history(log.user_key[first], now, request)
        batch = FeatureBatch(
            user_key=log.user_key[first],
            surface=log.surface[first],
            request_ms=now,
            user_ids=self._user_ids(first, now),
            user_dense=self._user_dense(examples, first, now),
            candidate_offsets=offsets,
            ad_ids=self.ads.gather_ids(ad_rows, log.ad_key[shown]),
            ad_dense=np.concatenate([ad_dense, examples.counted.ad[shown]], axis=1),
            **history,
            **no_memory(len(first)),
            **no_pairs(len(shown)),
        )
        if self._annotations is not None:
            batch = batch._replace(**self._annotations.windows(batch, request))
        if self._pairs is not None:
            batch = batch._replace(**self._pairs.of(shown))
        return batch

    def _user_ids(self, first: Ints, now: Ints) -> Ints:
        keys = self.impressions.user_key[first]
        stored = self.users.gather_ids(self.users.versions.at(keys, now), keys)
        return np.concatenate([stored, self.impressions.id_features[first]], axis=1)

    def _user_dense(self, examples: Examples, first: Ints, now: Ints) -> Floats:
        keys = self.impressions.user_key[first]
        stored = self.users.gather_dense(self.users.versions.at(keys, now), now)
        return np.concatenate([stored, self.impressions.dense_features[first], examples.counted.user[first]], axis=1)

    def _history(self, user_key: Ints, now: Ints, request: Ints) -> Columns:
        parts = [
            self._source_history(index, user_key, now, request) for index in range(len(self.histories))
        ]
        owner = np.concatenate([np.zeros(0, np.int64), *(part.owner for part in parts)])
        place = np.concatenate([np.zeros(0, np.int64), *(part.place for part in parts)])
        order = np.argsort(owner * (1 + int(place.max(initial=0))) + place, kind="stable")
        offsets = np.zeros(len(now) + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=len(now)), out=offsets[1:])
        return {
            "event_offsets": offsets,
            **{
                name: np.concatenate([none, *(part.columns[name] for part in parts)])[order]
                for name, none in _no_events(self.layout).items()
            },
        }

    def _source_history(self, index: int, user_key: Ints, now: Ints, request: Ints) -> _SourceHistory:
        history = self.histories[index]
        limit = self.spec.message.event_sources[index].max_length
        queries = Queries(positions(history.users, user_key), now, request)
        windows = newest_known(history.segments, queries, limit=limit)
        owner, rows = np.repeat(np.arange(len(now)), np.diff(windows.offsets)), windows.rows
        labels = np.zeros(len(rows), dtype=np.int32)
        if self.spec.event_sources[index] == IMPRESSION:
            labels = known_bits(self.impressions.label_ms[history.impression[rows]], now[owner])
        columns: Columns = {
            "event_ms": history.segments.event_ms[rows],
            "event_source": np.full(len(rows), index, dtype=np.int32),
            "event_surface": history.surface[rows],
            "event_labels": labels,
            "event_ids": history.ids[rows],
            "event_dense": history.dense[rows],
        }
        return _SourceHistory(owner, history.place[rows], columns)

    def _targets(self, examples: Examples, shown: Ints) -> Targets:
        log = self.impressions
        label = (log.label_ms[shown] <= examples.known_by_ms) & (log.label_ms[shown] != NEVER)
        windows = np.array([o.attribution_window_seconds * 1000 for o in self.spec.message.objectives])
        settled = label | (log.event_ms[shown][:, None] + windows <= examples.known_by_ms)
        for index in range(len(self.spec.objectives)):
            parent = self.spec.parent_index(index)
            if parent is not None:
                settled[:, index] &= label[:, parent]
        logits = np.zeros(label.shape, dtype=np.float32)
        taught = np.zeros(len(shown), dtype=bool)
        if self._annotations is not None:
            logits, taught = self._annotations.teacher(shown, label.shape[1])
        return Targets(
            example_id=log.example_id[shown],
            user_key=log.user_key[shown],
            labels=np.where(label & settled, log.label_value[shown], 0.0).astype(np.float32),
            label_mask=settled,
            teacher_logits=logits,
            teacher_mask=taught,
        )

    def read_ms(self, requests: Requests) -> Ints:
        """[impressions] when each impression's request is read."""
        log = self.impressions
        if requests == "impression":
            return log.event_ms
        began = np.full(len(log.request_ids), NEVER, dtype=np.int64)
        np.minimum.at(began, log.request, log.event_ms)
        return began[log.request]

    def count(self, requests: Requests, progress: Progress) -> None:
        """Replays the counters now, with progress, rather than at the first `examples`."""
        self._progress = progress
        self._counters(requests)

    def _counters(self, requests: Requests) -> Counted:
        if requests not in self._counted:
            at_ms = self.read_ms(requests)
            ad_key = self.impressions.ad_key
            ad_ids = self.ads.gather_ids(self.ads.versions.at(ad_key, at_ms), ad_key)
            self._counted[requests] = count(
                self.spec, self.impressions, self.events, at_ms, ad_ids, self._progress
            )
        return self._counted[requests]


def no_memory(num_requests: int, dim: int = 64) -> Columns:
    """The memory tensors of requests without a LoopFM window."""
    return {
        "memory_offsets": np.zeros(num_requests + 1, dtype=np.int64),
        "memory_ms": np.zeros(0, dtype=np.int64),
        "memory_surface": np.zeros(0, dtype=np.int32),
        "memory_labels": np.zeros(0, dtype=np.int32),
        "memory_q": np.zeros((0, dim // 2), dtype=np.uint8),
    }


def no_pairs(num_candidates: int, dim: int = 64) -> Columns:
    """The pair tensors of candidates of which nothing is known."""
    return {
        "pair_q": np.zeros((num_candidates, dim), dtype=np.int8),
        "pair_scale": np.zeros(num_candidates, dtype=np.float32),
        "pair_level": np.full(num_candidates, DEFAULT_LEVEL, dtype=np.int32),
        "pair_meta": np.zeros((num_candidates, 3), dtype=np.float32),
    }


class _SourceHistory(NamedTuple):
    """Rows of one source, of many requests: whose each is, and where it stands among rows of all sources."""

    owner: Ints
    place: Ints
    columns: Columns


def _no_events(layout: Layout) -> Columns:
    return {
        "event_ms": np.zeros(0, dtype=np.int64),
        "event_source": np.zeros(0, dtype=np.int32),
        "event_surface": np.zeros(0, dtype=np.int32),
        "event_labels": np.zeros(0, dtype=np.int32),
        "event_ids": np.full((0, len(layout.event_ids)), ABSENT, dtype=np.int64),
        "event_dense": np.zeros((0, total_width(layout.event_dense)), dtype=np.float32),
    }
