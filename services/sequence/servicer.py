"""Answers SequenceService: the state of a user and N ads as of an instant, and appended events.

Knows requests and limits. Does not know rows.
"""

from __future__ import annotations

import grpc
import numpy as np
from gem.sequence.v1 import sequence_service_pb2 as messages
from gem.sequence.v1 import sequence_service_pb2_grpc

from feature_store.errors import InvalidInput
from feature_store.ids import to_keys
from feature_store.spec import Spec
from feature_store.wire import pack_tensor
from services.runtime.limits import Limits
from services.runtime.telemetry import span
from services.sequence.appender import Appender
from services.sequence.metrics import SequenceMetrics
from services.sequence.reader import Question, StateReader


class SequenceServicer(sequence_service_pb2_grpc.SequenceServiceServicer):
    """Serves reads and appends over an online store.

    Raises:
        InvalidInput: the spec's histories are longer than the limit.
    """

    def __init__(
        self,
        reader: StateReader,
        appender: Appender,
        spec: Spec,
        *,
        metrics: SequenceMetrics,
        limits: Limits | None = None,
    ) -> None:
        self._reader, self._appender, self._spec = reader, appender, spec
        self._metrics, self._limits = metrics, limits or Limits()
        self._limits.check_history(sum(source.max_length for source in spec.message.event_sources))

    def GetUserState(
        self, request: messages.GetUserStateRequest, context: grpc.ServicerContext
    ) -> messages.GetUserStateResponse:
        """Reads one user and N ads.

        Raises:
            InvalidInput: an id, the surface, the instant or a request feature is malformed.
            ResourceExhausted: more ads than the limit.
            NotReady: the store does not answer.
        """
        answer = self._reader.read(self._question(request))
        with span("sequence.pack"):
            tensors = {name: pack_tensor(array) for name, array in answer.tensors.items()}
        return messages.GetUserStateResponse(
            tensors=tensors,
            as_of_ms=request.as_of_ms,
            user_version=answer.user_version,
            spec_hash=self._spec.hash,
            ad_group_keys=answer.ad_group_keys.tolist(),
            missing=answer.missing,
        )

    def AppendEvents(
        self, request: messages.AppendEventsRequest, context: grpc.ServicerContext
    ) -> messages.AppendEventsResponse:
        """Adds events and outcomes.

        Raises:
            InvalidInput: one is malformed; none was added.
            ResourceExhausted: more than the limit.
            NotReady: the store does not answer.
        """
        count = len(request.events) + len(request.outcomes)
        self._limits.check_count(count, limit=self._limits.max_appended_events, what="events and outcomes")
        added = self._appender.append(request.events, request.outcomes)
        self._metrics.count(added)
        return messages.AppendEventsResponse(
            appended_event_count=added.events,
            appended_outcome_count=added.outcomes,
            duplicate_count=added.duplicates,
            unknown_outcome_count=added.unknown,
        )

    def _question(self, request: messages.GetUserStateRequest) -> Question:
        self._limits.check_id(request.user_id, what="user id")
        self._limits.check_candidates(request.ad_ids)
        if request.as_of_ms <= 0:
            raise InvalidInput(f"as_of_ms is {request.as_of_ms}; give milliseconds since the epoch")
        if len(request.loopfm_space_id) not in (0, 8):
            raise InvalidInput(f"loopfm_space_id has {len(request.loopfm_space_id)} bytes; it must have 8, or none")
        return Question(
            user_key=int(to_keys([request.user_id], self._spec.id_type("user"))[0]),
            surface=self._spec.surface_index(request.surface),
            request_id=request.request_id,
            as_of_ms=request.as_of_ms,
            ad_keys=to_keys(list(request.ad_ids), self._spec.id_type("ad")).astype(np.int64),
            context=request.context,
            loopfm_space=request.loopfm_space_id,
        )
