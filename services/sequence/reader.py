"""Reads what was known of one user and N ads at an instant: two multi-gets, then arithmetic.

Knows packed rows and the batch. Does not know transports or models. Every number is what replay computes from the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.aggregates import AggregateSet, Slots, keys_of_all
from feature_store.asof import Caps
from feature_store.batch import Array
from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput
from feature_store.history import History, event_shape, memory_shape
from feature_store.ids import ABSENT, key_of
from feature_store.layout import Layout
from feature_store.online import OnlineStore, split_version
from feature_store.packing import (
    MEMORY_SPACES_KEY,
    ad_key,
    ad_shape,
    counter_keys,
    counter_slots,
    counters_digest,
    memory_key,
    past_key,
    profile_key,
    user_shape,
)
from feature_store.spec import Spec
from services.runtime.telemetry import span
from services.sequence.past import decode

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
LOOPFM = "loopfm"
"""What a memory that could not be read is called in `missing`."""


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
    missing: tuple[str, ...]
    """Inputs that could not be read."""


class StateReader:
    """Reads user states from an online store."""

    def __init__(self, store: OnlineStore, spec: Spec, *, memory_bytes: int = 32, caps: Caps | None = None) -> None:
        self._store, self._spec, self._layout = store, spec, Layout(spec)
        self._aggregates, self._history = AggregateSet(spec), event_shape(spec)
        self._ads, self._users = ad_shape(self._layout), user_shape(self._layout)
        self._memory_bytes, self._caps = memory_bytes, caps or Caps()
        names = [column.name for column in self._layout.ad_ids]
        self._group_column = names.index("ad_group") if "ad_group" in names else None
        self._digest = counters_digest(self._aggregates)
        self._widths: dict[bytes, int] = {}

    def read(self, question: Question) -> Answer:
        """The state of one user and N ads.

        Raises:
            InvalidInput: a request feature is malformed.
            CorruptArtefact: the user's row is damaged.
            NotReady: the store does not answer.
        """
        own = [profile_key(question.user_key), past_key(question.user_key)]
        if question.loopfm_space:
            own.append(memory_key(question.loopfm_space, question.user_key))
        with span("sequence.rows", ads=len(question.ad_keys)):
            rows = self._store.get_many([*own, *map(ad_key, question.ad_keys.tolist())])
        held = split_version(rows[1])
        past = decode(held.value, self._history, self._aggregates, key=own[1])
        ad_ids, ad_dense, known = self._ads.decode(rows[len(own) :], question.ad_keys, question.as_of_ms)
        slots = self._slots(question, ad_ids, past.counters)
        memory, missing = self._memory_tensors(question, rows[2] if question.loopfm_space else None)
        now = np.array([question.as_of_ms], dtype=np.int64)
        counted = self._aggregates.ad_statistics(slots[1:], np.repeat(now, len(ad_ids)))
        tensors: dict[str, Array] = {
            "user_key": np.array([question.user_key], dtype=np.int64),
            "surface": np.array([question.surface], dtype=np.int32),
            "request_ms": now,
            **self._user_tensors(question, rows[0], slots[:1]),
            **self._event_tensors(question, past.history),
            "ad_ids": ad_ids,
            "ad_dense": np.concatenate([ad_dense, counted], axis=1),
            **memory,
        }
        absent = np.full(len(ad_ids), ABSENT, dtype=np.int64)
        groups = absent if self._group_column is None else ad_ids[:, self._group_column]
        return Answer(tensors, held.version, groups, int((~known).sum()), missing)

    def _slots(
        self, question: Question, ad_ids: Ints, counters: list[dict[int, Slots]]
    ) -> npt.NDArray[np.float64]:
        """Counter states [1 + N, slots]: of the user without an ad, then of every ad."""
        nobody = np.full((1, ad_ids.shape[1]), ABSENT, dtype=np.int64)
        asked = np.concatenate([nobody, ad_ids])
        slots = self._aggregates.snapshots(question.surface, asked, counters, [{} for _ in counters])
        self._fill_shared(question.surface, asked, slots)
        return slots

    def _fill_shared(self, surface: int, asked: Ints, slots: npt.NDArray[np.float64]) -> None:
        """Fills in the slots of all shared groups: one multi-get of the distinct rows."""
        shared = [(at, group) for at, group in enumerate(self._aggregates.groups) if group.width and not group.per_user]
        names: list[str] = []
        parts = []
        for at, group in shared:
            keys, of_asked = np.unique(keys_of_all(group, surface, asked), return_inverse=True)
            parts.append((at, group, slice(len(names), len(names) + len(keys)), of_asked))
            names += counter_keys(self._digest, group, keys.tolist())
        with span("sequence.counters", rows=len(names)):
            held = self._store.get_many(names)
        starts = self._aggregates.starts
        for at, group, own, of_asked in parts:
            slots[:, starts[at] : starts[at + 1]] = counter_slots(held[own], group)[of_asked]

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

    def _memory_tensors(
        self, question: Question, row: bytes | None
    ) -> tuple[dict[str, Array], tuple[str, ...]]:
        """The LoopFM window and what of it is missing: a memory that cannot be read costs the memory, not the request."""
        width = self._width(question.loopfm_space)
        missing: tuple[str, ...] = ()
        shape = memory_shape(len(self._spec.objectives), num_bytes=width, caps=self._caps)
        memory = History(shape)
        try:
            memory = History.from_bytes(shape, split_version(row).value)
        except (CorruptArtefact, FailedPrecondition) as error:
            log.error("LoopFM memory of space %s: %s", question.loopfm_space.hex(), error)
            missing = (LOOPFM,)
        rows, bits = memory.read(question.as_of_ms, request_id=question.request_id)
        tensors: dict[str, Array] = {
            "memory_ms": rows["event_ms"].copy(),
            "memory_surface": rows["surface"].copy(),
            "memory_labels": bits,
            "memory_q": rows["q"].copy(),
        }
        return tensors, missing

    def _width(self, space_id: bytes) -> int:
        """Bytes of a vector of a space, which never change; of a space that nobody wrote yet, the usual ones."""
        if not space_id:
            return self._memory_bytes
        width = self._widths.get(space_id)
        if width is None:
            (said,) = self._store.hget_many(MEMORY_SPACES_KEY, [space_id.hex()])
            if said is None:
                return self._memory_bytes
            width = self._widths[space_id] = int(said)
        return width


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
