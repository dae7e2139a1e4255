"""Loops of a worker over the ids of a batch: the distinct ones, their slices, sums of gradients."""

from __future__ import annotations

import numpy as np

from pscore.memory.kernels import kernel, read_only
from pscore.rows.hashing import IdArray, mask_of, mix
from pscore.rows.partition import BUCKET_BITS
from pscore.types import FloatArray, IntArray

DIGIT_BITS = 11  # A pass of the sort orders by so many bits.
DIGITS = 1 << DIGIT_BITS
LOW = np.uint64(DIGITS - 1)
NOT_BUCKET, BUCKET = np.uint64(64 - BUCKET_BITS), np.uint64(BUCKET_BITS)


def distinct(batch: IdArray, padding: int | None) -> tuple[IdArray, IntArray, IntArray]:
    """Returns the distinct ids of a batch, and where each id of the batch is among them.

    Args:
        batch: `(n,) uint64`.
        padding: An id that is left out, as int64; None: there is none.

    Returns:
        The ids, `(u,) uint64`, ascending; how often each occurs, `(u,) int64`; and the number of
        each of the batch, `(n,) int64`: that of the padding is u.
    """
    ids, counts = np.empty(len(batch), np.uint64), np.empty(len(batch), np.int64)
    places = np.empty(len(batch), np.int64)
    left_out = np.uint64(0 if padding is None else padding & 0xFFFFFFFFFFFFFFFF)
    count = _distinct(read_only(batch), left_out, padding is not None, ids, counts, places)
    return ids[:count], counts[:count], places


def divide(ids: IdArray, seed: int, num_slices: int) -> tuple[IntArray, list[int]]:
    """Returns the positions of ids by slice, and where those of each slice begin among them.

    Args:
        ids: `(n,) uint64`.

    Returns:
        `(n,) int64`, those of each slice in the order of the ids; and `num_slices + 1` bounds.
    """
    order, edges = np.empty(len(ids), np.int64), np.zeros(num_slices + 1, np.int64)
    _divide(read_only(ids), mask_of(seed), np.uint64(num_slices), order, edges)
    return order, edges.tolist()


def add_rows(rows: FloatArray, places: IntArray, out: FloatArray) -> None:
    """Adds each row to that at its place, in their order; rows for the last place are left out.

    Args:
        rows: `(n, dim) float32`.
        places: `(n,) int64`.
        out: `(u + 1, dim) float32`.
    """
    _add_rows(read_only(rows.reshape(-1)), read_only(places), out.shape[1], out.reshape(-1))


def warm_up() -> None:
    """Compiles the loops."""
    ids, _, places = distinct(np.zeros(1, np.uint64), None)
    divide(ids, 0, 1)
    add_rows(np.zeros((1, 1), np.float32), places, np.zeros((2, 1), np.float32))


@kernel
def _sort(batch: IdArray) -> tuple[IdArray, IntArray]:
    """Returns ids in order and the position of each, by the digits in which some differ."""
    num = len(batch)
    keys, other_keys = np.empty(num, np.uint64), np.empty(num, np.uint64)
    order, other_order = np.empty(num, np.int64), np.empty(num, np.int64)
    differ = np.uint64(0)
    for i in range(num):
        keys[i], order[i] = batch[i], i
        differ |= batch[i] ^ batch[0]
    heads = np.empty(DIGITS, np.int64)
    for digit in range(0, 64, DIGIT_BITS):
        shift = np.uint64(digit)
        if (differ >> shift) & LOW == 0:
            continue
        heads[:] = 0
        for i in range(num):
            heads[np.int64((keys[i] >> shift) & LOW)] += 1
        total = 0
        for k in range(DIGITS):
            total, heads[k] = total + heads[k], total
        for i in range(num):
            own = np.int64((keys[i] >> shift) & LOW)
            other_keys[heads[own]], other_order[heads[own]] = keys[i], order[i]
            heads[own] += 1
        keys, other_keys = other_keys, keys
        order, other_order = other_order, order
    return keys, order


@kernel
def _distinct(
    batch: IdArray,
    padding: np.uint64,
    has_padding: bool,
    ids: IdArray,
    counts: IntArray,
    places: IntArray,
) -> int:
    """Writes each id once, its count, and the number of each of the batch; returns how many."""
    num = len(batch)
    keys, order = _sort(batch)
    count = 0
    for i in range(num):
        if has_padding and keys[i] == padding:
            continue
        if count == 0 or ids[count - 1] != keys[i]:
            ids[count], counts[count] = keys[i], 0
            count += 1
        counts[count - 1] += 1
        places[order[i]] = count - 1
    if has_padding:
        for i in range(num):
            if batch[i] == padding:
                places[i] = count
    return count


@kernel
def _divide(
    ids: IdArray, mask: np.uint64, num_slices: np.uint64, order: IntArray, edges: IntArray
) -> None:
    owners = np.empty(len(ids), np.int32)
    for i in range(len(ids)):
        owner = ((mix(ids[i] ^ mask) >> NOT_BUCKET) * num_slices) >> BUCKET
        owners[i] = np.int32(owner)
        edges[owners[i] + 1] += 1
    for k in range(1, len(edges)):
        edges[k] += edges[k - 1]
    heads = edges.copy()
    for i in range(len(ids)):
        order[heads[owners[i]]] = i
        heads[owners[i]] += 1


@kernel
def _add_rows(rows: FloatArray, places: IntArray, dim: int, out: FloatArray) -> None:
    last = len(out) // dim - 1
    for i in range(len(places)):
        if places[i] != last:
            added = rows[i * dim : (i + 1) * dim]
            total = out[places[i] * dim : (places[i] + 1) * dim]
            for j in range(len(added)):
                total[j] += added[j]
