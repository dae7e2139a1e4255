from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveRequest(_message.Message):
    __slots__ = ("to", "mbit", "stays", "same_host", "register", "failover_s", "withdraws", "ends")
    TO_FIELD_NUMBER: _ClassVar[int]
    MBIT_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_S_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    to: str
    mbit: int
    stays: bool
    same_host: bool
    register: str
    failover_s: float
    withdraws: bool
    ends: bool
    def __init__(self, to: _Optional[str] = ..., mbit: _Optional[int] = ..., stays: bool = ..., same_host: bool = ..., register: _Optional[str] = ..., failover_s: _Optional[float] = ..., withdraws: bool = ..., ends: bool = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("phase", "to", "sent_nbytes", "problem", "pause_s", "table_nbytes", "taking", "num_live")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    TAKING_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    to: str
    sent_nbytes: int
    problem: str
    pause_s: float
    table_nbytes: int
    taking: str
    num_live: int
    def __init__(self, phase: _Optional[str] = ..., to: _Optional[str] = ..., sent_nbytes: _Optional[int] = ..., problem: _Optional[str] = ..., pause_s: _Optional[float] = ..., table_nbytes: _Optional[int] = ..., taking: _Optional[str] = ..., num_live: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("id", "shard", "num_shards", "cluster", "protocol", "journal_format", "instance", "table_nbytes", "tables", "source", "register", "failover_s", "holder", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_S_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    shard: int
    num_shards: int
    cluster: str
    protocol: int
    journal_format: int
    instance: int
    table_nbytes: int
    tables: _containers.RepeatedScalarFieldContainer[str]
    source: str
    register: str
    failover_s: float
    holder: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., cluster: _Optional[str] = ..., protocol: _Optional[int] = ..., journal_format: _Optional[int] = ..., instance: _Optional[int] = ..., table_nbytes: _Optional[int] = ..., tables: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., register: _Optional[str] = ..., failover_s: _Optional[float] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("boot",)
    BOOT_FIELD_NUMBER: _ClassVar[int]
    boot: str
    def __init__(self, boot: _Optional[str] = ...) -> None: ...

class MovedPiece(_message.Message):
    __slots__ = ("path", "offset", "data", "size", "reserved", "gone")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    data: bytes
    size: int
    reserved: int
    gone: bool
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., size: _Optional[int] = ..., reserved: _Optional[int] = ..., gone: bool = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("id", "pieces", "more")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    id: str
    pieces: _containers.RepeatedCompositeFieldContainer[MovedPiece]
    more: bool
    def __init__(self, id: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[MovedPiece, _Mapping]]] = ..., more: bool = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MovedPart(_message.Message):
    __slots__ = ("path", "offset", "nbytes", "digest")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    nbytes: int
    digest: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class PrepareMoveRequest(_message.Message):
    __slots__ = ("id", "parts")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    parts: _containers.RepeatedCompositeFieldContainer[MovedPart]
    def __init__(self, id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[MovedPart, _Mapping]]] = ...) -> None: ...

class PrepareMoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowedRequest(_message.Message):
    __slots__ = ("id", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class FollowedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseStandbyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseStandbyReply(_message.Message):
    __slots__ = ("serves",)
    SERVES_FIELD_NUMBER: _ClassVar[int]
    serves: bool
    def __init__(self, serves: bool = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromoteReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginMoveRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class BeginMoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
