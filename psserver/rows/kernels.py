"""Numba loops of row slices: an index by open addressing, rows in and out, and sums of pushes.

A slab is an array of places of one length; a place holds a header and a row (pscore/rows). The
index maps ids to places: a power of two of positions with linear probing, at most half of them in
use. An id's position is that of the low bits of its hash with the index's own salt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from pscore.memory.kernels import floats_at, inlined, kernel, prefetch
from pscore.rows.hashing import IdArray, mix
from pscore.rows.init import Init, fill
from pscore.rows.optimizers import FLAGS_WORD, FRESH, HEADER_WORDS, USED, VERSION_WORD
from pscore.types import ByteArray, FloatArray, IntArray

WordArray = npt.NDArray[np.uint32]
PlaceArray = npt.NDArray[np.int32]  # A place and 1; 0: none.
AHEAD = 16  # Turns of a loop: so many rows or positions come from memory at the same time.
LINE, FETCHED_NBYTES = 64, 256
GROUP = 8  # Places that share one note of their newest change.
NO_VERSION = np.uint32((1 << 32) - 1)


class SlabArrays(NamedTuple):
    """The memory of a slab, the same bytes in three types."""

    floats: FloatArray  # As numbers.
    words: WordArray  # As words of 32 bits.
    longs: IdArray  # As words of 64 bits.
    stride: int  # Words of a place.


class CopiedRows(NamedTuple):
    """The copy of rows of a slab, as far as it has come."""

    since: int  # Only rows of a later version are copied.
    is_copied: ByteArray  # `(num_places,) uint8`, the rows that are not to be copied (any more).
    ids: IdArray  # The ids of the rows.
    values: FloatArray  # The rows with their state.
    versions: IntArray  # The version of each.
    num_rows: IntArray  # `(1,) int64`, the rows that there are.


class OldestRows(NamedTuple):
    """Rows by bucket, those of a bucket in the order in which they go."""

    heads: IntArray  # `(num_buckets,) int64`, the first row of each bucket; moves on.
    stops: IntArray  # `(num_buckets,) int64`, that behind the last one.
    places: IntArray  # The place of each row.
    versions: IntArray  # The version of each when it was found.


@inlined
def _copy(source: Any, out: Any) -> None:
    """Copies a row; as arrays of their own, so that the loop takes several numbers at once."""
    for j in range(len(out)):
        out[j] = source[j]


@inlined
def _fetch(address: Any, place: Any, stride: Any) -> None:
    """Fetches the first lines of a place, which a loop copies some turns later."""
    if place >= 0:
        begin = address + 4 * place * stride
        for offset in range(0, min(4 * stride, FETCHED_NBYTES), LINE):
            prefetch(begin + offset)


@inlined
def _fetch_position(keys: Any, places: Any, at: Any) -> None:
    """Fetches a position of the index, which a loop reads some turns later."""
    prefetch(keys.ctypes.data + 8 * np.int64(at))
    prefetch(places.ctypes.data + 4 * np.int64(at))


@kernel
def find(keys: IdArray, places: PlaceArray, salt: np.uint64, ids: IdArray, out: IntArray) -> int:
    """Writes the place of each id, or -1; returns how many have none."""
    last = np.uint64(len(keys) - 1)
    absent = 0
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            _fetch_position(keys, places, mix(ids[i + AHEAD] ^ salt) & last)
        at = mix(ids[i] ^ salt) & last
        while places[at] != 0 and keys[at] != ids[i]:
            at = (at + np.uint64(1)) & last
        out[i] = places[at] - 1
        absent += places[at] == 0
    return absent


@kernel
def put(keys: IdArray, places: PlaceArray, salt: np.uint64, ids: IdArray, new: IntArray) -> None:
    """Maps ids that have no place to places."""
    last = np.uint64(len(keys) - 1)
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            _fetch_position(keys, places, mix(ids[i + AHEAD] ^ salt) & last)
        at = mix(ids[i] ^ salt) & last
        while places[at] != 0:
            at = (at + np.uint64(1)) & last
        keys[at] = ids[i]
        places[at] = new[i] + 1


@kernel
def remove(keys: IdArray, places: PlaceArray, salt: np.uint64, ids: IdArray) -> None:
    """Removes ids that have places; those behind each move forward, so no gap parts a chain."""
    last = np.uint64(len(keys) - 1)
    one = np.uint64(1)
    for i in range(len(ids)):
        hole = mix(ids[i] ^ salt) & last
        while keys[hole] != ids[i] or places[hole] == 0:
            hole = (hole + one) & last
        at = (hole + one) & last
        while places[at] != 0:
            home = mix(keys[at] ^ salt) & last
            if ((at - home) & last) >= ((at - hole) & last):
                keys[hole], places[hole] = keys[at], places[at]
                hole = at
            at = (at + one) & last
        places[hole] = 0


@kernel
def probe_max(keys: IdArray, places: PlaceArray, salt: np.uint64) -> int:
    """Returns the longest way from an id's own position to its place in the index."""
    last = np.uint64(len(keys) - 1)
    longest = np.int64(0)
    for at in range(len(keys)):
        if places[at] != 0:
            home = mix(keys[at] ^ salt) & last
            steps = np.int64((np.uint64(at) - home) & last) + 1
            if steps > longest:
                longest = steps
    return longest  # type: ignore[return-value]  # An int64.


