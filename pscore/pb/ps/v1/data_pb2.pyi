from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_GRADIENT: _ClassVar[Role]
    ROLE_WEIGHTS: _ClassVar[Role]
    ROLE_DELTA: _ClassVar[Role]
    ROLE_STATE: _ClassVar[Role]
    ROLE_MODEL: _ClassVar[Role]
    ROLE_LAST_MODEL: _ClassVar[Role]
    ROLE_REFILL: _ClassVar[Role]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_ACCEPTED: _ClassVar[Verdict]
    VERDICT_DUPLICATE: _ClassVar[Verdict]
    VERDICT_TOO_LATE: _ClassVar[Verdict]
ROLE_GRADIENT: Role
ROLE_WEIGHTS: Role
ROLE_DELTA: Role
ROLE_STATE: Role
ROLE_MODEL: Role
ROLE_LAST_MODEL: Role
ROLE_REFILL: Role
VERDICT_ACCEPTED: Verdict
VERDICT_DUPLICATE: Verdict
VERDICT_TOO_LATE: Verdict

class Sender(_message.Message):
    __slots__ = ("job", "table", "worker", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: int
    worker: int
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., table: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("sender", "slice", "step", "base_version", "role", "compressor", "samples", "present", "hyper", "counts", "shared", "may_wait", "minibatch", "pull")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    MAY_WAIT_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    sender: Sender
    slice: int
    step: int
    base_version: int
    role: Role
    compressor: str
    samples: float
    present: bytes
    hyper: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    shared: bool
    may_wait: bool
    minibatch: int
    pull: PullHeader
    def __init__(self, sender: _Optional[_Union[Sender, _Mapping]] = ..., slice: _Optional[int] = ..., step: _Optional[int] = ..., base_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., compressor: _Optional[str] = ..., samples: _Optional[float] = ..., present: _Optional[bytes] = ..., hyper: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., shared: bool = ..., may_wait: bool = ..., minibatch: _Optional[int] = ..., pull: _Optional[_Union[PullHeader, _Mapping]] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("verdict", "version", "send_residual")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEND_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    version: int
    send_residual: bool
    def __init__(self, verdict: _Optional[_Union[Verdict, str]] = ..., version: _Optional[int] = ..., send_residual: bool = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("sender", "slice", "clock", "min_version", "with_state", "wait_ms", "shared", "estimate", "held", "begins", "look")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    sender: Sender
    slice: int
    clock: int
    min_version: int
    with_state: bool
    wait_ms: int
    shared: bool
    estimate: bool
    held: int
    begins: bool
    look: bool
    def __init__(self, sender: _Optional[_Union[Sender, _Mapping]] = ..., slice: _Optional[int] = ..., clock: _Optional[int] = ..., min_version: _Optional[int] = ..., with_state: bool = ..., wait_ms: _Optional[int] = ..., shared: bool = ..., estimate: bool = ..., held: _Optional[int] = ..., begins: bool = ..., look: bool = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("ready", "version", "counts", "waiting_for", "clock", "buffer", "fingerprint", "deltas", "whole", "counted", "pushed")
    READY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    version: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    waiting_for: str
    clock: int
    buffer: int
    fingerprint: int
    deltas: _containers.RepeatedScalarFieldContainer[int]
    whole: bool
    counted: int
    pushed: PushReply
    def __init__(self, ready: bool = ..., version: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., waiting_for: _Optional[str] = ..., clock: _Optional[int] = ..., buffer: _Optional[int] = ..., fingerprint: _Optional[int] = ..., deltas: _Optional[_Iterable[int]] = ..., whole: bool = ..., counted: _Optional[int] = ..., pushed: _Optional[_Union[PushReply, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("sender", "nbytes", "token", "memory", "slot_nbytes")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SLOT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    sender: Sender
    nbytes: int
    token: str
    memory: int
    slot_nbytes: int
    def __init__(self, sender: _Optional[_Union[Sender, _Mapping]] = ..., nbytes: _Optional[int] = ..., token: _Optional[str] = ..., memory: _Optional[int] = ..., slot_nbytes: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("memory", "number", "nbytes")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    memory: int
    number: int
    nbytes: int
    def __init__(self, memory: _Optional[int] = ..., number: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Give(_message.Message):
    __slots__ = ("sender", "epoch", "kind", "round", "part", "slot")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    sender: Sender
    epoch: int
    kind: int
    round: int
    part: int
    slot: Slot
    def __init__(self, sender: _Optional[_Union[Sender, _Mapping]] = ..., epoch: _Optional[int] = ..., kind: _Optional[int] = ..., round: _Optional[int] = ..., part: _Optional[int] = ..., slot: _Optional[_Union[Slot, _Mapping]] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offer(_message.Message):
    __slots__ = ("sender", "number", "slice", "slot")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    sender: Sender
    number: int
    slice: int
    slot: Slot
    def __init__(self, sender: _Optional[_Union[Sender, _Mapping]] = ..., number: _Optional[int] = ..., slice: _Optional[int] = ..., slot: _Optional[_Union[Slot, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("busy", "nbytes")
    BUSY_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    busy: bool
    nbytes: int
    def __init__(self, busy: bool = ..., nbytes: _Optional[int] = ...) -> None: ...

class HeldSlice(_message.Message):
    __slots__ = ("slice", "number", "fingerprint")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    slice: int
    number: int
    fingerprint: int
    def __init__(self, slice: _Optional[int] = ..., number: _Optional[int] = ..., fingerprint: _Optional[int] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("job", "table", "lineage", "target", "slices", "reader")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    lineage: int
    target: int
    slices: _containers.RepeatedCompositeFieldContainer[HeldSlice]
    reader: int
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., lineage: _Optional[int] = ..., target: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[HeldSlice, _Mapping]]] = ..., reader: _Optional[int] = ...) -> None: ...

class DeltaHead(_message.Message):
    __slots__ = ("form", "nbytes")
    FORM_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    form: int
    nbytes: int
    def __init__(self, form: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class FetchedSlice(_message.Message):
    __slots__ = ("slice", "number", "fingerprint", "step", "base", "deltas")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    slice: int
    number: int
    fingerprint: int
    step: int
    base: int
    deltas: _containers.RepeatedCompositeFieldContainer[DeltaHead]
    def __init__(self, slice: _Optional[int] = ..., number: _Optional[int] = ..., fingerprint: _Optional[int] = ..., step: _Optional[int] = ..., base: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[DeltaHead, _Mapping]]] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("lineage", "slices")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    slices: _containers.RepeatedCompositeFieldContainer[FetchedSlice]
    def __init__(self, lineage: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[FetchedSlice, _Mapping]]] = ...) -> None: ...

class NextAddress(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("id", "push", "pull", "pushed", "pulled", "failed", "attach", "attached", "hello", "give", "taken", "offer", "answer", "fetch", "fetched", "next")
    ID_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    push: PushHeader
    pull: PullHeader
    pushed: PushReply
    pulled: PullReply
    failed: Failure
    attach: Attach
    attached: Attached
    hello: Hello
    give: Give
    taken: Taken
    offer: Offer
    answer: Answer
    fetch: FetchHeader
    fetched: FetchReply
    next: NextAddress
    def __init__(self, id: _Optional[int] = ..., push: _Optional[_Union[PushHeader, _Mapping]] = ..., pull: _Optional[_Union[PullHeader, _Mapping]] = ..., pushed: _Optional[_Union[PushReply, _Mapping]] = ..., pulled: _Optional[_Union[PullReply, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., give: _Optional[_Union[Give, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., fetch: _Optional[_Union[FetchHeader, _Mapping]] = ..., fetched: _Optional[_Union[FetchReply, _Mapping]] = ..., next: _Optional[_Union[NextAddress, _Mapping]] = ...) -> None: ...
