from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("awaited", "wait_ms")
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    awaited: int
    wait_ms: int
    def __init__(self, awaited: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("cluster", "shard", "num_shards", "protocol", "version", "instance", "data_port", "data_local", "now_s", "moved_to", "former_instance", "stands_by")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    DATA_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    FORMER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    shard: int
    num_shards: int
    protocol: int
    version: str
    instance: int
    data_port: int
    data_local: str
    now_s: float
    moved_to: str
    former_instance: int
    stands_by: bool
    def __init__(self, cluster: _Optional[str] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., protocol: _Optional[int] = ..., version: _Optional[str] = ..., instance: _Optional[int] = ..., data_port: _Optional[int] = ..., data_local: _Optional[str] = ..., now_s: _Optional[float] = ..., moved_to: _Optional[str] = ..., former_instance: _Optional[int] = ..., stands_by: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job", "rank", "num_workers", "incarnation", "restart", "host", "pid", "protocol", "returns", "min_workers", "former", "life", "after", "refills", "waited_ms", "run_id", "continues", "anew")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REFILLS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    num_workers: int
    incarnation: int
    restart: int
    host: str
    pid: int
    protocol: int
    returns: bool
    min_workers: int
    former: _containers.RepeatedScalarFieldContainer[int]
    life: int
    after: int
    refills: bool
    waited_ms: int
    run_id: str
    continues: bool
    anew: bool
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., num_workers: _Optional[int] = ..., incarnation: _Optional[int] = ..., restart: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., protocol: _Optional[int] = ..., returns: bool = ..., min_workers: _Optional[int] = ..., former: _Optional[_Iterable[int]] = ..., life: _Optional[int] = ..., after: _Optional[int] = ..., refills: bool = ..., waited_ms: _Optional[int] = ..., run_id: _Optional[str] = ..., continues: bool = ..., anew: bool = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("rank", "num_workers", "lease_s", "instance", "rounds", "news", "progress", "life", "modes", "mends", "anew", "under_way", "former_modes")
    class RoundsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ModesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class FormerModesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    MENDS_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    FORMER_MODES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    num_workers: int
    lease_s: float
    instance: int
    rounds: _containers.ScalarMap[str, int]
    news: str
    progress: _containers.ScalarMap[str, int]
    life: int
    modes: _containers.ScalarMap[str, str]
    mends: bool
    anew: bool
    under_way: bool
    former_modes: _containers.ScalarMap[str, str]
    def __init__(self, rank: _Optional[int] = ..., num_workers: _Optional[int] = ..., lease_s: _Optional[float] = ..., instance: _Optional[int] = ..., rounds: _Optional[_Mapping[str, int]] = ..., news: _Optional[str] = ..., progress: _Optional[_Mapping[str, int]] = ..., life: _Optional[int] = ..., modes: _Optional[_Mapping[str, str]] = ..., mends: bool = ..., anew: bool = ..., under_way: bool = ..., former_modes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "group", "compress")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    group: int
    compress: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., group: _Optional[int] = ..., compress: bool = ...) -> None: ...

class Plugin(_message.Message):
    __slots__ = ("name", "arguments", "release")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    release: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ..., release: _Optional[str] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "tensors", "num_shards", "rule", "compressor", "optimizer", "num_groups", "fingerprint", "pull_compressor", "optimizer_release", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PULL_COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_RELEASE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    num_shards: int
    rule: Plugin
    compressor: Plugin
    optimizer: str
    num_groups: int
    fingerprint: str
    pull_compressor: Plugin
    optimizer_release: str
    content: Plugin
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., num_shards: _Optional[int] = ..., rule: _Optional[_Union[Plugin, _Mapping]] = ..., compressor: _Optional[_Union[Plugin, _Mapping]] = ..., optimizer: _Optional[str] = ..., num_groups: _Optional[int] = ..., fingerprint: _Optional[str] = ..., pull_compressor: _Optional[_Union[Plugin, _Mapping]] = ..., optimizer_release: _Optional[str] = ..., content: _Optional[_Union[Plugin, _Mapping]] = ...) -> None: ...

class DefineRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "adopts", "clock", "step", "held", "number")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ADOPTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: Table
    adopts: bool
    clock: int
    step: int
    held: bool
    number: int
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., adopts: bool = ..., clock: _Optional[int] = ..., step: _Optional[int] = ..., held: bool = ..., number: _Optional[int] = ...) -> None: ...

