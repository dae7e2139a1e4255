"""Error feedback of gradients on a GPU: they are encoded there, and the small payload is copied.

The encoder runs on torch's current stream, right after backward has made the slice. The payload is
copied to pinned memory on another stream (psworker/model/copies.py), while backward continues, and
only the thread that sends it waits for that copy. Residuals stay on the device. Gradients that
cannot be encoded there are copied, and the CPU encodes them.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch

from pscore.compressors.base import RESIDUAL, Compressor, require_finite
from pscore.cuda.base import Encoder
from pscore.cuda.choice import make_encoder
from pscore.memory.kernels import all_finite
from pscore.net import wire
from pscore.partition import Layout
from pscore.types import FloatArray, Push, Verdict
from psworker.compression.error_feedback import FLOAT_MAX, Feedback, Sent
from psworker.model.copies import Copies, copies_of, current_stream, on_stream
from psworker.model.finite import FiniteCheck

log = logging.getLogger("paceline")
NOTHING = memoryview(b"")  # The payload of a push that was given up; its sender is refused too.


class DeviceFeedback(Feedback):
    """Error feedback of one slice on a GPU."""

    def __init__(self, encoder: Encoder, copies: Copies, key: str) -> None:
        """Starts without a residual.

        Args:
            key: Job, table, worker and slice.
        """
        super().__init__(encoder.compressor, encoder.numel, key)
        self._encoder = encoder
        self._copies = copies
        self._host = torch.zeros_like(
            encoder.sent, device="cpu", pin_memory=encoder.sent.device.type == "cuda"
        )
        self._newest: Push | None = None  # The push that is not settled.
        self._stream: torch.cuda.Stream | None = None  # That of the newest push's kernels.

    def start(self, push: Push, grad: torch.Tensor, check: FiniteCheck) -> Callable[[], memoryview]:
        """Starts kernels and copy; returns a function that waits for the payload and returns it."""
        with self._lock:
            self._begin(push)
            self._encoder.encode(grad, seed=self._seed(push), step=push.step)
            nbytes = self._encoder.nbytes_at(push.step)
            done = self._copies.to_host((self._host[:nbytes], self._encoder.sent[:nbytes]))

        def ready() -> memoryview:
            done.wait()
            with self._lock:
                if self._newest is not push:
                    return NOTHING
                host = self._host.numpy()
                if self._encoder.is_refused(host):
                    check.refuse(grad, push.step)
                if self._sent is None:
                    payload = self._encoder.finish(host)
                    self._sent = Sent(step=push.step, payload=payload, is_compressed=True)
                return wire.as_bytes(self._sent.payload)

        return ready

    def start_flush(
        self, push: Push, grad: torch.Tensor, check: FiniteCheck, host: torch.Tensor
    ) -> Callable[[], memoryview]:
        """Starts the sum of gradient and residual, which becomes zero, and its copy to the host.

        Args:
            grad: `(numel,) float32` on the device.
            check: Finds NaN and Inf in it.
            host: `(numel,) float32`, pinned; it is the payload until the push is settled.

        Returns:
            A function that waits for the uncompressed payload and returns it.
        """
        with self._lock:
            self._begin(push)
            check.start(grad)
            total, residual = grad, self._encoder.state.get(RESIDUAL)
            if residual is not None:
                total = grad + residual  # Not finite where the gradient is not.
                stays = torch.isfinite(total).all().logical_not()
                residual.copy_(torch.where(stays, residual, 0.0))
            done = self._copies.to_host((host, total))

        def ready() -> memoryview:
            done.wait()
            with self._lock:
                if self._newest is not push:
                    return NOTHING
                check.require_finite(grad, push.step)
                if self._sent is None:
                    require_finite(all_finite(host.numpy()), self._compressor.name)
                    payload = host.numpy().view(np.uint8)
                    self._sent = Sent(step=push.step, payload=payload, is_compressed=False)
                return wire.as_bytes(self._sent.payload)

        return ready

    def settle(self, verdict: Verdict) -> None:
        """Ends the push that was encoded last; a late push is added back to the residual."""
        with self._lock:
            sent, self._sent, self._newest = self._sent, None, None
            residual = self._encoder.state.get(RESIDUAL)
            if sent is None or residual is None:
                return
            if verdict == Verdict.TOO_LATE:
                # torch keeps pinned memory until it is copied: no wait.
                is_cuda = residual.device.type == "cuda"
                back = torch.zeros(
                    self._numel, pin_memory=is_cuda, dtype=torch.float32, device="cpu"
                )
                if sent.is_compressed:
                    self._compressor.decode_add(sent.payload, back.numpy(), 1.0, assign=False)
                else:
                    back.numpy()[:] = sent.payload.view(np.float32)
                with on_stream(self._stream):  # Any thread settles, with a stream of its own.
                    residual.add_(back.to(residual.device, non_blocking=True))
                    residual.clamp_(-FLOAT_MAX, FLOAT_MAX)  # Rounding may pass it.

    @property
    def state(self) -> Mapping[str, FloatArray]:
        """A copy of the compressor's arrays by name, each `(numel,) float32` on the host."""
        self._await_kernels()
        return {name: value.cpu().numpy() for name, value in self._encoder.state.items()}

    def load(self, name: str, value: FloatArray) -> None:
        """Replaces one array of the state; one that the compressor does not keep is dropped."""
        if name in self._encoder.state:
            self._await_kernels()
            self._encoder.state[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
            self._await_kernels()

    def _begin(self, push: Push) -> None:
        """Records the push whose work is started now, and the stream that does it."""
        assert self._sent is None
        self._newest = push
        self._stream = current_stream(self._encoder.payload.device)

    def _await_kernels(self) -> None:
        """Waits for the device: this thread may use another stream than the one that trains."""
        if self._encoder.payload.device.type == "cuda":
            torch.cuda.synchronize(self._encoder.payload.device)


class DeviceSide:
    """Moves the gradients of one table off a device: checked, then encoded there, or copied."""

    def __init__(
        self, layout: Layout, compressor: Compressor, host: FloatArray, device: torch.device
    ) -> None:
        """Allocates nothing yet.

        Args:
            host: `(layout.numel,) float32` for copies of uncompressed gradients.
        """
        self._layout = layout
        self._compressor = compressor
        self._host = torch.from_numpy(host)
        self._device = device
        self._copies = copies_of(device)
        self._checks: dict[int, tuple[FiniteCheck, torch.Tensor]] = {}  # And the part of the host.
        self._placed: set[int] = set()  # Slices whose error feedback has seen the device.
        self._newest: dict[int, Push] = {}  # By slice: the last push without error feedback.
        if device.type == "cuda":
            _pin(self, self._host, device)

    def restart(self) -> None:
        """Gives up the pushes under way: none of them will be refused any more."""
        self._newest.clear()

    def place(self, index: int, feedback: Feedback) -> Feedback:
        """Returns a slice's error feedback, moved to the gradient's device if that is possible."""
        if index in self._placed:
            return feedback
        self._placed.add(index)
        encoder = make_encoder(self._compressor, self._layout.slices[index].numel, self._device)
        if encoder is None:
            return feedback
        placed = DeviceFeedback(encoder, self._copies, feedback.key)
        for name, value in feedback.state.items():
            placed.load(name, value)
        return placed

    def payload(
        self, index: int, push: Push, grad: torch.Tensor, feedback: Feedback | None, *, flush: bool
    ) -> Callable[[], memoryview]:
        """Starts a push's work on the device; returns a function that waits for its payload.

        Args:
            grad: `(numel,) float32` on the device.
            feedback: From `place`; None if the gradient is not compressed.
            flush: Whether the residual is added, uncompressed.
        """
        if index not in self._checks:
            spec = self._layout.slices[index]
            place = self._host[spec.start : spec.stop]
            self._checks[index] = FiniteCheck(self._layout, index, self._device), place
        check, host = self._checks[index]
        if isinstance(feedback, DeviceFeedback):
            if flush:
                return feedback.start_flush(push, grad, check, host)
            return feedback.start(push, grad, check)
        check.start(grad)
        done = self._copies.to_host((host, grad))
        self._newest[index] = push

        def ready() -> memoryview:
            done.wait()
            if self._newest.get(index) is not push:
                return NOTHING
            check.require_finite(grad, push.step)
            if feedback is None:
                return wire.as_bytes(host.numpy())
            make = feedback.flush if flush else feedback.encode
            return make(push, host.numpy())

        return ready


def _pin(owner: object, host: torch.Tensor, device: torch.device) -> None:
    """Pins existing memory while `owner` lives, so that copies to it are asynchronous."""
    if host.is_pinned():
        return
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # Else it takes memory of the first GPU for a context there.
        problem = int(driver.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if problem:  # CUDA keeps the error for the next kernel of torch, which raises it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device, dtype=torch.float32)
    if not problem:
        unpin = weakref.finalize(owner, lambda: driver.cudaHostUnregister(host.data_ptr()))
        unpin.atexit = False  # The driver may be gone by then.
    else:
        log.warning(
            "%d bytes for gradients cannot be pinned (CUDA error %d): copies will wait",
            host.nbytes,
            problem,
        )
