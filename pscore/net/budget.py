"""Bounds on the memory that peers can make a process allocate."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

from pscore.errors import LimitError
from pscore.types import ByteArray

KEPT_BUFFERS = 4  # Receive buffers that a connection keeps for the next payloads.


class Budget:
    """Bytes that may be under way in one process; used from any thread.

    Attributes:
        left: The bytes that are free.
    """

    def __init__(self, nbytes: int, setting: str = "under_way_mb") -> None:
        """Starts with all bytes free.

        Args:
            setting: Name of the setting that changes it, for messages; empty for none.
        """
        self._about = f" ({setting})" if setting else ""
        # A garbage collection may call `give` of a buffer in a thread that has the lock.
        self._lock = threading.RLock()
        self.nbytes = nbytes
        self.left = nbytes

    def take(self, nbytes: int, what: str) -> None:
        """Reserves bytes, to be given back later; `what` names their use in the message.

        Raises:
            LimitError: Fewer are left.
        """
        with self._lock:
            if nbytes > self.left:
                raise LimitError(
                    f"{what} wants {nbytes} bytes under way, {self.left} of {self.nbytes} are "
                    f"left{self._about}"
                )
            self.left -= nbytes

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._lock:
            self.left += nbytes
            assert self.left <= self.nbytes


class ReceiveBuffers:
    """Memory for the payloads of one connection; the last few buffers are used again.

    A buffer that was used before has its pages already: the kernel zeroes every page of a new one.
    """

    def __init__(self, budget: Budget) -> None:
        """Starts without a buffer; their memory is counted in `budget`."""
        self._budget = budget
        self._kept: deque[ByteArray] = deque(maxlen=KEPT_BUFFERS)

    def take(self, nbytes: int, what: str) -> ByteArray:
        """Returns a buffer of exactly `nbytes`, `(nbytes,) uint8`; `what` names its use.

        Raises:
            LimitError: Too many bytes are under way.
        """
        for _ in range(len(self._kept)):
            buffer = self._kept.popleft()
            if buffer.nbytes == nbytes:
                return buffer
            self._kept.append(buffer)
        self._budget.take(nbytes, what)
        data = np.empty(nbytes, dtype=np.uint8)
        weakref.finalize(data, self._budget.give, nbytes)  # Wherever its last reference goes.
        return data

    def give(self, buffer: ByteArray) -> None:
        """Keeps a buffer that is no longer read, for a later `take`."""
        self._kept.append(buffer)

    def close(self) -> None:
        """Drops the kept buffers; those that are given back from now on are dropped too."""
        self._kept = deque(maxlen=0)
