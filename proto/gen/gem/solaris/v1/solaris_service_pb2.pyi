from gem.common.v1 import tensor_pb2 as _tensor_pb2
from gem.solaris.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KnowledgeLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KNOWLEDGE_LEVEL_UNSPECIFIED: _ClassVar[KnowledgeLevel]
    KNOWLEDGE_LEVEL_EXACT: _ClassVar[KnowledgeLevel]
    KNOWLEDGE_LEVEL_AD_GROUP: _ClassVar[KnowledgeLevel]
    KNOWLEDGE_LEVEL_SIMILAR_USERS: _ClassVar[KnowledgeLevel]
    KNOWLEDGE_LEVEL_USER: _ClassVar[KnowledgeLevel]
    KNOWLEDGE_LEVEL_DEFAULT: _ClassVar[KnowledgeLevel]
KNOWLEDGE_LEVEL_UNSPECIFIED: KnowledgeLevel
KNOWLEDGE_LEVEL_EXACT: KnowledgeLevel
KNOWLEDGE_LEVEL_AD_GROUP: KnowledgeLevel
KNOWLEDGE_LEVEL_SIMILAR_USERS: KnowledgeLevel
KNOWLEDGE_LEVEL_USER: KnowledgeLevel
KNOWLEDGE_LEVEL_DEFAULT: KnowledgeLevel

class ReadPairsRequest(_message.Message):
    __slots__ = ("user_id", "ad_ids", "as_of_ms", "space_id", "dim")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    AD_IDS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_MS_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    ad_ids: _containers.RepeatedScalarFieldContainer[str]
    as_of_ms: int
    space_id: bytes
    dim: int
    def __init__(self, user_id: _Optional[str] = ..., ad_ids: _Optional[_Iterable[str]] = ..., as_of_ms: _Optional[int] = ..., space_id: _Optional[bytes] = ..., dim: _Optional[int] = ...) -> None: ...

class ReadPairsResponse(_message.Message):
    __slots__ = ("tensors", "model_version", "degraded")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    model_version: str
    degraded: bool
    def __init__(self, tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., model_version: _Optional[str] = ..., degraded: _Optional[bool] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[_task_pb2.SpeculationTask]
    def __init__(self, tasks: _Optional[_Iterable[_Union[_task_pb2.SpeculationTask, _Mapping]]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("accepted_count",)
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    accepted_count: int
    def __init__(self, accepted_count: _Optional[int] = ...) -> None: ...
