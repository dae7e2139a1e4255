"""The published versions of one slice: the newest whole, and the deltas that lead to it.

The slice's queue publishes, and the threads of readers fetch; each ring has a lock. Memory is 2
bytes an element for the newest version, less than that for all deltas, and once more the former
one while it is being sent whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pscore.publish.codec import BitArray, Delta, fingerprint, move, round_to_bf16
from pscore.types import FloatArray

KEPT_NBYTES_MIN = 64 << 10  # Bytes of deltas that a short slice keeps too.
OVERHEAD_NBYTES = 256  # Bytes of a delta beside its payload.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """One published version of a slice."""

    number: int
    step: int  # Steps of training behind it.
    fingerprint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundVersion:
    """A version for a reader: deltas from the one that it holds, or the whole."""

    version: PublishedVersion
    deltas: Sequence[Delta] = ()
    whole: BitArray | None = None  # Not changed any more.


class VersionRing:
    """The versions of one slice that a reader can get."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lineage = 0
        self._bits: BitArray | None = None  # The newest version of which all is here.
        self._whole: PublishedVersion | None = None  # That of `_bits`.
        self._is_shared = False  # Whether a reader may be reading `_bits`.
        # Versions, oldest first, each with the deltas to it from the one before: one, or several
        # that a relay has got together; the first has none.
        # Invariant: the deltas are together smaller than `_bits`, or than `KEPT_NBYTES_MIN`.
        self._versions: deque[tuple[PublishedVersion, Sequence[Delta]]] = deque()
        self._kept_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the newest version and of the deltas."""
        with self._lock:
            return self._kept_nbytes + (0 if self._bits is None else self._bits.nbytes)

    def publish(
        self, lineage: int, number: int, step: int, weights: FloatArray
    ) -> PublishedVersion:
        """Makes `weights`, `(numel,) float32`, the newest version, and returns it.

        A version of another lineage than the one before is the first of its own.
        """
        with self._lock:
            deltas: Sequence[Delta] = ()
            if self._bits is None or lineage != self._lineage:
                self._bits = round_to_bf16(weights)
                self._versions.clear()
                self._kept_nbytes = 0
            else:
                if self._is_shared:
                    self._bits = self._bits.copy()
                deltas = (move(self._bits, weights),)
            self._is_shared = False
            self._lineage = lineage
            version = PublishedVersion(
                number=number, step=step, fingerprint=fingerprint(self._bits)
            )
            self._whole = version
            self._append(version, deltas, max(self._bits.nbytes, KEPT_NBYTES_MIN))
            return version

    def adopt(
        self,
        lineage: int,
        version: PublishedVersion,
        bits: BitArray | None,
        deltas: Sequence[Delta] | None,
    ) -> None:
        """Makes a version of another ring the newest one, byte for byte.

        Args:
            bits: All of it, `(numel,) uint16`, which is not changed any more; None: `fill` brings
                it.
            deltas: Lead on to it from the newest version here; None: it came whole.
        """
        with self._lock:
            if deltas is None or lineage != self._lineage:
                self._versions.clear()
                self._kept_nbytes, deltas = 0, ()
            self._lineage = lineage
            if bits is not None:
                self._bits, self._whole, self._is_shared = bits, version, True
            assert self._bits is not None
            self._append(version, deltas, max(self._bits.nbytes, KEPT_NBYTES_MIN))

    def fill(self, bits: BitArray) -> None:
        """Keeps all of the newest version, `(numel,) uint16`, which is not changed any more."""
        with self._lock:
            self._bits, self._whole, self._is_shared = bits, self._versions[-1][0], True

    def _append(self, version: PublishedVersion, deltas: Sequence[Delta], nbytes_max: int) -> None:
        self._versions.append((version, deltas))
        self._kept_nbytes += _kept(deltas)
        while self._kept_nbytes >= nbytes_max and len(self._versions) > 1:
            self._versions.popleft()
            first, dropped = self._versions[0]
            self._kept_nbytes -= _kept(dropped)
            self._versions[0] = first, ()

    def find(
        self, lineage: int, target: int, held: int, held_fingerprint: int
    ) -> FoundVersion | None:
        """Returns version `target` for a reader, else the newest one whole.

        Args:
            held: Number of the version that the reader holds; -1: none.

        Returns:
            None if the slice has not reached the target, or not all of it is here yet.
        """
        with self._lock:
            if lineage != self._lineage or not self._versions:
                return None
            newest = self._versions[-1][0]
            if newest.number < target:
                return None
            deltas: list[Delta] | None = None  # From the held version on.
            for version, step in self._versions:
                if deltas is not None:
                    deltas += step
                if version.number == held and version.fingerprint == held_fingerprint:
                    deltas = []
                if version.number >= target:
                    if deltas is not None and version.number == target:
                        return FoundVersion(version=version, deltas=deltas)
                    break
            if self._whole is None or self._whole.number < target:
                return None
            self._is_shared = True
            return FoundVersion(version=self._whole, whole=self._bits)


def _kept(deltas: Sequence[Delta]) -> int:
    return sum(delta.payload.nbytes + OVERHEAD_NBYTES for delta in deltas)
