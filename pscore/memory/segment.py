"""Shared memory between processes of one host: anonymous, and gone with its last user.

A segment is a memfd: it has no name, so nobody else can open it and nothing is left behind after
any kind of death; its file descriptor travels over a Unix socket. Its memory is reserved when it is
made, so that a machine without room says so at once and not by a signal later. The weights of a
shard that keeps a journal lie in a file of its user's instead, and are there when it comes back.

The weights of a table on one shard lie in one segment:

    offset 0         versions, int64 (num_slices, 2): of each slice's two buffers; -1 while written
    offset 4096 * p  buffers, float32: slice 0 buffer 0, slice 0 buffer 1, slice 1 buffer 0, ...

each buffer starting at a multiple of 64 bytes, slices in the order of their index. A reader copies
a buffer and then looks at its version again: if it has changed, the copy is torn and is dropped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from pscore.memory.descriptor import Descriptor
from pscore.types import FloatArray, IntArray, SliceSpec

PAGE = 4096
LINE = 64
BUFFERS = 2  # Copies of the weights: one is read while the other is written.


class Segment(Descriptor):
    """Memory that other processes can map.

    Attributes:
        nbytes: Its length.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps an open segment and owns its descriptor."""
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        super().__init__(fd)  # Once it is mapped: else whoever has opened it closes it.

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Makes a zeroed segment.

        Raises:
            OSError: There is no memory for it.
        """
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Maps a segment that somebody else made; takes the descriptor over.

        Raises:
            OSError: It is shorter than declared, or cannot be mapped.
        """
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError(f"segment of {os.fstat(fd).st_size} bytes, {nbytes} declared")
            return cls(fd, nbytes)
        except OSError:
            os.close(fd)
            raise

    def floats(self, offset: int, numel: int) -> FloatArray:
        """Returns `(numel,) float32` at a byte offset, as a view."""
        return np.frombuffer(self._map, dtype=np.float32, count=numel, offset=offset)

    def integers(self, offset: int, numel: int) -> IntArray:
        """Returns `(numel,) int64` at a byte offset, as a view."""
        return np.frombuffer(self._map, dtype=np.int64, count=numel, offset=offset)


class WeightsMap:
    """Where the buffers of a table's weights lie in the segment of one shard."""

    def __init__(self, specs: Sequence[SliceSpec]) -> None:
        """Lays out the slices of one shard, in the order of their index."""
        self._offsets: dict[int, tuple[int, int]] = {}
        self._positions = {spec.index: position for position, spec in enumerate(specs)}
        offset = _round_up(8 * BUFFERS * len(specs), PAGE)
        for spec in specs:
            length = _round_up(4 * spec.numel, LINE)
            self._offsets[spec.index] = (offset, offset + length)
            offset += 2 * length
        self._numels = {spec.index: spec.numel for spec in specs}
        self.nbytes = max(offset, PAGE)

    def buffers(self, segment: Segment, index: int) -> list[FloatArray]:
        """Returns the two buffers of a slice."""
        return [segment.floats(offset, self._numels[index]) for offset in self._offsets[index]]

    def versions(self, segment: Segment, index: int) -> IntArray:
        """Returns the versions of a slice's two buffers, `(2,) int64`."""
        return segment.integers(8 * BUFFERS * self._positions[index], BUFFERS)

    def position(self, index: int) -> int:
        """Returns which of the shard's slices one is, from 0."""
        return self._positions[index]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