class DefineReply(_message.Message):
    __slots__ = ("table", "created", "clock", "step", "has_weights", "content")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    table: int
    created: bool
    clock: int
    step: int
    has_weights: bool
    content: Plugin
    def __init__(self, table: _Optional[int] = ..., created: bool = ..., clock: _Optional[int] = ..., step: _Optional[int] = ..., has_weights: bool = ..., content: _Optional[_Union[Plugin, _Mapping]] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "number", "rule", "step", "returns", "minibatch", "next")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: int
    number: int
    rule: Plugin
    step: int
    returns: bool
    minibatch: int
    next: Plugin
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[int] = ..., number: _Optional[int] = ..., rule: _Optional[_Union[Plugin, _Mapping]] = ..., step: _Optional[int] = ..., returns: bool = ..., minibatch: _Optional[int] = ..., next: _Optional[_Union[Plugin, _Mapping]] = ...) -> None: ...

class ChangeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChooseRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "step", "decides", "risk", "pace", "possible", "near", "overlaps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DECIDES_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    POSSIBLE_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    OVERLAPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: int
    step: int
    decides: bool
    risk: str
    pace: Pace
    possible: _containers.RepeatedScalarFieldContainer[str]
    near: _containers.RepeatedScalarFieldContainer[bool]
    overlaps: bool
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[int] = ..., step: _Optional[int] = ..., decides: bool = ..., risk: _Optional[str] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., possible: _Optional[_Iterable[str]] = ..., near: _Optional[_Iterable[bool]] = ..., overlaps: bool = ...) -> None: ...

