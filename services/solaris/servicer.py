"""Answers SolarisService: one user's pair embeddings for N ads, and offers of pairs to compute.

Knows requests, deadlines and what to answer when the store does not. Does not know models: no call here can reach one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import grpc
from gem.solaris.v1 import solaris_service_pb2 as messages
from gem.solaris.v1 import solaris_service_pb2_grpc
from opentelemetry import trace

from feature_store.errors import GemError, InvalidInput
from feature_store.wire import pack_tensor
from services.runtime import telemetry
from services.runtime.deadline import budget
from services.runtime.limits import Limits
from services.runtime.telemetry import in_context, span
from services.solaris.aftermath import Aftermath, FinishedRead, Tasks
from services.solaris.keys import Keys
from services.solaris.ledger import CANDIDATES, READS, REFUSED, Ledger
from services.solaris.lifetimes import Level
from services.solaris.reader import PairRead, PairReader, nothing
from services.solaris.rows import SPACE_BYTES

MAX_DIM = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """How long a read may take."""

    read_seconds: float = 0.008
    """Longest wait for the store; then every level is default."""
    reserve_seconds: float = 0.005
    """What packing the answer needs of the caller's deadline."""

    def __post_init__(self) -> None:
        if self.read_seconds <= 0:
            raise ValueError(f"read_seconds is {self.read_seconds}; it must be positive")


class SolarisServicer(solaris_service_pb2_grpc.SolarisServiceServicer):
    """Serves reads from the store, within its time or without it."""

    def __init__(
        self,
        reader: PairReader,
        groups: Callable[[Sequence[int]], Sequence[int | None]],
        tasks: Tasks,
        aftermath: Aftermath,
        ledger: Ledger,
        *,
        keys: Keys,
        surfaces: Sequence[str],
        pool: Executor,
        policy: ReadPolicy | None = None,
        limits: Limits | None = None,
        max_waiting_reads: int = 64,
    ) -> None:
        self._reader, self._groups, self._tasks = reader, groups, tasks
        self._aftermath, self._ledger, self._keys = aftermath, ledger, keys
        self._surfaces, self._pool = frozenset(surfaces), pool
        self._policy, self._limits = policy or ReadPolicy(), limits or Limits()
        self._max_waiting_reads = max_waiting_reads
        self._waiting: set[Future[PairRead]] = set()

    def ReadPairs(
        self, request: messages.ReadPairsRequest, context: grpc.ServicerContext
    ) -> messages.ReadPairsResponse:
        """Reads N pairs.

        Raises:
            InvalidInput: an id, the instant, the space or the width is malformed.
            ResourceExhausted: more ads than the limit.
        """
        self._check(request)
        user_key = self._keys.user(request.user_id)
        ad_ids = list(request.ad_ids)
        ad_keys = self._keys.ads(ad_ids)
        read, degraded = self._read(
            request, user_key, ad_keys, budget(context, reserve=self._policy.reserve_seconds)
        )
        self._count(read, degraded=degraded)
        if not degraded and request.ad_ids:
            finished = FinishedRead(
                user_id=request.user_id, user_key=user_key,
                ad_ids=ad_ids, ad_keys=ad_keys,
                as_of_ms=request.as_of_ms, space_id=request.space_id,
                read=read, traceparent=telemetry.traceparent(),
            )  # fmt: skip
            self._aftermath.offer(finished)
        return messages.ReadPairsResponse(
            tensors={name: pack_tensor(array) for name, array in read.tensors().items()},
            model_version=read.model_version,
            degraded=degraded,
        )

    def Speculate(
        self, request: messages.SpeculateRequest, context: grpc.ServicerContext
    ) -> messages.SpeculateResponse:
        """Queues pairs to compute.

        Raises:
            InvalidInput: a task names no user, no ad or an unknown surface.
        """
        for task in request.tasks:
            self._limits.check_id(task.user_id, what="user id")
            self._limits.check_candidates(task.ad_ids)
            if not task.ad_ids or task.surface not in self._surfaces:
                raise InvalidInput(
                    f"task of request {task.request_id!r} has {len(task.ad_ids)} ads on surface {task.surface!r}; "
                    f"it needs at least one ad and a surface of {sorted(self._surfaces)}"
                )
        if request.tasks:
            self._tasks.append([task.SerializeToString() for task in request.tasks])
        return messages.SpeculateResponse(accepted_count=len(request.tasks))

    def _check(self, request: messages.ReadPairsRequest) -> None:
        self._limits.check_id(request.user_id, what="user id")
        self._limits.check_candidates(request.ad_ids)
        if request.as_of_ms <= 0:
            raise InvalidInput(f"as_of_ms is {request.as_of_ms}; give milliseconds since the epoch")
        if len(request.space_id) != SPACE_BYTES:
            raise InvalidInput(
                f"space_id has {len(request.space_id)} bytes; it must have {SPACE_BYTES}, as in the model's manifest"
            )
        if not 0 < request.dim <= MAX_DIM:
            raise InvalidInput(f"dim is {request.dim}; it must be in 1..{MAX_DIM}")

    def _read(
        self,
        request: messages.ReadPairsRequest,
        user_key: int,
        ad_keys: list[int],
        seconds: float,
    ) -> tuple[PairRead, bool]:
        """The read, or the default of all ads and True: a store that fails or is slow never fails a request."""
        empty = nothing(len(ad_keys), request.dim)
        if len(self._waiting) >= self._max_waiting_reads:
            self._ledger.add(READS, "shed")
            return empty, True
        work = in_context(self._read_store)
        future = self._pool.submit(work, request, user_key, ad_keys)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        try:
            return future.result(min(self._policy.read_seconds, seconds)), False
        except FutureTimeout:
            future.cancel()
            self._ledger.add(READS, "late")
        except (GemError, OSError) as error:
            self._ledger.add(READS, "failed")
            telemetry.mark_failed(trace.get_current_span(), error)
        return empty, True

    def _read_store(
        self, request: messages.ReadPairsRequest, user_key: int, ad_keys: list[int]
    ) -> PairRead:
        with span("solaris.read"):
            return self._reader.read(
                user_key, ad_keys, self._groups(ad_keys),
                as_of_ms=request.as_of_ms, space_id=request.space_id, dim=request.dim,
            )  # fmt: skip

    def _count(self, read: PairRead, *, degraded: bool) -> None:
        self._ledger.add(READS, "degraded" if degraded else "answered")
        for level, count in zip(Level, read.level_counts, strict=True):
            self._ledger.add(CANDIDATES, level.name.lower(), count)
        self._ledger.add_all(REFUSED, read.refused._asdict())
