r"""Frames: a small protobuf header and raw little-endian bytes behind it, checked before use.

    offset  bytes  field
    0       4      magic "PL\x06\x00": name and version of the frame format
    4       4      header_nbytes, uint32, at most 1 MiB
    8       8      payload_nbytes, uint64, at most 64 MiB
    16      8      checksum, uint64: XXH3-64 of bytes 0..16, the header and the payload
    24      h      header, a protobuf message of proto/ps/v1/data.proto
    24+h    p      payload

All integers are little-endian. A frame is refused when its length is not exactly 24 + h + p, when
a size is over its limit, or when the checksum differs: then nothing of it has been believed, and
nothing has been allocated beyond the frame itself. An uncompressed payload is float32, one number
for each element of the slice; with the optimizer's state, each state array follows the weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

from pscore.errors import DamagedError, DecodeError
from pscore.types import ByteArray, FloatArray, HyperArray

PROTOCOL = 6  # Raised if a peer of the version before would refuse or misunderstand a message.
MAGIC = b"PL" + bytes([PROTOCOL, 0])
HEADER_NBYTES_MAX = 1 << 20
PAYLOAD_NBYTES_MAX = 64 << 20  # A long slice with three arrays of state.
PREFIX = struct.Struct("<4sIQQ")
CHECKED = struct.Struct("<4sIQ")
FLOAT_NBYTES = 4

Buffer = bytes | bytearray | memoryview


def encode(header: bytes, *payload: Buffer) -> bytes:
    """Returns the frame of `header` and the concatenated `payload` parts."""
    payload_nbytes = sum(len(part) for part in payload)
    start = CHECKED.pack(MAGIC, len(header), payload_nbytes)
    digest = xxhash.xxh3_64(start)
    digest.update(header)
    for part in payload:
        digest.update(part)
    return b"".join((start, digest.intdigest().to_bytes(8, "little"), header, *payload))


def decode(frame: Buffer) -> tuple[memoryview, memoryview]:
    """Returns header and payload of `frame`, as views on it.

    Raises:
        DecodeError: The frame is not exactly what its first 24 bytes declare.
        DamagedError: Its checksum differs.
    """
    view = memoryview(frame)
    if view.nbytes < PREFIX.size:
        raise DecodeError(f"frame of {view.nbytes} bytes, at least {PREFIX.size} wanted")
    magic, header_nbytes, payload_nbytes, checksum = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"frame begins with {magic!r}, {MAGIC!r} wanted")
    if header_nbytes > HEADER_NBYTES_MAX or payload_nbytes > PAYLOAD_NBYTES_MAX:
        raise DecodeError(
            f"frame declares {header_nbytes} bytes of header and {payload_nbytes} of payload, "
            f"at most {HEADER_NBYTES_MAX} and {PAYLOAD_NBYTES_MAX}"
        )
    declared = PREFIX.size + header_nbytes + payload_nbytes
    if view.nbytes != declared:
        raise DecodeError(f"frame of {view.nbytes} bytes declares {declared}")
    digest = xxhash.xxh3_64(view[: CHECKED.size])
    digest.update(view[PREFIX.size :])
    if digest.intdigest() != checksum:
        raise DamagedError(f"checksum of a frame of {view.nbytes} bytes differs from its content")
    middle = PREFIX.size + header_nbytes
    return view[PREFIX.size : middle], view[middle:]


def floats(payload: Buffer, num_arrays: int, numel: int) -> list[FloatArray]:
    """Returns `num_arrays` arrays `(numel,) float32` as views on an uncompressed payload.

    Raises:
        DecodeError: The payload has another length.
    """
    view = memoryview(payload)
    wanted = num_arrays * numel * FLOAT_NBYTES
    if view.nbytes != wanted:
        raise DecodeError(f"payload of {view.nbytes} bytes, {wanted} wanted for {numel} elements")
    flat = np.frombuffer(view, dtype="<f4")
    return [flat[i * numel : (i + 1) * numel] for i in range(num_arrays)]


def as_bytes(array: FloatArray | ByteArray) -> memoryview:
    """Returns a contiguous array's memory as bytes, without a copy."""
    return memoryview(array).cast("B")


def pack_bits(present: int, num_segments: int) -> bytes:
    """Returns a set of segments as bytes, bit i of the number for segment i; empty for all."""
    every = (1 << num_segments) - 1
    if present & every == every:
        return b""
    return (present & every).to_bytes((num_segments + 7) // 8, "little")


def unpack_bits(bits: bytes, num_segments: int) -> int:
    """Returns the set that `pack_bits` wrote; -1 for all.

    Raises:
        DecodeError: The bytes are not a set of `num_segments`.
    """
    if not bits:
        return -1
    present = int.from_bytes(bits, "little")
    if len(bits) != (num_segments + 7) // 8 or present >> num_segments:
        raise DecodeError(f"{len(bits)} bytes of segment bits for {num_segments} segments")
    return present


def unpack_hyper(values: Sequence[float], num_groups: int, num_hyper: int) -> HyperArray:
    """Returns hyper-parameters `(num_groups, num_hyper) float64` from a flat sequence.

    They are not to be written: all slices of a step have the same ones, and so the same array.

    Raises:
        DecodeError: There are too few or too many, or one of them is not finite.
    """
    if len(values) != num_groups * num_hyper:
        raise DecodeError(
            f"{len(values)} hyper-parameters, {num_groups} groups of {num_hyper} wanted"
        )
    return _hyper(tuple(values), (num_groups, num_hyper))


@lru_cache(maxsize=64)
def _hyper(values: tuple[float, ...], shape: tuple[int, int]) -> HyperArray:
    if not all(map(math.isfinite, values)):  # They are few: numpy would take longer.
        raise DecodeError(f"hyper-parameters are not finite: {list(values)}")
    return np.array(values, dtype=np.float64).reshape(shape)
