from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeadingDimension(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEADING_DIMENSION_UNSPECIFIED: _ClassVar[LeadingDimension]
    LEADING_DIMENSION_REQUEST: _ClassVar[LeadingDimension]
    LEADING_DIMENSION_EVENT: _ClassVar[LeadingDimension]
    LEADING_DIMENSION_CANDIDATE: _ClassVar[LeadingDimension]
    LEADING_DIMENSION_MEMORY: _ClassVar[LeadingDimension]
LEADING_DIMENSION_UNSPECIFIED: LeadingDimension
LEADING_DIMENSION_REQUEST: LeadingDimension
LEADING_DIMENSION_EVENT: LeadingDimension
LEADING_DIMENSION_CANDIDATE: LeadingDimension
LEADING_DIMENSION_MEMORY: LeadingDimension

class TensorContract(_message.Message):
    __slots__ = ("name", "datatype", "leading", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    datatype: str
    leading: LeadingDimension
    rank: int
    def __init__(self, name: _Optional[str] = ..., datatype: _Optional[str] = ..., leading: _Optional[_Union[LeadingDimension, str]] = ..., rank: _Optional[int] = ...) -> None: ...

class ScoringContract(_message.Message):
    __slots__ = ("inputs", "outputs", "spec_hash", "loopfm_space_id", "solaris_space_id")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    LOOPFM_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[TensorContract]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorContract]
    spec_hash: bytes
    loopfm_space_id: bytes
    solaris_space_id: bytes
    def __init__(self, inputs: _Optional[_Iterable[_Union[TensorContract, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorContract, _Mapping]]] = ..., spec_hash: _Optional[bytes] = ..., loopfm_space_id: _Optional[bytes] = ..., solaris_space_id: _Optional[bytes] = ...) -> None: ...