class ChooseReply(_message.Message):
    __slots__ = ("choice", "text")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    choice: int
    text: str
    def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "step", "waiting_for", "wants_live", "peers", "left_out", "reported", "pace", "data_plane", "stage", "instance", "reached", "process", "num_processes", "rests", "asks", "awaits")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WANTS_LIVE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    step: int
    waiting_for: str
    wants_live: bool
    peers: _containers.RepeatedCompositeFieldContainer[PeerReport]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    reported: _containers.ScalarMap[str, float]
    pace: Pace
    data_plane: str
    stage: StageReport
    instance: int
    reached: _containers.RepeatedScalarFieldContainer[int]
    process: int
    num_processes: int
    rests: bool
    asks: bool
    awaits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., waiting_for: _Optional[str] = ..., wants_live: bool = ..., peers: _Optional[_Iterable[_Union[PeerReport, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., reported: _Optional[_Mapping[str, float]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., data_plane: _Optional[str] = ..., stage: _Optional[_Union[StageReport, _Mapping]] = ..., instance: _Optional[int] = ..., reached: _Optional[_Iterable[int]] = ..., process: _Optional[int] = ..., num_processes: _Optional[int] = ..., rests: bool = ..., asks: bool = ..., awaits: _Optional[_Iterable[int]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("num_steps", "steps_s", "waits_s", "requests_s", "step_s", "round_steps")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    steps_s: float
    waits_s: float
    requests_s: float
    step_s: float
    round_steps: int
    def __init__(self, num_steps: _Optional[int] = ..., steps_s: _Optional[float] = ..., waits_s: _Optional[float] = ..., requests_s: _Optional[float] = ..., step_s: _Optional[float] = ..., round_steps: _Optional[int] = ...) -> None: ...

class PeerReport(_message.Message):
    __slots__ = ("table", "step", "partner", "age_s", "staleness", "distance", "num_exchanges")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    table: int
    step: int
    partner: int
    age_s: float
    staleness: int
    distance: float
    num_exchanges: int
    def __init__(self, table: _Optional[int] = ..., step: _Optional[int] = ..., partner: _Optional[int] = ..., age_s: _Optional[float] = ..., staleness: _Optional[int] = ..., distance: _Optional[float] = ..., num_exchanges: _Optional[int] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("stage", "replica", "minibatch", "version", "in_flight", "activation_nbytes", "versions_held", "waits_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_NBYTES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_HELD_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    stage: int
    replica: int
    minibatch: int
    version: int
    in_flight: int
    activation_nbytes: int
    versions_held: int
    waits_s: float
    def __init__(self, stage: _Optional[int] = ..., replica: _Optional[int] = ..., minibatch: _Optional[int] = ..., version: _Optional[int] = ..., in_flight: _Optional[int] = ..., activation_nbytes: _Optional[int] = ..., versions_held: _Optional[int] = ..., waits_s: _Optional[float] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("table", "steps", "count", "since")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    table: int
    steps: int
    count: int
    since: int
    def __init__(self, table: _Optional[int] = ..., steps: _Optional[int] = ..., count: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("waiting_for", "instance", "residual_requests", "live", "uneven", "epochs", "fastest_step_s", "next_address", "former_instance", "first", "awaited_at", "others_step", "awaited_by", "others_ended")
    class EpochsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FASTEST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FORMER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    AWAITED_AT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_STEP_FIELD_NUMBER: _ClassVar[int]
    AWAITED_BY_FIELD_NUMBER: _ClassVar[int]
    OTHERS_ENDED_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    instance: int
    residual_requests: _containers.RepeatedCompositeFieldContainer[ResidualRequest]
    live: _containers.RepeatedScalarFieldContainer[int]
    uneven: str
    epochs: _containers.ScalarMap[int, int]
    fastest_step_s: float
    next_address: str
    former_instance: int
    first: int
    awaited_at: _containers.RepeatedScalarFieldContainer[str]
    others_step: bool
    awaited_by: _containers.RepeatedScalarFieldContainer[int]
    others_ended: bool
    def __init__(self, waiting_for: _Optional[str] = ..., instance: _Optional[int] = ..., residual_requests: _Optional[_Iterable[_Union[ResidualRequest, _Mapping]]] = ..., live: _Optional[_Iterable[int]] = ..., uneven: _Optional[str] = ..., epochs: _Optional[_Mapping[int, int]] = ..., fastest_step_s: _Optional[float] = ..., next_address: _Optional[str] = ..., former_instance: _Optional[int] = ..., first: _Optional[int] = ..., awaited_at: _Optional[_Iterable[str]] = ..., others_step: bool = ..., awaited_by: _Optional[_Iterable[int]] = ..., others_ended: bool = ...) -> None: ...

class ResidualRequest(_message.Message):
    __slots__ = ("table", "step", "slices")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    table: int
    step: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[int] = ..., step: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class SendResidualRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "slice", "step", "arrays")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: int
    slice: int
    step: int
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[int] = ..., slice: _Optional[int] = ..., step: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class SendResidualReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchResidualRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "table", "slice")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    table: int
    slice: int
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., table: _Optional[int] = ..., slice: _Optional[int] = ...) -> None: ...

class FetchResidualReply(_message.Message):
    __slots__ = ("slices", "arrays")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, slices: _Optional[_Iterable[int]] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "name", "round", "wait_ms", "value", "holds", "withdraws", "excuses", "table")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWS_FIELD_NUMBER: _ClassVar[int]
    EXCUSES_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    name: str
    round: int
    wait_ms: int
    value: float
    holds: bool
    withdraws: bool
    excuses: _containers.RepeatedScalarFieldContainer[int]
    table: str
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., round: _Optional[int] = ..., wait_ms: _Optional[int] = ..., value: _Optional[float] = ..., holds: bool = ..., withdraws: bool = ..., excuses: _Optional[_Iterable[int]] = ..., table: _Optional[str] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ("done", "waiting_for", "value", "newest")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    done: bool
    waiting_for: str
    value: float
    newest: int
    def __init__(self, done: bool = ..., waiting_for: _Optional[str] = ..., value: _Optional[float] = ..., newest: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "incarnation", "host", "port", "local", "certificate", "position", "parts", "stays", "secret")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    host: str
    port: int
    local: str
    certificate: bytes
    position: int
    parts: bool
    stays: bool
    secret: str
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., local: _Optional[str] = ..., certificate: _Optional[bytes] = ..., position: _Optional[int] = ..., parts: bool = ..., stays: bool = ..., secret: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("job", "table", "epoch", "peer", "since", "parts", "again")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: int
    epoch: int
    peer: Peer
    since: int
    parts: bool
    again: bool
    def __init__(self, job: _Optional[str] = ..., table: _Optional[int] = ..., epoch: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., since: _Optional[int] = ..., parts: bool = ..., again: bool = ...) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("epoch", "peers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, epoch: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("epoch", "meetings", "peers", "waiting_for", "short")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEETINGS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    meetings: _containers.RepeatedCompositeFieldContainer[Meeting]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    waiting_for: str
    short: bool
    def __init__(self, epoch: _Optional[int] = ..., meetings: _Optional[_Iterable[_Union[Meeting, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., short: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "reason", "failed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    incarnation: int
    reason: str
    failed: bool
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., failed: bool = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("mender", "next_addresses")
    MENDER_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    mender: str
    next_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mender: _Optional[str] = ..., next_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "host", "pid", "step", "staleness", "state", "last_heard_s", "reported", "peers", "pace", "waited_for_s", "data_plane", "stage", "reached")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_S_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_S_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    step: int
    staleness: int
    state: str
    last_heard_s: float
    reported: _containers.ScalarMap[str, float]
    peers: _containers.RepeatedCompositeFieldContainer[PeerReport]
    pace: Pace
    waited_for_s: float
    data_plane: str
    stage: StageReport
    reached: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., step: _Optional[int] = ..., staleness: _Optional[int] = ..., state: _Optional[str] = ..., last_heard_s: _Optional[float] = ..., reported: _Optional[_Mapping[str, float]] = ..., peers: _Optional[_Iterable[_Union[PeerReport, _Mapping]]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., waited_for_s: _Optional[float] = ..., data_plane: _Optional[str] = ..., stage: _Optional[_Union[StageReport, _Mapping]] = ..., reached: _Optional[_Iterable[int]] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "mode", "compressor", "optimizer", "num_slices", "nbytes", "version_min", "version_max", "waiting_for", "fingerprint", "rounds", "minibatches", "num_exposed", "lead", "held", "on_workers")
    class HeldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPOSED_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ON_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: str
    compressor: str
    optimizer: str
    num_slices: int
    nbytes: int
    version_min: int
    version_max: int
    waiting_for: str
    fingerprint: str
    rounds: _containers.RepeatedScalarFieldContainer[int]
    minibatches: int
    num_exposed: int
    lead: int
    held: _containers.ScalarMap[str, int]
    on_workers: bool
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[str] = ..., compressor: _Optional[str] = ..., optimizer: _Optional[str] = ..., num_slices: _Optional[int] = ..., nbytes: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., waiting_for: _Optional[str] = ..., fingerprint: _Optional[str] = ..., rounds: _Optional[_Iterable[int]] = ..., minibatches: _Optional[int] = ..., num_exposed: _Optional[int] = ..., lead: _Optional[int] = ..., held: _Optional[_Mapping[str, int]] = ..., on_workers: bool = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "num_workers", "workers", "tables", "pushed_nbytes", "pulled_nbytes", "num_pushes", "num_updates", "waiting_for", "min_workers", "state", "step", "memory_nbytes", "silent_s", "raw_pushed_nbytes", "raw_pulled_nbytes", "open_steps", "num_lost", "has_checkpoint", "chosen", "checkpoint_age_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PUSHED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHES_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    RAW_PUSHED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_PULLED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    num_workers: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    pushed_nbytes: int
    pulled_nbytes: int
    num_pushes: int
    num_updates: int
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    min_workers: int
    state: str
    step: int
    memory_nbytes: int
    silent_s: float
    raw_pushed_nbytes: int
    raw_pulled_nbytes: int
    open_steps: int
    num_lost: int
    has_checkpoint: bool
    chosen: str
    checkpoint_age_s: float
    def __init__(self, job: _Optional[str] = ..., num_workers: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., pushed_nbytes: _Optional[int] = ..., pulled_nbytes: _Optional[int] = ..., num_pushes: _Optional[int] = ..., num_updates: _Optional[int] = ..., waiting_for: _Optional[_Iterable[str]] = ..., min_workers: _Optional[int] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., memory_nbytes: _Optional[int] = ..., silent_s: _Optional[float] = ..., raw_pushed_nbytes: _Optional[int] = ..., raw_pulled_nbytes: _Optional[int] = ..., open_steps: _Optional[int] = ..., num_lost: _Optional[int] = ..., has_checkpoint: bool = ..., chosen: _Optional[str] = ..., checkpoint_age_s: _Optional[float] = ...) -> None: ...

class LostJob(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CopiesStatus(_message.Message):
    __slots__ = ("place", "problem", "count")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    place: str
    problem: str
    count: int
    def __init__(self, place: _Optional[str] = ..., problem: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("shard", "jobs", "uptime_s", "memory_nbytes", "pid", "lost", "under_way_nbytes", "num_recoveries", "num_mended", "moving", "next_address", "copies")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_MENDED_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    shard: DescribeReply
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    uptime_s: float
    memory_nbytes: int
    pid: int
    lost: _containers.RepeatedCompositeFieldContainer[LostJob]
    under_way_nbytes: int
    num_recoveries: int
    num_mended: int
    moving: str
    next_address: str
    copies: CopiesStatus
    def __init__(self, shard: _Optional[_Union[DescribeReply, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., memory_nbytes: _Optional[int] = ..., pid: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostJob, _Mapping]]] = ..., under_way_nbytes: _Optional[int] = ..., num_recoveries: _Optional[int] = ..., num_mended: _Optional[int] = ..., moving: _Optional[str] = ..., next_address: _Optional[str] = ..., copies: _Optional[_Union[CopiesStatus, _Mapping]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("job", "force")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    force: bool
    def __init__(self, job: _Optional[str] = ..., force: bool = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ("found", "memory_nbytes", "checkpoints")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    memory_nbytes: int
    checkpoints: str
    def __init__(self, found: bool = ..., memory_nbytes: _Optional[int] = ..., checkpoints: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("limit_s",)
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    limit_s: float
    def __init__(self, limit_s: _Optional[float] = ...) -> None: ...
