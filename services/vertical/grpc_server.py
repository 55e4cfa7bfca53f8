"""KServe's gRPC server with the platform's habits: traced, limited, healthy, and errors that say what is wrong.

Knows sockets and statuses. Does not know models.

KServe's own interceptor looks for `reason` on errors that have none (`ModelNotReady`, `ServerNotReady`,
`NotImplementedError`), fails on them itself, and the client sees UNKNOWN; it also cannot carry details. `TranslateErrors`
below takes its place: every error becomes one of the domain's tree, with its stable reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kserve import errors as kserve_errors
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc import grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc
from kserve.protocol.grpc.server import GRPCServer
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.trace import TracerProvider

from feature_store.errors import GemError, InvalidInput, NotFound, NotReady, Unimplemented
from services.runtime import errors, interceptor, telemetry
from services.runtime.health import LIVENESS, OVERALL, READINESS
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics, short_method
from services.runtime.tls import TlsSettings

log = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcSettings:
    """Where the server listens and what it accepts."""

    listen: str
    """host:port; port 0 picks a free one."""
    limits: Limits = field(default_factory=Limits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    grace_seconds: float = 10.0
    """Seconds that calls in flight may take to finish."""


class InferenceServer(GRPCServer):  # type: ignore[misc]  # kserve is untyped
    """The Open Inference Protocol and the stock health protocol on one port."""

    def __init__(
        self,
        data_plane: DataPlane,
        repository: ModelRepositoryExtension,
        settings: GrpcSettings,
        *,
        call_metrics: CallMetrics,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        super().__init__(0, data_plane, repository, kwargs={}, grace_period=settings.grace_seconds)
        self._settings = settings
        self._layers = (
            aio_server_interceptor(tracer_provider, filter_=interceptor.is_ours),
            TranslateErrors(call_metrics),
        )
        self._health = health.aio.HealthServicer()
        self.port = 0
        self.listening = asyncio.Event()

    async def start(self, max_workers: int) -> None:
        """Listens until stopped; alive at once, ready when told.

        Raises:
            OSError: the address is taken.
        """
        self._server = aio.server(
            ThreadPoolExecutor(max_workers), interceptors=self._layers, options=self._options()
        )
        servicer = InferenceServicer(self._data_plane, self._model_repository_extension)
        grpc_predict_v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._bind(self._server)
        await self._health.set(LIVENESS, SERVING)
        await self.set_ready(False)
        await self._server.start()
        self.listening.set()
        await self._server.wait_for_termination()

    async def set_ready(self, ready: bool) -> None:  # the subject is the state
        """Tells health clients whether traffic is welcome."""
        for name in (OVERALL, READINESS):
            await self._health.set(name, SERVING if ready else NOT_SERVING)

    def _bind(self, server: aio.Server) -> int:
        credentials = self._settings.tls.server_credentials()
        try:
            if credentials is None:
                return int(server.add_insecure_port(self._settings.listen))
            return int(server.add_secure_port(self._settings.listen, credentials))
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self._settings.listen}; is the port taken?"
            ) from error

    def _options(self) -> list[tuple[str, int]]:
        size = self._settings.limits.max_message_bytes
        return [
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]


class TranslateErrors(aio.ServerInterceptor):
    """Times each call and ends a failed one with the status of its domain error."""

    def __init__(self, call_metrics: CallMetrics) -> None:
        self._seconds = call_metrics.answered

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the method's behaviour by this layer around it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        if not interceptor.is_ours(handler_call_details):
            return handler
        method, behaviour = short_method(handler_call_details.method), handler.unary_unary

        async def layered(request: Any, context: Any) -> Any:
            return await self._around(method, behaviour, request, context)

        return grpc.unary_unary_rpc_method_handler(
            layered,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _around(self, method: str, behaviour: Any, request: Any, context: Any) -> Any:
        begun, code = time.perf_counter(), "OK"
        try:
            return await behaviour(request, context)
        except Exception as error:  # the edge: nothing else may leave as it is
            refusal = translated(error)
            code = refusal.code if refusal else "INTERNAL"
            telemetry.mark_failed(trace.get_current_span(), refusal or error)
            if refusal is None:
                log.exception("%s failed", method)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error")
                raise AssertionError("abort raises") from error
            log.info("%s refused: %s %s", method, refusal.reason, refusal)
            await _abort(context, refusal)
        finally:
            self._seconds.labels(method, code).observe(time.perf_counter() - begun)


def translated(error: Exception) -> GemError | None:
    """The domain error that an error of kserve stands for; None for a bug."""
    if isinstance(error, GemError):
        return error
    if isinstance(error, kserve_errors.ModelNotFound):
        return NotFound(f"{error} Ask ServerMetadata or GET /v2/models for those that do.")
    if isinstance(
        error,
        (kserve_errors.ModelNotReady, kserve_errors.ServerNotReady, kserve_errors.ServerNotLive),
    ):
        return NotReady(f"{error} Try again later.")
    if isinstance(error, NotImplementedError):
        return Unimplemented(str(error) or "the method is not implemented; use ModelInfer")
    kinds = (
        kserve_errors.InvalidInput,
        kserve_errors.InferenceError,
        kserve_errors.UnsupportedProtocol,
    )
    return InvalidInput(str(error)) if isinstance(error, kinds) else None


async def _abort(context: Any, error: GemError) -> None:
    """grpc.aio has no `abort_with_status`: the details travel under their well-known key."""
    status = errors.to_status(error)
    await context.abort(
        grpc.StatusCode[error.code],
        status.message,
        (("grpc-status-details-bin", status.SerializeToString()),),
    )


SERVICE = grpc_predict_v2_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
