"""The memory of a reader's versions: the one that is shown, and the next one that is made from it.

A version that was shown is not changed while anybody has an array of it. The next version is made
in the memory of the version before last if nobody has that any more: few deltas are applied there
a second time. Else each place is copied from the version shown when its first delta comes, unless
that holds all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from pscore.publish import codec
from pscore.publish.codec import BitArray, Delta, Form

AGAIN = 8  # Deltas of up to one byte in so many of a version are applied a second time.
UNUSED = 2  # References to an array that only this object and the call below have.


class VersionMemory:
    """Memory for the versions of one table; used by one thread at a time."""

    def __init__(self, numel: int) -> None:
        self._bits: BitArray = np.zeros(numel, dtype=np.uint16)
        self._former: BitArray | None = None  # The version before `_bits`.
        # The deltas that lead from `_former` to `_bits`; None: they are too long to keep.
        self._way: list[tuple[slice, Delta]] | None = []
        self._way_nbytes = 0
        self._is_shown = False
        # Places of `_bits` that hold numbers of the next version; None: all do.
        self._begun: dict[int, slice] | None = None

    def show(self) -> BitArray:
        """Returns the version that was written, `(numel,) uint16`."""
        self._copy_rest()
        self._is_shown = True
        return self._bits

    def write(self, place: slice, deltas: Sequence[Delta]) -> int:
        """Applies deltas to a place of the next version, and returns that place's fingerprint.

        Raises:
            DecodeError: They are not deltas of that place, which may hold anything now.
        """
        self.prepare()
        if self._is_shown:
            self._begin(self._unused())
            self._begun = {}
        part = self._bits[place]
        if self._begun is not None and place.start not in self._begun:
            self._begun[place.start] = place
            if not deltas or deltas[0].form is not Form.DENSE:
                assert self._former is not None
                part[:] = self._former[place]
        for delta in deltas:
            codec.apply(delta, part)
            self._way_nbytes += delta.payload.nbytes
            if self._way_nbytes * AGAIN > self._bits.nbytes:
                self._way = None
            elif self._way is not None:
                self._way.append((place, delta))
        return codec.fingerprint(part)

    def prepare(self) -> None:
        """Begins the next version before its deltas have come, if that needs no copy."""
        former, way = self._former, self._way
        if not self._is_shown or former is None or way is None:
            return
        self._former = None
        if sys.getrefcount(former) > UNUSED:
            self._former = former
            return
        for place, delta in way:
            codec.apply(delta, former[place])
        self._begin(former)

    def _unused(self) -> BitArray:
        """Returns memory for a version; it may hold anything."""
        former, self._former = self._former, None
        if former is None or sys.getrefcount(former) > UNUSED:
            return np.empty_like(self._bits)
        return former

    def _begin(self, bits: BitArray) -> None:
        """Begins the next version in `bits`, which has the numbers of the one shown."""
        self._former, self._bits = self._bits, bits
        self._way, self._way_nbytes, self._is_shown, self._begun = [], 0, False, None

    def _copy_rest(self) -> None:
        """Copies the places of the version shown for which nothing has come."""
        if self._begun is None:
            return
        assert self._former is not None
        at = 0
        for _, place in sorted(self._begun.items()):
            self._bits[at : place.start] = self._former[at : place.start]
            at = place.stop
        self._bits[at:] = self._former[at:]
        self._begun = None
