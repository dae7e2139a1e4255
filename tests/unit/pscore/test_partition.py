"""The plan: every element once, aligned, balanced by bytes, the same for the same declaration."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore import partition
from pscore.contents import FLAT, LONG
from pscore.contents.flat import Flat
from pscore.errors import ConfigError
from pscore.net.rpc import MESSAGE_NBYTES_MAX
from pscore.net.wire import FLOAT_NBYTES, HEADER_NBYTES_MAX, PAYLOAD_NBYTES_MAX
from pscore.optimizers import OPTIMIZERS
from pscore.partition import (
    ALIGNMENT,
    LONG_NUMEL_MAX,
    NUMEL_MAX,
    SLICE_NUMEL_MAX,
    SLICE_NUMEL_MIN,
    Layout,
    fingerprint,
    first_difference,
    make_layout,
    owner,
)
from pscore.types import TensorSpec


def tensor(name: str, *shape: int, dtype: str = "float32", group: int = 0) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, group=group)


def model(numels: Sequence[int]) -> list[TensorSpec]:
    return [tensor(f"w{index}", numel, group=index % 3) for index, numel in enumerate(numels)]


# Tiny tensors, ones of about a slice, and one that spans several.
NUMELS = st.lists(
    st.one_of(st.integers(1, 40), st.integers(3_000, 9_000), st.integers(1, 60_000)),
    min_size=1,
    max_size=12,
)
SHARDS = st.integers(1, 7)


def covered(layout: Layout) -> dict[int, list[tuple[int, int]]]:
    """Returns, for each tensor, the ranges of its elements in the slices, in order."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for part in layout.slices:
        for segment in part.segments:
            stop = segment.tensor_start + segment.stop - segment.start
            ranges.setdefault(segment.tensor, []).append((segment.tensor_start, stop))
    return ranges


@given(NUMELS, SHARDS)
@settings(max_examples=200)
def test_every_element_is_in_exactly_one_slice(numels: list[int], num_shards: int) -> None:
    layout = make_layout(model(numels), num_shards)
    for index, numel in enumerate(numels):
        ranges = sorted(covered(layout)[index])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))


@given(NUMELS, SHARDS)
@settings(max_examples=100)
def test_slices_are_the_flat_vector_cut_in_order(numels: list[int], num_shards: int) -> None:
    layout = make_layout(model(numels), num_shards)
    edges = [0, *(part.stop for part in layout.slices)]
    assert [part.start for part in layout.slices] == edges[:-1]
    assert edges[-1] == layout.numel
    assert [part.index for part in layout.slices] == list(range(len(layout.slices)))
    assert all(0 < part.numel <= SLICE_NUMEL_MAX for part in layout.slices)


@pytest.mark.slow
@given(NUMELS, SHARDS)
@settings(max_examples=100)
def test_segments_agree_with_the_offsets(numels: list[int], num_shards: int) -> None:
    tensors = model(numels)
    layout = make_layout(tensors, num_shards)
    for part in layout.slices:
        assert list(part.segments) == sorted(part.segments, key=lambda segment: segment.start)
        for segment in part.segments:
            begin = layout.offsets[segment.tensor] + segment.tensor_start
            assert part.start + segment.start == begin
            assert 0 <= segment.start < segment.stop <= part.numel
            assert segment.group == tensors[segment.tensor].group


@given(NUMELS, SHARDS)
@settings(max_examples=100)
def test_tensors_and_slices_begin_at_64_bytes(numels: list[int], num_shards: int) -> None:
    layout = make_layout(model(numels), num_shards)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(part.start % ALIGNMENT == 0 for part in layout.slices)


@given(NUMELS)
@settings(max_examples=50)
def test_the_last_tensor_comes_first(numels: list[int]) -> None:
    """Backward finishes the last one first, so that its slice leaves first."""
    offsets = make_layout(model(numels), 2).offsets
    assert list(offsets) == sorted(offsets, reverse=True)
    assert offsets[-1] == 0


@given(NUMELS, SHARDS)
@settings(max_examples=100)
def test_shards_are_balanced_within_one_slice(numels: list[int], num_shards: int) -> None:
    layout = make_layout(model(numels), num_shards)
    loads = [sum(part.numel for part in layout.of_shard(shard)) for shard in range(num_shards)]
    largest = max(part.numel for part in layout.slices)
    assert max(loads) - min(loads) <= largest
    assert sum(loads) == layout.numel


@given(NUMELS, SHARDS)
@settings(max_examples=50)
def test_the_same_declaration_gives_the_same_plan(numels: list[int], num_shards: int) -> None:
    assert make_layout(model(numels), num_shards) == make_layout(tuple(model(numels)), num_shards)


@given(NUMELS, SHARDS, st.data())
@settings(max_examples=50)
def test_an_owner_is_the_shard_of_the_slice(
    numels: list[int], num_shards: int, data: st.DataObject
) -> None:
    layout = make_layout(model(numels), num_shards)
    position = data.draw(st.integers(0, layout.numel - 1))
    (part,) = [part for part in layout.slices if part.start <= position < part.stop]
    assert owner(layout, position) == part.shard


