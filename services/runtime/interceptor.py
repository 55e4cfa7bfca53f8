"""Wraps the unary methods of a server in layers, outside in: trace → measure → token → deadline → errors → log.

Knows handlers and contexts. Does not know messages. Health and reflection pass through untouched: they are streams with
a protocol of their own, and a probe needs neither a trace nor a deadline.
"""

from __future__ import annotations

import hmac
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
from opentelemetry import trace

from feature_store.errors import GemError
from services.runtime import deadline, errors, telemetry
from services.runtime.metrics import CallMetrics, short_method

log = logging.getLogger(__name__)

Behaviour = Callable[[Any, grpc.ServicerContext], Any]
Handler = Any  # the handler type is generic in its stubs only

PLUMBING = ("/grpc.health.", "/grpc.reflection.")


def is_ours(details: grpc.HandlerCallDetails) -> bool:
    """Whether a call is for a service, not for the plumbing around it."""
    return not details.method.startswith(PLUMBING)


class Unauthenticated(GemError):
    """The caller did not say who it is."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class UnaryInterceptor(grpc.ServerInterceptor, ABC):
    """A layer around every unary method."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Replace the method's behaviour by this layer around it."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None or not is_ours(handler_call_details):
            return handler
        method, behaviour = handler_call_details.method, cast(Behaviour, handler.unary_unary)

        def layered(request: Any, context: grpc.ServicerContext) -> Any:
            return self.around(method, behaviour, request, context)

        return grpc.unary_unary_rpc_method_handler(
            layered,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @abstractmethod
    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Answer by calling `behaviour(request, context)`, or refuse."""


class Measure(UnaryInterceptor):
    """Times each call by the code the caller sees."""

    def __init__(self, metrics: CallMetrics) -> None:
        self._seconds = metrics.answered

    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Time it."""
        begun = time.perf_counter()
        try:
            return behaviour(request, context)
        finally:
            code = cast(Any, context).code() or grpc.StatusCode.OK
            name = code.name if isinstance(code, grpc.StatusCode) else str(code)
            self._seconds.labels(short_method(method), name).observe(time.perf_counter() - begun)


class RequireToken(UnaryInterceptor):
    """Refuses a caller that bears none of the tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]

    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Refuse it, or go on."""
        sent = str(dict(context.invocation_metadata()).get("authorization", "")).encode()
        if not any([hmac.compare_digest(sent, token) for token in self._expected]):
            refusal = Unauthenticated("no valid token; send `authorization: Bearer TOKEN`")
            errors.abort(context, refusal)
        return behaviour(request, context)


class RequireDeadline(UnaryInterceptor):
    """Refuses a call whose caller would wait for ever."""

    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Refuse it, or go on."""
        try:
            deadline.remaining(context)
        except GemError as error:
            errors.abort(context, error)
        return behaviour(request, context)


class TranslateErrors(UnaryInterceptor):
    """Turns errors of the domain into statuses, and anything else into a bare INTERNAL."""

    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Translate what it raises."""
        try:
            return behaviour(request, context)
        except GemError as error:
            failure: GemError | None = error
        except Exception as error:
            if cast(Any, context).code() is not None:
                raise  # the method aborted by itself: gRPC's own signal
            log.exception("%s failed", method)
            telemetry.mark_failed(trace.get_current_span(), error)
            failure = None
        # Aborting outside the handlers keeps the cause, and the ids in its message, out of the trace.
        if failure is None:
            errors.abort_internal(context)
        telemetry.mark_failed(trace.get_current_span(), failure)
        errors.abort(context, failure)


class LogCalls(UnaryInterceptor):
    """Writes one line a call: debug if it went well, info if the caller was refused."""

    def around(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.ServicerContext
    ) -> Any:
        """Log it."""
        try:
            response = behaviour(request, context)
        except GemError as error:
            log.info("%s refused: %s %s", method, error.reason, error)
            raise
        log.debug("%s answered", method)
        return response
