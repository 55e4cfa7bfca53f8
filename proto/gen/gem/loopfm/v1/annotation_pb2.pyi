from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AnnotationRecord(_message.Message):
    __slots__ = ("example_id", "request_id", "user_key", "ad_key", "ad_group_key", "surface", "event_ms", "model_version", "train_watermark_ms", "self_label_seen", "space_id", "logits", "z_q", "forward_id", "row_in_forward", "produced_ms", "available_ms")
    EXAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    USER_KEY_FIELD_NUMBER: _ClassVar[int]
    AD_KEY_FIELD_NUMBER: _ClassVar[int]
    AD_GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    EVENT_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_WATERMARK_MS_FIELD_NUMBER: _ClassVar[int]
    SELF_LABEL_SEEN_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    Z_Q_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_IN_FORWARD_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_MS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MS_FIELD_NUMBER: _ClassVar[int]
    example_id: bytes
    request_id: str
    user_key: int
    ad_key: int
    ad_group_key: int
    surface: str
    event_ms: int
    model_version: str
    train_watermark_ms: int
    self_label_seen: bool
    space_id: bytes
    logits: _containers.RepeatedScalarFieldContainer[float]
    z_q: bytes
    forward_id: bytes
    row_in_forward: int
    produced_ms: int
    available_ms: int
    def __init__(self, example_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., user_key: _Optional[int] = ..., ad_key: _Optional[int] = ..., ad_group_key: _Optional[int] = ..., surface: _Optional[str] = ..., event_ms: _Optional[int] = ..., model_version: _Optional[str] = ..., train_watermark_ms: _Optional[int] = ..., self_label_seen: _Optional[bool] = ..., space_id: _Optional[bytes] = ..., logits: _Optional[_Iterable[float]] = ..., z_q: _Optional[bytes] = ..., forward_id: _Optional[bytes] = ..., row_in_forward: _Optional[int] = ..., produced_ms: _Optional[int] = ..., available_ms: _Optional[int] = ...) -> None: ...
