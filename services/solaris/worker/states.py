"""Reads users' states from the sequence service, several at once.

Knows the service's messages. Does not know what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from gem.sequence.v1 import sequence_service_pb2 as messages
from gem.sequence.v1.sequence_service_pb2_grpc import SequenceServiceStub
from gem.solaris.v1 import task_pb2

from feature_store.batch import from_tensors
from feature_store.errors import FailedPrecondition, GemError
from feature_store.ids import ABSENT
from feature_store.wire import unpack_tensor
from services.runtime import client
from services.solaris.reader import nothing
from services.solaris.worker.loop import State


class SequenceStates:
    """States over gRPC."""

    def __init__(
        self, stub: SequenceServiceStub, *, spec_hash: bytes, timeout_seconds: float = 5.0
    ) -> None:
        self._stub = stub
        self._spec_hash = spec_hash
        self._timeout_seconds = timeout_seconds

    def read(self, tasks: Sequence[tuple[task_pb2.SpeculationTask, int]]) -> list[State | GemError]:
        """The state of each task's user as of the instant beside it, or why there is none."""
        calls = [
            client.start(
                self._stub.GetUserState, _request(task, as_of_ms), timeout=self._timeout_seconds
            )
            for task, as_of_ms in tasks
        ]
        return [self._state(call) for call in calls]

    def _state(self, call: client.Pending[messages.GetUserStateResponse]) -> State | GemError:
        try:
            response = call.result()
            if response.spec_hash != self._spec_hash:
                raise FailedPrecondition(
                    f"the sequence service follows spec {response.spec_hash.hex()}, this worker "
                    f"{self._spec_hash.hex()}; start both with the same spec"
                )
            tensors = {name: unpack_tensor(tensor) for name, tensor in response.tensors.items()}
            # The foundation model reads no pair embedding: it makes them.
            pairs = nothing(len(response.ad_group_keys), dim=0).tensors()
            batch = from_tensors({**tensors, **pairs})
        except GemError as error:
            return error
        groups = [None if key == ABSENT else key for key in response.ad_group_keys]
        return State(batch, groups)


def _request(task: task_pb2.SpeculationTask, as_of_ms: int) -> messages.GetUserStateRequest:
    return messages.GetUserStateRequest(
        user_id=task.user_id,
        surface=task.surface,
        request_id=task.request_id,
        as_of_ms=as_of_ms,
        ad_ids=task.ad_ids,
        context=task.context,
    )
