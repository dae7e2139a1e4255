"""The assignment of parameters to slices and shards: a pure function of the model's declaration.

The parameters are laid out once in a flat vector, last parameter first, because backward finishes
the last ones first: a slice is complete, and leaves, as early as it can. Each tensor starts at a
multiple of 16 elements (64 bytes), so that a view on it is aligned; the gaps are zeros. The vector
is cut into slices of at most 4 MiB, or 16 MiB where a job says so (pscore/contents/flat.py), which
are distributed over the shards by bytes. Tensors that
may be compressed lie before the others, with a cut between them, so that no slice has both. Every
worker and every shard computes the same plan from names, shapes, dtypes, groups, compressibility
and the number of shards, and they compare its fingerprint.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.types import SliceSpec, TensorSegment, TensorSpec

ALIGNMENT = 16  # Elements; 64 bytes of float32.
SLICE_NUMEL_MAX = 1 << 20  # 4 MiB of float32: hides latency, and gRPC is slow beyond 16 MiB.
SLICE_NUMEL_FINE = 1 << 17  # 512 KiB of float32: overlap alone makes no slice shorter.
SLICE_NUMEL_MIN = 1 << 12  # Below 16 KiB a message costs more than its bytes.
SLICES_PER_SHARD = 6  # At least, of a model that is large enough: see `_length`.
LONG_NUMEL_MAX, LONG_PER_SHARD = 1 << 22, 2  # Of long slices; a frame holds one with its state.
TENSORS_MAX = 1 << 17
NUMEL_MAX = 1 << 36  # Most elements of one model: 256 GiB of weights, planned as 65536 slices.
SHARDS_MAX = 64  # Most shards that are started together.
DIMENSIONS_MAX = 64  # As in torch.
NAMES_RESERVED = frozenset({"__metadata__"})  # By safetensors, in which checkpoints are written.
HEADER_NBYTES_MAX = 100_000_000  # Of a safetensors file: names, shapes and places of all tensors.
HEADER_NBYTES_TENSOR, HEADER_NBYTES_DIMENSION = 96, 13  # At most, beside the name.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The place of every parameter in the flat vector, and the owner of every slice."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # Start of each tensor in the flat vector, in elements.
    numel: int  # Elements of the flat vector, gaps included.
    num_shards: int
    slices: tuple[SliceSpec, ...]
    fingerprint: str

    def of_shard(self, shard: int) -> tuple[SliceSpec, ...]:
        """Returns the slices that `shard` owns."""
        return tuple(spec for spec in self.slices if spec.shard == shard)


def make_layout(tensors: Sequence[TensorSpec], num_shards: int, *, is_long: bool = False) -> Layout:
    """Returns the layout of `tensors` over `num_shards`, in slices of the usual length or longer.

    The flat vector begins with the last tensor, and each shard has a part of about equal size:

    >>> weight = TensorSpec(name="weight", shape=(1000, 20), dtype="float32")
    >>> bias = TensorSpec(name="bias", shape=(20,), dtype="float32")
    >>> layout = make_layout([weight, bias], num_shards=2)
    >>> [(part.shard, part.start, part.stop) for part in layout.slices]
    [(0, 0, 10016), (1, 10016, 20032)]

    Raises:
        ConfigError: There are no tensors, two of one name, or one that no shard accepts.
    """
    _check(tensors, num_shards)
    offsets, numel, cuts = [0] * len(tensors), 0, [0]
    for compress in (True, False):
        start = numel
        for index in reversed(range(len(tensors))):
            if tensors[index].compress is compress:
                offsets[index] = numel
                numel += -(-tensors[index].numel // ALIGNMENT) * ALIGNMENT
        if numel > start:
            length = _length(numel - start, num_shards, is_long)
            cuts += [*range(start, numel, length), numel][1:]
    slices = _slices(tensors, offsets, cuts, num_shards)
    return Layout(
        tensors=tuple(tensors),
        offsets=tuple(offsets),
        numel=numel,
        num_shards=num_shards,
        slices=slices,
        fingerprint=fingerprint(tensors, num_shards),
    )


def owner(layout: Layout, position: int) -> int:
    """Returns the shard that owns element `position` of the flat vector."""
    return next(s.shard for s in layout.slices if s.start <= position < s.stop)


def fingerprint(
    tensors: Sequence[TensorSpec], num_shards: int, content: Mapping[str, object] | None = None
) -> str:
    """Returns 16 hexadecimal digits that differ when the declarations differ.

    Args:
        content: Arguments of the table's content, where they count too; None: they do not.
    """
    declared = [[t.name, list(t.shape), t.dtype, t.group, t.compress] for t in tensors]
    lengths = [SLICE_NUMEL_MAX, SLICE_NUMEL_FINE, SLICE_NUMEL_MIN, SLICES_PER_SHARD]
    rules = [num_shards, ALIGNMENT, *lengths, *([content] if content else [])]
    return hashlib.sha256(json.dumps([declared, rules]).encode()).hexdigest()[:16]


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """Returns a sentence about the first tensor that differs, or None."""
    for index, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
        if mine != yours:
            return f"tensor {index} is {_describe(mine)} here and {_describe(yours)} in the job"
    if len(ours) != len(theirs):
        longer, where = (ours, "here") if len(ours) > len(theirs) else (theirs, "in the job")
        extra = longer[min(len(ours), len(theirs))]
        return (
            f"{len(ours)} tensors here and {len(theirs)} in the job; "
            f"the first one only {where} is {_describe(extra)}"
        )
    return None


def _describe(spec: TensorSpec) -> str:
    suffix = ", compressed" if spec.compress else ""
    return f"{spec.name!r} {list(spec.shape)} {spec.dtype} in parameter group {spec.group}{suffix}"


def _check(tensors: Sequence[TensorSpec], num_shards: int) -> None:
    if not 1 <= num_shards <= 4096:  # noqa: PLR2004
        raise ConfigError(f"number of shards is {num_shards}, must be in 1..4096")
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise ConfigError(
            f"the model has {len(tensors)} trainable tensors, must be 1..{TENSORS_MAX}"
        )
    seen: set[str] = set()
    for spec in tensors:
        _check_name(spec.name, seen)
        _check_tensor(spec)
    numel = sum(spec.numel for spec in tensors)
    if numel > NUMEL_MAX:  # The plan itself is in proportion to it.
        raise ConfigError(f"the model has {numel} elements, at most {NUMEL_MAX}")
    nbytes = sum(_header_nbytes(spec) for spec in tensors)
    if nbytes > HEADER_NBYTES_MAX:
        raise ConfigError(
            f"names and shapes of the model's tensors need {nbytes} bytes in a checkpoint, at most "
            f"{HEADER_NBYTES_MAX}; give the parameters shorter names"
        )


def _check_name(name: str, seen: set[str]) -> None:
    """Refuses a parameter's name that no checkpoint can hold, or that is one of `seen`."""
    if name in seen:
        raise ConfigError(f"two parameters are named {name!r}")
    seen.add(name)
    if name in NAMES_RESERVED:
        raise ConfigError(
            f"a parameter is named {name!r}; checkpoints are safetensors files, in which this name "
            "has another meaning: give it another name"
        )
    try:
        name.encode()
    except UnicodeEncodeError as problem:
        raise ConfigError(f"a parameter's name {name!a} is not Unicode") from problem


