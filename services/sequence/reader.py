"""Reads what was known of one user and N ads at an instant: two multi-gets, then arithmetic.

Knows packed rows and the batch. Does not know transports or models. Every number is what replay computes from the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.aggregates import AggregateSet, Slots
from feature_store.asof import Caps
from feature_store.batch import Array
from feature_store.errors import InvalidInput
from feature_store.history import History, event_shape, memory_shape
from feature_store.ids import ABSENT, key_of
from feature_store.layout import Layout
from feature_store.online import OnlineStore, split_version
from feature_store.packing import (
    ad_key,
    ad_shape,
    counter_key,
    memory_key,
    past_key,
    profile_key,
    user_shape,
)
from feature_store.spec import Spec
from services.runtime.telemetry import span
from services.sequence.past import decode

Ints = npt.NDArray[np.int64]


class Question(NamedTuple):
    """What is asked of the reader, in keys."""

    user_key: int
    surface: int
    request_id: str
    as_of_ms: int
    ad_keys: Ints
    context: Mapping[str, str]
    loopfm_space: bytes


class Answer(NamedTuple):
    """Tensors of the feature batch, and what they were read from."""

    tensors: dict[str, Array]
    user_version: int
    ad_group_keys: Ints
    unknown_ads: int


class StateReader:
    """Reads user states from an online store."""

    def __init__(self, store: OnlineStore, spec: Spec, *, memory_bytes: int = 32, caps: Caps | None = None) -> None:
        self._store, self._spec, self._layout = store, spec, Layout(spec)
        self._aggregates, self._history = AggregateSet(spec), event_shape(spec)
        self._ads, self._users = ad_shape(self._layout), user_shape(self._layout)
        self._memory_bytes, self._caps = memory_bytes, caps or Caps()
        names = [column.name for column in self._layout.ad_ids]
        self._group_column = names.index("ad_group") if "ad_group" in names else None

    def read(self, question: Question) -> Answer:
        """The state of one user and N ads.

        Raises:
            InvalidInput: a request feature is malformed.
            NotReady: the store does not answer.
        """
        own = [profile_key(question.user_key), past_key(question.user_key)]
        if question.loopfm_space:
            own.append(memory_key(question.loopfm_space, question.user_key))
        with span("read rows", ads=len(question.ad_keys)):
            rows = self._store.get_many([*own, *map(ad_key, question.ad_keys.tolist())])
        ads = rows[len(own) :]
        past_row = split_version(rows[1])
        past = decode(past_row.value, self._history, self._aggregates)
        ad_ids, ad_dense, known = self._ads.decode(ads, question.ad_keys, question.as_of_ms)
        user_slots, ad_slots = self._slots(question, ad_ids, past.counters)
        memory = split_version(rows[2]).value if question.loopfm_space else b""
        now = np.array([question.as_of_ms], dtype=np.int64)
        tensors = {
            "user_key": np.array([question.user_key], dtype=np.int64),
            "surface": np.array([question.surface], dtype=np.int32),
            "request_ms": now,
            **self._user_tensors(question, rows[0], user_slots),
            **self._event_tensors(question, past.history),
            "ad_ids": ad_ids,
            "ad_dense": np.concatenate(
                [ad_dense, self._aggregates.ad_statistics(ad_slots, np.repeat(now, len(ad_ids)))], axis=1
            ),
            **self._memory_tensors(question, memory),
        }
        groups = ad_ids[:, self._group_column] if self._group_column is not None else np.full(len(ad_ids), ABSENT)
        return Answer(tensors, past_row.version, groups, int((~known).sum()))

    def _slots(
        self, question: Question, ad_ids: Ints, counters: list[dict[int, Slots]]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Counter states for the user's own columns [1, slots] and for every ad [N, slots]."""
        nobody = [ABSENT] * ad_ids.shape[1]
        asked = [nobody, *ad_ids.tolist()]
        shared = self._shared(question.surface, asked)
        flat: list[float] = []
        for ids in asked:
            self._aggregates.snapshot(question.surface, ids, counters, shared, flat)
        slots = np.array(flat, dtype=np.float64).reshape(len(asked), self._aggregates.num_slots)
        return slots[:1], slots[1:]

    def _shared(self, surface: int, asked: Sequence[Sequence[int]]) -> list[dict[int, Slots]]:
        """Rows of all shared groups that the asked ads need: one multi-get."""
        wanted: dict[str, tuple[int, int]] = {}
        for index, group in enumerate(self._aggregates.groups):
            if group.per_user:
                continue
            for ids in asked:
                key = self._aggregates.key(group, surface, ids)
                if key is not None:
                    wanted[counter_key(index, key)] = (index, key)
        shared: list[dict[int, Slots]] = [{} for _ in self._aggregates.groups]
        with span("read counters", rows=len(wanted)):
            values = self._store.get_many(list(wanted))
        for (index, key), value in zip(wanted.values(), values, strict=True):
            stored = split_version(value).value
            if stored:
                shared[index][key] = np.frombuffer(stored, dtype=np.float64).tolist()
        return shared

    def _user_tensors(
        self, question: Question, profile: bytes | None, slots: npt.NDArray[np.float64]
    ) -> dict[str, Array]:
        key, now = np.array([question.user_key]), np.array([question.as_of_ms])
        ids, dense, _ = self._users.decode([profile], key, question.as_of_ms)
        request_ids, request_dense = self._context(question.context)
        counted = self._aggregates.user_statistics(slots, now)
        return {
            "user_ids": np.concatenate([ids, request_ids], axis=1),
            "user_dense": np.concatenate([dense, request_dense, counted], axis=1),
        }

    def _context(self, context: Mapping[str, str]) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Request features [1, ·]; absent where they were not sent."""
        ids, dense = [], []
        for feature in self._spec.features(pb.OWNER_REQUEST):
            text = context.get(feature.name)
            if feature.HasField("id"):
                ids.append(ABSENT if text is None else key_of(text, self._spec.id_type(feature.name)))
            else:
                dense.extend(_numbers(feature, text))
        return np.array([ids], dtype=np.int64), np.array([dense], dtype=np.float32)

    def _event_tensors(self, question: Question, history: History) -> dict[str, Array]:
        rows, bits = history.read(question.as_of_ms, request_id=question.request_id)
        return {
            "event_ms": rows["event_ms"].copy(),
            "event_source": rows["source"].copy(),
            "event_surface": rows["surface"].copy(),
            "event_labels": bits,
            "event_ids": rows["ids"].copy(),
            "event_dense": rows["dense"].copy(),
        }

    def _memory_tensors(self, question: Question, row: bytes) -> dict[str, Array]:
        width = self._memory_bytes
        shape = memory_shape(len(self._spec.objectives), num_bytes=width, caps=self._caps)
        memory = History.from_bytes(shape, row)
        rows, bits = memory.read(question.as_of_ms, request_id=question.request_id)
        return {
            "memory_ms": rows["event_ms"].copy(),
            "memory_surface": rows["surface"].copy(),
            "memory_labels": bits,
            "memory_q": rows["q"].copy(),
        }


def _numbers(feature: pb.Feature, text: str | None) -> list[float]:
    width = feature.embedding.dim or 1
    if text is None:
        return [float("nan")] * width
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"request feature {feature.name!r} is {text!r}; send {width} number(s)") from error
    if len(numbers) != width:
        raise InvalidInput(f"request feature {feature.name!r} has {len(numbers)} numbers; send {width}")
    return numbers
