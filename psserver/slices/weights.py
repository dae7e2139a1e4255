"""The weights of one slice: their copies, the readers of each, and the place of the next ones.

An update is made in place if nothing reads the newest weights: it then reads and writes the same
memory once, two passes over the weights less than an update from one copy to another. A buffer has
readers while it is leased, because it is being sent, and while a worker copies it out of shared
memory. Such a worker holds no lease; it looks at the version after its copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pscore.types import FloatArray, IntArray
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import Buffer, Cell, Pool, give


class Weights:
    """Copies of one slice's weights, `(numel,) float32` each; one of them is the newest."""

    def __init__(
        self,
        pool: Pool | SliceJournal,
        buffers: Sequence[FloatArray] | None = None,
        versions: IntArray | None = None,
        stamps: IntArray | None = None,
    ) -> None:
        """Starts with zeros, as version -1.

        Args:
            pool: Where private copies come from.
            buffers: Two that workers can map, in shared memory; None: all are private.
            versions: `(2,) int64`, where the versions of these buffers are published.
            stamps: `(2,) int64`, the same again at the end of the file that they lie in.
        """
        self._pool = pool
        self._versions = versions
        self._stamped = [array for array in (versions, stamps) if array is not None]
        self._leasing = threading.Lock()
        self._is_mapped = False  # Whether a worker may copy weights without a lease.
        if buffers is None:
            self._buffers = [self._take()]
            self._buffers[0].array.fill(0.0)
        else:
            self._buffers = [Buffer(array, i + 1) for i, array in enumerate(buffers)]
        self._newest = self._buffers[0]  # Invariant: one of `_buffers`.

    @property
    def newest(self) -> FloatArray:
        """The newest weights."""
        return self._newest.array

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the copies that workers can map."""
        return sum(buffer.array.nbytes for buffer in self._buffers if buffer.number)

    def lease(self) -> Buffer:
        """Returns the newest weights' buffer; it stays unchanged until `release`."""
        with self._leasing:
            self._newest.leases += 1
            return self._newest

    def release(self, buffer: Buffer) -> None:
        """Ends a lease; may be called from any thread."""
        with self._leasing:
            buffer.leases -= 1

    def newest_mapped(self) -> int:
        """Returns the number of the newest weights' buffer in shared memory, 0 if it is not there.

        The caller's worker copies them without a lease. So from the first call on, updates are made
        in place only where the caller of `spare` states that workers have finished copying.
        """
        self._is_mapped = True
        return self._newest.number

    def spare(self, *, in_place: bool, readers_wait: bool) -> Buffer:
        """Returns where the next weights are written; a slow reader stalls no update.

        Args:
            in_place: The newest weights may be overwritten: nothing is lost with this process.
            readers_wait: Workers that copy weights out of shared memory have done so before the
                gradients of the next ones are complete.
        """
        in_place = in_place and (readers_wait or not self._is_mapped)
        with self._leasing:
            is_free = in_place and self._newest.leases == 0
            buffer = self._newest if is_free else self._other()
        self.stamp(buffer, -1)
        return buffer

    def stamp(self, buffer: Buffer, version: int) -> None:
        """Writes a buffer's version beside it; -1: it is being written."""
        if buffer.number:
            for stamps in self._stamped:
                stamps[buffer.number - 1] = version

    def publish(self, buffer: Buffer) -> None:
        """Makes the contents of `buffer`, which is stamped, the newest weights."""
        self._newest = buffer

    def recover(self, place: int, version: int, at: Callable[[int], Cell]) -> None:
        """Restores the weights that a killed process had published.

        Args:
            place: `Buffer.place` of the newest.
            version: Their version; negative: there are no weights yet.
            at: Returns the memory at a place that workers cannot map.
        """
        numbers = [buffer.number for buffer in self._buffers]
        if place in numbers:
            self._newest = self._buffers[numbers.index(place)]
        elif version >= 0:
            cell = at(place)
            self._newest = Buffer(cell.array, 0, cell)
            self._buffers.append(self._newest)
        for stamps in self._stamped:
            stamps[:] = -1
        if version >= 0:
            self.stamp(self._newest, version)

    @property
    def num_leases(self) -> int:
        """Leases of all copies that have not ended."""
        with self._leasing:
            return sum(buffer.leases for buffer in self._buffers)

    def poison_others(self) -> None:
        """Fills all copies but the newest with NaN, for tests and the simulator."""
        for buffer in self._buffers:
            if buffer is not self._newest:
                buffer.array.fill(np.nan)

    def check_invariants(self, buffers_max: int, *, is_idle: bool) -> None:
        """Asserts that the newest weights are one of at most `buffers_max` copies, for tests.

        Args:
            is_idle: Whether no answer is being sent, so that no copy is leased.
        """
        assert any(buffer is self._newest for buffer in self._buffers)
        assert len(self._buffers) <= buffers_max, f"{len(self._buffers)} copies of the weights"
        assert all(buffer.leases >= 0 for buffer in self._buffers)
        assert not (is_idle and self.num_leases)

    def _other(self) -> Buffer:
        """Returns a buffer without leases that is not the newest."""
        free = [b for b in self._buffers if b is not self._newest and b.leases == 0]
        for buffer in free:
            if not isinstance(self._pool, SliceJournal) or buffer.place:
                return buffer
            # It was made on the heap when the disk was full, and would not outlive the process.
            self._buffers.remove(buffer)
            give(self._pool, buffer.cell)
        buffer = self._take()
        self._buffers.append(buffer)
        return buffer

    def _take(self) -> Buffer:
        cell = self._pool.take()
        return Buffer(cell.array, 0, cell)
