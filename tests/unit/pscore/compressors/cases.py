"""Every compressor by name, as all tests run them, and the helpers to run one."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscore.compressors import COMPRESSORS, Compressor, parse_compressor
from pscore.compressors.base import RESIDUAL
from pscore.types import ByteArray, FloatArray

NAMES = [name + arguments for name, kind in COMPRESSORS.own.items() for arguments in kind.examples]
# The residual of these is the part not sent; that of dgc with momentum is a velocity, and that of
# sparseloco decays.
FORGETTING = ("dgc(ratio=0.03)", "sparseloco(k=5)")
WITH_RESIDUAL = [
    name
    for name in NAMES
    if RESIDUAL in parse_compressor(name).state_names and name not in FORGETTING
]
SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 1023, 1025, 2047, 2048, 2049, 4097, 6000)


FLOAT_MAX = np.finfo(np.float32).max


def _extremes() -> dict[str, FloatArray]:
    rng, numel = np.random.default_rng(4), 4200
    mixed: list[float] = [float(FLOAT_MAX), -float(FLOAT_MAX), 1e-45, 0.0, -0.0, 1e-30, 1.0, -1e36]
    values = {
        "largest": np.full(numel, FLOAT_MAX),
        "both signs": rng.choice([FLOAT_MAX, -FLOAT_MAX], numel),
        "one of all": np.where(np.arange(numel) == 2049, -FLOAT_MAX, 0.0),
        "1e38": np.clip(rng.standard_normal(numel), -3, 3) * 1e38,
        "3e36": rng.standard_normal(numel) * 3e36,
        "denormal": rng.standard_normal(numel) * 1e-40,
        "mixed": rng.choice(mixed, numel),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


EXTREMES = _extremes()  # Finite numbers at the ends of float32.


class Sender:
    """A worker's side of one slice."""

    def __init__(self, compressor: Compressor, numel: int) -> None:
        self.compressor = compressor
        self.state = {n: np.zeros(numel, dtype=np.float32) for n in compressor.state_names}
        self.buffer = np.full(compressor.payload_nbytes_max(numel), 0xA5, dtype=np.uint8)

    def encode(self, grad: FloatArray, *, seed: int = 0, step: int = 0) -> ByteArray:
        """Returns a copy of the payload, and asserts that the gradient is as before."""
        before = grad.copy()
        nbytes = self.compressor.encode(grad, self.state, self.buffer, seed=seed, step=step)
        assert np.array_equal(before.view(np.uint32), grad.view(np.uint32))
        assert nbytes <= len(self.buffer)
        return self.buffer[:nbytes].copy()

    @property
    def residual(self) -> FloatArray:
        """The residual."""
        return self.state["residual"]


def decode(compressor: Compressor, payload: ByteArray, numel: int) -> FloatArray:
    """Returns what a checked payload says."""
    compressor.check(payload, numel)
    out = np.full(numel, np.nan, dtype=np.float32)
    compressor.decode_add(payload, out, 1.0, assign=True)
    return out


def normal(numel: int, seed: int = 0, scale: float = 0.05) -> FloatArray:
    """Returns normally distributed numbers."""
    rng: Any = np.random.default_rng(seed)
    values: FloatArray = (rng.standard_normal(numel) * scale).astype(np.float32)
    return values
