"""The protocol of an encoder on a device: it encodes a slice in place, and no thread waits for it.

The payload is the CPU's, bit for bit. Results that are only known at the end (the number of
elements, whether a number was beyond float32) follow the payload in memory and are copied with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from pscore.compressors.base import Compressor, require_finite
from pscore.types import ByteArray

TAIL_NBYTES = 16  # Behind the payload, int32: whether a number was beyond float32, the refusal.


class Encoder(ABC):
    """Encodes one slice of a device.

    Attributes:
        payload: `(nbytes,) uint8` on the device: payload, padding, and `TAIL_NBYTES`.
        state: The compressor's arrays by name, each `(numel,) float32` on the device.
    """

    def __init__(self, compressor: Compressor, numel: int, device: torch.device) -> None:
        """Allocates payload and state, once.

        Args:
            compressor: Compressor of the slice's pushes.
            numel: Elements of the slice.
            device: Device of gradients and state.
        """
        self.compressor = compressor
        self.numel = numel
        longest = compressor.payload_nbytes_max(numel)
        self._tail = -(-longest // TAIL_NBYTES) * TAIL_NBYTES
        self.payload = torch.zeros(self._tail + TAIL_NBYTES, dtype=torch.uint8, device=device)
        tail = self.payload[self._tail :].view(torch.int32)
        self.bad, self.refused = tail[:1], tail[1:2]
        self.state = {
            name: torch.zeros(numel, dtype=torch.float32, device=device)
            for name in compressor.state_names
        }

    def encode(
        self, grad: torch.Tensor, *, seed: int, step: int, refused: torch.Tensor | None = None
    ) -> None:
        """Starts the encoding of gradient and state into the payload, without waiting.

        Args:
            grad: `(numel,) float32` on the device; not changed.
            seed: Seed of this (job, worker, slice, step), for compressors that draw.
            step: Step of the worker.
            refused: `(1,) int32` on the device: where it is not 0, the gradient is no number and
                the state stays as it is. The payload is then none.
        """
        self.bad.zero_()
        if refused is None:
            self.refused.zero_()
        else:
            self.refused.copy_(refused)
        self._encode(grad, seed, step)

    @abstractmethod
    def _encode(self, grad: torch.Tensor, seed: int, step: int) -> None:
        """Makes the payload; leaves the state as it is where `refused` is not 0."""

    def finish(self, host: ByteArray) -> ByteArray:
        """Returns the payload in a copy of `self.payload` that has arrived on the host.

        Raises:
            GradientError: Gradient and residual are too large for float32 together.
        """
        bad, refused = host[self._tail : self._tail + 8].view(np.int32).tolist()
        assert not refused, "a gradient that is no number was to be reported before"
        require_finite(bad == 0, self.compressor.name)
        return host[: self.compressor.payload_nbytes(host, self.numel)]
