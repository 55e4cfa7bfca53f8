from gem.common.v1 import tensor_pb2 as _tensor_pb2
from gem.router.v1 import route_table_pb2 as _route_table_pb2
from gem.solaris.v1 import solaris_service_pb2 as _solaris_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DegradedInput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEGRADED_INPUT_UNSPECIFIED: _ClassVar[DegradedInput]
    DEGRADED_INPUT_SEQUENCE: _ClassVar[DegradedInput]
    DEGRADED_INPUT_SOLARIS: _ClassVar[DegradedInput]
    DEGRADED_INPUT_LOOPFM: _ClassVar[DegradedInput]
    DEGRADED_INPUT_VERTICAL: _ClassVar[DegradedInput]
DEGRADED_INPUT_UNSPECIFIED: DegradedInput
DEGRADED_INPUT_SEQUENCE: DegradedInput
DEGRADED_INPUT_SOLARIS: DegradedInput
DEGRADED_INPUT_LOOPFM: DegradedInput
DEGRADED_INPUT_VERTICAL: DegradedInput

class RankRequest(_message.Message):
    __slots__ = ("request_id", "surface", "user_id", "request_ms", "candidates", "context", "top_count")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    surface: str
    user_id: str
    request_ms: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    context: _containers.ScalarMap[str, str]
    top_count: int
    def __init__(self, request_id: _Optional[str] = ..., surface: _Optional[str] = ..., user_id: _Optional[str] = ..., request_ms: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., context: _Optional[_Mapping[str, str]] = ..., top_count: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("ad_id", "bid")
    AD_ID_FIELD_NUMBER: _ClassVar[int]
    BID_FIELD_NUMBER: _ClassVar[int]
    ad_id: str
    bid: float
    def __init__(self, ad_id: _Optional[str] = ..., bid: _Optional[float] = ...) -> None: ...

class RankResponse(_message.Message):
    __slots__ = ("request_id", "ads", "degraded", "arm", "model_version", "route_version", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ads: _containers.RepeatedCompositeFieldContainer[RankedAd]
    degraded: _containers.RepeatedScalarFieldContainer[DegradedInput]
    arm: str
    model_version: str
    route_version: int
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., ads: _Optional[_Iterable[_Union[RankedAd, _Mapping]]] = ..., degraded: _Optional[_Iterable[_Union[DegradedInput, str]]] = ..., arm: _Optional[str] = ..., model_version: _Optional[str] = ..., route_version: _Optional[int] = ..., trace_id: _Optional[str] = ...) -> None: ...

class RankedAd(_message.Message):
    __slots__ = ("ad_id", "value", "probabilities", "level", "fallback", "candidate_index")
    class ProbabilitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    AD_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ad_id: str
    value: float
    probabilities: _containers.ScalarMap[str, float]
    level: _solaris_service_pb2.KnowledgeLevel
    fallback: bool
    candidate_index: int
    def __init__(self, ad_id: _Optional[str] = ..., value: _Optional[float] = ..., probabilities: _Optional[_Mapping[str, float]] = ..., level: _Optional[_Union[_solaris_service_pb2.KnowledgeLevel, str]] = ..., fallback: _Optional[bool] = ..., candidate_index: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("surface", "user_id")
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    surface: str
    user_id: str
    def __init__(self, surface: _Optional[str] = ..., user_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("bucket", "arm", "shadows", "route_version", "value_weights")
    class ValueWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    arm: _route_table_pb2.Arm
    shadows: _containers.RepeatedCompositeFieldContainer[_route_table_pb2.Arm]
    route_version: int
    value_weights: _containers.ScalarMap[str, float]
    def __init__(self, bucket: _Optional[int] = ..., arm: _Optional[_Union[_route_table_pb2.Arm, _Mapping]] = ..., shadows: _Optional[_Iterable[_Union[_route_table_pb2.Arm, _Mapping]]] = ..., route_version: _Optional[int] = ..., value_weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ServedRequest(_message.Message):
    __slots__ = ("request_id", "surface", "user_id", "request_ms", "ad_ids", "tensors", "probabilities", "values", "arm", "model_version", "route_version", "degraded", "spec_hash", "shadow")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class ProbabilitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MS_FIELD_NUMBER: _ClassVar[int]
    AD_IDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    surface: str
    user_id: str
    request_ms: int
    ad_ids: _containers.RepeatedScalarFieldContainer[str]
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    probabilities: _containers.MessageMap[str, _tensor_pb2.Tensor]
    values: _containers.RepeatedScalarFieldContainer[float]
    arm: str
    model_version: str
    route_version: int
    degraded: _containers.RepeatedScalarFieldContainer[DegradedInput]
    spec_hash: bytes
    shadow: bool
    def __init__(self, request_id: _Optional[str] = ..., surface: _Optional[str] = ..., user_id: _Optional[str] = ..., request_ms: _Optional[int] = ..., ad_ids: _Optional[_Iterable[str]] = ..., tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., probabilities: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., values: _Optional[_Iterable[float]] = ..., arm: _Optional[str] = ..., model_version: _Optional[str] = ..., route_version: _Optional[int] = ..., degraded: _Optional[_Iterable[_Union[DegradedInput, str]]] = ..., spec_hash: _Optional[bytes] = ..., shadow: _Optional[bool] = ...) -> None: ...
