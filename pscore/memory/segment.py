"""Shared memory between processes of one host: anonymous, and freed with its last user.

A segment is a memfd. It has no name: no other process can open it, and nothing is left behind when
a process dies. Its file descriptor travels over a Unix socket. Its memory is reserved when it is
made, so a machine without room reports that at once and not by a signal later. Its length is
sealed, and memory without that seal is refused: its owner could shorten it, and the next access to
the lost pages would end the process that maps it. The weights of a shard with a journal lie in a
file of its user's instead, and survive the process. A file cannot be sealed; a worker accepts one
from its shard, and a shard accepts none from a worker.

The weights of a table on one shard lie in one segment:

    offset 0         versions, int64 (num_slices, 2): of each slice's two buffers; -1 while written
    offset 4096 * p  buffers, float32: slice 0 buffer 0, slice 0 buffer 1, slice 1 buffer 0, ...

each buffer starting at a multiple of 64 bytes, slices in the order of their index. A reader copies
a buffer and then looks at its version again: if it has changed, the copy is torn and is dropped.

That look has no memory barrier. It relies on a processor that keeps stores in order among stores
and loads in order among loads: x86-64. On other hosts workers use sockets (`keeps_order`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import stat
from collections.abc import Sequence

import numpy as np

from pscore.memory.descriptor import Descriptor
from pscore.types import FloatArray, IntArray, SliceSpec

PAGE = 4096
LINE = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
BUFFERS = 2  # Copies of the weights: one is read while the other is written.


def keeps_order() -> bool:
    """Returns whether this processor orders the copy of a buffer and the look at its version."""
    return platform.machine().lower() in ("x86_64", "amd64")


class Segment(Descriptor):
    """Memory that other processes can map."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps an open segment and owns its descriptor."""
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        super().__init__(fd)  # After the map: if that fails, the caller closes the descriptor.

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Makes a zeroed segment; raises OSError if the machine has too little memory."""
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, nbytes)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, may_be_file: bool = False) -> Segment:
        """Maps a segment of another process; owns the descriptor from now on.

        Args:
            nbytes: Length of the part that is mapped.
            may_be_file: Whether a file of this user, which cannot be sealed, is accepted too.

        Raises:
            OSError: The segment is shorter than declared or could become so, or cannot be mapped.
        """
        try:
            if not (_is_sealed(fd) or (may_be_file and _is_own_file(fd))):
                raise OSError("the segment is not sealed: its owner could shorten it")
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
    """Offsets of the buffers of a table's weights in the segment of one shard."""

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

    def buffer_span(self, index: int, number: int) -> tuple[int, int]:
        """Returns offset and bytes of one of the two buffers of a slice."""
        return self._offsets[index][number], 4 * self._numels[index]

    def versions_span(self, index: int) -> tuple[int, int]:
        """Returns offset and bytes of the versions of a slice's two buffers."""
        return 8 * BUFFERS * self._positions[index], 8 * BUFFERS

    def versions(self, segment: Segment, index: int) -> IntArray:
        """Returns the versions of a slice's two buffers, `(2,) int64`."""
        return segment.integers(self.versions_span(index)[0], BUFFERS)

    def position(self, index: int) -> int:
        """Returns a slice's position among the shard's slices, from 0."""
        return self._positions[index]


def _is_sealed(fd: int) -> bool:
    """Returns whether nobody can shorten a segment; no other kind of file has seals."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _is_own_file(fd: int) -> bool:
    """Returns whether a descriptor is a file with a name that belongs to this user."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_nlink > 0 and found.st_uid == os.geteuid()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
