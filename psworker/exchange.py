"""The worker's network edge for one table: slices out, slices in, over one link per shard.

`Exchange` is the `Outbox` of a replica: it compresses and frames on the links' threads, and keeps
a future for each slice that is on its way. A slice has at most one push and one pull under way, so
what is in flight is bounded by the size of the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import xxhash

from pscore import wire
from pscore.compressors.base import Compressor
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.types import ByteArray, FloatArray, Push, Role, Verdict
from psworker.link import SAY_AFTER_S, Link
from psworker.replica import Landing
from psworker.session import Session

log = logging.getLogger("paceline")
T = TypeVar("T")


@dataclass(slots=True)
class Sender:
    """What error feedback owes of one slice, and the buffer that its payloads are made in."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    residual: FloatArray | None = None
    buffer: ByteArray | None = None


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What a worker has sent and received, in frames' bytes, and what came of its pushes."""

    pushed_nbytes: int = 0
    pulled_nbytes: int = 0
    num_pushes: int = 0
    num_pulls: int = 0
    num_too_late: int = 0


class Exchange:
    """Pushes and pulls of one table."""

    def __init__(
        self,
        session: Session,
        name: str,
        layout: Layout,
        rule: Rule,
        compressor: Compressor,
        optimizer: Optimizer,
        num_groups: int,
    ) -> None:
        """Declares the table at every shard.

        Raises:
            JobMismatchError: The job's table of this name is another one; says in what.
        """
        self.session = session
        self.layout = layout
        self.compressor = compressor
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self.table = session.define(name, layout, rule, compressor, optimizer, num_groups)
        self._senders = [Sender() for _ in layout.slices]
        self._pushes: dict[int, Future[data_pb2.PushReply]] = {}
        self._pulls: dict[int, Future[data_pb2.PullReply]] = {}
        self._left: dict[int, threading.Event] = {}  # Set when a push's gradient was copied.

    # ----- Outbox

    def push(self, index: int, push: Push, grad: torch.Tensor, *, compress: bool) -> None:
        """Sends one slice; `grad` must stay as it is until `left(index)`."""
        self.acknowledged(index)
        ready = _on_host(grad)
        compressor = self.compressor if compress else None
        left = self._left[index] = threading.Event()

        def make_frame() -> bytes:
            try:
                return self._frame(index, push, ready(), compressor)
            finally:
                left.set()

        self._pushes[index] = self._link(index).push(make_frame)

    def pull(
        self, index: int, clock: int, min_version: int, landing: Landing, *, with_state: bool
    ) -> None:
        """Asks for one slice."""
        header = data_pb2.PullHeader(
            sender=self._sender(),
            slice=index,
            clock=clock,
            min_version=min_version,
            with_state=with_state,
            wait_ms=int(SAY_AFTER_S * 1000),
        )

        def land(reply: data_pb2.PullReply, payload: memoryview) -> None:
            self._land(index, reply, payload, landing)

        self._pulls[index] = self._link(index).pull(header, land)

    # ----- waiting

    def run(self, waits: Iterable[int]) -> None:
        """Drives a replica's generator: waits for each pull it asks for.

        Raises:
            PacelineError: A pull or push was refused, or nobody answers.
        """
        for index in waits:
            self._wait(self._pulls[index], f"slice {index} from {self._link(index).address}")

    def left(self, index: int) -> None:
        """Waits until the gradient of a slice's last push has been copied and may be changed."""
        event = self._left.pop(index, None)
        if event is not None and not event.wait(SAY_AFTER_S):
            self.acknowledged(index)

    def has_landed(self, index: int) -> bool:
        """Whether no pull of a slice is under way."""
        return index not in self._pulls or self._pulls[index].done()

    def is_busy(self) -> bool:
        """Whether a push has not been acknowledged yet."""
        return any(not future.done() for future in self._pushes.values())

    def acknowledged(self, index: int) -> None:
        """Waits until the last push of a slice is acknowledged, and so its buffer is free."""
        future = self._pushes.pop(index, None)
        if future is not None:
            address = self._link(index).address
            reply = self._wait(future, f"room for slice {index} at {address}: others are behind")
            self.traffic.num_too_late += Verdict(int(reply.verdict)) is Verdict.TOO_LATE

    def flush(self) -> None:
        """Waits until every push is acknowledged."""
        for index in list(self._pushes):
            self.acknowledged(index)

    def _wait(self, future: Future[T], what: str) -> T:
        started_s, say_s = time.monotonic(), 2 * SAY_AFTER_S - 1.0
        while not wait([future], timeout=1.0).done:
            self.session.check()
            waited_s = time.monotonic() - started_s
            if waited_s >= say_s:
                say_s *= 2
                log.warning("worker %d has waited %.0f s for %s", self.session.rank, waited_s, what)
        return future.result()

    # ----- loading

    def load(self, index: int, role: Role, arrays: list[FloatArray], counts: list[int]) -> None:
        """Uploads weights, or weights and state, of one slice."""
        header = data_pb2.PushHeader(
            sender=self._sender(),
            slice=index,
            role=data_pb2.Role.Name(int(role)),
            counts=counts,
        )

        def make_frame() -> bytes:
            parts = [wire.as_bytes(np.ascontiguousarray(array)) for array in arrays]
            return wire.encode(header.SerializeToString(), *parts)

        self.acknowledged(index)
        self._pushes[index] = self._link(index).push(make_frame)

    # ----- residuals

    def residuals(self) -> dict[int, FloatArray]:
        """Returns what error feedback owes, by slice; pushes must have been flushed."""
        return {
            index: sender.residual
            for index, sender in enumerate(self._senders)
            if sender.residual is not None
        }

    def set_residual(self, index: int, residual: FloatArray) -> None:
        """Replaces what error feedback owes of a slice, `(numel,) float32`."""
        sender = self._senders[index]
        with sender.lock:
            sender.residual = np.array(residual, dtype=np.float32)

    # ----- inside

    def _link(self, index: int) -> Link:
        return self.session.links[self.layout.slices[index].shard]

    def _sender(self) -> data_pb2.Sender:
        session = self.session
        return data_pb2.Sender(
            job=session.job,
            table=self.table,
            worker=session.rank,
            incarnation=session.incarnation,
        )

    def _frame(
        self, index: int, push: Push, grad: FloatArray, compressor: Compressor | None
    ) -> bytes:
        """Compresses and frames one slice, on a link's thread."""
        spec = self.layout.slices[index]
        header = data_pb2.PushHeader(
            sender=self._sender(),
            slice=index,
            step=push.step,
            base_version=push.base_version,
            role=data_pb2.Role.Name(int(push.role)),
            samples=push.samples,
            present=wire.pack_bits(push.present, len(spec.segments)),
            hyper=() if push.hyper is None else push.hyper.ravel().tolist(),
        )
        if push.present == 0:
            payload = memoryview(b"")
        elif compressor is None or compressor.name == "none":
            payload = wire.as_bytes(grad)
        else:
            header.compressor = compressor.name
            payload = self._compressed(index, push, grad, compressor)
        frame = wire.encode(header.SerializeToString(), payload)
        with self._lock:
            self.traffic.pushed_nbytes += len(frame)
            self.traffic.num_pushes += 1
        return frame

    def _compressed(
        self, index: int, push: Push, grad: FloatArray, compressor: Compressor
    ) -> memoryview:
        sender = self._senders[index]
        with sender.lock:
            if sender.buffer is None:
                sender.buffer = np.empty(compressor.payload_nbytes_max(len(grad)), dtype=np.uint8)
            if compressor.keeps_residual and sender.residual is None:
                sender.residual = np.zeros(len(grad), dtype=np.float32)
            drawn_for = f"{self.session.job}/{self.table}/{push.worker}/{index}/{push.step}"
            seed = xxhash.xxh3_64_intdigest(drawn_for.encode())
            nbytes = compressor.encode(grad, sender.residual, sender.buffer, seed)
            return wire.as_bytes(sender.buffer[:nbytes])

    def _land(
        self, index: int, reply: data_pb2.PullReply, payload: memoryview, landing: Landing
    ) -> None:
        numel = self.layout.slices[index].numel
        weights, *state = wire.floats(payload, 1 + len(landing.state) * bool(reply.counts), numel)
        np.copyto(landing.weights.numpy(), weights)
        for tensor, array in zip(landing.state, state, strict=False):
            np.copyto(tensor.numpy(), array)
        landing.counts = np.array(reply.counts, dtype=np.int64) if reply.counts else None
        landing.version = reply.version
        with self._lock:
            self.traffic.pulled_nbytes += payload.nbytes
            self.traffic.num_pulls += 1


def _on_host(grad: torch.Tensor) -> Callable[[], FloatArray]:
    """Returns a function that returns `grad` as an array; a copy from a GPU starts now."""
    if grad.device.type == "cpu":
        return grad.numpy
    host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
    host.copy_(grad, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def ready() -> FloatArray:
        event.synchronize()
        array: FloatArray = host.numpy()
        return array

    return ready
