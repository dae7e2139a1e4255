"""The protocol of an encoder on a device: it encodes a slice in place, and no thread waits for it.

The payload is the CPU's, bit for bit. Whether the gradient is fit to be sent is found on the device
too: two flags are before the payload in memory and are copied with it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch

from pscore.compressors.base import Compressor, require_finite
from pscore.types import ByteArray

HEAD_NBYTES = 16  # Before the payload, so that this is aligned as its memory is.


class Encoder(ABC):
    """Encodes one slice of a device.

    Attributes:
        sent: `(nbytes,) uint8` on the device: two flags in `HEAD_NBYTES`, then the payload.
        payload: The part of it behind the flags.
        bad: `(1,) int32`, not 0 where gradient and residual are beyond float32 together.
        refused: `(1,) int32` behind it, not 0 where the gradient holds NaN or Inf.
        state: The compressor's arrays by name, each `(numel,) float32` on the device.
    """

    def __init__(self, compressor: Compressor, numel: int, device: torch.device) -> None:
        """Allocates payload and state, once."""
        self.compressor = compressor
        self.numel = numel
        nbytes = HEAD_NBYTES + compressor.payload_nbytes_max(numel)
        self.sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.payload = self.sent[HEAD_NBYTES:]
        self._flags = self.sent[:8].view(torch.int32)
        self.bad, self.refused = self._flags[:1], self._flags[1:]
        self.state = {
            name: torch.zeros(numel, dtype=torch.float32, device=device)
            for name in compressor.state_names
        }

    def encode(self, grad: torch.Tensor, *, seed: int, step: int) -> None:
        """Starts the encoding of gradient and state into the payload, without waiting.

        Where the gradient holds NaN or Inf, or float32 does not hold its sum with the residual, the
        state stays as it is, and there is no payload.

        Args:
            grad: `(numel,) float32` on the device; not changed.
            seed: Seed of this (job, worker, slice, step), for compressors that draw.
        """
        self._flags.zero_()
        self._encode(grad, seed, step)

    def nbytes_at(self, step: int) -> int:
        """Returns how many bytes of `sent` can be used after `encode` at a step."""
        return HEAD_NBYTES + self.compressor.payload_nbytes_at(self.numel, step)

    @abstractmethod
    def _encode(self, grad: torch.Tensor, seed: int, step: int) -> None:
        """Makes the payload and sets the flags; where one is set, the state stays as it is."""

    @staticmethod
    def is_refused(host: ByteArray) -> bool:
        """Returns whether the gradient held NaN or Inf, by a copy of `sent` on the host."""
        return bool(host[:8].view(np.int32)[1])

    def finish(self, host: ByteArray) -> ByteArray:
        """Returns the payload in a copy of `sent` that has arrived on the host.

        Raises:
            GradientError: Gradient and residual are too large for float32 together.
        """
        assert not self.is_refused(host), "a gradient with NaN or Inf was to be reported before"
        require_finite(not host[:4].view(np.int32)[0], self.compressor.name)
        payload = host[HEAD_NBYTES:]
        return payload[: self.compressor.payload_nbytes(payload, self.numel)]


def is_not_finite(grad: torch.Tensor) -> torch.Tensor:
    """Returns whether a gradient on a device holds NaN or Inf, `(1,) bool`; does not wait."""
    largest = torch.linalg.vector_norm(grad, math.inf)  # NaN if any element is.
    return torch.isfinite(largest).logical_not().view(1)
