from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunSpec(_message.Message):
    __slots__ = ("run_id", "preset", "train_from_ms", "train_to_ms", "seed", "batch_rows", "world_size", "spec_hash", "mix")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_TO_MS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    preset: str
    train_from_ms: int
    train_to_ms: int
    seed: int
    batch_rows: int
    world_size: int
    spec_hash: bytes
    mix: MixPlan
    def __init__(self, run_id: _Optional[str] = ..., preset: _Optional[str] = ..., train_from_ms: _Optional[int] = ..., train_to_ms: _Optional[int] = ..., seed: _Optional[int] = ..., batch_rows: _Optional[int] = ..., world_size: _Optional[int] = ..., spec_hash: _Optional[bytes] = ..., mix: _Optional[_Union[MixPlan, _Mapping]] = ...) -> None: ...

class MixPlan(_message.Message):
    __slots__ = ("sources", "micro_batch_rows")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[MixSource]
    micro_batch_rows: int
    def __init__(self, sources: _Optional[_Iterable[_Union[MixSource, _Mapping]]] = ..., micro_batch_rows: _Optional[int] = ...) -> None: ...

class MixSource(_message.Message):
    __slots__ = ("name", "surface", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    surface: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., surface: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...
