from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Message(_message.Message):
    __slots__ = ("opening", "header", "body", "refusal")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    header: bytes
    body: bytes
    refusal: Refusal
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., header: _Optional[bytes] = ..., body: _Optional[bytes] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("method", "header_size", "body_size")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HEADER_SIZE_FIELD_NUMBER: _ClassVar[int]
    BODY_SIZE_FIELD_NUMBER: _ClassVar[int]
    method: str
    header_size: int
    body_size: int
    def __init__(self, method: _Optional[str] = ..., header_size: _Optional[int] = ..., body_size: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("kind", "code", "message")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Refusal.Kind]
        REFUSED: _ClassVar[Refusal.Kind]
        MALFORMED: _ClassVar[Refusal.Kind]
        FAILED: _ClassVar[Refusal.Kind]
    KIND_UNSPECIFIED: Refusal.Kind
    REFUSED: Refusal.Kind
    MALFORMED: Refusal.Kind
    FAILED: Refusal.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: Refusal.Kind
    code: int
    message: str
    def __init__(self, kind: _Optional[_Union[Refusal.Kind, str]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
