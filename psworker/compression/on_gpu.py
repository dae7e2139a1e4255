"""Error feedback of a slice whose gradients are on a GPU: encoded there, copied when it is small.

What encodes runs on torch's current stream, right behind backward; the payload is copied to pinned
memory without anyone waiting, and only the thread that sends it waits for that copy. Residuals
stay on the device. What cannot be encoded there is copied, and the CPU encodes.
"""

from __future__ import annotations

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
from psworker.model.finite import Screen

log = logging.getLogger("paceline")


class DeviceFeedback(Feedback):
    """Error feedback of one slice on a GPU."""

    def __init__(self, encoder: Encoder, key: str) -> None:
        """Owes nothing yet.

        Args:
            encoder: Of the slice.
            key: Job, table, worker and slice.
        """
        super().__init__(encoder.compressor, encoder.numel, key)
        self._encoder = encoder
        self._host = torch.zeros_like(
            encoder.payload, device="cpu", pin_memory=encoder.payload.device.type == "cuda"
        )

    def start(self, push: Push, grad: torch.Tensor, screen: Screen) -> Callable[[], memoryview]:
        """Starts kernels and copy, and returns what waits for the payload."""
        with self._lock:
            assert self._sent is None
            refused = screen.start(grad)
            seed = self._seed(push)
            self._encoder.encode(grad, seed=seed, step=push.step, refused=refused)
            self._host.copy_(self._encoder.payload, non_blocking=True)
            done = _mark(grad.device)

        def ready() -> memoryview:
            done()
            screen.require_finite(grad, push.step)
            with self._lock:
                if self._sent is None:
                    payload = self._encoder.finish(self._host.numpy())
                    self._sent = Sent(step=push.step, payload=payload, is_compressed=True)
                return wire.as_bytes(self._sent.payload)

        return ready

    def flush(self, push: Push, grad: FloatArray) -> memoryview:
        """Returns gradient and residual together, uncompressed; nothing is owed after it."""
        with self._lock:
            if self._sent is None or self._sent.step != push.step:
                total = grad.copy()
                residual = self._encoder.state.get(RESIDUAL)
                if residual is not None:
                    total += residual.cpu().numpy()
                    require_finite(all_finite(total), self._compressor.name)
                    residual.zero_()
                    if residual.device.type == "cuda":
                        # The next kernels may be on another stream than this thread's.
                        torch.cuda.current_stream(residual.device).synchronize()
                payload = total.view(np.uint8)
                self._sent = Sent(step=push.step, payload=payload, is_compressed=False)
            return wire.as_bytes(self._sent.payload)

    def settle(self, verdict: Verdict) -> None:
        """Ends the push that was encoded last; one that entered no update is owed again."""
        with self._lock:
            sent, self._sent = self._sent, None
            residual = self._encoder.state.get(RESIDUAL)
            if sent is None or residual is None:
                return
            if verdict == Verdict.TOO_LATE:
                # From pinned memory, which torch keeps until it is copied: nobody waits.
                is_cuda = residual.device.type == "cuda"
                back = torch.zeros(self._numel, pin_memory=is_cuda)
                if sent.is_compressed:
                    self._compressor.decode_add(sent.payload, back.numpy(), 1.0, assign=False)
                else:
                    back.numpy()[:] = sent.payload.view(np.float32)
                residual.add_(back.to(residual.device, non_blocking=True))
                residual.clamp_(-FLOAT_MAX, FLOAT_MAX)  # Rounding may pass it.

    @property
    def state(self) -> Mapping[str, FloatArray]:
        """A copy of the compressor's arrays by name, each `(numel,) float32` on the host."""
        return {name: value.cpu().numpy() for name, value in self._encoder.state.items()}

    def load(self, name: str, value: FloatArray) -> None:
        """Replaces one array of the state; one that the compressor does not keep is dropped."""
        if name in self._encoder.state:
            self._encoder.state[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))


class DeviceSide:
    """How the gradients of one table leave a device: screened, then encoded there, or copied."""

    def __init__(
        self, layout: Layout, compressor: Compressor, host: FloatArray, device: torch.device
    ) -> None:
        """Allocates nothing yet.

        Args:
            layout: The slices.
            compressor: Of their pushes.
            host: `(layout.numel,) float32`: where gradients are copied that leave as they are.
            device: Of the gradients.
        """
        self._layout = layout
        self._compressor = compressor
        self._host = torch.from_numpy(host)
        self._device = device
        self._screens: dict[int, Screen] = {}
        self._placed: set[int] = set()  # Slices whose error feedback has seen the device.
        if device.type == "cuda":
            _pin(self, self._host)

    def place(self, index: int, feedback: Feedback) -> Feedback:
        """Returns a slice's error feedback, from now on where its gradient is if that can be."""
        if index in self._placed:
            return feedback
        self._placed.add(index)
        encoder = make_encoder(self._compressor, self._layout.slices[index].numel, self._device)
        if encoder is None:
            return feedback
        placed = DeviceFeedback(encoder, feedback.key)
        for name, value in feedback.state.items():
            placed.load(name, value)
        return placed

    def payload(
        self, index: int, push: Push, grad: torch.Tensor, feedback: Feedback | None, *, flush: bool
    ) -> Callable[[], memoryview]:
        """Starts what a push needs of the device, and returns what waits for its payload.

        Args:
            index: The slice.
            push: The push.
            grad: `(numel,) float32` on the device.
            feedback: From `place`; None where the gradient leaves as it is.
            flush: Whether what is owed goes along, uncompressed.
        """
        if index not in self._screens:
            self._screens[index] = Screen(self._layout, index, self._device)
        screen = self._screens[index]
        if isinstance(feedback, DeviceFeedback) and not flush:
            return feedback.start(push, grad, screen)
        spec = self._layout.slices[index]
        screen.start(grad)
        host = self._host[spec.start : spec.stop]
        host.copy_(grad, non_blocking=True)
        done = _mark(self._device)

        def ready() -> memoryview:
            done()
            screen.require_finite(grad, push.step)
            if feedback is None:
                return wire.as_bytes(host.numpy())
            make = feedback.flush if flush else feedback.encode
            return make(push, host.numpy())

        return ready


def _mark(device: torch.device) -> Callable[[], object]:
    """Returns what waits until all that was started on the device's current stream is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _pin(owner: object, host: torch.Tensor) -> None:
    """Has the driver copy to memory that we have already without waiting, while `owner` lives."""
    if host.is_pinned():
        return
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if host.is_pinned():
        unpin = weakref.finalize(owner, lambda: driver.cudaHostUnregister(host.data_ptr()))
        unpin.atexit = False  # Then the driver may be gone.
    else:
        log.warning("%d bytes for gradients cannot be pinned: copies will wait", host.nbytes)
