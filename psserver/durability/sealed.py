"""Files of a journal, each with a check that it is whole and belongs to that journal.

    JSON       {"sha256": of the rest, "meta": ...}
    bytes      SHA-256, 32 bytes, and the bytes
    weights    the segment that workers map (pscore/memory/segment.py), filled up to whole
               pages; then magic and format, 8 bytes; seal, 8; length of the segment, int64; and the
               versions of all buffers once more, int64 (num_slices, 2)

Small files are hashed. Weights change with every update, at the speed of memory, so they are not:
the seal ties the file to its job, its length shows that nothing is cut off, and the versions at its
start and at its end must be those of the journal's records. So a file
that is missing, empty, cut, of another job or of another time is refused, and so is a copy that was
made while updates continued. Bits that flip within the numbers are noticed where a slice was quiet
(`SliceJournal.seal`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pscore.memory.segment import BUFFERS, PAGE, Segment, WeightsMap
from pscore.types import IntArray

Meta = dict[str, Any]
MAGIC = b"PLWEIGH1"
WORD = 8
HEAD_WORDS = 3  # Magic, seal, length.


class WeightsFile:
    """The weights of one table in a file."""

    def __init__(
        self, path: Path, nbytes: int, num_slices: int, seal: int, *, is_new: bool
    ) -> None:
        """Makes the file, or opens one that is there.

        Args:
            path: The file; a new one replaces a former one.
            num_slices: Number of slices of the table on this shard.
            is_new: Whether the file is made.

        Raises:
            OSError: There is no room for it, or it is not there.
            ValueError: It is not whole, or of another journal.
        """
        self._begin = -(-nbytes // PAGE) * PAGE
        length = WORD * (HEAD_WORDS + BUFFERS * num_slices)
        size = self._begin + length
        flags = os.O_RDWR | os.O_CLOEXEC
        if is_new:
            path.unlink(missing_ok=True)
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(path, flags, 0o600)
        try:
            if is_new:
                os.posix_fallocate(fd, 0, size)
            elif (found := os.fstat(fd).st_size) != size:
                raise ValueError(f"{path} has {found} bytes, {size} wanted")
            self._tail = mmap.mmap(fd, length, offset=self._begin)
            words = np.frombuffer(self._tail, dtype=np.int64)
            wanted = np.array([int.from_bytes(MAGIC, "little"), seal, nbytes], dtype=np.int64)
            if is_new:
                words[:HEAD_WORDS] = wanted
                words[HEAD_WORDS:] = -1
            elif words[:HEAD_WORDS].tolist() != wanted.tolist():
                raise ValueError(f"{path} is not the weights file of this journal")
            self._stamps: IntArray = words[HEAD_WORDS:].reshape(num_slices, BUFFERS)
            self.segment = Segment(fd, nbytes)  # The part that workers map.
        except (OSError, ValueError):
            os.close(fd)
            raise

    def stamps(self, position: int) -> IntArray:
        """Returns the versions at the end of the file, `(2,) int64`, of the slice at a position."""
        stamps: IntArray = self._stamps[position]
        return stamps


def tail_spans(layout: WeightsMap, index: int) -> list[tuple[int, int]]:
    """Returns offset and bytes of the tail's head, and of a slice's versions in the tail."""
    begin = -(-layout.nbytes // PAGE) * PAGE
    stamps = begin + WORD * (HEAD_WORDS + BUFFERS * layout.position(index))
    return [(begin, WORD * HEAD_WORDS), (stamps, WORD * BUFFERS)]


def write_json(path: Path, meta: Mapping[str, object]) -> None:
    """Writes a JSON object with its hash, in one piece.

    Raises:
        OSError: The disk is full; the former file is still there.
    """
    text = json.dumps(meta)
    _replace(path, f'{{"sha256": "{_hash(text.encode())}", "meta": {text}}}\n'.encode())


def read_json(path: Path) -> Meta:
    """Returns what `write_json` wrote.

    Raises:
        OSError: It is not there.
        ValueError: It is damaged, or of another format.
    """
    try:
        whole = json.loads(path.read_bytes())
        meta = whole["meta"]
        if not isinstance(meta, dict) or whole["sha256"] != _hash(json.dumps(meta).encode()):
            raise ValueError(f"{path} does not match the hash that it contains")
    except (TypeError, KeyError, RecursionError) as problem:
        raise ValueError(f"{path} is not a JSON object with a hash") from problem
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    return meta


def write_bytes(path: Path, data: bytes) -> None:
    """Writes bytes with their hash, in one piece.

    Raises:
        OSError: The disk is full; the former file is still there.
    """
    _replace(path, hashlib.sha256(data).digest() + data)


def read_bytes(path: Path) -> bytes:
    """Returns what `write_bytes` wrote.

    Raises:
        OSError: It is not there.
        ValueError: It is damaged.
    """
    whole = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(whole[size:]).digest() != whole[:size]:
        raise ValueError(f"{path} is damaged: it does not match the hash that it contains")
    return whole[size:]


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
