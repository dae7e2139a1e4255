"""Gradients that lie once in memory: `.grad` of a parameter is the part of the vector that is sent.

If the script asks for it (`gradient_as_bucket_view=True`, as of DDP), `.grad` becomes a view of the
flat vector when a gradient has been gathered there during backward, and torch's own memory is free;
what is accumulated there in the next step need not be copied again. The contract is DDP's: the next
backward pass overwrites a `.grad` that the script has kept. A write to such a `.grad` would change
what a shard may still read, or what has yet to be sent, so that the wrapper waits for its
acknowledgement before `step()` returns; a change between backward and `step()` is an error, which a
fingerprint of the gradient shows. Small gradients stay where torch has made them, for they are not
worth that wait; so does what is gathered at `step()`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch
import xxhash

from pscore.net import wire
from pscore.partition import Layout
from pscore.types import FloatArray

NBYTES_MIN = 1 << 18


def is_plain(grad: torch.Tensor, numel: int) -> bool:
    """Whether a gradient of `numel` elements lies in memory as it will in the vector."""
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.dtype == torch.float32
        and grad.is_contiguous()
        and not grad.is_neg()
        and grad.numel() == numel
    )


class GradViews:
    """Parts of the flat gradient that parameters have as `.grad`."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: Layout, grads: FloatArray | None
    ) -> None:
        """Lends nothing yet.

        Args:
            parameters: In the order of `layout.tensors`.
            layout: Where each of them lies.
            grads: `(layout.numel,) float32` on the host; None if nothing is to be views.
        """
        self._parameters = parameters
        self._layout = layout
        self._grads = grads
        self._home = 0 if grads is None else int(grads.ctypes.data)
        self._views: dict[int, torch.Tensor] = {}
        self._prints: dict[int, int] = {}  # Fingerprints of the gradients when they were views.
        self._has_trimmed = False

    def can_attach(self, index: int) -> bool:
        """Whether `.grad` of a parameter can become a part of the vector, and is none yet.

        A gradient of another type or order than the vector's cannot, nor one with a graph or of a
        class of its own.
        """
        parameter = self._parameters[index]
        grad = parameter.grad
        if self._grads is None or grad is None or parameter.nbytes < NBYTES_MIN or self.has(index):
            return False
        is_alike = is_plain(grad, parameter.numel()) and parameter.dtype == torch.float32
        return is_alike and not grad.requires_grad

    def attach(self, index: int) -> None:
        """Makes the part of the vector, where the gradient has been gathered, `.grad`."""
        parameter = self._parameters[index]
        if index not in self._views or not self._is_home(index):
            assert self._grads is not None
            start = self._layout.offsets[index]
            flat = self._grads[start : start + parameter.numel()].reshape(parameter.shape)
            self._views[index] = torch.from_numpy(flat)
        parameter.grad = self._views[index]

    def stamp(self, index: int) -> None:
        """Takes the fingerprint of a views gradient that is about to leave."""
        self._prints[index] = self._print(index)

    def is_stamped(self, index: int) -> bool:
        """Whether a views gradient is still as it was when it left."""
        return self._prints[index] == self._print(index)

    def has(self, index: int) -> bool:
        """Whether `.grad` of a parameter lies in the vector.

        A script may have given it other memory (`grad.data = ...`); then it is the script's.
        """
        views = self._views.get(index)
        return views is not None and self._parameters[index].grad is views and self._is_home(index)

    def detach(self, index: int) -> None:
        """Gives a `.grad` that lies in the vector memory of its own."""
        grad = self._views.pop(index)
        self._parameters[index].grad = grad.clone()

    def detach_all(self) -> None:
        """Gives each `.grad` that lies in the vector memory of its own."""
        for index in [index for index in self._views if self.has(index)]:
            self.detach(index)

    def end_step(self) -> list[int]:
        """Returns the parameters whose `.grad` lies in the vector.

        The first time that there are some, what torch's own gradients have left in the heap goes
        back to the system: the allocator would keep what lies below something else.
        """
        views = [index for index in self._views if self.has(index)]
        if views and not self._has_trimmed:
            self._has_trimmed = True
            with contextlib.suppress(AttributeError):  # Another C library than glibc.
                ctypes.CDLL(None).malloc_trim(0)
        return views

    def _print(self, index: int) -> int:
        return xxhash.xxh3_64_intdigest(wire.as_bytes(self._views[index].numpy()))

    def _is_home(self, index: int) -> bool:
        """Whether a tensor that was views still lies in the vector."""
        place = self._home + 4 * self._layout.offsets[index]
        return self._views[index].data_ptr() == place
