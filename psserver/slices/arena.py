"""Arenas: memory in a file, which outlives the process that wrote it.

The file is mapped and shared, so each write reaches the kernel at once, without a system call:
after a SIGKILL the next process finds all of it. A crash of the machine loses it; checkpoints
survive that. Disk space is reserved before it is used, so a full disk raises an error at the
allocation and no SIGBUS at a write.

    offset 0     magic and format, 8 bytes; bytes in use, int64; seal of the journal, int64
    offset 4096  the allocations, each at a multiple of 64 bytes
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from pathlib import Path

import numpy as np

from pscore.memory.descriptor import Descriptor
from pscore.types import ByteArray, FloatArray, IntArray

MAGIC = b"PLARENA2"
PAGE = 4096
LINE = 64
GROWTH_NBYTES = 1 << 20  # Smallest growth of a file.
HEAD_NBYTES = 24


class Arena(Descriptor):
    """Arrays in one file; any thread may allocate more."""

    def __init__(self, path: Path, seal: int | None = None) -> None:
        """Opens the file, or creates it.

        Args:
            seal: Number of the journal for which it is created; None: opens an existing one.

        Raises:
            OSError: It cannot be created or does not exist, or the disk is full.
            ValueError: It is not an arena, or is cut off.
        """
        self.path = path
        self._lock = threading.Lock()
        is_new = seal is not None
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        super().__init__(os.open(path, flags, 0o600))
        self._starts: list[int] = []  # Offset of each mapped part.
        self._maps: list[mmap.mmap] = []
        self._size = 0
        if is_new:
            self._grow_to(PAGE)
        else:
            self._map_to(max(PAGE, os.fstat(self.fd).st_size // PAGE * PAGE))
        if is_new:
            self._maps[0][: len(MAGIC)] = MAGIC
        elif self._maps[0][: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is not an arena")
        self._used = np.frombuffer(self._maps[0], dtype=np.int64, count=2, offset=len(MAGIC))
        if seal is not None:
            self._used[:] = PAGE, seal
        elif not PAGE <= self._used[0] <= self._size:
            raise ValueError(f"{path} is truncated")

    @property
    def seal(self) -> int:
        """Number of the journal for which it was created."""
        return int(self._used[1])

    def reserve(self, nbytes: int) -> None:
        """Reserves `nbytes` for all allocations in one piece; OSError: the disk is full."""
        with self._lock:
            self._reserve(nbytes)

    def allocate(self, nbytes: int) -> int:
        """Allocates `nbytes` of zeros and returns their place, a byte offset.

        Raises:
            OSError: The disk is full.
        """
        nbytes = _round_up(nbytes, LINE)
        with self._lock:
            self._reserve(nbytes)
            place = int(self._used[0])
            self._used[0] = place + nbytes
            return place

    def bytes_at(self, place: int, nbytes: int) -> ByteArray:
        """Returns `(nbytes,) uint8` at a place, as a view.

        Raises:
            ValueError: There is no such place.
        """
        index = bisect_right(self._starts, place) - 1
        if place < PAGE or place % LINE or not 0 <= nbytes <= int(self._used[0]) - place:
            raise ValueError(f"{self.path} has no place {place}")
        offset = place - self._starts[index]
        return np.frombuffer(self._maps[index], dtype=np.uint8, count=nbytes, offset=offset)

    def floats_at(self, place: int, numel: int) -> FloatArray:
        """Returns `(numel,) float32` at a place, as a view."""
        return self.bytes_at(place, 4 * numel).view(np.float32)

    def integers_at(self, place: int, numel: int) -> IntArray:
        """Returns `(numel,) int64` at a place, as a view."""
        return self.bytes_at(place, 8 * numel).view(np.int64)

    def _reserve(self, nbytes: int) -> None:
        if self._size - int(self._used[0]) < nbytes:
            size = self._size
            self._grow_to(size + max(_round_up(nbytes, PAGE), GROWTH_NBYTES))
            self._used[0] = size  # The rest of the last part is too small.

    def _grow_to(self, size: int) -> None:
        os.posix_fallocate(self.fd, self._size, size - self._size)
        self._map_to(size)

    def _map_to(self, size: int) -> None:
        self._maps.append(mmap.mmap(self.fd, size - self._size, offset=self._size))
        self._starts.append(self._size)
        self._size = size


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
