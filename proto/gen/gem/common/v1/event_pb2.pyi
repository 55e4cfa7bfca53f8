from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("event_id", "source", "user_id", "ad_id", "surface", "request_id", "event_ms", "available_ms")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    AD_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_MS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MS_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    source: str
    user_id: str
    ad_id: str
    surface: str
    request_id: str
    event_ms: int
    available_ms: int
    def __init__(self, event_id: _Optional[str] = ..., source: _Optional[str] = ..., user_id: _Optional[str] = ..., ad_id: _Optional[str] = ..., surface: _Optional[str] = ..., request_id: _Optional[str] = ..., event_ms: _Optional[int] = ..., available_ms: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("example_id", "user_id", "objective", "occurred_ms", "available_ms", "value")
    EXAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    OCCURRED_MS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    example_id: bytes
    user_id: str
    objective: str
    occurred_ms: int
    available_ms: int
    value: float
    def __init__(self, example_id: _Optional[bytes] = ..., user_id: _Optional[str] = ..., objective: _Optional[str] = ..., occurred_ms: _Optional[int] = ..., available_ms: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
