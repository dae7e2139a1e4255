"""Finds NaN and Inf in a gradient on a device without waiting for the device.

A gradient that is not encoded is checked on the device right before it is copied, by one kernel
that writes a flag to pinned memory of the host, or by torch where there are no kernels. The host
reads the flag once the gradient has arrived, and then sends nothing. Only then is each tensor
checked, to name one. Encoders check what they encode, with flags of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch

from pscore.cuda.base import is_not_finite
from pscore.cuda.encoders import start_room
from pscore.cuda.runtime import launcher
from pscore.errors import GradientError
from pscore.partition import Layout
from psworker.model.copies import on_host


class FiniteCheck:
    """Checks the gradients of one slice."""

    def __init__(self, layout: Layout, index: int, device: torch.device) -> None:
        """Allocates its memory, once."""
        spec = layout.slices[index]
        self._spans = [(part.start, part.stop) for part in spec.segments]
        self._names = [layout.tensors[part.tensor].name for part in spec.segments]
        self._launch = launcher(device)
        # Two results by turns: the kernel of a push that was given up may still be queued.
        host = torch.zeros(2, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._hosts = list(host)
        self._results = host.numpy()
        self._turn = 0

    def start(self, grad: torch.Tensor) -> None:
        """Starts the check of `(numel,) float32` on the current stream; returns at once."""
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        if self._launch is None:
            host[1:].copy_(is_not_finite(grad).int(), non_blocking=True)
        else:
            self._results[self._turn] = 0
            start_room(self._launch, grad, np.uint64(0), host)

    def require_finite(self, grad: torch.Tensor, step: int) -> None:
        """Raises if `start` has found NaN or Inf; the stream must have made it by then.

        Args:
            grad: The gradient that was given to `start`.
            step: Step of the push, for the message.

        Raises:
            GradientError: The gradient holds NaN or Inf; names the tensor.
        """
        if self._results[self._turn, 1]:
            self.refuse(grad, step)

    def refuse(self, grad: torch.Tensor, step: int) -> NoReturn:
        """Raises GradientError for a gradient of the slice that holds NaN or Inf."""
        for name, (start, stop) in zip(self._names, self._spans, strict=True):
            part = grad[start:stop]
            if not bool(torch.isfinite(part).all()):
                raise not_finite(name, part, step)
        raise AssertionError("a value that is not finite, outside of every tensor")


def first_not_finite(parts: Sequence[torch.Tensor]) -> int | None:
    """Returns the place of the first tensor that holds NaN or Inf; None if all are finite.

    All tensors are on one device, and it waits for the device once, or once more if a sum is not
    finite. Sums come first, since `isfinite` takes many times as long on a CPU.
    """
    if not parts:
        return None
    sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
    if bool(on_host(sums).isfinite().all()):
        return None
    flags = torch.stack([torch.isfinite(part).all() for part in parts])
    finite: list[bool] = on_host(flags).tolist()
    return None if all(finite) else finite.index(False)


def is_finite(values: torch.Tensor) -> bool:
    """Returns whether all values on the host are finite; a finite sum tells that much faster.

    A sum may be beyond its type though all values are finite.
    """
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def not_finite(name: str, grad: torch.Tensor, step: int) -> GradientError:
    """Builds the error for a gradient that contains NaN or Inf."""
    bad = int((~torch.isfinite(grad)).sum())
    return GradientError(
        f"gradient of {name!r} holds {bad} NaN or Inf of {grad.numel()} elements at step {step}; "
        "nothing of it was pushed"
    )
