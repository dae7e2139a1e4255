"""Published weights: bfloat16, and lossless deltas between two versions of one slice.

A version X of n elements is `(n,) uint16`, the bits of bfloat16, rounded to the nearest with ties
to even: the upper half of a float32, so NaN keeps its sign and the upper bits of its payload, and
-0 is not 0. A delta is the difference of the bits as ordered integers, modulo 2^16:

    d = ord(X') - ord(X);   ord(b) = b for b < 0x8000, else -1 - (b & 0x7fff)

So a change by one rounding step is 1 or -1 whatever the exponent, and X' follows from X and d
exactly, for any bits. A delta is written in the smallest of four forms, little-endian:

    SPARSE  for each changed element: the unchanged ones before it, 1 byte, or 255 and 2 bytes; then
            d. After 65535 unchanged elements an entry with d = 0 stands for one of them.
    MASK    a bit for each element, the lowest first; then d of those whose bit is set
    NIBBLE  four bits for each element, the lower half first: d + 7, or 15; then the other d, 2
            bytes each
    DENSE   X' itself, 2 bytes an element

SPARSE and MASK write d as 1 byte from -127 to 127, else as 128 and 2 bytes. PULSE of Erfan Miahi
and Eugene Belilovsky, arXiv:2602.03839, observes how few bfloat16 weights change at the learning
rates of reinforcement learning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from numpy import int32, uint8, uint16, uint32

from pscore.errors import DecodeError
from pscore.memory.kernels import bf16_of, kernel
from pscore.types import ByteArray, FloatArray

BitArray = npt.NDArray[np.uint16]  # (numel,): the bits of bfloat16.
StepArray = npt.NDArray[np.int16]  # (numel,): differences, modulo 2^16.

FAR = 255  # The first byte of a long gap.
GAP_MAX = 65535
WIDE = 128  # The first byte of a long difference.
NARROW_MAX = 127
NIBBLE_MAX = 7
ESCAPED = 15
WORD = 4  # Elements that are compared with 0 at once.
BLOCK = 4096


class Form(enum.IntEnum):
    """How a delta is written."""

    DENSE = 0
    SPARSE = 1
    MASK = 2
    NIBBLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A step from one version of a slice to another."""

    form: Form
    payload: ByteArray  # (nbytes,)


def fingerprint(bits: BitArray) -> int:
    """Returns XXH3-64 of a version, `(numel,) uint16`; never 0, which means none."""
    return xxhash.xxh3_64_intdigest(memoryview(bits).cast("B")) or 1


def round_to_bf16(weights: FloatArray) -> BitArray:
    """Returns `(numel,) float32` as the bits of bfloat16, to the nearest, ties to even."""
    bits = np.empty(len(weights), dtype=np.uint16)
    _round(weights.view(np.uint32), bits)
    return bits


def widen(bits: BitArray, out: FloatArray) -> None:
    """Writes the exact values of a version into `out`, `(numel,) float32`."""
    _widen(bits, out.view(np.uint32))


def move(bits: BitArray, weights: FloatArray) -> Delta:
    """Makes the version `bits` that of `weights`, and returns the delta between the two.

    Args:
        bits: `(numel,) uint16`, the former version; overwritten by the new one.
        weights: `(numel,) float32`.
    """
    steps = np.empty(len(bits), dtype=np.int16)
    _move(weights.view(np.uint32), bits, steps)
    return encode(steps, bits)


def encode(steps: StepArray, bits: BitArray) -> Delta:
    """Returns the smallest form of a delta.

    Args:
        steps: `(numel,) int16`, the differences.
        bits: `(numel,) uint16`, the version that they lead to.
    """
    form, nbytes = smallest(steps)
    if form is Form.DENSE:
        return Delta(form=form, payload=bits.astype("<u2").view(np.uint8))
    payload = np.empty(nbytes, dtype=np.uint8)
    written = WRITERS[form](steps, payload)
    assert written == nbytes, f"{written} bytes of a {form.name} delta, {nbytes} were counted"
    return Delta(form=form, payload=payload)


def smallest(steps: StepArray) -> tuple[Form, int]:
    """Returns the smallest form of the differences `(numel,) int16`, and its length in bytes."""
    numel = len(steps)
    num_changed, num_wide, num_escaped, gaps_nbytes = _count(steps)
    ulps_nbytes = num_changed + 2 * num_wide
    sizes = {
        Form.SPARSE: ulps_nbytes + gaps_nbytes,
        Form.MASK: ulps_nbytes + (numel + 7) // 8,
        Form.NIBBLE: (numel + 1) // 2 + 2 * num_escaped,
        Form.DENSE: 2 * numel,
    }
    form = min(sizes, key=lambda form: sizes[form])
    return form, sizes[form]


