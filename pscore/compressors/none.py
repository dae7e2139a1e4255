"""No compression: float32, little-endian, as it is. The format is Paceline's own (wire.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pscore.compressors.base import RESIDUAL, Compressor, State
from pscore.memory import kernels
from pscore.net.wire import floats
from pscore.types import ByteArray, FloatArray


@dataclass(frozen=True)
class NoCompression(Compressor):
    """float32 as it is: 4 bytes per element, nothing lost."""

    name = "none"
    is_raw = True

    def payload_nbytes_max(self, numel: int) -> int:
        """4 bytes per element."""
        return 4 * numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """Any 4 bytes are a float32; NaN and Inf are refused by the worker that sends them."""
        if payload.nbytes != 4 * numel:
            floats(memoryview(payload), 1, numel)  # Raises, with the lengths.

    @property
    def state_names(self) -> tuple[str, ...]:
        """Nothing: it is all sent."""
        return ()

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Copies; a residual, if there is one, goes along and becomes zero."""
        flat = out[: 4 * len(grad)].view("<f4")
        residual = state.get(RESIDUAL)
        if residual is None:
            np.copyto(flat, grad)
        else:
            np.add(grad, residual, out=flat)
            residual[:] = 0.0
        return 4 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds the floats."""
        (grad,) = floats(memoryview(payload), 1, len(out))
        if assign:
            kernels.assign_scaled(grad, out, scale)
        else:
            kernels.add_scaled(grad, out, scale)
