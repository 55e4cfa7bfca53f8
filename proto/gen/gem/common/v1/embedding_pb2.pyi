from gem.common.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Embedding(_message.Message):
    __slots__ = ("space_id", "vector")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    vector: _tensor_pb2.Tensor
    def __init__(self, space_id: _Optional[bytes] = ..., vector: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
