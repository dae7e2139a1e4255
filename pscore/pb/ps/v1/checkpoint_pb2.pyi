from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CaptureState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPTURE_WAITING: _ClassVar[CaptureState]
    CAPTURE_DONE: _ClassVar[CaptureState]
    CAPTURE_PASSED: _ClassVar[CaptureState]
    CAPTURE_RESIDUALS: _ClassVar[CaptureState]
CAPTURE_WAITING: CaptureState
CAPTURE_DONE: CaptureState
CAPTURE_PASSED: CaptureState
CAPTURE_RESIDUALS: CaptureState

class CaptureRequest(_message.Message):
    __slots__ = ("job", "table", "id", "version", "wait_ms", "weights_only", "base")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    id: str
    version: int
    wait_ms: int
    weights_only: bool
    base: str
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., id: _Optional[str] = ..., version: _Optional[int] = ..., wait_ms: _Optional[int] = ..., weights_only: bool = ..., base: _Optional[str] = ...) -> None: ...

class CaptureReply(_message.Message):
    __slots__ = ("state", "version_min", "version_max", "about", "by_step", "missing", "waiting_for")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    BY_STEP_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    state: CaptureState
    version_min: int
    version_max: int
    about: str
    by_step: bool
    missing: _containers.RepeatedScalarFieldContainer[int]
    waiting_for: str
    def __init__(self, state: _Optional[_Union[CaptureState, str]] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., about: _Optional[str] = ..., by_step: bool = ..., missing: _Optional[_Iterable[int]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("id", "slice", "array", "offset", "nbytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    slice: int
    array: str
    offset: int
    nbytes: int
    def __init__(self, id: _Optional[str] = ..., slice: _Optional[int] = ..., array: _Optional[str] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("job", "id", "num_workers", "tables", "min_workers", "replaces")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    job: str
    id: str
    num_workers: int
    tables: _containers.RepeatedScalarFieldContainer[str]
    min_workers: int
    replaces: bool
    def __init__(self, job: _Optional[str] = ..., id: _Optional[str] = ..., num_workers: _Optional[int] = ..., tables: _Optional[_Iterable[str]] = ..., min_workers: _Optional[int] = ..., replaces: bool = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("id", "table", "slice", "array", "offset", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: str
    table: int
    slice: int
    array: str
    offset: int
    data: bytes
    def __init__(self, id: _Optional[str] = ..., table: _Optional[int] = ..., slice: _Optional[int] = ..., array: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NoteCopiesRequest(_message.Message):
    __slots__ = ("place", "problem", "count")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    place: str
    problem: str
    count: int
    def __init__(self, place: _Optional[str] = ..., problem: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class NoteCopiesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NoteLastRequest(_message.Message):
    __slots__ = ("is_over",)
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    is_over: bool
    def __init__(self, is_over: bool = ...) -> None: ...

class NoteLastReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
