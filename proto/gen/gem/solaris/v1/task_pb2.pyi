from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculationTask(_message.Message):
    __slots__ = ("request_id", "user_id", "surface", "request_ms", "ad_ids", "scores", "context", "traceparent", "expires_ms")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MS_FIELD_NUMBER: _ClassVar[int]
    AD_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    user_id: str
    surface: str
    request_ms: int
    ad_ids: _containers.RepeatedScalarFieldContainer[str]
    scores: _containers.RepeatedScalarFieldContainer[float]
    context: _containers.ScalarMap[str, str]
    traceparent: str
    expires_ms: int
    def __init__(self, request_id: _Optional[str] = ..., user_id: _Optional[str] = ..., surface: _Optional[str] = ..., request_ms: _Optional[int] = ..., ad_ids: _Optional[_Iterable[str]] = ..., scores: _Optional[_Iterable[float]] = ..., context: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class PairRow(_message.Message):
    __slots__ = ("vector", "scale", "computed_ms", "available_ms", "model_version", "space_id")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_MS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    vector: bytes
    scale: float
    computed_ms: int
    available_ms: int
    model_version: str
    space_id: bytes
    def __init__(self, vector: _Optional[bytes] = ..., scale: _Optional[float] = ..., computed_ms: _Optional[int] = ..., available_ms: _Optional[int] = ..., model_version: _Optional[str] = ..., space_id: _Optional[bytes] = ...) -> None: ...
