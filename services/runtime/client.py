"""Opens channels to other services and calls them, raising errors of the domain only.

Knows channels, retries and statuses: nobody else sees a status code. Does not know what is asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
from opentelemetry.instrumentation.grpc import client_interceptor
from opentelemetry.instrumentation.grpc.grpcext import intercept_channel
from opentelemetry.trace import TracerProvider

from services.runtime import errors
from services.runtime.health import READINESS
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics, short_method
from services.runtime.tls import TlsSettings

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Reply = TypeVar("Reply")


class Method(Protocol[Request, Response]):
    """A unary method of a stub."""

    def __call__(self, request: Request, *, timeout: float) -> Response:
        """Call and wait."""

    def future(self, request: Request, *, timeout: float) -> Any:
        """Call and go on."""


class Pending(Generic[Reply]):
    """A call that has been sent."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> Reply:
        """Wait for the answer, at most as long as the call's timeout.

        Raises:
            GemError: the peer refused, failed, or was late.
        """
        try:
            return cast(Reply, self._future.result())
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._future.cancel()


def call(method: Method[Request, Reply], request: Request, *, timeout: float) -> Reply:
    """Call a stub's method and wait for its answer.

    Raises:
        GemError: the peer refused, failed, or was late.
    """
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise errors.from_rpc_error(error) from error


def start(method: Method[Request, Reply], request: Request, *, timeout: float) -> Pending[Reply]:
    """Send a call without waiting, so that several run at once and none needs a thread."""
    return Pending(method.future(request, timeout=timeout))


def connect(
    target: str,
    *,
    limits: Limits,
    idempotent: Sequence[str] = (),
    health: bool = True,
    tls: TlsSettings | None = None,
    token: str = "",
    call_metrics: CallMetrics | None = None,
    tracer_provider: TracerProvider | None = None,
) -> grpc.Channel:
    """A channel that spreads calls over every address of its target; opens no socket until it is used.

    Args:
        target: host:port, or any gRPC target such as dns:///name:port or ipv4:1.2.3.4:1,1.2.3.4:2.
        limits: bounds of a message, either way.
        idempotent: full method names such as /gem.sequence.v1.SequenceService/GetUserState that are tried again, at
            most twice, when a server was unavailable.
        health: leave out servers that say they are not ready, as a draining one does; a server that does not speak the
            health protocol counts as ready.
        tls: certificate files; None for plain text.
        token: bearer token to send with every call; empty for none.
        call_metrics: where to time the calls.
        tracer_provider: None for the process's own.
    """
    options = channel_options(limits, idempotent=idempotent, health=health)
    credentials = tls.channel_credentials() if tls else None
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    if token:
        channel = grpc.intercept_channel(channel, _Bear(token))
    if call_metrics is not None:
        channel = grpc.intercept_channel(channel, _Measure(call_metrics))
    # grpc.intercept_channel refuses the instrumentation library's interceptor; its own twin takes it.
    return cast(grpc.Channel, intercept_channel(channel, client_interceptor(tracer_provider)))


def channel_options(
    limits: Limits, *, idempotent: Sequence[str] = (), health: bool = True
) -> list[tuple[str, Any]]:
    """Options of every channel of the platform."""
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.service_config", service_config(idempotent, health=health)),
        ("grpc.enable_retries", 1),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # A peer that was killed and has come back is found within a second, not within the default two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def service_config(idempotent: Sequence[str], *, health: bool) -> str:
    """gRPC service config: round robin, readiness, and retries of idempotent methods with throttling."""
    config: dict[str, Any] = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
    if health:
        config["healthCheckConfig"] = {"serviceName": READINESS}
    if idempotent:
        config["methodConfig"] = [{"name": [_named(m) for m in idempotent], "retryPolicy": RETRY}]
    return json.dumps(config)


RETRY = {
    "maxAttempts": 3,
    "initialBackoff": "0.005s",
    "maxBackoff": "0.05s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _named(full_method: str) -> dict[str, str]:
    service, method = full_method.lstrip("/").split("/")
    return {"service": service, "method": method}


class _Bear(grpc.UnaryUnaryClientInterceptor):
    """Sends a bearer token along."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        """Add the header."""
        metadata = [*(client_call_details.metadata or ()), self._header]
        return continuation(client_call_details._replace(metadata=metadata), request)


class _Measure(grpc.UnaryUnaryClientInterceptor):
    """Times each call, retries included."""

    def __init__(self, metrics: CallMetrics) -> None:
        self._seconds = metrics.made

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        """Time it until its answer is there."""
        method, begun = short_method(str(client_call_details.method)), time.perf_counter()
        outcome = continuation(client_call_details, request)
        outcome.add_done_callback(
            lambda done: self._seconds.labels(method, done.code().name).observe(
                time.perf_counter() - begun
            )
        )
        return outcome
