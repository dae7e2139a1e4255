"""Error feedback of a slice whose gradients are on a GPU: encoded there, copied when it is small.

The kernels run on torch's current stream, right behind backward; the payload is copied to pinned
memory without anyone waiting, and only the thread that sends it waits for that copy. Residuals
stay on the device. Where there are no kernels the gradient is copied and the CPU encodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from pscore import wire
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.cuda.encoders import Encoder, Launch, can_encode
from pscore.types import FloatArray, Push, Verdict
from psworker.feedback import Feedback, Sent


class DeviceFeedback(Feedback):
    """Error feedback of one slice on a GPU."""

    def __init__(
        self, compressor: Compressor, numel: int, key: str, device: torch.device, launch: Launch
    ) -> None:
        """Owes nothing yet.

        Args:
            compressor: Of the slice's pushes; one that `can_encode`.
            numel: Elements of the slice.
            key: Job, table, worker and slice.
            device: Of the gradients.
            launch: Starts kernels there.
        """
        assert can_encode(compressor)
        super().__init__(compressor, numel, key)
        self._encoder = Encoder(compressor, numel, device, launch)
        self._host = torch.zeros_like(
            self._encoder.payload, device="cpu", pin_memory=device.type == "cuda"
        )

    def start(self, push: Push, grad: torch.Tensor) -> Callable[[], memoryview]:
        """Starts kernels and copy, and returns what waits for the payload."""
        with self._lock:
            assert self._sent is None
            self._encoder.encode(grad, seed=self._seed(push), step=push.step)
            self._host.copy_(self._encoder.payload, non_blocking=True)
            event: torch.cuda.Event | None = None
            if grad.device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(grad.device))

        def ready() -> memoryview:
            if event is not None:
                event.synchronize()
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
            if verdict in (Verdict.TOO_LATE, Verdict.STALE):
                back = np.zeros(self._numel, dtype=np.float32)
                if sent.is_compressed:
                    self._compressor.decode_add(sent.payload, back, 1.0, assign=False)
                else:
                    back += sent.payload.view(np.float32)
                residual.add_(torch.from_numpy(back).to(residual.device))

    @property
    def state(self) -> Mapping[str, FloatArray]:
        """A copy of the compressor's arrays by name, each `(numel,) float32` on the host."""
        return {name: value.cpu().numpy() for name, value in self._encoder.state.items()}

    def load(self, name: str, value: FloatArray) -> None:
        """Replaces one array of the state; one that the compressor does not keep is dropped."""
        if name in self._encoder.state:
            self._encoder.state[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def make_feedback(
    compressor: Compressor, numel: int, key: str, device: torch.device, launch: Launch | None
) -> Feedback:
    """Returns error feedback on the device if there are kernels, else on the host."""
    if launch is not None and can_encode(compressor):
        return DeviceFeedback(compressor, numel, key, device, launch)
    return Feedback(compressor, numel, key)
