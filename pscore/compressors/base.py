"""The protocol of a compressor: one file each; bytes out, and back into an accumulator.

A compressor is an immutable value without network. Its memory of a slice is in named arrays that
the caller keeps (and saves); its random numbers depend on the seed that the caller gives.
Error feedback is part of `encode`, because on the hot path gradient and residual are read once and
the residual is written once (Karimireddy et al., arXiv:1901.09847):

    u = grad + residual;  send C(u);  residual = u - D(C(u))

Finite numbers stay finite: a payload of finite numbers decodes to finite numbers, and a gradient
whose sum with the residual is too large is refused before anything is changed.

Decoding adds directly to the shard's accumulator, in one pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pscore.errors import GradientError
from pscore.memory.kernels import read_only, sum_is_finite
from pscore.plugins import Plugin
from pscore.types import ByteArray, FloatArray

RESIDUAL = "residual"
ORIGIN = "origin"  # Optional entry of a state: the weights that a move begins at.
LARGEST = "largest"  # Optional entry of a state, `(1,) float32`: a bound of its magnitudes.
CALM = np.float32(2.0**102)  # A smaller number plus any float32 is finite in float32.
INF_BITS = np.int32(0x7F800000)
EMPTY: FloatArray = np.empty(0, dtype=np.float32)

# By the names in `state_names`, each `(numel,) float32`; and `LARGEST`, if the caller keeps it.
State = Mapping[str, FloatArray]


@dataclass(frozen=True)
class Compressor(Plugin):
    """One way of sending a slice in fewer bytes.

    Attributes:
        is_raw: Whether a payload is the float32 as they are, so that nothing is kept of them.
        needs_origin: Whether the caller gives the weights that a move begins at (`ORIGIN`).
    """

    is_raw: ClassVar[bool] = False
    needs_origin: ClassVar[bool] = False

    @property
    def needs_norm(self) -> bool:
        """Whether encoding begins with a sum over the whole slice, which no kernel makes."""
        return False

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the arrays that the worker keeps of each slice, such as `residual`."""
        return (RESIDUAL,)

    @property
    def bounds_residual(self) -> bool:
        """Whether each payload reduces the residual, so that it stays bounded."""
        return self.state_names == (RESIDUAL,)

    @abstractmethod
    def payload_nbytes_max(self, numel: int) -> int:
        """Returns the largest payload of `numel` elements, in bytes."""

    def payload_nbytes_at(self, numel: int, step: int) -> int:
        """Returns the largest payload of `numel` elements at a worker's step, in bytes."""
        return self.payload_nbytes_max(numel)

    def payload_nbytes(self, buffer: ByteArray, numel: int) -> int:
        """Returns the length of the payload of `numel` elements that `buffer` begins with."""
        return self.payload_nbytes_max(numel)

    @abstractmethod
    def check(self, payload: ByteArray, numel: int) -> None:
        """Raises an error unless a payload is one of `numel` elements; called before it is counted.

        Raises:
            DecodeError: Its size, a size in it, an index or a scale is wrong.
        """

    def require_room(self, grad: FloatArray, state: State) -> None:
        """Refuses a gradient whose sum with the residual is too large; changes nothing.

        Reads the numbers only if `LARGEST` does not exclude it.

        Raises:
            GradientError: Gradient plus residual is too large for float32.
        """
        known = state.get(LARGEST)
        if known is None or not known[0] < CALM:
            require_finite(self._has_room(grad, state), self.name)

    def _has_room(self, grad: FloatArray, state: State) -> bool:
        """Returns whether gradient plus residual is finite in float32."""
        residual = state.get(RESIDUAL)
        return residual is None or sum_is_finite(grad, residual)

    @abstractmethod
    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Writes the payload of `grad` and returns its length in bytes.

        Args:
            grad: `(numel,) float32`, finite; not changed.
            state: The arrays of `state_names`, changed in place unless an error is raised.
            out: `(>= payload_nbytes_max(numel),) uint8`, aligned to 8 bytes.
            seed: Seed of this (job, worker, slice, step), 64 bits, for compressors that draw.
            step: Step of the worker, for compressors whose ratio is warmed up.

        Raises:
            GradientError: Gradient plus residual is too large for float32.
        """

    @abstractmethod
    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds `scale` times the decoded payload to `out`, or assigns it.

        Args:
            payload: `(nbytes,) uint8`, one that `check` has accepted.
            out: `(numel,) float32`.
            scale: Weight of this push in the mean of its step.
            assign: Overwrite `out` instead of adding to it.
        """


def aligned(payload: ByteArray, dtype: str) -> Any:
    """Returns a part of a payload as `dtype`, not writable; copied if it is not aligned."""
    array = payload.view(dtype)
    return read_only(array if array.flags.aligned else array.copy())


def note_largest(state: State, bits: int | np.integer[Any], name: str) -> None:
    """Records the bits of the largest magnitude that an encoder has met, as the residual's bound.

    Raises:
        GradientError: It is NaN or Inf.
    """
    require_finite(bits < INF_BITS, name)
    if LARGEST in state:
        state[LARGEST].view(np.int32)[0] = bits


def require_finite(ok: bool | np.bool, name: str) -> None:
    """Raises a `GradientError` if an encoder has met a number beyond float32."""
    if not ok:
        raise GradientError(
            f"{name}: gradient + residual is beyond float32; the gradient diverges, or the "
            "threshold is far too small for it"
        )