@kernel
def gather(
    floats: FloatArray,
    stride: int,
    dim: int,
    width: int,
    places: IntArray,
    ids: IdArray,
    init: Init,
    out: FloatArray,
) -> None:
    """Copies `width` numbers of each place; where there is none, the first values of the id."""
    for i in range(len(places)):
        if i + AHEAD < len(places):
            _fetch(floats.ctypes.data, places[i + AHEAD], stride)
        if places[i] >= 0:
            base = places[i] * stride + HEADER_WORDS
            _copy(floats[base : base + width], out[i * width : (i + 1) * width])
    for i in range(len(places)):
        if places[i] < 0:
            fill(out, i * width, dim, ids[i], init)
            out[i * width + dim : (i + 1) * width] = np.float32(0.0)


@kernel
def versions_of(words: WordArray, stride: int, places: IntArray, out: IntArray) -> None:
    """Writes the version of each place, of an update; -1 where there is none."""
    for i in range(len(places)):
        out[i] = -1 if places[i] < 0 else words[places[i] * stride + VERSION_WORD]


@kernel
def ages(words: WordArray, stride: int, out: IntArray) -> None:
    """Writes the version of each place below the length of `out`; the largest for a free one."""
    for place in range(len(out)):
        out[place] = words[place * stride + VERSION_WORD]


