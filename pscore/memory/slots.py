"""Places for payloads in a segment that another process reads, each in use by one message."""

from __future__ import annotations

import queue
import secrets

import numpy as np

from pscore.memory.segment import PAGE, Segment
from pscore.types import FloatArray

TOTAL_NBYTES = 8 << 20
NUM_MIN, NUM_MAX = 2, 16
WAIT_S = 0.02


class Slots:
    """The payloads of one sender's messages to one receiver; used from any thread."""

    def __init__(self, nbytes: int) -> None:
        """Reserves memory; raises OSError if the machine has too little memory."""
        self.number = secrets.randbits(64)  # Random number by which messages name this memory.
        self.nbytes = -(-nbytes // PAGE) * PAGE  # Longest payload.
        num = min(max(TOTAL_NBYTES // self.nbytes, NUM_MIN), NUM_MAX)
        self.segment = Segment.create(num * self.nbytes)  # The memory, of `nbytes` for each slot.
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num):
            self._free.put(slot)

    def put(self, values: FloatArray) -> int | None:
        """Copies `(numel,) float32` into a slot; returns its number, or None if none is free soon.

        The slot is in use until `free`.
        """
        if values.nbytes > self.nbytes:
            return None
        try:
            slot = self._free.get(timeout=WAIT_S)
        except queue.Empty:
            return None
        np.copyto(self.segment.floats(slot * self.nbytes, len(values)), values)
        return slot

    def free(self, slot: int) -> None:
        """Ends the use of a slot: its message is answered, or never will be."""
        self._free.put(slot)
