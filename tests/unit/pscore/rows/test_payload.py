"""Payloads of row slices: both sides, and every refusal."""

import struct
from collections.abc import Callable

import numpy as np
import pytest

from pscore.errors import DecodeError
from pscore.rows.partition import buckets_of
from pscore.rows.payload import (
    Owned,
    decode_pull,
    decode_push,
    decode_values,
    encode_changed,
    encode_pull,
    encode_push,
    fits,
)
from pscore.types import ByteArray

OWNED = [
    Owned(name="a", num_rows=0, seed=0, start=0, stop=4096),
    Owned(name="b", num_rows=10, seed=1, start=0, stop=4096),
]
WIDTHS = [2, 3]
IDS = [np.array([1, 5, (1 << 64) - 1], np.uint64), np.array([9], np.uint64)]
VALUES = [np.arange(6, dtype=np.float32).reshape(3, 2), np.full((1, 3), 7.0, np.float32)]
TIMES = [np.array([1, 2, 65535], np.uint16), np.array([4], np.uint16)]


def joined(parts: list[memoryview]) -> ByteArray:
    return np.frombuffer(b"".join(parts), np.uint8)


def test_a_push_is_read_as_it_was_written() -> None:
    found = decode_push(joined(encode_push(IDS, VALUES, TIMES)), OWNED, WIDTHS)
    for rows, ids, values, times in zip(found, IDS, VALUES, TIMES, strict=True):
        np.testing.assert_array_equal(rows.ids, ids)
        np.testing.assert_array_equal(rows.values, values.ravel())
        np.testing.assert_array_equal(rows.occurrences, times)


def test_a_push_without_rows_has_no_bytes() -> None:
    empty = [array[:0] for array in IDS]
    assert encode_push(empty, [v[:0] for v in VALUES], [t[:0] for t in TIMES]) == []
    found = decode_push(joined([]), OWNED, WIDTHS)
    assert [len(rows.ids) for rows in found] == [0, 0]
    counts = joined([memoryview(struct.pack("<2Q", 0, 0))])
    assert [len(rows.ids) for rows in decode_push(counts, OWNED, WIDTHS)] == [0, 0]


def test_a_push_at_an_odd_address_is_read_too() -> None:
    whole = b"".join(encode_push(IDS, VALUES, TIMES))
    shifted = np.frombuffer(b"." + whole, np.uint8)[1:]
    np.testing.assert_array_equal(decode_push(shifted, OWNED, WIDTHS)[0].ids, IDS[0])


def test_a_pull_names_rows_and_the_answer_brings_them() -> None:
    wanted = decode_pull(joined(encode_pull(IDS, since=3)), OWNED)
    assert wanted.since == 3
    np.testing.assert_array_equal(wanted.ids[0], IDS[0])
    out = [np.zeros((3, 2), np.float32), np.zeros((1, 3), np.float32)]
    decode_values(joined([memoryview(v).cast("B") for v in VALUES]), -1, WIDTHS, out)
    np.testing.assert_array_equal(out[0], VALUES[0])
    np.testing.assert_array_equal(out[1], VALUES[1])


def test_an_answer_with_what_has_changed_leaves_the_other_rows() -> None:
    out = [np.full((3, 2), -1.0, np.float32), np.full((1, 3), -1.0, np.float32)]
    bits = encode_changed(np.array([False, True, False, True]))
    assert bits.nbytes == 8
    parts = [memoryview(bits), memoryview(VALUES[0][1]).cast("B"), memoryview(VALUES[1]).cast("B")]
    decode_values(joined(parts), 0, WIDTHS, out)
    assert out[0].tolist() == [[-1.0, -1.0], [2.0, 3.0], [-1.0, -1.0]]
    assert out[1].tolist() == [[7.0, 7.0, 7.0]]


def changed(index: int, ids: list[int]) -> list[np.ndarray]:
    arrays = list(IDS)
    arrays[index] = np.array(ids, np.uint64)
    return arrays


@pytest.mark.parametrize(
    "ids",
    [
        changed(0, [5, 1, 9]),  # Not in order.
        changed(0, [1, 1, 9]),  # Twice.
        changed(0, [(1 << 64) - 1, 1, 5]),  # In the order of signed numbers.
        changed(1, [10]),  # Beyond the table.
    ],
)
def test_ids_out_of_order_or_range_are_refused(ids: list[np.ndarray]) -> None:
    with pytest.raises(DecodeError, match=r"of row table '[ab]' is not above"):
        decode_push(joined(encode_push(ids, VALUES, TIMES)), OWNED, WIDTHS)
    with pytest.raises(DecodeError, match=r"of row table '[ab]' is not above"):
        decode_pull(joined(encode_pull(ids)), OWNED)


def test_an_id_of_another_slice_is_refused() -> None:
    (bucket,) = buckets_of(IDS[1], 1).tolist()
    others = [OWNED[0], Owned(name="b", num_rows=10, seed=1, start=bucket + 1, stop=4096)]
    with pytest.raises(DecodeError, match="id 9 of row table 'b'"):
        decode_push(joined(encode_push(IDS, VALUES, TIMES)), others, WIDTHS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    values = [VALUES[0].copy(), VALUES[1]]
    values[0][1, 1] = value
    with pytest.raises(DecodeError, match="not finite"):
        decode_push(joined(encode_push(IDS, values, TIMES)), OWNED, WIDTHS)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: np.concatenate([data, data[:1]]),
        lambda data: data[:15],
        lambda data: np.concatenate([np.full(8, 255, np.uint8), data[8:]]),  # 2^64 - 1 rows.
    ],
)
def test_another_length_is_refused(change: Callable[[ByteArray], ByteArray]) -> None:
    data = joined(encode_push(IDS, VALUES, TIMES))
    assert fits(data, WIDTHS)
    assert not fits(change(data), WIDTHS)
    with pytest.raises(DecodeError, match="bytes"):
        decode_push(change(data), OWNED, WIDTHS)
    asked = joined(encode_pull(IDS))
    for wrong in (asked[:-1], asked[:7], np.concatenate([asked, asked[:8]])):
        with pytest.raises(DecodeError, match="bytes for"):
            decode_pull(wrong, OWNED)


def test_an_answer_of_another_length_is_refused() -> None:
    out = [np.zeros((3, 2), np.float32), np.zeros((1, 3), np.float32)]
    for nbytes in (0, 35, 40):
        with pytest.raises(DecodeError, match="wanted"):
            decode_values(np.zeros(nbytes, np.uint8), -1, WIDTHS, out)
    with pytest.raises(DecodeError, match="for 4 rows"):
        decode_values(np.zeros(3, np.uint8), 0, WIDTHS, out)