@kernel
def note_change(newest: WordArray, places: IntArray, version: np.uint32) -> None:
    """Notes the version at which places have changed, the newest so far, by group of places."""
    for i in range(len(places)):
        newest[places[i] // GROUP] = version


@kernel
def take_oldest(
    slab: SlabArrays,
    found: OldestRows,
    surplus: IntArray,
    version: int,
    ids: IdArray,
    out: IntArray,
) -> int:
    """Writes the places of the oldest rows of each bucket that have not changed since a look.

    Args:
        found: The rows of the look.
        surplus: `(num_buckets,) int64`, rows wanted of each bucket; falls by those found.
        version: All rows up to this one are wanted.
        ids: Those of rows that are not wanted, ascending.
        out: Receives places; returns their number.
    """
    heads, stops, places, versions = found
    words, longs, stride = slab.words, slab.longs, slab.stride
    count = 0
    for bucket in range(len(heads)):
        at = heads[bucket]
        while at < stops[bucket] and (versions[at] <= version or surplus[bucket] > 0):
            base = places[at] * stride
            if words[base + VERSION_WORD] == versions[at]:
                own = longs[base // 2]
                low, high = 0, len(ids)
                while low < high:
                    middle = (low + high) // 2
                    if ids[middle] < own:
                        low = middle + 1
                    else:
                        high = middle
                if low == len(ids) or ids[low] != own:
                    out[count] = places[at]
                    count += 1
                    surplus[bucket] -= 1
            at += 1
        heads[bucket] = at
    return count


@kernel
def occupy(longs: IdArray, words: WordArray, stride: int, places: IntArray, ids: IdArray) -> None:
    """Gives places to ids; their rows are not written yet."""
    for i in range(len(places)):
        longs[places[i] * stride // 2] = ids[i]
        words[places[i] * stride + VERSION_WORD] = np.uint32(0)
        words[places[i] * stride + FLAGS_WORD] = USED


@kernel
def vacate(words: WordArray, stride: int, places: IntArray) -> None:
    """Marks places as free; their version is that of no row."""
    for i in range(len(places)):
        words[places[i] * stride + VERSION_WORD] = NO_VERSION
        words[places[i] * stride + FLAGS_WORD] = np.uint32(0)


@kernel
def load(
    floats: FloatArray,
    words: WordArray,
    stride: int,
    places: IntArray,
    values: FloatArray,
    width: int,
    versions: IntArray,
    flags: np.uint32,
) -> None:
    """Sets the first `width` numbers of places, and their version and flags."""
    for i in range(len(places)):
        base = places[i] * stride + HEADER_WORDS
        _copy(values[i * width : (i + 1) * width], floats[base : base + width])
        words[base - HEADER_WORDS + VERSION_WORD] = np.uint32(versions[i])
        words[base - HEADER_WORDS + FLAGS_WORD] = flags


@kernel
def is_fresh(words: WordArray, stride: int, places: IntArray, out: npt.NDArray[np.uint8]) -> None:
    """Adds 2 to `out` for each place that has weights, and no state yet."""
    for i in range(len(places)):
        if words[places[i] * stride + FLAGS_WORD] & FRESH:
            out[i] = 2


@kernel
def save(words: WordArray, stride: int, places: IntArray, out: WordArray) -> None:
    """Copies whole places, one behind the other."""
    for i in range(len(places)):
        if i + AHEAD < len(places):
            _fetch(words.ctypes.data, places[i + AHEAD], stride)
        base = places[i] * stride
        _copy(words[base : base + stride], out[i * stride : (i + 1) * stride])


@kernel
def bring_back(words: WordArray, stride: int, places: IntArray, saved: WordArray) -> None:
    """Copies whole places back that `save` has copied."""
    for i in range(len(places)):
        base = places[i] * stride
        _copy(saved[i * stride : (i + 1) * stride], words[base : base + stride])


@inlined
def _copy_row(slab: Any, place: Any, copied: Any) -> None:
    """Copies a row with its id and version behind the others."""
    count = copied.num_rows[0]
    base, width = place * slab.stride, len(copied.values) // max(1, len(copied.ids))
    copied.ids[count] = slab.longs[base // 2]
    copied.versions[count] = slab.words[base + VERSION_WORD]
    begin = base + HEADER_WORDS
    _copy(slab.floats[begin : begin + width], copied.values[count * width : (count + 1) * width])
    copied.num_rows[0] = count + 1


@kernel
def copy_range(
    slab: SlabArrays, newest: WordArray, start: int, stop: int, copied: CopiedRows
) -> None:
    """Copies the rows from place `start` to before `stop` that are not copied yet.

    Args:
        newest: By group of places: the newest change.
        stop: The place behind the last one.
    """
    for place in range(start, stop):
        if copied.since >= 0 and newest[place // GROUP] <= copied.since:
            continue
        base = place * slab.stride
        is_used = slab.words[base + FLAGS_WORD] & USED
        is_new = slab.words[base + VERSION_WORD] > copied.since
        if is_used and not copied.is_copied[place] and is_new:
            _copy_row(slab, place, copied)


@kernel
def copy_places(slab: SlabArrays, places: IntArray, start: int, copied: CopiedRows) -> None:
    """Copies the rows of places from `start` on that are not copied yet, and notes that they are.

    The arguments are those of `copy_range`.
    """
    for i in range(len(places)):
        place = places[i]
        if start <= place < len(copied.is_copied) and not copied.is_copied[place]:
            copied.is_copied[place] = 1
            if slab.words[place * slab.stride + VERSION_WORD] > copied.since:
                _copy_row(slab, place, copied)


@kernel
def scan(
    longs: IdArray, words: WordArray, stride: int, high: int, ids: IdArray, out: IntArray
) -> int:
    """Writes id and place of each place in use below `high`; returns their number."""
    count = 0
    for place in range(high):
        prefetch(words.ctypes.data + 4 * (place + AHEAD) * stride)
        if words[place * stride + FLAGS_WORD] & USED:
            ids[count] = longs[place * stride // 2]
            out[count] = place
            count += 1
    return count


@kernel
def merge(ids: IdArray, starts: IntArray, union: IdArray, at: IntArray) -> int:
    """Merges ascending lists of ids.

    Args:
        ids: `(n,) uint64`, the lists one behind the other.
        starts: `(k + 1,) int64`, where each begins, and their end.
        union: `(n,) uint64`, receives each id once, in order.
        at: `(n,) int64`, receives the position of each of `ids` in `union`.

    Returns:
        The number of different ids.
    """
    heads = starts[:-1].copy()
    count = 0
    while True:
        is_found = False
        least = np.uint64(0)
        for k in range(len(heads)):
            if heads[k] < starts[k + 1] and (not is_found or ids[heads[k]] < least):
                is_found, least = True, ids[heads[k]]
        if not is_found:
            return count
        for k in range(len(heads)):
            if heads[k] < starts[k + 1] and ids[heads[k]] == least:
                at[heads[k]] = count
                heads[k] += 1
        union[count] = least
        count += 1


@kernel
def add_up(
    addresses: IntArray, starts: IntArray, at: IntArray, scales: FloatArray, dim: int, out: Any
) -> None:
    """Adds rows of pushes, in the order of the pushes, each times its scale.

    Args:
        addresses: `(k,) int64`, of the values of each push.
        scales: `(k,) float32`.
        out: `(num_ids * dim,) float32`.
    """
    is_begun = np.zeros(len(out) // dim, np.bool_)
    for k in range(len(addresses)):
        num = starts[k + 1] - starts[k]
        values = carray(floats_at(addresses[k]), num * dim)
        scale = scales[k]
        for i in range(num):
            row = at[starts[k] + i]
            total, added = out[row * dim : (row + 1) * dim], values[i * dim : (i + 1) * dim]
            if is_begun[row]:
                for j in range(len(total)):
                    total[j] += added[j] * scale
            else:
                is_begun[row] = True
                for j in range(len(total)):
                    total[j] = added[j] * scale
