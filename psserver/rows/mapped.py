"""Memory of row slices in files of the job's journal, or on the heap without one.

A file is as long as its declared maximum from the start, and mapped once; disk space is reserved as
it comes into use, so a full disk raises an error at the reservation and no SIGBUS at a write.

    offset 0     magic and format, 8 bytes; seal of the journal, int64; length, int64; words of the
                 owner, int64
    offset 4096  the memory
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from pscore.types import ByteArray, IntArray

MAGIC = b"PLROWS01"
PAGE = 4096
GROWTH_NBYTES = 1 << 20  # Smallest growth of a file, and its unit.
BLOCK_NBYTES = 512  # Unit of `st_blocks`, on every file system.
NUM_WORDS = 8  # Words of the owner.


class Mapped:
    """Memory of one slab or undo area."""

    def __init__(
        self, nbytes: int, path: Path | None = None, seal: int = 0, *, is_new: bool = True
    ) -> None:
        """Makes the memory, or opens that of a killed process.

        Args:
            nbytes: The most bytes that it can have.
            path: The file; None: on the heap.
            seal: Number of the job's journal.
            is_new: Whether the file is made again if a killed process has made it.

        Raises:
            OSError: The file cannot be made, or is missing.
            ValueError: It is not whole, or of another journal.
        """
        self._fd = -1
        self._reserved = nbytes
        self._lock = threading.Lock()  # Lock of `_reserved`.
        if path is None:
            self._map = mmap.mmap(-1, max(nbytes, 1))  # Pages come when they are used.
            self.data: ByteArray = np.frombuffer(self._map, np.uint8, count=nbytes)
            self.words: IntArray = np.zeros(NUM_WORDS, np.int64)
            return
        made = os.O_CREAT | os.O_TRUNC if is_new else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | made, 0o600)
        wanted = np.array([int.from_bytes(MAGIC, "little"), seal, nbytes], np.int64)
        try:
            if is_new:
                os.posix_fallocate(self._fd, 0, PAGE)
                os.ftruncate(self._fd, PAGE + nbytes)
            elif os.fstat(self._fd).st_size != PAGE + nbytes:
                raise ValueError(f"{path} has another length than its table needs")
            self._map = mmap.mmap(self._fd, PAGE + nbytes)
            head = np.frombuffer(self._map, np.int64, count=len(wanted) + NUM_WORDS)
            if is_new:
                head[: len(wanted)] = wanted
            elif head[: len(wanted)].tolist() != wanted.tolist():
                raise ValueError(f"{path} is not of this journal")
        except (OSError, ValueError):
            self.close()
            raise
        self.words = head[len(wanted) :]  # `(8,) int64`, words of the owner, zeros at first.
        # `(nbytes,) uint8`, zeros at first.
        self.data = np.frombuffer(self._map, np.uint8, count=nbytes, offset=PAGE)
        self._reserved = 0 if is_new else self._blocks_nbytes()

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the first `nbytes` may be written; any thread may call it.

        Raises:
            OSError: The disk is full.
        """
        with self._lock:
            if nbytes <= self._reserved:
                return
            wanted = max(nbytes, self._reserved + self._reserved // 4)  # In few steps.
            wanted = min(len(self.data), -(-wanted // GROWTH_NBYTES) * GROWTH_NBYTES)
            os.posix_fallocate(self._fd, PAGE + self._reserved, wanted - self._reserved)
            self._reserved = wanted

    def close(self) -> None:
        """Closes the file; the memory stays until its arrays are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Closes the file."""
        self.close()

    def _blocks_nbytes(self) -> int:
        """Returns the bytes from the start that have space on the disk, of a former process."""
        taken = os.fstat(self._fd).st_blocks * BLOCK_NBYTES - PAGE
        return max(0, taken // GROWTH_NBYTES * GROWTH_NBYTES)
