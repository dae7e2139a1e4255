"""Views of the flat gradient vector as `.grad`, so that a gradient exists only once in memory.

The script asks for them with `gradient_as_bucket_view=True`, as in DDP. When a gradient has been
gathered during backward, its `.grad` becomes a view of the flat vector and torch's own memory is
freed; the next backward pass accumulates there, and no copy is needed. The contract is DDP's: the
next backward pass overwrites a `.grad` that the script has kept. A write to such a `.grad` would
change memory that a shard may still read or that has yet to be sent. So `step()` waits for its
acknowledgement before it returns, and a change between backward and `step()` is an error, which is
found by a fingerprint of the gradient. Small gradients, and those gathered at `step()`, stay in
torch's memory: they are not worth that wait.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch
import xxhash

from pscore.net import wire
from pscore.partition import Layout
from pscore.placement import WORKER
from pscore.types import FloatArray


def is_plain(grad: torch.Tensor, numel: int) -> bool:
    """Returns whether a gradient has the memory layout and type of the vector."""
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.dtype == torch.float32
        and grad.is_contiguous()
        and not grad.is_neg()
        and grad.numel() == numel
    )


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient without its graph, as a dense tensor if it is sparse."""
    if grad.layout is not torch.strided:
        return grad.detach().to_dense()
    return grad.detach() if grad.requires_grad else grad  # Each call takes microseconds.


class GradViews:
    """Views of the flat gradients that parameters have as `.grad`."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: Layout, grads: FloatArray | None
    ) -> None:
        """Starts without views.

        Args:
            parameters: In the order of `layout.tensors`.
            grads: `(layout.numel,) float32` on the host; None: no views.
        """
        self._parameters = parameters
        self._layout = layout
        self._grads = grads
        self._home = 0 if grads is None else int(grads.ctypes.data)
        self._views: dict[int, torch.Tensor] = {}
        self._prints: dict[int, int] = {}  # Fingerprints of gradients when they left.
        self._has_trimmed = False

    def can_attach(self, index: int) -> bool:
        """Returns whether `.grad` of a parameter can become a view, and is none yet.

        A gradient of another type or memory order than the vector cannot, nor one with a graph or
        of a tensor subclass.
        """
        parameter = self._parameters[index]
        grad = parameter.grad
        is_small = parameter.nbytes < WORKER.grad_view_nbytes_min
        if self._grads is None or grad is None or is_small or self.has(index):
            return False
        is_alike = is_plain(grad, parameter.numel()) and parameter.dtype == torch.float32
        return is_alike and not grad.requires_grad

    def attach(self, index: int) -> None:
        """Makes `.grad` a view of the part of the vector that holds the gathered gradient."""
        parameter = self._parameters[index]
        if index not in self._views or not self._is_home(index):
            assert self._grads is not None
            start = self._layout.offsets[index]
            flat = self._grads[start : start + parameter.numel()].reshape(parameter.shape)
            self._views[index] = torch.from_numpy(flat)
        parameter.grad = self._views[index]

    def stamp(self, index: int) -> None:
        """Records the fingerprint of a gradient that is about to leave."""
        self._prints[index] = self._print(index)

    def is_stamped(self, index: int) -> bool:
        """Returns whether a gradient still has the fingerprint with which it left."""
        return self._prints[index] == self._print(index)

    def has(self, index: int) -> bool:
        """Returns whether `.grad` of a parameter is a view of the vector.

        If the script has replaced its memory (`grad.data = ...`), it is no view any more.
        """
        view = self._views.get(index)
        return view is not None and self._parameters[index].grad is view and self._is_home(index)

    def detach(self, index: int) -> None:
        """Copies a `.grad` that is a view into memory of its own."""
        grad = self._views.pop(index)
        self._parameters[index].grad = grad.clone()

    def detach_all(self) -> None:
        """Copies each `.grad` that is a view into memory of its own."""
        for index in [index for index in self._views if self.has(index)]:
            self.detach(index)

    def end_step(self) -> list[int]:
        """Returns the parameters whose `.grad` is a view of the vector.

        When the first views exist, the heap that torch's own gradients used is returned to the
        system: the allocator would keep free memory below other allocations.
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
        """Returns whether a view still points into the vector."""
        place = self._home + 4 * self._layout.offsets[index]
        return self._views[index].data_ptr() == place
