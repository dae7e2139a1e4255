"""What compression keeps of one slice on the worker: what is owed, and the payload on its way.

A residual belongs to its push: when a shard answers that a push came too late, what was sent of it
goes back into the residual, so that nothing is lost. A payload stays as it is until its push is
answered, because it is what is sent again after a failure.
"""

from __future__ import annotations

import threading

import numpy as np
import xxhash

from pscore import wire
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.types import ByteArray, FloatArray, Push


class Feedback:
    """Error feedback of one slice.

    Attributes:
        state: The compressor's arrays, by name, each `(numel,) float32`.
    """

    def __init__(self, compressor: Compressor, numel: int, key: str) -> None:
        """Owes nothing yet.

        Args:
            compressor: Of the slice's pushes.
            numel: Elements of the slice.
            key: Job, table, worker and slice: what is drawn differs between them.
        """
        self._compressor = compressor
        self._numel = numel
        self._key = key
        self._lock = threading.Lock()
        self._buffer: ByteArray | None = None
        self._sent: tuple[ByteArray, bool] | None = None  # The newest payload, and if compressed.
        self.state: dict[str, FloatArray] = {}

    def encode(self, push: Push, grad: FloatArray) -> memoryview:
        """Returns the payload of a push; it stays as it is until the next call."""
        with self._lock:
            self._allocate()
            assert self._buffer is not None
            seed = xxhash.xxh3_64_intdigest(f"{self._key}/{push.step}".encode())
            nbytes = self._compressor.encode(
                grad, self.state, self._buffer, seed=seed, step=push.step
            )
            self._sent = (self._buffer[:nbytes], True)
            return wire.as_bytes(self._buffer[:nbytes])

    def flush(self, grad: FloatArray) -> memoryview:
        """Returns gradient and residual together, uncompressed; nothing is owed after it."""
        with self._lock:
            self._allocate()
            total = grad.copy()
            if RESIDUAL in self.state:
                total += self.state[RESIDUAL]
                self.state[RESIDUAL].fill(0.0)
            self._sent = (total.view(np.uint8), False)
            return wire.as_bytes(total)

    def returned(self) -> None:
        """Takes back what the newest push has sent: it did not enter any update."""
        with self._lock:
            if self._sent is None or RESIDUAL not in self.state:
                return
            payload, is_compressed = self._sent
            self._sent = None
            residual = self.state[RESIDUAL]
            if is_compressed:
                self._compressor.decode_add(payload, residual, 1.0, assign=False)
            else:
                residual += payload.view(np.float32)

    @property
    def residual(self) -> FloatArray | None:
        """What is owed, `(numel,) float32`; None if the compressor owes nothing."""
        return self.state.get(RESIDUAL)

    @residual.setter
    def residual(self, value: FloatArray) -> None:
        with self._lock:
            self._allocate()
            if RESIDUAL in self.state:
                self.state[RESIDUAL][:] = value

    def _allocate(self) -> None:
        if self._buffer is None:
            longest = self._compressor.payload_nbytes_max(self._numel)
            self._buffer = np.zeros(longest, dtype=np.uint8)
            self.state = {
                name: np.zeros(self._numel, dtype=np.float32)
                for name in self._compressor.state_names
            }
