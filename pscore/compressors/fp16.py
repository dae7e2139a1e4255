"""Half precision: each element as IEEE binary16, little-endian, 2 bytes.

Paulius Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740 (the number format and
its range); as a compressor in Horovod and BytePS. What rounding and the range of +-65504 cut off
stays in the residual, so nothing is lost over steps (error feedback, arXiv:1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscore import kernels
from pscore.compressors.base import Compressor
from pscore.errors import DecodeError
from pscore.types import ByteArray, FloatArray

FP16_MAX = 65504.0


@dataclass(frozen=True)
class FP16(Compressor):
    """IEEE half precision with error feedback."""

    name: ClassVar[str] = "fp16"
    source: ClassVar[str] = "Micikevicius et al., arXiv:1710.03740"
    keeps_residual: ClassVar[bool] = True

    def payload_nbytes_max(self, numel: int) -> int:
        """2 bytes per element."""
        return 2 * numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """2 bytes per element, all of them finite."""
        if payload.nbytes != 2 * numel:
            raise DecodeError(f"{payload.nbytes} bytes of fp16, {2 * numel} wanted")
        if not np.isfinite(payload.view("<f2")).all():
            raise DecodeError("fp16 payload holds NaN or Inf")

    def encode(
        self, grad: FloatArray, residual: FloatArray | None, out: ByteArray, seed: int
    ) -> int:
        """Rounds to the nearest half."""
        half = out[: 2 * len(grad)].view("<f2")
        owed = grad if residual is None else np.add(grad, residual, out=residual)
        np.clip(owed, -FP16_MAX, FP16_MAX, out=half, casting="unsafe")
        if residual is not None:
            np.subtract(owed, half, out=residual)
        return 2 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Widens and adds."""
        grad = payload.view("<f2").astype(np.float32)
        if assign:
            kernels.assign_scaled(grad, out, scale)
        else:
            kernels.add_scaled(grad, out, scale)
