"""Error feedback of one slice on the worker: its residual, and the payload that is under way.

A residual belongs to its push: if a shard answers that a push came too late, its payload is added
back to the residual, so that nothing is lost. A payload does not change until its push is answered,
because a failure makes the worker send it again; a push is never encoded twice.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from pscore.compressors.base import LARGEST, ORIGIN, RESIDUAL, Compressor
from pscore.net import wire
from pscore.types import ByteArray, FloatArray, Push, TensorSpec, Verdict

FLOAT_MAX = float(np.finfo(np.float32).max)
UNKNOWN = np.inf  # The residual has no known bound: it has to be scanned.
MATRIX_NDIM = 2  # Biases and the weights of norm layers have one dimension.


def choose(
    tensors: Sequence[TensorSpec], *compressors: Compressor, min_nbytes: int, exclude: Sequence[str]
) -> list[TensorSpec]:
    """Returns the declarations, with tensors marked that may be compressed.

    Args:
        *compressors: The compressor of pushes, and that of pulls if there is one.
        min_nbytes: Smaller tensors are not compressed, in bytes of float32.
        exclude: Names, or patterns as in `fnmatch`, of tensors that are not compressed.
    """
    return [
        replace(
            spec,
            compress=not all(compressor.is_raw for compressor in compressors)
            and len(spec.shape) >= MATRIX_NDIM
            and wire.FLOAT_NBYTES * spec.numel >= min_nbytes
            and not any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in exclude),
        )
        for spec in tensors
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A push that has not been answered."""

    step: int
    payload: ByteArray
    is_compressed: bool  # Else the payload is the sum of gradient and residual.


class Feedback:
    """Error feedback of one slice."""

    # The weights that the next move begins at, `(numel,) float32`; None: not needed.
    origin: FloatArray | None = None

    def __init__(self, compressor: Compressor, numel: int, key: str) -> None:
        """Starts without a residual.

        Args:
            key: Job, table, worker and slice, which seed its random numbers.
        """
        self._compressor = compressor
        self._numel = numel
        self.key = key  # Job, table, worker and slice.
        self._lock = threading.Lock()
        self._buffer: ByteArray | None = None
        self._total: FloatArray | None = None
        self._sent: Sent | None = None
        self._state: dict[str, FloatArray] = {LARGEST: np.zeros(1, dtype=np.float32)}

    def require_room(self, grad: FloatArray) -> None:
        """Raises GradientError if a gradient cannot be added to the residual; changes nothing."""
        with self._lock:
            self._allocate()
            self._compressor.require_room(grad, self._state)

    def encode(self, push: Push, grad: FloatArray) -> memoryview:
        """Returns the payload of a push; it does not change until the push is settled."""
        with self._lock:
            if self._sent is None or self._sent.step != push.step:
                buffer = self._allocate()
                state = self._state
                if self.origin is not None:
                    state = {**state, ORIGIN: self.origin}
                nbytes = self._compressor.encode(
                    grad, state, buffer, seed=self._seed(push), step=push.step
                )
                self._sent = Sent(step=push.step, payload=buffer[:nbytes], is_compressed=True)
            return wire.as_bytes(self._sent.payload)

    def flush(self, push: Push, grad: FloatArray) -> memoryview:
        """Returns the sum of gradient and residual, uncompressed; the residual becomes zero."""
        with self._lock:
            if self._sent is None or self._sent.step != push.step:
                self._allocate()
                self._compressor.require_room(grad, self._state)
                if self._total is None:
                    self._total = np.empty(self._numel, dtype=np.float32)
                residual = self._state.get(RESIDUAL)
                if residual is None:
                    self._total[:] = grad
                else:
                    np.add(grad, residual, out=self._total)
                    residual.fill(0.0)
                payload = self._total.view(np.uint8)
                self._sent = Sent(step=push.step, payload=payload, is_compressed=False)
            return wire.as_bytes(self._sent.payload)

    def settle(self, verdict: Verdict) -> None:
        """Ends the push that was encoded last; a late push is added back to the residual.

        Without a residual such a push is lost, as an uncompressed one is.
        """
        with self._lock:
            sent, self._sent = self._sent, None
            residual = self._state.get(RESIDUAL)
            if sent is None or residual is None:
                return
            if verdict == Verdict.TOO_LATE:
                if sent.is_compressed:
                    self._compressor.decode_add(sent.payload, residual, 1.0, assign=False)
                else:
                    residual += sent.payload.view(np.float32)
                np.clip(residual, -FLOAT_MAX, FLOAT_MAX, out=residual)  # Rounding may pass it.
                self._state[LARGEST][0] = UNKNOWN

    @property
    def state(self) -> Mapping[str, FloatArray]:
        """The compressor's arrays by name, each `(numel,) float32`; empty before the first push."""
        return {name: array for name, array in self._state.items() if name != LARGEST}

    def load(self, name: str, value: FloatArray) -> None:
        """Replaces one array of the state; one that the compressor does not keep is dropped."""
        with self._lock:
            self._allocate()
            if name in self.state:
                self._state[name][:] = value
                self._state[LARGEST][0] = UNKNOWN

    def _seed(self, push: Push) -> int:
        return xxhash.xxh3_64_intdigest(f"{self.key}/{push.step}".encode())

    def _allocate(self) -> ByteArray:
        if self._buffer is None:
            longest = self._compressor.payload_nbytes_max(self._numel)
            self._buffer = np.zeros(longest, dtype=np.uint8)
            for name in self._compressor.state_names:
                self._state[name] = np.zeros(self._numel, dtype=np.float32)
        return self._buffer