def apply(delta: Delta, bits: BitArray) -> None:
    """Makes the version `bits` the one that a delta leads to.

    Args:
        delta: From the version `bits` on.
        bits: `(numel,) uint16`; overwritten.

    Raises:
        DecodeError: The delta is not one of a slice of this length; `bits` may be anything.
    """
    if delta.form is Form.DENSE:
        is_whole = delta.payload.nbytes == 2 * len(bits)
        if is_whole:
            bits[:] = delta.payload.view("<u2")
    else:
        is_whole = READERS[delta.form](delta.payload, bits)
    if not is_whole:
        raise DecodeError(
            f"{delta.payload.nbytes} bytes are no {delta.form.name} delta of {len(bits)} elements"
        )


def form_of(number: int) -> Form:
    """Returns the form of that number; raises DecodeError if there is none."""
    try:
        return Form(number)
    except ValueError:
        raise DecodeError(f"form of a delta is {number}, must be 0..{len(Form) - 1}") from None


@kernel
def _round(weights: np.ndarray, out: BitArray) -> None:
    for i in range(out.size):
        out[i] = bf16_of(weights[i])


@kernel
def _widen(bits: BitArray, out: np.ndarray) -> None:
    for i in range(bits.size):
        out[i] = uint32(bits[i]) << uint32(16)


@kernel
def _order(bits: np.uint16) -> np.int32:
    value = int32(bits)
    return value if value < int32(0x8000) else int32(0x7FFF) - value


@kernel
def _bits(order: np.int32) -> np.uint16:
    """Returns the bits of an ordered integer, taken modulo 2^16."""
    value = int32(np.int16(order))
    return uint16(value if value >= int32(0) else int32(0x7FFF) - value)


@kernel
def _move(weights: np.ndarray, bits: BitArray, steps: StepArray) -> None:
    for i in range(bits.size):
        new = bf16_of(weights[i])
        steps[i] = np.int16(_order(new) - _order(bits[i]))
        bits[i] = new


