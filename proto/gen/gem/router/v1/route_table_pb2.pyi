from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteTable(_message.Message):
    __slots__ = ("version", "surfaces")
    class SurfacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SurfaceRoutes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SurfaceRoutes, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SURFACES_FIELD_NUMBER: _ClassVar[int]
    version: int
    surfaces: _containers.MessageMap[str, SurfaceRoutes]
    def __init__(self, version: _Optional[int] = ..., surfaces: _Optional[_Mapping[str, SurfaceRoutes]] = ...) -> None: ...

class SurfaceRoutes(_message.Message):
    __slots__ = ("salt", "arms", "value_weights", "speculation_top")
    class ValueWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SALT_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    VALUE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_TOP_FIELD_NUMBER: _ClassVar[int]
    salt: str
    arms: _containers.RepeatedCompositeFieldContainer[Arm]
    value_weights: _containers.ScalarMap[str, float]
    speculation_top: int
    def __init__(self, salt: _Optional[str] = ..., arms: _Optional[_Iterable[_Union[Arm, _Mapping]]] = ..., value_weights: _Optional[_Mapping[str, float]] = ..., speculation_top: _Optional[int] = ...) -> None: ...

class Arm(_message.Message):
    __slots__ = ("name", "model", "weight", "loopfm", "solaris", "shadow", "loopfm_space_id", "solaris_space_id", "solaris_dim", "loopfm_dim")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_DIM_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_DIM_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    weight: int
    loopfm: bool
    solaris: bool
    shadow: bool
    loopfm_space_id: str
    solaris_space_id: str
    solaris_dim: int
    loopfm_dim: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., weight: _Optional[int] = ..., loopfm: _Optional[bool] = ..., solaris: _Optional[bool] = ..., shadow: _Optional[bool] = ..., loopfm_space_id: _Optional[str] = ..., solaris_space_id: _Optional[str] = ..., solaris_dim: _Optional[int] = ..., loopfm_dim: _Optional[int] = ...) -> None: ...
