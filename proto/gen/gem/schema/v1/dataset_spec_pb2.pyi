from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IdType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ID_TYPE_UNSPECIFIED: _ClassVar[IdType]
    ID_TYPE_INT64: _ClassVar[IdType]
    ID_TYPE_STRING: _ClassVar[IdType]

class Owner(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_UNSPECIFIED: _ClassVar[Owner]
    OWNER_USER: _ClassVar[Owner]
    OWNER_AD: _ClassVar[Owner]
    OWNER_REQUEST: _ClassVar[Owner]

class Statistic(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATISTIC_UNSPECIFIED: _ClassVar[Statistic]
    STATISTIC_COUNT: _ClassVar[Statistic]
    STATISTIC_RATE: _ClassVar[Statistic]
    STATISTIC_RECENCY: _ClassVar[Statistic]
ID_TYPE_UNSPECIFIED: IdType
ID_TYPE_INT64: IdType
ID_TYPE_STRING: IdType
OWNER_UNSPECIFIED: Owner
OWNER_USER: Owner
OWNER_AD: Owner
OWNER_REQUEST: Owner
STATISTIC_UNSPECIFIED: Statistic
STATISTIC_COUNT: Statistic
STATISTIC_RATE: Statistic
STATISTIC_RECENCY: Statistic

class DatasetSpec(_message.Message):
    __slots__ = ("name", "surfaces", "objectives", "entities", "features", "event_sources", "aggregates", "tables")
    class EntitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Entity
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Entity, _Mapping]] = ...) -> None: ...
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TableMap
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TableMap, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SURFACES_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    EVENT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    AGGREGATES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    surfaces: _containers.RepeatedCompositeFieldContainer[Surface]
    objectives: _containers.RepeatedCompositeFieldContainer[Objective]
    entities: _containers.MessageMap[str, Entity]
    features: _containers.RepeatedCompositeFieldContainer[Feature]
    event_sources: _containers.RepeatedCompositeFieldContainer[EventSource]
    aggregates: _containers.RepeatedCompositeFieldContainer[Aggregate]
    tables: _containers.MessageMap[str, TableMap]
    def __init__(self, name: _Optional[str] = ..., surfaces: _Optional[_Iterable[_Union[Surface, _Mapping]]] = ..., objectives: _Optional[_Iterable[_Union[Objective, _Mapping]]] = ..., entities: _Optional[_Mapping[str, Entity]] = ..., features: _Optional[_Iterable[_Union[Feature, _Mapping]]] = ..., event_sources: _Optional[_Iterable[_Union[EventSource, _Mapping]]] = ..., aggregates: _Optional[_Iterable[_Union[Aggregate, _Mapping]]] = ..., tables: _Optional[_Mapping[str, TableMap]] = ...) -> None: ...

class Surface(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("name", "attribution_window_seconds", "parent", "train_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTION_WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    attribution_window_seconds: int
    parent: str
    train_only: bool
    def __init__(self, name: _Optional[str] = ..., attribution_window_seconds: _Optional[int] = ..., parent: _Optional[str] = ..., train_only: _Optional[bool] = ...) -> None: ...

class Entity(_message.Message):
    __slots__ = ("id_type",)
    ID_TYPE_FIELD_NUMBER: _ClassVar[int]
    id_type: IdType
    def __init__(self, id_type: _Optional[_Union[IdType, str]] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("name", "owner", "id", "dense", "embedding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: Owner
    id: IdFeature
    dense: DenseFeature
    embedding: EmbeddingFeature
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[_Union[Owner, str]] = ..., id: _Optional[_Union[IdFeature, _Mapping]] = ..., dense: _Optional[_Union[DenseFeature, _Mapping]] = ..., embedding: _Optional[_Union[EmbeddingFeature, _Mapping]] = ...) -> None: ...

class IdFeature(_message.Message):
    __slots__ = ("rows", "vocabulary_min_count", "table", "id_type")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ID_TYPE_FIELD_NUMBER: _ClassVar[int]
    rows: int
    vocabulary_min_count: int
    table: str
    id_type: IdType
    def __init__(self, rows: _Optional[int] = ..., vocabulary_min_count: _Optional[int] = ..., table: _Optional[str] = ..., id_type: _Optional[_Union[IdType, str]] = ...) -> None: ...

class DenseFeature(_message.Message):
    __slots__ = ("age",)
    AGE_FIELD_NUMBER: _ClassVar[int]
    age: bool
    def __init__(self, age: _Optional[bool] = ...) -> None: ...

class EmbeddingFeature(_message.Message):
    __slots__ = ("dim",)
    DIM_FIELD_NUMBER: _ClassVar[int]
    dim: int
    def __init__(self, dim: _Optional[int] = ...) -> None: ...

class EventSource(_message.Message):
    __slots__ = ("name", "features", "max_length", "merge_group", "priority")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MERGE_GROUP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    features: _containers.RepeatedScalarFieldContainer[str]
    max_length: int
    merge_group: str
    priority: int
    def __init__(self, name: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., max_length: _Optional[int] = ..., merge_group: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Aggregate(_message.Message):
    __slots__ = ("name", "by", "source", "objective", "statistic", "half_life_seconds", "prior_strength")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    STATISTIC_FIELD_NUMBER: _ClassVar[int]
    HALF_LIFE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    by: _containers.RepeatedScalarFieldContainer[str]
    source: str
    objective: str
    statistic: Statistic
    half_life_seconds: int
    prior_strength: float
    def __init__(self, name: _Optional[str] = ..., by: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., objective: _Optional[str] = ..., statistic: _Optional[_Union[Statistic, str]] = ..., half_life_seconds: _Optional[int] = ..., prior_strength: _Optional[float] = ...) -> None: ...

class TableMap(_message.Message):
    __slots__ = ("path", "columns", "constants", "time_unit")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ConstantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PATH_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIT_FIELD_NUMBER: _ClassVar[int]
    path: str
    columns: _containers.ScalarMap[str, str]
    constants: _containers.ScalarMap[str, str]
    time_unit: str
    def __init__(self, path: _Optional[str] = ..., columns: _Optional[_Mapping[str, str]] = ..., constants: _Optional[_Mapping[str, str]] = ..., time_unit: _Optional[str] = ...) -> None: ...
