from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CountedSteps(_message.Message):
    __slots__ = ("clock", "ahead", "late", "skipped")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    clock: int
    ahead: _containers.RepeatedScalarFieldContainer[int]
    late: _containers.RepeatedScalarFieldContainer[int]
    skipped: int
    def __init__(self, clock: _Optional[int] = ..., ahead: _Optional[_Iterable[int]] = ..., late: _Optional[_Iterable[int]] = ..., skipped: _Optional[int] = ...) -> None: ...

class PendingPush(_message.Message):
    __slots__ = ("worker", "step", "base_version", "samples", "present", "hyper", "weight", "place", "nbytes", "is_compressed", "role")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    IS_COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    step: int
    base_version: int
    samples: float
    present: bytes
    hyper: _containers.RepeatedScalarFieldContainer[float]
    weight: float
    place: int
    nbytes: int
    is_compressed: bool
    role: int
    def __init__(self, worker: _Optional[int] = ..., step: _Optional[int] = ..., base_version: _Optional[int] = ..., samples: _Optional[float] = ..., present: _Optional[bytes] = ..., hyper: _Optional[_Iterable[float]] = ..., weight: _Optional[float] = ..., place: _Optional[int] = ..., nbytes: _Optional[int] = ..., is_compressed: bool = ..., role: _Optional[int] = ...) -> None: ...

class PendingStep(_message.Message):
    __slots__ = ("key", "place", "added")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    key: int
    place: int
    added: _containers.RepeatedCompositeFieldContainer[PendingPush]
    def __init__(self, key: _Optional[int] = ..., place: _Optional[int] = ..., added: _Optional[_Iterable[_Union[PendingPush, _Mapping]]] = ...) -> None: ...

class SliceRecord(_message.Message):
    __slots__ = ("version", "weights", "state", "counts", "counted", "open_steps", "held", "memory", "places", "num_groups", "epoch", "digest", "minibatches", "totals")
    class CountedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: CountedSteps
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[CountedSteps, _Mapping]] = ...) -> None: ...
    class MemoryEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    version: int
    weights: int
    state: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    counted: _containers.MessageMap[int, CountedSteps]
    open_steps: _containers.RepeatedCompositeFieldContainer[PendingStep]
    held: _containers.RepeatedCompositeFieldContainer[PendingPush]
    memory: _containers.ScalarMap[str, int]
    places: _containers.RepeatedScalarFieldContainer[int]
    num_groups: int
    epoch: int
    digest: int
    minibatches: CountedSteps
    totals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., weights: _Optional[int] = ..., state: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., counted: _Optional[_Mapping[int, CountedSteps]] = ..., open_steps: _Optional[_Iterable[_Union[PendingStep, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[PendingPush, _Mapping]]] = ..., memory: _Optional[_Mapping[str, int]] = ..., places: _Optional[_Iterable[int]] = ..., num_groups: _Optional[int] = ..., epoch: _Optional[int] = ..., digest: _Optional[int] = ..., minibatches: _Optional[_Union[CountedSteps, _Mapping]] = ..., totals: _Optional[_Iterable[int]] = ...) -> None: ...