def test_a_small_model_is_not_cut_below_16_kib() -> None:
    layout = make_layout(model([SLICE_NUMEL_MIN]), 4)
    assert [part.shard for part in layout.slices] == [0]


def test_a_large_tensor_is_cut_into_equal_slices_of_at_most_4_mib() -> None:
    layout = make_layout(model([5 * SLICE_NUMEL_MAX]), 2)
    numels = [part.numel for part in layout.slices]
    assert max(numels) <= SLICE_NUMEL_MAX
    assert max(numels) - min(numels) <= ALIGNMENT * len(numels)
    assert [part.shard for part in layout.slices] == [0, 1] * 6


@pytest.mark.parametrize(
    ("numel", "num_shards", "num_slices"),
    [
        (6_400_000, 4, 24),  # Six for each shard.
        (25_600_000, 1, 25),  # Already more than six at 4 MiB.
        (1_000_000, 1, 6),
        (1_000_000, 4, 8),  # Two for each shard: shorter than 512 KiB they do not get.
        (100_000, 1, 1),
    ],
)
def test_a_shard_has_six_slices_unless_they_would_be_below_512_kib(
    numel: int, num_shards: int, num_slices: int
) -> None:
    layout = make_layout(model([numel]), num_shards)
    assert len(layout.slices) == num_slices
    counts = [len(layout.of_shard(shard)) for shard in range(num_shards)]
    assert max(counts) - min(counts) <= 1


def test_a_scalar_is_one_element() -> None:
    layout = make_layout([tensor("scale")], 1)
    (segment,) = layout.slices[0].segments
    assert (segment.start, segment.stop, layout.numel) == (0, 1, ALIGNMENT)