@kernel
def _words(steps: StepArray) -> np.ndarray:
    """Returns the elements four at a time: most are 0. Those behind the last four are left out."""
    return steps[: steps.size // WORD * WORD].view(np.uint64)


@kernel
def _count(steps: StepArray) -> tuple[int, int, int, int]:
    """Returns changed elements, those beyond a byte, beyond four bits, and bytes of the gaps."""
    num_changed, num_wide, num_escaped = 0, 0, 0
    for start in range(0, steps.size, BLOCK):  # Counts of 2 bytes, so that many are made at once.
        part = steps[start : start + BLOCK]
        changed, wide, escaped = np.int16(0), np.int16(0), np.int16(0)
        for i in range(part.size):
            step = part[i]
            changed = np.int16(changed + np.int16(step != 0))
            wide = np.int16(wide + np.int16((step > NARROW_MAX) | (step < -NARROW_MAX)))
            escaped = np.int16(escaped + np.int16((step > NIBBLE_MAX) | (step < -NIBBLE_MAX)))
        num_changed += int(changed)
        num_wide += int(wide)
        num_escaped += int(escaped)
    gaps_nbytes = num_changed
    begin = 0
    if 2 * num_changed <= steps.size:  # Else MASK is smaller than SPARSE with any gaps.
        words = _words(steps)
        for word in range(words.size + 1):
            if word < words.size and words[word] == 0:
                continue
            for i in range(word * WORD, min((word + 1) * WORD, steps.size)):
                if steps[i] != 0:
                    if i - begin >= FAR:  # Entries without a change: 3 bytes, and 1 for d.
                        gaps_nbytes += 2 + (i - begin) // (GAP_MAX + 1) * 4
                        gaps_nbytes -= 2 * ((i - begin) % (GAP_MAX + 1) < FAR)
                    begin = i + 1
    return num_changed, num_wide, num_escaped, gaps_nbytes


@kernel
def _write_ulp(step: np.int16, out: ByteArray, at: int) -> int:
    if -NARROW_MAX <= step <= NARROW_MAX:
        out[at] = uint8(step)
        return at + 1
    out[at] = uint8(WIDE)
    return _write_two(uint16(step), out, at + 1)


@kernel
def _write_two(value: np.uint16, out: ByteArray, at: int) -> int:
    out[at] = uint8(value & uint16(0xFF))
    out[at + 1] = uint8(value >> uint16(8))
    return at + 2


@kernel
def _read_two(payload: ByteArray, at: int) -> np.int32:
    return int32(payload[at]) | (int32(payload[at + 1]) << int32(8))


@kernel
def _write_sparse(steps: StepArray, out: ByteArray) -> int:
    at, begin, words = 0, 0, _words(steps)
    for word in range(words.size + 1):
        if word < words.size and words[word] == 0:
            continue
        for i in range(word * WORD, min((word + 1) * WORD, steps.size)):
            if steps[i] != 0:
                gap = i - begin
                while gap > GAP_MAX:
                    out[at] = uint8(FAR)
                    at = _write_two(uint16(GAP_MAX), out, at + 1)
                    at = _write_ulp(np.int16(0), out, at)
                    gap -= GAP_MAX + 1
                if gap >= FAR:
                    out[at] = uint8(FAR)
                    at = _write_two(uint16(gap), out, at + 1)
                else:
                    out[at] = uint8(gap)
                    at += 1
                at = _write_ulp(steps[i], out, at)
                begin = i + 1
    return at


@kernel
def _read_sparse(payload: ByteArray, bits: BitArray) -> bool:
    at, position, end = 0, 0, payload.size
    while at < end:
        gap = int32(payload[at])
        at += 1
        if gap == FAR:
            if at + 2 > end:
                return False
            gap = _read_two(payload, at)
            at += 2
        position = int(position + gap)
        if at >= end or position >= bits.size:
            return False
        step = int32(np.int8(payload[at]))
        at += 1
        if step == -WIDE:
            if at + 2 > end:
                return False
            step = _read_two(payload, at)
            at += 2
        bits[position] = _bits(_order(bits[position]) + step)
        position += 1
    return True


@kernel
def _write_mask(steps: StepArray, out: ByteArray) -> int:
    numel = steps.size
    at = (numel + 7) // 8
    for first in range(0, numel, 8):
        mask = uint32(0)
        for i in range(first, min(first + 8, numel)):
            if steps[i] != 0:
                mask |= uint32(1) << uint32(i - first)
                at = _write_ulp(steps[i], out, at)
        out[first // 8] = uint8(mask)
    return at


@kernel
def _read_mask(payload: ByteArray, bits: BitArray) -> bool:
    numel, end = bits.size, payload.size
    at = (numel + 7) // 8
    if at > end:
        return False
    for i in range(numel):
        if not (payload[i // 8] >> uint8(i % 8)) & uint8(1):
            continue
        if at >= end:
            return False
        step = int32(np.int8(payload[at]))
        at += 1
        if step == -WIDE:
            if at + 2 > end:
                return False
            step = _read_two(payload, at)
            at += 2
        bits[i] = _bits(_order(bits[i]) + step)
    return at == end


@kernel
def _write_nibbles(steps: StepArray, out: ByteArray) -> int:
    at = (steps.size + 1) // 2
    for i in range(steps.size):
        step = int32(steps[i])
        nibble = uint32(step + NIBBLE_MAX)
        if step > NIBBLE_MAX or step < -NIBBLE_MAX:
            nibble = uint32(ESCAPED)
            at = _write_two(uint16(steps[i]), out, at)
        if i % 2:
            out[i // 2] |= uint8(nibble << uint32(4))
        else:
            out[i // 2] = uint8(nibble)
    return at


@kernel
def _read_nibbles(payload: ByteArray, bits: BitArray) -> bool:
    numel, end = bits.size, payload.size
    at = (numel + 1) // 2
    if at > end:
        return False
    for i in range(numel):
        nibble = int32((payload[i // 2] >> uint8(4 * (i % 2))) & uint8(15))
        step = nibble - int32(NIBBLE_MAX)
        if nibble == ESCAPED:
            if at + 2 > end:
                return False
            step = _read_two(payload, at)
            at += 2
        bits[i] = _bits(_order(bits[i]) + step)
    return at == end


WRITERS = {Form.SPARSE: _write_sparse, Form.MASK: _write_mask, Form.NIBBLE: _write_nibbles}
READERS = {Form.SPARSE: _read_sparse, Form.MASK: _read_mask, Form.NIBBLE: _read_nibbles}
