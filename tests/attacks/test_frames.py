"""Bytes that are not exactly a frame: bit flips, truncation, false sizes, and their cost."""

import random
import struct
import tracemalloc

import pytest
import xxhash

from pscore.errors import DecodeError
from pscore.net.wire import CHECKED, HEADER_NBYTES_MAX, MAGIC, PAYLOAD_NBYTES_MAX, PREFIX, decode
from tests.golden.frames.frames import recorded

FRAMES = sorted(recorded().items())
IDS = [name for name, _ in FRAMES]
COST_NBYTES_MAX = 1 << 16  # Of refusing anything: an exception and its message.


def sealed(start: bytes, rest: bytes) -> bytes:
    """Returns a frame whose checksum is right, although its sizes may be wrong."""
    digest = xxhash.xxh3_64_intdigest(start + rest)
    return start + digest.to_bytes(8, "little") + rest


@pytest.mark.parametrize(("name", "frame"), FRAMES, ids=IDS)
def test_every_bit_flip_is_refused(name: str, frame: bytes) -> None:
    decode(frame)
    for bit in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecodeError):
            decode(bytes(broken))


@pytest.mark.parametrize(("name", "frame"), FRAMES, ids=IDS)
def test_every_truncation_is_refused(name: str, frame: bytes) -> None:
    for length in range(len(frame)):
        with pytest.raises(DecodeError):
            decode(frame[:length])
        with pytest.raises(DecodeError):
            decode(frame[len(frame) - length :])


@pytest.mark.parametrize(("name", "frame"), FRAMES, ids=IDS)
def test_trailing_bytes_are_refused(name: str, frame: bytes) -> None:
    for more in (b"\0", b"\xff", frame, bytes(1000)):
        with pytest.raises(DecodeError, match=f"frame of {len(frame) + len(more)} bytes declares"):
            decode(frame + more)


@pytest.mark.parametrize(("name", "frame"), FRAMES, ids=IDS)
def test_every_byte_replaced_by_every_other_in_the_prefix_is_refused(
    name: str, frame: bytes
) -> None:
    for position in range(PREFIX.size):
        for value in range(256):
            if frame[position] != value:
                broken = bytearray(frame)
                broken[position] = value
                with pytest.raises(DecodeError):
                    decode(bytes(broken))


def test_two_flips_are_refused() -> None:
    """All pairs of bits of the smallest frame: no two of them cancel out in the checksum."""
    frame = dict(FRAMES)["empty"]
    for first in range(8 * len(frame)):
        for second in range(first):
            broken = bytearray(frame)
            broken[first // 8] ^= 1 << first % 8
            broken[second // 8] ^= 1 << second % 8
            with pytest.raises(DecodeError):
                decode(bytes(broken))


def test_parts_of_one_frame_in_another_are_refused() -> None:
    rng = random.Random(1)
    frames = [frame for _, frame in FRAMES]
    for _ in range(3000):
        one, other = rng.sample(frames, 2)
        cut = rng.randrange(1, min(len(one), len(other)))
        mixed = one[:cut] + other[cut:]
        if mixed not in frames:
            with pytest.raises(DecodeError):
                decode(mixed)


def test_noise_is_refused() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        noise = rng.randbytes(rng.randrange(200))
        for frame in (noise, MAGIC + noise):
            with pytest.raises(DecodeError):
                decode(frame)


@pytest.mark.parametrize("header_nbytes", [0, 1, 2, 3, HEADER_NBYTES_MAX, (1 << 32) - 1])
@pytest.mark.parametrize(
    "payload_nbytes", [0, 1, 2, 3, PAYLOAD_NBYTES_MAX, 1 << 32, 1 << 63, (1 << 64) - 1]
)
def test_lying_sizes_are_refused_even_with_a_right_checksum(
    header_nbytes: int, payload_nbytes: int
) -> None:
    for rest in (b"", b"h", b"hp", b"hpx"):
        frame = sealed(CHECKED.pack(MAGIC, header_nbytes, payload_nbytes), rest)
        if header_nbytes + payload_nbytes == len(rest):
            decode(frame)
        else:
            with pytest.raises(DecodeError):
                decode(frame)


def test_sizes_that_add_up_only_beyond_64_bits_are_refused() -> None:
    frame = sealed(CHECKED.pack(MAGIC, 3, (1 << 64) - 3), b"")
    with pytest.raises(DecodeError):
        decode(frame)


@pytest.mark.parametrize("version", range(256))
def test_other_versions_of_the_format_are_refused(version: int) -> None:
    frame = sealed(CHECKED.pack(bytes((*b"PL", version, 0)), 1, 1), b"hp")
    if version == MAGIC[2]:
        decode(frame)
    else:
        with pytest.raises(DecodeError, match="frame begins with"):
            decode(frame)


def test_refusing_costs_no_memory_whatever_is_declared() -> None:
    """64 MiB are declared, and allowed; nothing is allocated for bytes that are not there."""
    frames = [
        sealed(CHECKED.pack(MAGIC, header, payload), b"x")
        for header in (HEADER_NBYTES_MAX, (1 << 32) - 1)
        for payload in (PAYLOAD_NBYTES_MAX, (1 << 64) - 1)
    ]
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(DecodeError):
                decode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < COST_NBYTES_MAX


def test_a_frame_is_decoded_without_a_copy_of_its_payload() -> None:
    payload = bytes(8 << 20)
    start = CHECKED.pack(MAGIC, 0, len(payload))
    frame = sealed(start, payload)
    tracemalloc.start()
    try:
        decode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < COST_NBYTES_MAX


def test_integers_of_the_other_byte_order_are_refused() -> None:
    frame = dict(FRAMES)["push"]
    magic, header_nbytes, payload_nbytes = CHECKED.unpack_from(frame)
    swapped = struct.pack(">4sIQ", magic, header_nbytes, payload_nbytes)
    with pytest.raises(DecodeError):
        decode(sealed(swapped, frame[PREFIX.size :]))
