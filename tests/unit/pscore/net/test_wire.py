"""Frames: `decode` returns the message that `encode` was given, and refuses other bytes."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.errors import DecodeError
from pscore.net import wire
from pscore.net.wire import (
    CHECKED,
    HEADER_NBYTES_MAX,
    MAGIC,
    PAYLOAD_NBYTES_MAX,
    PREFIX,
    as_bytes,
    decode,
    encode,
    floats,
    pack_bits,
    unpack_bits,
    unpack_hyper,
)


def sealed(start: bytes, rest: bytes) -> bytes:
    """Returns a frame with a right checksum and any other content."""
    digest = xxhash.xxh3_64(start + rest).intdigest()
    return start + digest.to_bytes(8, "little") + rest


# ----- frames


@given(st.binary(max_size=300), st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200)
def test_a_frame_gives_back_header_and_payload(header: bytes, parts: list[bytes]) -> None:
    got, payload = decode(encode(header, *parts))
    assert bytes(got) == header
    assert bytes(payload) == b"".join(parts)


def test_a_frame_is_laid_out_as_its_specification_says() -> None:
    frame = encode(b"head", b"pay", b"load")
    assert frame[:4] == b"PL\x06\x00"
    assert struct.unpack_from("<IQ", frame, 4) == (4, 7)
    checksum = xxhash.xxh3_64_intdigest(frame[:16] + b"headpayload")
    assert int.from_bytes(frame[16:24], "little") == checksum
    assert frame[24:] == b"headpayload"


def test_decoding_copies_nothing() -> None:
    frame = bytearray(encode(b"head", b"payload"))
    header, payload = decode(frame)
    frame[-1] ^= 0xFF
    frame[PREFIX.size] ^= 0xFF
    assert bytes(payload) != b"payload"
    assert bytes(header) != b"head"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_decoded(kind: type) -> None:
    assert bytes(decode(kind(encode(b"h", b"p")))[1]) == b"p"


def test_payload_parts_may_be_views_of_arrays() -> None:
    array = np.arange(6, dtype=np.float32)
    _, payload = decode(encode(b"", as_bytes(array[:2]), as_bytes(array[2:])))
    (back,) = floats(payload, 1, 6)
    assert np.array_equal(back, array)


@pytest.mark.parametrize("nbytes", range(PREFIX.size))
def test_a_frame_shorter_than_its_prefix_is_refused(nbytes: int) -> None:
    with pytest.raises(DecodeError, match=f"frame of {nbytes} bytes, at least 24 wanted"):
        decode(encode(b"")[:nbytes])


@pytest.mark.parametrize("magic", [b"PL\x00\x00", b"PL\x03\x00", b"XL\x04\x00", b"\0\0\0\0"])
def test_another_magic_or_version_is_refused(magic: bytes) -> None:
    frame = sealed(CHECKED.pack(magic, 1, 1), b"hp")
    with pytest.raises(DecodeError, match=r"frame begins with .*, b'PL\\x06\\x00' wanted"):
        decode(frame)


@pytest.mark.parametrize(
    ("header_nbytes", "payload_nbytes"),
    [
        (HEADER_NBYTES_MAX + 1, 0),
        (0, PAYLOAD_NBYTES_MAX + 1),
        ((1 << 32) - 1, 0),
        (0, (1 << 64) - 1),
        ((1 << 32) - 1, (1 << 64) - 1),
    ],
)
def test_sizes_over_their_limit_are_refused_by_name(
    header_nbytes: int, payload_nbytes: int
) -> None:
    frame = sealed(CHECKED.pack(MAGIC, header_nbytes, payload_nbytes), b"x")
    with pytest.raises(
        DecodeError,
        match=f"declares {header_nbytes} bytes of header and {payload_nbytes} of payload, at most",
    ):
        decode(frame)


def test_the_limit_of_a_header_is_reached() -> None:
    assert len(decode(encode(bytes(HEADER_NBYTES_MAX)))[0]) == HEADER_NBYTES_MAX


@pytest.mark.parametrize(("header_nbytes", "payload_nbytes"), [(2, 1), (1, 2), (0, 0), (1, 0)])
def test_sizes_that_do_not_add_up_are_refused(header_nbytes: int, payload_nbytes: int) -> None:
    frame = sealed(CHECKED.pack(MAGIC, header_nbytes, payload_nbytes), b"hp")
    declared = 24 + header_nbytes + payload_nbytes
    with pytest.raises(DecodeError, match=f"frame of 26 bytes declares {declared}"):
        decode(frame)


def test_a_wrong_checksum_is_refused() -> None:
    frame = bytearray(encode(b"h", b"p"))
    frame[16] ^= 1
    with pytest.raises(DecodeError, match="checksum of a frame of 26 bytes differs"):
        decode(frame)


def test_bytes_that_move_between_header_and_payload_are_refused() -> None:
    """Their lengths are under the checksum, not only the bytes that follow."""
    frame = bytearray(encode(b"ab", b"cd"))
    CHECKED.pack_into(frame, 0, MAGIC, 3, 1)
    with pytest.raises(DecodeError, match="checksum"):
        decode(frame)


# ----- floats


@given(st.integers(1, 4), st.integers(1, 50))
def test_floats_are_views_in_order(num_arrays: int, numel: int) -> None:
    flat = np.arange(num_arrays * numel, dtype=np.float32)
    arrays = floats(flat.tobytes(), num_arrays, numel)
    assert len(arrays) == num_arrays
    assert all(array.dtype == np.float32 for array in arrays)
    assert np.array_equal(np.concatenate(arrays), flat)


@pytest.mark.parametrize("nbytes", [0, 4, 7, 9, 12])
def test_floats_of_another_length_are_refused(nbytes: int) -> None:
    with pytest.raises(DecodeError, match=f"payload of {nbytes} bytes, 8 wanted for 2 elements"):
        floats(bytes(nbytes), 1, 2)


def test_floats_are_little_endian() -> None:
    assert floats(b"\x00\x00\x80\x3f", 1, 1)[0][0] == 1.0


# ----- sets of segments


@given(st.integers(1, 70), st.data())
def test_segment_bits_come_back(num_segments: int, data: st.DataObject) -> None:
    every = (1 << num_segments) - 1
    present = data.draw(st.integers(0, every))
    bits = pack_bits(present, num_segments)
    assert unpack_bits(bits, num_segments) == (-1 if present == every else present)
    assert len(bits) in (0, (num_segments + 7) // 8)


def test_all_segments_are_no_bytes() -> None:
    assert pack_bits(-1, 9) == pack_bits(0b111111111, 9) == b""
    assert pack_bits(0, 9) == b"\0\0"
    assert pack_bits(0b100000010, 9) == b"\x02\x01"


@pytest.mark.parametrize(
    ("bits", "num_segments"),
    [(b"\0\0", 8), (b"\0", 9), (b"\x04", 2), (b"\xff", 7), (b"\0\x02", 9), (bytes(1000), 3)],
)
def test_bits_beyond_the_segments_are_refused(bits: bytes, num_segments: int) -> None:
    with pytest.raises(DecodeError, match=f"segment bits for {num_segments} segments"):
        unpack_bits(bits, num_segments)


# ----- hyper-parameters


def test_hyper_parameters_are_rows_of_groups() -> None:
    hyper = unpack_hyper([1, 2, 3, 4, 5, 6], 2, 3)
    assert hyper.dtype == np.float64
    assert hyper.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 5, [1.0] * 7])
def test_too_few_or_too_many_hyper_parameters_are_refused(values: list[float]) -> None:
    with pytest.raises(DecodeError, match=rf"{len(values)} hyper-parameters, 2 groups of 3 wanted"):
        unpack_hyper(values, 2, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_hyper_parameters_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(DecodeError, match="hyper-parameters are not finite"):
        unpack_hyper([0.1, bad], 1, 2)


def test_the_magic_names_the_version_of_the_format() -> None:
    assert wire.MAGIC[2] == wire.PROTOCOL
