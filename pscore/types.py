"""Nouns of both sides, which never change; without network."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
HyperArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

SAMPLES_MAX = 1e12  # Largest weight of a push in the mean of its step.
REPORTED_MAX = 16  # Values that a worker may report of its training.
REPORTED_ADDED = 4  # Values that it adds: the rate of tokens, and bytes per token.
REPORTED_LENGTH_MAX = 40  # Characters of their names.
ANY_STEP = -2  # For a checkpoint: the residual after any push.


class Role(enum.IntEnum):
    """The kind of a payload; part of every message."""

    GRADIENT = 0
    WEIGHTS = 1  # Initial weights, uploaded by one worker.
    DELTA = 2  # Weights at the last pull minus weights now: a pseudo-gradient.
    STATE = 3  # Weights and optimizer state, restored from a checkpoint.
    MODEL = 4  # A worker's own weights, of which the shards keep the mean.
    LAST_MODEL = 5  # The same, of a worker that makes no further step.
    REFILL = 6  # Weights and optimizer state of a version that a worker has, for a lost shard.


class Verdict(enum.IntEnum):
    """A shard's answer to a push."""

    ACCEPTED = 0
    DUPLICATE = 1  # Counted before; nothing changed.
    TOO_LATE = 2  # The step closed without it (backup workers); the payload is the worker's again.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter of the model, as every worker must declare it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16", "float16".
    group: int = 0  # Index of its parameter group in the optimizer.
    compress: bool = False  # Whether the job's compressor may be used for it.

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSegment:
    """The part of one tensor in one slice; all offsets in elements."""

    tensor: int  # Index into the table's tensors.
    group: int  # Parameter group: the row of the hyper-parameters that applies.
    start: int  # Within the slice.
    stop: int
    tensor_start: int  # Within the flattened tensor.


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec:
    """A contiguous part of the flat parameter vector, owned by one shard."""

    index: int
    shard: int
    start: int  # Within the flat vector, in elements.
    stop: int
    segments: tuple[TensorSegment, ...]
    compress: bool = False  # Like every tensor in it.

    @property
    def numel(self) -> int:
        """Elements of the slice, padding between tensors included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTable:
    """The segments of a slice as arrays, for the kernels."""

    bounds: IntArray  # (num_segments, 2): start and stop within the slice, in elements.
    groups: IntArray  # (num_segments,): row of the hyper-parameters.

    @classmethod
    def of(cls, spec: SliceSpec) -> SegmentTable:
        """Returns the arrays for `spec`."""
        bounds = np.array([(s.start, s.stop) for s in spec.segments], dtype=np.int64)
        groups = np.array([s.group for s in spec.segments], dtype=np.int64)
        return cls(bounds=bounds.reshape(-1, 2), groups=groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class Origin:
    """The start of the count of training steps, set by a change of mode or by loading a state.

    A worker that has pushed n times since is at step `rule.step_after(step, n)`.
    """

    clock: int = 0  # Pushes of each worker, as the shards count them.
    step: int = 0  # Steps of training that lay behind each worker then.


class Push(NamedTuple):
    """One push without its payload, as a shard decides about it."""

    worker: int  # Rank.
    step: int  # 0-based minibatch counter of that worker.
    base_version: int  # Version of the weights that the gradient was computed from.
    role: Role = Role.GRADIENT
    samples: float = 1.0  # Weight of this gradient in the mean of its step.
    present: int = -1  # Bit i: segment i has a gradient; -1 is all of them.
    hyper: HyperArray | None = None  # (num_groups, num_hyper) float64: lr and the rest.
    may_wait: bool = False  # The worker needs its memory only after the step's weights arrive.
    minibatch: int = -1  # Each slice counts it once, from any worker; -1: it has no number.


class Pull(NamedTuple):
    """One pull, as a shard decides about it."""

    worker: int
    clock: int  # One more than the step of this worker's last push before it asked; 0: none.
    min_version: int  # Never answered with an older version.
    with_state: bool = False  # The optimizer's state travels with the weights.
    begins: bool = False  # The worker has just (re)joined, and pushes no step before `clock`.
    is_look: bool = False  # Read-only: it changes nothing, and no worker trains on the answer.
