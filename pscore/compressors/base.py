"""The protocol of a compressor: one file each; bytes out, and back into an accumulator.

A compressor is an immutable value that never talks to the network. Error feedback is part of
`encode`, because on the hot path gradient and residual are read once and written once:
`u = grad + residual; send C(u); residual = u - D(C(u))` (ALGORITHMS: the EF template; Karimireddy
et al., arXiv:1901.09847). Decoding adds straight into the shard's accumulator, in one pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pscore.types import ByteArray, FloatArray


@dataclass(frozen=True)
class Compressor(ABC):
    """One way of sending a slice in fewer bytes.

    Attributes:
        name: Its name in `COMPRESSORS`, in `compression=` and on the wire.
        keeps_residual: Whether `encode` needs a residual (error feedback).
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    keeps_residual: ClassVar[bool] = False

    @abstractmethod
    def payload_nbytes_max(self, numel: int) -> int:
        """Returns the largest payload of `numel` elements, in bytes."""

    @abstractmethod
    def check(self, payload: ByteArray, numel: int) -> None:
        """Refuses a payload that is not one of `numel` elements, before it is counted.

        Raises:
            DecodeError: Its size, a size in it, an index or a scale is wrong.
        """

    @abstractmethod
    def encode(
        self, grad: FloatArray, residual: FloatArray | None, out: ByteArray, seed: int
    ) -> int:
        """Writes the payload of `grad` and returns its length in bytes.

        Args:
            grad: `(numel,) float32`; not changed.
            residual: `(numel,) float32`, what is owed; replaced by what is owed afterwards.
                None sends without error feedback.
            out: `(>= payload_nbytes_max(numel),) uint8`.
            seed: Of this (job, worker, slice, step), for compressors that draw.
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

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments by name, as they travel."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __str__(self) -> str:
        """Returns the compressor as `parse_compressor` reads it."""
        inner = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        return f"{self.name}({inner})" if inner else self.name