def _check_tensor(spec: TensorSpec) -> None:
    """Refuses a dtype or a shape that no shard accepts."""
    if spec.dtype not in DTYPES:
        raise ConfigError(
            f"{spec.name!r} is {spec.dtype}, must be {', '.join(DTYPES)}; train a float64 "
            "model as model.float(), and keep a complex parameter as torch.view_as_real of it"
        )
    if len(spec.shape) > DIMENSIONS_MAX:
        raise ConfigError(
            f"{spec.name!r} has {len(spec.shape)} dimensions, at most {DIMENSIONS_MAX}"
        )
    if any(size < 0 for size in spec.shape) or not 0 < spec.numel <= NUMEL_MAX:
        raise ConfigError(f"{spec.name!r} has shape {list(spec.shape)}: {spec.numel} elements")


def _header_nbytes(spec: TensorSpec) -> int:
    """Returns the most bytes of a tensor in the header of a safetensors file."""
    dimensions_nbytes = HEADER_NBYTES_DIMENSION * len(spec.shape)
    return len(json.dumps(spec.name)) + HEADER_NBYTES_TENSOR + dimensions_nbytes


def _length(numel: int, num_shards: int, is_long: bool) -> int:
    """Returns the elements of each slice.

    A shard's part of the model is at least `SLICES_PER_SHARD` slices, so that pushes, updates and
    pulls overlap, and so that all shards' links are busy from the first gradients on; within one
    host fewer long ones need less Python (`is_long`). But no slice is shorter than
    `SLICE_NUMEL_FINE` for that. A smaller model has one slice on each shard, unless they would be
    shorter than `SLICE_NUMEL_MIN`.
    """
    per_shard = -(-numel // num_shards)
    most, number = SLICE_NUMEL_MAX, SLICES_PER_SHARD
    if is_long:
        most, number = LONG_NUMEL_MAX, LONG_PER_SHARD
    longest = min(most, max(SLICE_NUMEL_FINE, -(-per_shard // number)))
    per_slice = max(SLICE_NUMEL_MIN, -(-per_shard // -(-per_shard // longest)))
    return -(-per_slice // ALIGNMENT) * ALIGNMENT


def _slices(
    tensors: Sequence[TensorSpec], offsets: Sequence[int], cuts: Sequence[int], num_shards: int
) -> tuple[SliceSpec, ...]:
    """Returns the slices; each goes to the shard with the fewest bytes so far."""
    order = sorted(range(len(tensors)), key=lambda index: offsets[index])
    owned = [(0, shard) for shard in range(num_shards)]  # Elements and number: a heap.
    slices: list[SliceSpec] = []
    first = 0
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        while offsets[order[first]] + tensors[order[first]].numel <= start:
            first += 1
        segments: list[TensorSegment] = []
        for position in range(first, len(order)):
            tensor = order[position]
            low, high = offsets[tensor], offsets[tensor] + tensors[tensor].numel
            if low >= stop:
                break
            begin, end = max(low, start), min(high, stop)
            if begin < end:
                segments.append(
                    TensorSegment(
                        tensor=tensor,
                        group=tensors[tensor].group,
                        start=begin - start,
                        stop=end - start,
                        tensor_start=begin - low,
                    )
                )
        numel, shard = owned[0]
        heapq.heapreplace(owned, (numel + stop - start, shard))
        slices.append(
            SliceSpec(
                index=index,
                shard=shard,
                start=start,
                stop=stop,
                segments=tuple(segments),
                compress=tensors[segments[0].tensor].compress,
            )
        )
    return tuple(slices)
