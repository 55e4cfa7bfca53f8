"""Reads what is known of a user and of candidates, from both services at once, and makes do without what is late.

Knows the two reads and what stands for a missing one. Does not know models, nor what is done with the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from gem.common.v1.tensor_pb2 import Tensor
from gem.router.v1.route_table_pb2 import Arm
from gem.router.v1.router_service_pb2 import DegradedInput
from gem.sequence.v1.sequence_service_pb2 import GetUserStateRequest, GetUserStateResponse
from gem.sequence.v1.sequence_service_pb2_grpc import SequenceServiceStub
from gem.solaris.v1.solaris_service_pb2 import ReadPairsRequest, ReadPairsResponse
from gem.solaris.v1.solaris_service_pb2_grpc import SolarisServiceStub

from feature_store.errors import FailedPrecondition, GemError, InvalidInput
from feature_store.wire import unpack_tensor
from services.router import absent
from services.router.absent import Absent, Tensors
from services.router.asked import Asked
from services.router.policy import space_bytes
from services.runtime import client
from services.runtime.client import Pending

log = logging.getLogger(__name__)

LOOPFM = "loopfm"
"""What the sequence service calls a LoopFM memory that it could not read."""
IDEMPOTENT = (
    "/gem.sequence.v1.SequenceService/GetUserState",
    "/gem.solaris.v1.SolarisService/ReadPairs",
)


class Inputs(NamedTuple):
    """What a model is given, and what it is not."""

    tensors: Tensors
    degraded: frozenset[DegradedInput]
    levels: npt.NDArray[np.int32]
    """[N] where each candidate's pair embedding came from, 0 exact … 4 default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """The two reads of a request."""

    sequence: SequenceServiceStub
    solaris: SolarisServiceStub
    absent: Absent
    spec_hash: bytes

    def read(self, asked: Asked, arm: Arm, *, timeout: float) -> Inputs:
        """Tensors for one arm's model, within `timeout` seconds; never fails for want of an input.

        Raises:
            InvalidInput: the sequence service refuses the request itself.
        """
        state = client.start(
            self.sequence.GetUserState, _state_request(asked, arm), timeout=timeout
        )
        pairs: Pending[ReadPairsResponse] | None = None
        if arm.solaris:
            pairs = client.start(
                self.solaris.ReadPairs, _pairs_request(asked, arm), timeout=timeout
            )
        state_tensors, missing = self._state(state, asked, arm)
        pair_tensors, lost = self._pairs(pairs, asked, arm)
        levels = unpack_tensor(pair_tensors["pair_level"]).astype(np.int32)
        return Inputs({**state_tensors, **pair_tensors}, missing | lost, levels)

    def for_other_arm(self, inputs: Inputs, asked: Asked, *, read_for: Arm, arm: Arm) -> Inputs:
        """What was read for one arm, for the arm that answers in its place: without coordinates they do not share."""
        tensors, levels = dict(inputs.tensors), inputs.levels
        if _loopfm_space(arm) != _loopfm_space(read_for):
            tensors |= Absent.memory(memory_bytes=arm.loopfm_dim // 2)
        if _solaris_space(arm) != _solaris_space(read_for):
            tensors |= Absent.pairs(len(asked.ad_ids), dim=arm.solaris_dim)
            levels = unpack_tensor(tensors["pair_level"]).astype(np.int32)
        lost = inputs.degraded | {DegradedInput.DEGRADED_INPUT_VERTICAL}
        return Inputs(tensors, lost, levels)

    def _state(
        self, pending: Pending[GetUserStateResponse], asked: Asked, arm: Arm
    ) -> tuple[Tensors, frozenset[DegradedInput]]:
        try:
            response = pending.result()
            self._check_state(response, asked)
        except InvalidInput:
            raise
        except GemError as error:
            log.warning("answering without user state: %s", error)
            tensors = self.absent.state(asked, memory_bytes=arm.loopfm_dim // 2)
            lost = {DegradedInput.DEGRADED_INPUT_SEQUENCE}
            return tensors, frozenset(lost | _loopfm_lost(arm))
        tensors = {
            name: response.tensors[name] for name in absent.STATE if name in response.tensors
        }
        if not arm.loopfm or LOOPFM in response.missing or _is_empty(tensors.get("memory_q")):
            # The service cannot know the width of a memory that it does not hold.
            tensors |= Absent.memory(memory_bytes=arm.loopfm_dim // 2)
        return tensors, frozenset(_loopfm_lost(arm) if LOOPFM in response.missing else ())

    def _pairs(
        self, pending: Pending[ReadPairsResponse] | None, asked: Asked, arm: Arm
    ) -> tuple[Tensors, frozenset[DegradedInput]]:
        lost = frozenset({DegradedInput.DEGRADED_INPUT_SOLARIS})
        if pending is None:
            return Absent.pairs(len(asked.ad_ids), dim=arm.solaris_dim), frozenset()
        try:
            response = pending.result()
            _check_rows(response.tensors, ("pair_q", "pair_level"), len(asked.ad_ids))
        except GemError as error:
            log.warning("answering without pair embeddings: %s", error)
            return Absent.pairs(len(asked.ad_ids), dim=arm.solaris_dim), lost
        tensors = {name: response.tensors[name] for name in absent.PAIRS}
        return tensors, lost if response.degraded else frozenset()

    def _check_state(self, response: GetUserStateResponse, asked: Asked) -> None:
        if response.spec_hash != self.spec_hash:
            raise FailedPrecondition(
                f"the sequence service follows spec {response.spec_hash.hex()}, "
                f"the router {self.spec_hash.hex()}; give both the same spec"
            )
        _check_rows(response.tensors, ("ad_ids", "ad_dense"), len(asked.ad_ids))


def connect_reader(
    sequence: grpc.Channel, solaris: grpc.Channel, *, absent: Absent, spec_hash: bytes
) -> Reader:
    """A reader over two channels."""
    return Reader(
        sequence=SequenceServiceStub(sequence),
        solaris=SolarisServiceStub(solaris),
        absent=absent,
        spec_hash=spec_hash,
    )


def _state_request(asked: Asked, arm: Arm) -> GetUserStateRequest:
    return GetUserStateRequest(
        user_id=asked.user_id,
        surface=asked.surface,
        request_id=asked.request_id,
        as_of_ms=asked.request_ms,
        ad_ids=asked.ad_ids,
        context=asked.context,
        loopfm_space_id=_loopfm_space(arm),
    )


def _pairs_request(asked: Asked, arm: Arm) -> ReadPairsRequest:
    return ReadPairsRequest(
        user_id=asked.user_id,
        ad_ids=asked.ad_ids,
        as_of_ms=asked.request_ms,
        space_id=_solaris_space(arm),
        dim=arm.solaris_dim,
    )


def _loopfm_space(arm: Arm) -> bytes:
    return (space_bytes(arm.loopfm_space_id) or b"") if arm.loopfm else b""


def _solaris_space(arm: Arm) -> bytes:
    return (space_bytes(arm.solaris_space_id) or b"") if arm.solaris else b""


def _loopfm_lost(arm: Arm) -> set[DegradedInput]:
    return {DegradedInput.DEGRADED_INPUT_LOOPFM} if arm.loopfm else set()


def _is_empty(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.shape[0] == 0


def _check_rows(tensors: Tensors, names: Sequence[str], rows: int) -> None:
    for name in names:
        if name not in tensors or list(tensors[name].shape[:1]) != [rows]:
            raise FailedPrecondition(
                f"a peer sent no tensor {name!r} of {rows} rows; check its version"
            )
