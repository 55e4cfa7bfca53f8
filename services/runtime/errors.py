"""Translates the tree of domain errors to gRPC statuses at the edge, and back on the other side.

Knows statuses and details. Does not know when an error is raised.

A refusal travels as `google.rpc.Status` with exactly one `ErrorInfo{reason, domain "gem", metadata}`, and a `RetryInfo`
if the error says how long to wait. What is no domain error travels as a bare INTERNAL: its traceback is in the log only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from feature_store.errors import GemError

DOMAIN = "gem"
RETRY_AFTER_MS = "retry_after_ms"
"""Metadata key that also becomes a RetryInfo."""


def to_status(error: GemError) -> Status:
    """The status that tells a caller of a refusal."""
    info = ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if RETRY_AFTER_MS in error.metadata:
        delay = Duration()
        delay.FromMilliseconds(int(error.metadata[RETRY_AFTER_MS]))
        details.append(_packed(RetryInfo(retry_delay=delay)))
    return Status(code=Code.Value(error.code), message=str(error), details=details)


def abort(context: grpc.ServicerContext, error: GemError) -> NoReturn:
    """End the call with the status of a refusal."""
    context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status raises")


def abort_internal(context: grpc.ServicerContext) -> NoReturn:
    """End the call with INTERNAL and nothing that a caller could learn from."""
    context.abort(grpc.StatusCode.INTERNAL, "internal error")
    raise AssertionError("abort raises")


def from_rpc_error(error: grpc.RpcError) -> GemError:
    """The domain error that a failed call stands for.

    A status with our ErrorInfo becomes the class that bears its reason; any other becomes the class of its code, with the
    code's name as its reason.
    """
    call = cast(grpc.Call, error)
    status = rpc_status.from_call(call)
    if status is not None:
        info = _error_info(status)
        if info is not None:
            return _rebuilt(call.code().name, info.reason, status.message, dict(info.metadata))
    code = call.code().name
    return _rebuilt(code, code, str(call.details() or code), {})


def _rebuilt(code: str, reason: str, message: str, metadata: Mapping[str, str]) -> GemError:
    classes = list(_tree(GemError))
    exact = (c for c in classes if (c.code, c.reason) == (code, reason))
    of_code = (c for c in classes if c.code == code)
    error = next(exact, next(of_code, GemError))(message, **metadata)
    error.code, error.reason = code, reason
    return error


def _tree(cls: type[GemError]) -> Iterator[type[GemError]]:
    """The class and all below it, nearest first."""
    level = [cls]
    while level:
        yield from level
        level = [below for each in level for below in each.__subclasses__()]


def _error_info(status: Status) -> ErrorInfo | None:
    info = ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _packed(message: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
