from gem.common.v1 import event_pb2 as _event_pb2
from gem.common.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetUserStateRequest(_message.Message):
    __slots__ = ("user_id", "surface", "request_id", "as_of_ms", "ad_ids", "context", "loopfm_space_id")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AS_OF_MS_FIELD_NUMBER: _ClassVar[int]
    AD_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    surface: str
    request_id: str
    as_of_ms: int
    ad_ids: _containers.RepeatedScalarFieldContainer[str]
    context: _containers.ScalarMap[str, str]
    loopfm_space_id: bytes
    def __init__(self, user_id: _Optional[str] = ..., surface: _Optional[str] = ..., request_id: _Optional[str] = ..., as_of_ms: _Optional[int] = ..., ad_ids: _Optional[_Iterable[str]] = ..., context: _Optional[_Mapping[str, str]] = ..., loopfm_space_id: _Optional[bytes] = ...) -> None: ...

class GetUserStateResponse(_message.Message):
    __slots__ = ("tensors", "as_of_ms", "user_version", "spec_hash", "missing", "ad_group_keys")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_MS_FIELD_NUMBER: _ClassVar[int]
    USER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    AD_GROUP_KEYS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    as_of_ms: int
    user_version: int
    spec_hash: bytes
    missing: _containers.RepeatedScalarFieldContainer[str]
    ad_group_keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., as_of_ms: _Optional[int] = ..., user_version: _Optional[int] = ..., spec_hash: _Optional[bytes] = ..., missing: _Optional[_Iterable[str]] = ..., ad_group_keys: _Optional[_Iterable[int]] = ...) -> None: ...

class AppendEventsRequest(_message.Message):
    __slots__ = ("events", "outcomes")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[_event_pb2.Event]
    outcomes: _containers.RepeatedCompositeFieldContainer[_event_pb2.Outcome]
    def __init__(self, events: _Optional[_Iterable[_Union[_event_pb2.Event, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[_event_pb2.Outcome, _Mapping]]] = ...) -> None: ...

class AppendEventsResponse(_message.Message):
    __slots__ = ("appended_event_count", "appended_outcome_count", "duplicate_count", "unknown_outcome_count")
    APPENDED_EVENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    APPENDED_OUTCOME_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_OUTCOME_COUNT_FIELD_NUMBER: _ClassVar[int]
    appended_event_count: int
    appended_outcome_count: int
    duplicate_count: int
    unknown_outcome_count: int
    def __init__(self, appended_event_count: _Optional[int] = ..., appended_outcome_count: _Optional[int] = ..., duplicate_count: _Optional[int] = ..., unknown_outcome_count: _Optional[int] = ...) -> None: ...
