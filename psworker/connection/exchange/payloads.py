"""Payloads of one table's pushes: gradients as they are, or compressed with error feedback.

The part that a compressor leaves out of a gradient is its residual, which is added to the next one
(error_feedback.py). A gradient on the host that cannot be added to it is refused before anything is
sent. A gradient on a GPU is checked when its copy has arrived, after the push has begun: if it is
refused, the push is sent as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from pscore.compressors.base import Compressor
from pscore.errors import GradientError
from pscore.net import wire
from pscore.partition import Layout
from pscore.types import FloatArray, Push
from psworker.compression.error_feedback import Feedback
from psworker.compression.on_gpu import DeviceSide
from psworker.model.device import is_on_device


class Payloads:
    """Makes the payloads of one table, and keeps its residuals.

    Attributes:
        feedback: Error feedback by slice; None where nothing is compressed. A slice's entry is
            replaced when its gradients turn out to be on a GPU.
    """

    def __init__(
        self,
        layout: Layout,
        compressor: Compressor,
        grads: FloatArray | None,
        key: Callable[[int], str],
        own: Collection[int],
    ) -> None:
        """Starts without residuals.

        Args:
            layout: The table's slices.
            compressor: The compressor of its pushes.
            grads: `(layout.numel,) float32` on the host, for copies of gradients from a GPU; None:
                it is allocated when the first one comes.
            key: Returns a string that seeds a slice's random numbers.
            own: The slices that this process pushes.
        """
        self._layout = layout
        self._compressor = compressor
        self._grads = grads
        self._key = key
        self._device: DeviceSide | None = None  # For a model on a GPU.
        self._refused: GradientError | None = None  # Why a push was sent as absent; not raised yet.
        self.feedback: list[Feedback | None] = [
            Feedback(compressor, spec.numel, key(spec.index))
            if spec.compress and not compressor.is_raw and spec.index in own
            else None
            for spec in layout.slices
        ]

    def restart(self) -> None:
        """Starts again, perhaps at another rank; residuals stay."""
        self._refused = None
        if self._device is not None:
            self._device.restart()
        for index, feedback in enumerate(self.feedback):
            if feedback is not None:
                feedback.key = self._key(index)

    def require_room(
        self, grads: Mapping[int, torch.Tensor], present: Callable[[int], int]
    ) -> None:
        """Refuses gradients of some slices, by index, that cannot be added to the residuals.

        Raises:
            GradientError: A sum is too large for float32; nothing is changed.
        """
        for index, grad in grads.items():
            self._require_room(self._choose(index, present(index)), grad)

    def choose(
        self, index: int, present: int, grad: torch.Tensor, *, compress: bool
    ) -> Feedback | None:
        """Returns the error feedback of a push, or None if it is not compressed.

        Raises:
            GradientError: The gradient cannot be added to the residual; nothing is changed.
        """
        feedback = self._choose(index, present) if compress else None
        self._require_room(feedback, grad)
        if feedback is not None and is_on_device(grad):
            self.feedback[index] = feedback = self._on_device(grad.device).place(index, feedback)
        return feedback

    def prepare(
        self, index: int, push: Push, grad: torch.Tensor, feedback: Feedback | None, *, flush: bool
    ) -> Callable[[], memoryview]:
        """Starts work on a GPU, and returns a function that returns the payload."""
        if is_on_device(grad):
            return self._on_device(grad.device).payload(index, push, grad, feedback, flush=flush)
        if feedback is None:
            return lambda: wire.as_bytes(grad.numpy())
        if flush:
            return lambda: feedback.flush(push, grad.numpy())
        return lambda: feedback.encode(push, grad.numpy())

    def refuse(self, problem: GradientError) -> None:
        """Records an error found in a gradient after its push; the first one will be raised."""
        self._refused = self._refused or problem

    @property
    def has_refused(self) -> bool:
        """Whether `raise_refused` would raise."""
        return self._refused is not None

    def raise_refused(self) -> None:
        """Raises the error that `refuse` has recorded, once.

        Raises:
            GradientError: A gradient holds NaN or Inf, or cannot be added to the residual.
        """
        problem, self._refused = self._refused, None
        if problem is not None:
            raise problem

    # ----- residuals

    def state(self) -> dict[str, FloatArray]:
        """Returns the state of error feedback, `(layout.numel,)` each; pushes must be flushed."""
        state: dict[str, FloatArray] = {}
        for spec, feedback in zip(self._layout.slices, self.feedback, strict=True):
            for name, array in feedback.state.items() if feedback is not None else ():
                flat = state.setdefault(name, np.zeros(self._layout.numel, dtype=np.float32))
                flat[spec.start : spec.stop] = array
        return state

    def load(self, state: Mapping[str, FloatArray]) -> None:
        """Replaces the state of error feedback; it is the same for any number of shards."""
        for spec, feedback in zip(self._layout.slices, self.feedback, strict=True):
            for name, flat in state.items() if feedback is not None else ():
                assert feedback is not None
                feedback.load(name, flat[spec.start : spec.stop])

    # ----- inside

    def _choose(self, index: int, present: int) -> Feedback | None:
        """Returns the error feedback of a slice, unless a segment has no gradient.

        The shard ignores that segment, and its part of the residual would be lost.
        """
        is_whole = not wire.pack_bits(present, len(self._layout.slices[index].segments))
        return self.feedback[index] if is_whole else None

    @staticmethod
    def _require_room(feedback: Feedback | None, grad: torch.Tensor) -> None:
        if not (feedback is None or is_on_device(grad)):
            feedback.require_room(grad.numpy())

    def _on_device(self, device: torch.device) -> DeviceSide:
        """Returns the GPU side, made when it is first needed."""
        if self._device is None:
            if self._grads is None:
                self._grads = np.zeros(self._layout.numel, dtype=np.float32)
            self._device = DeviceSide(self._layout, self._compressor, self._grads, device)
        return self._device
