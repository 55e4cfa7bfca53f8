from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ModelManifest(_message.Message):
    __slots__ = ("name", "version", "kind", "digests", "spec_hash", "loopfm_space_id", "solaris_space_id", "train_watermark_ms", "config_json", "architecture_hash", "metrics", "objectives", "surface", "created_ms")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAIN_WATERMARK_MS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_HASH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    kind: str
    digests: _containers.ScalarMap[str, str]
    spec_hash: bytes
    loopfm_space_id: bytes
    solaris_space_id: bytes
    train_watermark_ms: int
    config_json: str
    architecture_hash: str
    metrics: _containers.ScalarMap[str, float]
    objectives: _containers.RepeatedScalarFieldContainer[str]
    surface: str
    created_ms: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., kind: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ..., spec_hash: _Optional[bytes] = ..., loopfm_space_id: _Optional[bytes] = ..., solaris_space_id: _Optional[bytes] = ..., train_watermark_ms: _Optional[int] = ..., config_json: _Optional[str] = ..., architecture_hash: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., objectives: _Optional[_Iterable[str]] = ..., surface: _Optional[str] = ..., created_ms: _Optional[int] = ...) -> None: ...
