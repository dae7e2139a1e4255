"""The weights of one slice: where they are, who reads them, and where the next ones are written.

An update is made in place if nobody reads: it reads and writes the same memory once, which is two
passes of the weights less than an update from one copy to another. Who holds a lease reads, because
the weights are being sent from where they are, and who copies them out of shared memory. That one
holds no lease; it looks at the version behind its copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pscore.types import FloatArray, IntArray
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import Buffer, Cell, Pool


class Weights:
    """Copies of one slice's weights, `(numel,) float32` each, of which one is the newest."""

    def __init__(
        self,
        pool: Pool | SliceJournal,
        buffers: Sequence[FloatArray] | None = None,
        versions: IntArray | None = None,
        stamps: IntArray | None = None,
    ) -> None:
        """Starts with zeros, as version -1.

        Args:
            pool: Where copies are taken from.
            buffers: Two that workers can map, in shared memory; None: all are private.
            versions: `(2,) int64`, where the versions of these buffers are published.
            stamps: `(2,) int64`, the same again at the end of the file that they lie in.
        """
        self._pool = pool
        self._versions = versions
        self._stamped = [array for array in (versions, stamps) if array is not None]
        self._leasing = threading.Lock()
        self._is_mapped = False
        if buffers is None:
            self._buffers = [self._take()]
            self._buffers[0].array.fill(0.0)
        else:
            self._buffers = [Buffer(array, i + 1) for i, array in enumerate(buffers)]
        self._newest = self._buffers[0]

    @property
    def newest(self) -> FloatArray:
        """The newest weights."""
        return self._newest.array

    @property
    def shared_nbytes(self) -> int:
        """Bytes of those that workers can map."""
        return sum(buffer.array.nbytes for buffer in self._buffers if buffer.number)

    def lease(self) -> Buffer:
        """Returns the newest weights' buffer; it stays as it is until `release`."""
        with self._leasing:
            self._newest.leases += 1
            return self._newest

    def release(self, buffer: Buffer) -> None:
        """Ends a lease; may be called from any thread."""
        with self._leasing:
            buffer.leases -= 1

    def mapped(self) -> int:
        """Returns the number of the newest weights' buffer in shared memory, 0 if it is not there.

        Whoever asks copies them without a lease.
        """
        self._is_mapped = True
        return self._newest.number

    def spare(self, *, in_place: bool, readers_wait: bool) -> Buffer:
        """Returns where the next weights are written; a slow reader stalls nobody.

        Args:
            in_place: Those that count may be overwritten: nothing is lost with this process.
            readers_wait: Who copies weights out of shared memory has done so before the gradients
                of the next ones are complete.
        """
        in_place = in_place and (readers_wait or not self._is_mapped)
        with self._leasing:
            is_free = in_place and self._newest.leases == 0
            buffer = self._newest if is_free else self._other()
        self.stamp(buffer, -1)
        return buffer

    def stamp(self, buffer: Buffer, version: int) -> None:
        """Writes beside a buffer of which version it is now; -1: it is being written."""
        if buffer.number:
            for stamps in self._stamped:
                stamps[buffer.number - 1] = version

    def publish(self, buffer: Buffer) -> None:
        """Makes what was written to `buffer`, and stamped, the newest."""
        self._newest = buffer

    def take_up(self, place: int, version: int, at: Callable[[int], Cell]) -> None:
        """Goes on with what a former process has published.

        Args:
            place: `Buffer.place` of the newest.
            version: Of them; negative: there are none yet.
            at: Returns what is at a place that workers cannot map.
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

    def _other(self) -> Buffer:
        """Returns one that nobody reads and that is not the newest."""
        for buffer in self._buffers:
            if buffer is not self._newest and buffer.leases == 0:
                return buffer
        buffer = self._take()
        self._buffers.append(buffer)
        return buffer

    def _take(self) -> Buffer:
        cell = self._pool.take()
        return Buffer(cell.array, 0, cell)
