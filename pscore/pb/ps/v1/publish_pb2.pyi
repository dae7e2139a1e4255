from pscore.pb.ps.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reader(_message.Message):
    __slots__ = ("id", "host", "pid", "lineage", "number", "resyncs", "leaves", "relays")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    id: int
    host: str
    pid: int
    lineage: int
    number: int
    resyncs: int
    leaves: bool
    relays: bool
    def __init__(self, id: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., lineage: _Optional[int] = ..., number: _Optional[int] = ..., resyncs: _Optional[int] = ..., leaves: bool = ..., relays: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job", "table", "lineage", "after", "wait_ms", "fingerprint", "reader")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    lineage: int
    after: int
    wait_ms: int
    fingerprint: str
    reader: Reader
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., lineage: _Optional[int] = ..., after: _Optional[int] = ..., wait_ms: _Optional[int] = ..., fingerprint: _Optional[str] = ..., reader: _Optional[_Union[Reader, _Mapping]] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("lineage", "newest", "every", "exact", "table", "waiting_for", "instance", "former_instance", "next_address")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FORMER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    newest: int
    every: int
    exact: bool
    table: _control_pb2.Table
    waiting_for: str
    instance: int
    former_instance: int
    next_address: str
    def __init__(self, lineage: _Optional[int] = ..., newest: _Optional[int] = ..., every: _Optional[int] = ..., exact: bool = ..., table: _Optional[_Union[_control_pb2.Table, _Mapping]] = ..., waiting_for: _Optional[str] = ..., instance: _Optional[int] = ..., former_instance: _Optional[int] = ..., next_address: _Optional[str] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "every")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: int
    every: int
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[int] = ..., every: _Optional[int] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReaderStatus(_message.Message):
    __slots__ = ("reader", "silent_s", "lag", "lag_steps", "lag_s")
    READER_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    LAG_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    reader: Reader
    silent_s: float
    lag: int
    lag_steps: int
    lag_s: float
    def __init__(self, reader: _Optional[_Union[Reader, _Mapping]] = ..., silent_s: _Optional[float] = ..., lag: _Optional[int] = ..., lag_steps: _Optional[int] = ..., lag_s: _Optional[float] = ...) -> None: ...

class PublicationStatus(_message.Message):
    __slots__ = ("job", "table", "lineage", "newest", "step", "every", "exact", "nbytes", "memory_nbytes", "readers")
    class NbytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    lineage: int
    newest: int
    step: int
    every: int
    exact: bool
    nbytes: _containers.ScalarMap[str, int]
    memory_nbytes: int
    readers: _containers.RepeatedCompositeFieldContainer[ReaderStatus]
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., lineage: _Optional[int] = ..., newest: _Optional[int] = ..., step: _Optional[int] = ..., every: _Optional[int] = ..., exact: bool = ..., nbytes: _Optional[_Mapping[str, int]] = ..., memory_nbytes: _Optional[int] = ..., readers: _Optional[_Iterable[_Union[ReaderStatus, _Mapping]]] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("publications",)
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    publications: _containers.RepeatedCompositeFieldContainer[PublicationStatus]
    def __init__(self, publications: _Optional[_Iterable[_Union[PublicationStatus, _Mapping]]] = ...) -> None: ...
