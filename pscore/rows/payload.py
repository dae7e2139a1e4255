"""Payloads of row slices, little-endian; T is the number of row tables, n that of all ids.

    pull, request     since int64; counts uint64 [T]; ids uint64 [n]
    pull, since -1    values float32, rows in the order of the request
    pull, since >= 0  one bit a row, bit k % 8 of byte k / 8, filled up to 8 bytes: it may have
                      changed since that version; then the values of these rows
    push              counts uint64 [T]; ids uint64 [n]; values float32; occurrences uint16 [n]

The ids of each table are strictly ascending as unsigned numbers. A push of no bytes has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pscore.errors import DecodeError
from pscore.memory.kernels import all_finite, kernel, read_only
from pscore.rows.hashing import IdArray, mask_of, mix
from pscore.rows.partition import BUCKET_BITS
from pscore.types import ByteArray, FloatArray, IntArray

CountArray = npt.NDArray[np.uint16]
WORD = 8
ALL = -1  # `since` of a pull that wants every row.
OCCURRENCES_MAX = (1 << 16) - 1
BITS = np.uint64(64 - BUCKET_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfTable:
    """Rows of one row table in a payload."""

    ids: IdArray  # (n,), strictly ascending.
    values: FloatArray  # (n * width,)
    occurrences: CountArray  # (n,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """The rows that a pull asks for."""

    since: int  # -1: every row.
    ids: tuple[IdArray, ...]  # By table.


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """The ids of one row table that a slice owns."""

    name: str
    num_rows: int  # Ids are below it; 0: there is no bound.
    seed: int
    start: int  # First bucket.
    stop: int  # That behind the last one.


# ----- both sides


def encode_pull(ids: Sequence[IdArray], since: int = ALL) -> list[memoryview]:
    """Returns the parts of a request for rows, by table."""
    head = np.array([since, *(len(each) for each in ids)], np.int64)
    return [_bytes_of(head), *(_bytes_of(each) for each in ids)]


def encode_push(
    ids: Sequence[IdArray], values: Sequence[FloatArray], occurrences: Sequence[CountArray]
) -> list[memoryview]:
    """Returns the parts of a push, by table; of a push without rows no parts."""
    if not any(len(each) for each in ids):
        return []
    head = np.array([len(each) for each in ids], np.int64)
    parts = [_bytes_of(head)]
    parts += [_bytes_of(array) for array in ids]
    parts += [_bytes_of(array) for array in values]
    parts += [_bytes_of(array) for array in occurrences]
    return parts


def encode_changed(is_changed: npt.NDArray[np.bool_]) -> ByteArray:
    """Returns the bits of an answer: one for each row of the request."""
    bits = np.packbits(is_changed, bitorder="little")
    out = np.zeros(-(-len(bits) // WORD) * WORD, np.uint8)
    out[: len(bits)] = bits
    return out


def decode_changed(payload: ByteArray, num_rows: int) -> tuple[npt.NDArray[np.bool_], ByteArray]:
    """Returns which rows of a request an answer brings, and the values of these.

    Raises:
        DecodeError: The answer is too short.
    """
    nbytes = -(-num_rows // (8 * WORD)) * WORD
    if payload.nbytes < nbytes:
        raise DecodeError(f"answer of {payload.nbytes} bytes for {num_rows} rows")
    bits = np.unpackbits(payload[:nbytes], count=num_rows, bitorder="little")
    return bits.astype(np.bool_), payload[nbytes:]


def decode_values(
    payload: ByteArray, since: int, dims: Sequence[int], out: Sequence[FloatArray]
) -> None:
    """Writes the rows of an answer into arrays; rows that have not changed stay as they are.

    Args:
        payload: `(nbytes,) uint8`.
        since: That of the request.
        out: `(n, dim) float32` by table, the rows of the request.

    Raises:
        DecodeError: The answer has another length.
    """
    is_here = np.ones(sum(len(rows) for rows in out), np.bool_)
    if since != ALL:
        is_here, payload = decode_changed(payload, len(is_here))
    begin, offset = 0, 0
    chosen = []
    for rows in out:
        chosen.append(np.flatnonzero(is_here[begin : begin + len(rows)]))
        begin += len(rows)
    wanted = 4 * sum(len(rows) * dim for rows, dim in zip(chosen, dims, strict=True))
    if payload.nbytes != wanted:
        raise DecodeError(f"rows of {payload.nbytes} bytes, {wanted} wanted")
    for places, dim, target in zip(chosen, dims, out, strict=True):
        nbytes = 4 * dim * len(places)
        values = np.frombuffer(payload[offset : offset + nbytes].data, "<f4").reshape(-1, dim)
        target[places if len(places) < len(target) else slice(None)] = values
        offset += nbytes


# ----- the shard's side


def decode_pull(payload: ByteArray, owned: Sequence[Owned]) -> RowRequest:
    """Returns the rows that a pull asks for.

    Raises:
        DecodeError: The payload has another length, or an id is not in order, range or slice.
    """
    head = WORD * (1 + len(owned))
    if payload.nbytes < head:
        raise DecodeError(f"request of {payload.nbytes} bytes for rows, at least {head} wanted")
    payload = aligned(payload)
    since = int(payload[:WORD].view("<i8")[0])
    if since < ALL:
        raise DecodeError(f"request for rows since version {since}")
    counts = payload[WORD:head].view("<u8").tolist()
    if payload.nbytes != head + WORD * sum(counts):
        raise DecodeError(f"request of {payload.nbytes} bytes for {sum(counts)} rows")
    ids = payload[head:].view("<u8")
    stops = np.cumsum(counts).tolist()
    parts = tuple(ids[stop - count : stop] for count, stop in zip(counts, stops, strict=True))
    for part, table in zip(parts, owned, strict=True):
        require_owned(part, table)
    return RowRequest(since=since, ids=parts)


def decode_push(
    payload: ByteArray, owned: Sequence[Owned], widths: Sequence[int]
) -> tuple[RowsOfTable, ...]:
    """Returns the rows of a push, by table, as views.

    Args:
        payload: `(nbytes,) uint8`; without bytes there are no rows.
        owned: The ids that the slice owns, by table.

    Raises:
        DecodeError: The payload has another length, an id is not in order, range or slice, or a
            number is not finite.
    """
    found = split_push(payload, widths)
    for rows, table in zip(found, owned, strict=True):
        require_owned(rows.ids, table)
        if not all_finite(rows.values):
            raise DecodeError(f"rows of row table {table.name!r} with a number that is not finite")
    return found


def split_push(payload: ByteArray, widths: Sequence[int]) -> tuple[RowsOfTable, ...]:
    """Returns the rows of a push as `decode_push`, without a look at ids and values.

    Raises:
        DecodeError: The payload has another length.
    """
    if not payload.nbytes:
        payload = np.zeros(WORD * len(widths), np.uint8)
    counts, numel = _counts_of(payload, widths)
    payload = aligned(payload)
    head = WORD * len(widths)
    values_start = head + WORD * sum(counts)
    values_stop = values_start + 4 * numel
    ids = payload[head:values_start].view("<u8")
    values = payload[values_start:values_stop].view("<f4")
    occurrences = payload[values_stop:].view("<u2")
    found, begin, offset = [], 0, 0
    for count, width in zip(counts, widths, strict=True):
        rows = RowsOfTable(
            ids=ids[begin : begin + count],
            values=values[offset : offset + count * width],
            occurrences=occurrences[begin : begin + count],
        )
        found.append(rows)
        begin, offset = begin + count, offset + count * width
    return tuple(found)


def fits(payload: ByteArray, widths: Sequence[int]) -> bool:
    """Returns whether a push has the length of rows of these widths."""
    try:
        _counts_of(payload, widths)
    except DecodeError:
        return not payload.nbytes
    return True


def aligned(payload: ByteArray) -> ByteArray:
    """Returns a payload at a whole number of words: the same, or a copy."""
    return payload if payload.ctypes.data % WORD == 0 else payload.copy()


def _counts_of(payload: ByteArray, widths: Sequence[int]) -> tuple[list[int], int]:
    """Returns the rows of each table, and the numbers of all of them."""
    head = WORD * len(widths)
    if payload.nbytes < head:
        raise DecodeError(f"push of {payload.nbytes} bytes of rows, at least {head} wanted")
    counts = np.frombuffer(payload[:head].data, "<u8").tolist()
    numel = sum(count * width for count, width in zip(counts, widths, strict=True))
    wanted = head + (WORD + 2) * sum(counts) + 4 * numel
    if payload.nbytes != wanted:
        raise DecodeError(f"push of {payload.nbytes} bytes with {sum(counts)} rows, not {wanted}")
    return counts, numel


def require_owned(ids: IdArray, table: Owned) -> None:
    """Raises DecodeError for ids that are not in order, in the table and in the slice."""
    wrong = _first_wrong(
        read_only(ids),
        np.uint64(table.num_rows),
        mask_of(table.seed),
        np.uint64(table.start),
        np.uint64(table.stop),
    )
    if wrong >= 0:
        raise DecodeError(
            f"id {int(ids[wrong])} of row table {table.name!r} is not above the one before it, "
            "beyond the table's rows, or of another slice"
        )


@kernel
def _first_wrong(
    ids: IdArray, num_rows: np.uint64, mask: np.uint64, start: np.uint64, stop: np.uint64
) -> int:
    for i in range(len(ids)):
        bucket = mix(ids[i] ^ mask) >> BITS
        is_below = num_rows == np.uint64(0) or ids[i] < num_rows
        is_after = i == 0 or ids[i - 1] < ids[i]
        if not (is_below and is_after and start <= bucket < stop):
            return i
    return -1


def _bytes_of(array: npt.NDArray[np.generic] | IntArray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
