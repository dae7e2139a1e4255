"""Payloads of one table's pushes: gradients as they are, or compressed with error feedback.

What a compressor leaves out of a gradient is owed, and goes into the next one (error_feedback.py).
A gradient on the host that cannot be added to it is refused before anything is sent; one on a GPU
is looked at when it has arrived, which is behind the push: that one is sent as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    """Payloads, and what is owed.

    Attributes:
        feedback: By slice; None where nothing is compressed. Another one may take its place.
    """

    def __init__(
        self,
        layout: Layout,
        compressor: Compressor,
        grads: FloatArray | None,
        key: Callable[[int], str],
    ) -> None:
        """Owes nothing.

        Args:
            layout: The table's slices.
            compressor: Of its pushes.
            grads: `(layout.numel,) float32` on the host, for gradients that are on a GPU.
            key: Returns what tells a slice's random numbers from others'.
        """
        self._layout = layout
        self._compressor = compressor
        self._grads = grads
        self._key = key
        self._device: DeviceSide | None = None  # Of a model on a GPU.
        self._refused: GradientError | None = None  # Sent as absent, and not raised yet.
        self.feedback: list[Feedback | None] = [
            Feedback(compressor, spec.numel, key(spec.index))
            if spec.compress and not compressor.is_raw
            else None
            for spec in layout.slices
        ]

    def restart(self) -> None:
        """Begins anew as this worker, which may have another rank by now; what is owed stays."""
        self._refused = None
        for index, feedback in enumerate(self.feedback):
            if feedback is not None:
                feedback.key = self._key(index)

    def require_room(self, grads: Sequence[torch.Tensor], present: Callable[[int], int]) -> None:
        """Refuses gradients of all slices that cannot be added to what is owed.

        Raises:
            GradientError: Together they are too large for float32; nothing is changed.
        """
        for index, grad in enumerate(grads):
            self._require_room(self._choose(index, present(index)), grad)

    def choose(
        self, index: int, present: int, grad: torch.Tensor, *, compress: bool
    ) -> Feedback | None:
        """Returns the error feedback that a push goes through, if it does.

        Raises:
            GradientError: The gradient is too large for what is owed; nothing is changed.
        """
        feedback = self._choose(index, present) if compress else None
        self._require_room(feedback, grad)
        if feedback is not None and is_on_device(grad):
            self.feedback[index] = feedback = self._on_device(grad.device).place(index, feedback)
        return feedback

    def prepare(
        self, index: int, push: Push, grad: torch.Tensor, feedback: Feedback | None, *, flush: bool
    ) -> Callable[[], memoryview]:
        """Returns what returns the payload; what runs on a GPU, copies too, starts now."""
        if is_on_device(grad):
            return self._on_device(grad.device).payload(index, push, grad, feedback, flush=flush)
        if feedback is None:
            return lambda: wire.as_bytes(grad.numpy())
        if flush:
            return lambda: feedback.flush(push, grad.numpy())
        return lambda: feedback.encode(push, grad.numpy())

    def refuse(self, problem: GradientError) -> None:
        """Notes what was found in a gradient behind its push; the first one is told."""
        self._refused = self._refused or problem

    def raise_refused(self) -> None:
        """Raises what `refuse` has noted, once.

        Raises:
            GradientError: A gradient holds NaN or Inf, or cannot be added to what is owed.
        """
        problem, self._refused = self._refused, None
        if problem is not None:
            raise problem

    # ----- what is owed

    def state(self) -> dict[str, FloatArray]:
        """Returns what error feedback keeps, `(layout.numel,)` each; pushes must be flushed."""
        state: dict[str, FloatArray] = {}
        for spec, feedback in zip(self._layout.slices, self.feedback, strict=True):
            for name, array in feedback.state.items() if feedback is not None else ():
                flat = state.setdefault(name, np.zeros(self._layout.numel, dtype=np.float32))
                flat[spec.start : spec.stop] = array
        return state

    def load(self, state: Mapping[str, FloatArray]) -> None:
        """Replaces what error feedback keeps; of a layout for any number of shards."""
        for spec, feedback in zip(self._layout.slices, self.feedback, strict=True):
            for name, flat in state.items() if feedback is not None else ():
                assert feedback is not None
                feedback.load(name, flat[spec.start : spec.stop])

    # ----- inside

    def _choose(self, index: int, present: int) -> Feedback | None:
        """Returns the error feedback of a slice, unless a segment has no gradient.

        The shard leaves that segment out, and so would be what is owed of it.
        """
        is_whole = not wire.pack_bits(present, len(self._layout.slices[index].segments))
        return self.feedback[index] if is_whole else None

    @staticmethod
    def _require_room(feedback: Feedback | None, grad: torch.Tensor) -> None:
        if not (feedback is None or is_on_device(grad)):
            feedback.require_room(grad.numpy())

    def _on_device(self, device: torch.device) -> DeviceSide:
        """Returns how the gradients of a model on a GPU leave it."""
        if self._device is None:
            assert self._grads is not None
            self._device = DeviceSide(self._layout, self._compressor, self._grads, device)
        return self._device
