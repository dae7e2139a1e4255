"""The pushes of one table as they leave: gradients as they are, or with error feedback.

The part that a compressor leaves out of a gradient is its residual, which is added to the next one
(error_feedback.py). A gradient on the host that cannot be added to it is refused before anything is
sent. A gradient on a GPU is checked when its copy has arrived, after the push has begun: if it is
refused, the push is sent as absent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from pscore.compressors.base import Compressor
from pscore.errors import GradientError
from pscore.net import wire
from pscore.observe.timeline import Timeline
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.types import FloatArray, Push
from psworker.compression.error_feedback import Feedback
from psworker.compression.on_gpu import DeviceSide
from psworker.connection.accounts.trace import note_payload
from psworker.connection.accounts.traffic import Traffic
from psworker.connection.exchange.headers import PreparedHeaders
from psworker.connection.exchange.shared_grads import SharedGrads
from psworker.model.device import is_on_device
from psworker.transports import OutgoingPush


class Payloads:
    """Makes the pushes of one table, counts them, and keeps its residuals.

    Attributes:
        feedback: Error feedback by slice; None where nothing is compressed. A slice's entry is
            replaced when its gradients turn out to be on a GPU.
        origin_of: Returns the weights that a slice's move begins at; None: it is a gradient.
    """

    def __init__(
        self,
        layout: Layout,
        compressor: Compressor,
        own: Collection[int],
        *,
        shared: SharedGrads | None,
        sender: Callable[[], data_pb2.Sender],
        traffic: Traffic,
        timeline: Timeline | None,
    ) -> None:
        """Starts without residuals.

        Args:
            own: The slices that this process pushes.
            shared: Memory for copies of gradients from a GPU; None: memory that no shard maps is
                allocated when the first one comes.
            sender: Returns the table and this worker as they stand in messages; not to be changed.
            timeline: Records the time of each compression; None: nothing is recorded.
        """
        self._layout = layout
        self._compressor = compressor
        self._shared = shared
        self._sender = sender
        self._headers = PreparedHeaders(data_pb2.PushHeader)
        self._traffic = traffic
        self._timeline = timeline
        self.origin_of: Callable[[int], torch.Tensor | None] = lambda index: None
        self._counting = threading.Lock()  # Guards `_traffic`: pushes leave on several threads.
        self._device: DeviceSide | None = None  # For a model on a GPU.
        self._refused: GradientError | None = None  # Why a push was sent as absent; not raised yet.
        seed = self._seed()
        self.feedback: list[Feedback | None] = [
            Feedback(compressor, spec.numel, f"{seed}/{spec.index}")
            if spec.compress and not compressor.is_raw and spec.index in own
            else None
            for spec in layout.slices
        ]

    def restart(self) -> None:
        """Starts again, perhaps at another rank; residuals stay."""
        self._refused = None
        if self._device is not None:
            self._device.restart()
        seed = self._seed()
        for index, feedback in enumerate(self.feedback):
            if feedback is not None:
                feedback.key = f"{seed}/{index}"

    def require_room(
        self, grads: Mapping[int, torch.Tensor], present: Callable[[int], int]
    ) -> None:
        """Raises GradientError if a gradient, by slice, cannot be added to its residual."""
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
        self,
        index: int,
        push: Push,
        grad: torch.Tensor,
        feedback: Feedback | None,
        *,
        flush: bool,
        minibatch: int,
    ) -> OutgoingPush:
        """Starts work on a GPU, and returns the push as it leaves: of this worker as it is now.

        Args:
            grad: `(numel,) float32`; it must not change until the push is acknowledged.
            feedback: From `choose`; None: the payload is the gradient.
            flush: Whether the payload is the sum of gradient and residual, uncompressed.
            minibatch: Number of the gradient's minibatch; -1: it names none.
        """
        is_shared = (
            feedback is None
            and push.present != 0
            and self._shared is not None
            and self._shared.holds(index, grad)
        )
        compressor = "" if feedback is None or flush else self._compressor.name
        header = self._header(index, push, compressor, is_shared=is_shared)
        header.minibatch = minibatch + 1
        if feedback is not None and self._compressor.needs_origin:
            origin = self.origin_of(index)  # Copied: the next round may begin before it is encoded.
            feedback.origin = None if origin is None else origin.numpy(force=True).copy()
        waits = is_on_device(grad)
        if is_shared and not waits:
            return OutgoingPush(header=header, payload=partial(self._count, grad.nbytes))
        if waits:
            encode = self._on_device(grad.device).payload(index, push, grad, feedback, flush=flush)
        elif feedback is None:
            encode = partial(wire.as_bytes, grad.numpy())
        else:
            encode = partial(feedback.flush if flush else feedback.encode, push, grad.numpy())
        payload = partial(self._make_payload, header, push, encode)
        return OutgoingPush(header=header, payload=payload, waits=waits)

    @property
    def has_refused(self) -> bool:
        """Whether `raise_refused` would raise."""
        return self._refused is not None

    def raise_refused(self) -> None:
        """Raises the first error that was found in a gradient after its push, once.

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

    def _make_payload(
        self, header: data_pb2.PushHeader, push: Push, encode: Callable[[], memoryview]
    ) -> Sequence[memoryview]:
        """Encodes and counts one push, on a thread of the transport.

        A gradient that is refused only now, after its copy from a GPU, is sent as absent, so that
        the step still ends.

        Args:
            header: The header of the push; it changes if the gradient is refused.
            encode: Returns the bytes of its payload, or raises GradientError.

        Returns:
            The payload; nothing if the shard reads it in shared memory, or it is absent.
        """
        begin_ns = 0 if self._timeline is None else self._timeline.now_ns()
        try:
            data = encode()
        except GradientError as problem:
            self._refused = self._refused or problem  # The first one will be raised.
            header.present = wire.pack_bits(0, len(self._layout.slices[header.slice].segments))
            header.compressor, header.shared, header.may_wait = "", False, False
            return ()
        if self._timeline is not None and header.compressor:
            note_payload(self._timeline, begin_ns, header, data.nbytes)
        self._count(data.nbytes if push.present else 0)
        return () if header.shared or push.present == 0 else (data,)

    def _header(
        self, index: int, push: Push, compressor: str, *, is_shared: bool
    ) -> data_pb2.PushHeader:
        """Returns the header of a push of a slice, by a compressor's name, without a minibatch."""
        sender = self._sender()

        def make() -> data_pb2.PushHeader:
            return data_pb2.PushHeader(
                sender=sender,
                slice=index,
                role=data_pb2.Role.Name(int(push.role)),
                compressor=compressor,
                samples=push.samples,
                present=wire.pack_bits(push.present, len(self._layout.slices[index].segments)),
                hyper=() if push.hyper is None else push.hyper.ravel().tolist(),
                shared=is_shared,
                may_wait=push.may_wait,
            )

        values = b"" if push.hyper is None else push.hyper.tobytes()
        said = sender, push.role, push.samples, push.present, values, push.may_wait
        header = self._headers.copy(index, (*said, is_shared, compressor), make)
        header.step, header.base_version = push.step, push.base_version
        return header

    def _count(self, nbytes: int) -> Sequence[memoryview]:
        """Counts a push of a gradient of `nbytes`; returns the payload of one in shared memory."""
        with self._counting:
            self._traffic.num_pushes += 1
            self._traffic.pushed_nbytes += nbytes
        return ()

    def _seed(self) -> str:
        """Returns a string that seeds the random numbers of this worker's pushes."""
        sender = self._sender()
        return f"{sender.job}/{sender.table}/{sender.worker}"

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
            shared = self._shared
            host = np.zeros(self._layout.numel, np.float32) if shared is None else shared.array
            self._device = DeviceSide(self._layout, self._compressor, host, device)
        return self._device