def test_a_layout_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 and 40 elements, last first: 0..40 the second, gap to 48, 48..68 the first, gap to 80."""
    monkeypatch.setattr(partition, "SLICE_NUMEL_MIN", 16)
    layout = make_layout([tensor("a", 20), tensor("b", 5, 8, group=1)], 2)
    assert (layout.numel, layout.offsets) == (80, (48, 0))
    assert [(part.start, part.stop, part.shard) for part in layout.slices] == [
        (0, 48, 0),
        (48, 80, 1),
    ]
    first, second = layout.slices
    assert [(s.tensor, s.group, s.start, s.stop) for s in first.segments] == [(1, 1, 0, 40)]
    assert [(s.tensor, s.group, s.start, s.stop) for s in second.segments] == [(0, 0, 0, 20)]


# ----- fingerprint

BASE = (tensor("fc1.weight", 8, 4), tensor("fc1.bias", 8))


@pytest.mark.parametrize(
    ("tensors", "num_shards"),
    [
        ((tensor("fc2.weight", 8, 4), BASE[1]), 2),
        ((tensor("fc1.weight", 4, 8), BASE[1]), 2),
        ((tensor("fc1.weight", 32), BASE[1]), 2),
        ((tensor("fc1.weight", 8, 4, dtype="float16"), BASE[1]), 2),
        ((tensor("fc1.weight", 8, 4, group=1), BASE[1]), 2),
        (BASE[:1], 2),
        (BASE[::-1], 2),
        ((*BASE, tensor("fc2.bias", 8)), 2),
        (BASE, 1),
    ],
    ids=["name", "shape", "flat", "dtype", "group", "fewer", "order", "more", "shards"],
)
def test_a_fingerprint_differs_when_anything_differs(
    tensors: tuple[TensorSpec, ...], num_shards: int
) -> None:
    assert fingerprint(tensors, num_shards) != fingerprint(BASE, 2)


@pytest.mark.parametrize(
    "name",
    ["ALIGNMENT", "SLICE_NUMEL_MAX", "SLICE_NUMEL_FINE", "SLICE_NUMEL_MIN", "SLICES_PER_SHARD"],
)
def test_a_fingerprint_differs_when_the_rules_of_cutting_differ(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(BASE, 2)
    monkeypatch.setattr(partition, name, 2 * getattr(partition, name))
    assert fingerprint(BASE, 2) != before


def test_a_fingerprint_is_16_hexadecimal_digits_and_the_layouts() -> None:
    assert fingerprint(BASE, 2) == make_layout(BASE, 2).fingerprint
    assert len(bytes.fromhex(fingerprint(BASE, 2))) == 8


# ----- differences


def test_equal_declarations_do_not_differ() -> None:
    assert first_difference(BASE, [dataclasses.replace(spec) for spec in BASE]) is None


def test_the_first_tensor_that_differs_is_named_on_both_sides() -> None:
    theirs = (BASE[0], tensor("fc1.bias", 9, dtype="float16", group=1))
    assert first_difference(BASE, theirs) == (
        "tensor 1 is 'fc1.bias' [8] float32 in parameter group 0 here and "
        "'fc1.bias' [9] float16 in parameter group 1 in the job"
    )


def test_a_tensor_too_many_is_named_on_either_side() -> None:
    more = (*BASE, tensor("fc2.bias", 3))
    tail = "'fc2.bias' [3] float32 in parameter group 0"
    assert first_difference(more, BASE) == (
        f"3 tensors here and 2 in the job; the first one only here is {tail}"
    )
    assert first_difference(BASE, more) == (
        f"2 tensors here and 3 in the job; the first one only in the job is {tail}"
    )


# ----- what no shard accepts


@pytest.mark.parametrize(
    ("tensors", "num_shards", "pattern"),
    [
        (BASE, 0, r"number of shards is 0, must be in 1\.\.4096"),
        (BASE, 4097, "number of shards is 4097"),
        ([], 1, "the model has 0 trainable tensors"),
        ([BASE[0], BASE[0]], 1, "two parameters are named 'fc1.weight'"),
        ([tensor("__metadata__", 4)], 1, "named '__metadata__'; checkpoints are safetensors files"),
        ([tensor("w\udc80", 4)], 1, r"a parameter's name 'w\\udc80' is not Unicode"),
        ([tensor("w" * 100_000_000, 4)], 1, "need 100000111 bytes in a checkpoint, at most 1000"),
        ([tensor("w", 4, dtype="int64")], 1, "'w' is int64, must be float32, bfloat16, float16"),
        ([tensor("w", 0)], 1, r"'w' has shape \[0\]: 0 elements"),
        ([tensor("w", 4, 0, 2)], 1, r"'w' has shape \[4, 0, 2\]: 0 elements"),
        ([tensor("w", -4)], 1, r"'w' has shape \[-4\]: -4 elements"),
        ([tensor("w", -2, -2)], 1, r"'w' has shape \[-2, -2\]: 4 elements"),
        ([tensor("w", 1 << 62, 1 << 62)], 1, "'w' has shape"),
        ([tensor("w", NUMEL_MAX + 1)], 1, "'w' has shape"),
        ([tensor("w", *[1] * 65)], 1, "'w' has 65 dimensions, at most 64"),
        ([tensor("w", *[1 << 62] * 4_000_000)], 1, "'w' has 4000000 dimensions"),
        (
            [tensor(f"w{index}", NUMEL_MAX // 2) for index in range(3)],
            1,
            f"the model has {3 * (NUMEL_MAX // 2)} elements, at most {NUMEL_MAX}",
        ),
    ],
)
def test_values_that_no_shard_accepts_are_refused_by_name(
    tensors: Sequence[TensorSpec], num_shards: int, pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        make_layout(tensors, num_shards)


def test_tensors_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "TENSORS_MAX", 3)
    make_layout(model([1, 1, 1]), 1)
    with pytest.raises(ConfigError, match=r"has 4 trainable tensors, must be 1\.\.3"):
        make_layout(model([1, 1, 1, 1]), 1)


@pytest.mark.slow
def test_the_largest_model_is_planned_in_little_memory() -> None:
    """A declaration that is accepted must not cost a shard its memory before a byte has come."""
    layout = make_layout([tensor("w", NUMEL_MAX)], 2)
    assert len(layout.slices) == NUMEL_MAX // SLICE_NUMEL_MAX <= 1 << 16


@pytest.mark.parametrize("numel", [100, 300_000, 1_500_000, 25_600_000, 100_000_000])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_long_slices_are_fewer_and_two_at_least_on_each_shard(numel: int, num_shards: int) -> None:
    tensors = model([numel, 7])
    usual, layout = FLAT.layout(tensors, num_shards), LONG.layout(tensors, num_shards)
    assert (layout.offsets, layout.numel) == (usual.offsets, usual.numel)
    assert sum(part.numel for part in layout.slices) == numel_of(layout) == layout.numel
    assert len(layout.slices) <= len(usual.slices)
    assert max(part.numel for part in layout.slices) <= LONG_NUMEL_MAX
    for shard in range(num_shards):
        wanted = min(2, len(usual.of_shard(shard)))
        assert len(layout.of_shard(shard)) >= wanted
    if numel >= 25_600_000:
        assert len(layout.slices) <= len(usual.slices) // 3


def numel_of(layout: Layout) -> int:
    return max(part.stop for part in layout.slices)


def test_a_frame_holds_the_longest_slice_with_the_state_of_each_optimizer() -> None:
    for name in OPTIMIZERS:
        num_arrays = 1 + len(FLAT.optimizer(name).state_names)
        nbytes = num_arrays * FLOAT_NBYTES * LONG_NUMEL_MAX
        assert nbytes <= PAYLOAD_NBYTES_MAX, name
    assert PAYLOAD_NBYTES_MAX + HEADER_NBYTES_MAX < MESSAGE_NBYTES_MAX


def test_the_length_of_slices_is_part_of_the_declaration() -> None:
    tensors = model([300_000])
    assert Flat.of(LONG.arguments()) == LONG != FLAT == Flat.of(FLAT.arguments())
    known = [fingerprint(tensors, 2, content.arguments()) for content in (FLAT, LONG)]
    assert known[0] == fingerprint(tensors, 2) != known[1]
    for wrong in ({"long": 1}, {"rows": True}):
        with pytest.raises(ConfigError, match=r"content 'flat' has no arguments \{'"):
            Flat.of(wrong)
