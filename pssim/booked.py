"""A worker whose gradients the ledger can tell apart, and that enters each push and pull in it."""

import contextlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pscore.errors import ReplacedError
from pscore.optimizers import hyper_rows
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Role, Verdict
from psserver.slices.base import Payload
from pssim.captures import ResidualBook
from pssim.case import GRADIENT, HALF, RAW, STEPS_MAX, Case
from pssim.events import Recorder, What
from pssim.ledger import Ledger, SentPush
from pssim.network import Loop, Message, Network
from pssim.shard import SimulatedShard
from pssim.worker import Program, Worker, is_load
from psworker.transports.base import PullCall

GROUP = {
    "lr": 1.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
QUADRATIC_GROUP = {**GROUP, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def start_weights(layout: Layout) -> FloatArray:
    """Returns small whole numbers, `(layout.numel,) float32`."""
    return (np.arange(layout.numel) % 7).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """The parts of a simulated job that each worker has to know."""

    case: Case
    spec: TableSpec
    layout: Layout
    optimizer: Optimizer
    shards: Sequence[SimulatedShard]
    ledger: Ledger
    loop: Loop
    network: Network
    recorder: Recorder


class BookedWorker(Worker):
    """A worker that the ledger watches.

    Attributes:
        case: The simulated job; likewise the other parts of `WatchedJob`.
        grads: Gradient of each slice in the step under way.
        elements: Elements of each slice that its steps since the last push of it have touched.
        segment: `(layout.numel,) float32`, memory that a shard on its host reads.
        step_now: Step of its own program.
        residuals: Its residuals after each push, for checkpoints.
    """

    def __init__(self, rank: int, job: WatchedJob) -> None:
        super().__init__(rank, job.shards, job.loop, job.network)
        self.case, self.spec, self.layout = job.case, job.spec, job.layout
        self.optimizer, self.ledger, self.recorder = job.optimizer, job.ledger, job.recorder
        self.rng = random.Random(job.case.seed * 31 + rank)
        self.grads = [torch.zeros(part.numel) for part in job.layout.slices]
        self.elements: list[list[int]] = [[] for _ in job.layout.slices]
        self.segment: FloatArray = np.zeros(job.layout.numel, np.float32)
        self.step_now = 0
        self.residuals = ResidualBook()
        self._pushed: dict[int, int] = {}  # By slice: step of the newest push.

    # ----- gradients

    def set_hyper(self) -> None:
        """Sets the hyper-parameters of the step under way."""
        group = QUADRATIC_GROUP if self.case.quadratic else GROUP
        outer = self.case.rule.outer_group(self.replica.step, group, self.case.num_workers)
        rows = hyper_rows(self.optimizer, [outer])
        for part in self.replica.parts:
            part.hyper = rows

    def make_grads(self, step: int) -> None:
        """Writes one element that no other push touches, or a quadratic's slope with noise."""
        element = self.rank * STEPS_MAX + step
        for touched in self.elements:
            touched.append(element)
        noise = np.random.default_rng((self.rank, step))
        self.grads = [torch.zeros(spec.numel) for spec in self.layout.slices]
        for spec, grad in zip(self.layout.slices, self.grads, strict=True):
            if self.case.quadratic:
                slope = self.replica.weights[spec.start : spec.stop] - 1.0
                scatter = noise.standard_normal(spec.numel, dtype=np.float32)
                grad.copy_(slope + torch.from_numpy(scatter))
            else:
                grad[element] = GRADIENT

    def clear(self, indices: Iterable[int]) -> None:
        """Begins new rounds of some slices."""
        for index in indices:
            self.elements[index].clear()

    def present(self, index: int) -> int:
        """Returns the segments with the element in them, and some others."""
        if self.case.quadratic:
            return -1
        present = 0
        for position, segment in enumerate(self.layout.slices[index].segments):
            is_in = segment.start <= self.elements[index][-1] < segment.stop
            present |= (is_in or self.rng.random() < HALF) << position
        part = self.replica.parts[index]
        part.active[:] = [present >> i & 1 for i in range(len(part.active))]
        return present

    # ----- the ledger

    def begin_push(self, header: data_pb2.PushHeader, payload: bytes) -> None:
        """Enters a push in the ledger."""
        if is_load(header):
            return
        step, index = header.step, header.slice
        self._pushed[index] = step
        self.recorder.note(self.name, What.PUSH_SENT, worker=self.rank, step=step, slice=index)
        book = self.ledger.books[header.slice]
        identity = (self.rank, header.step, self.incarnation)
        assert identity not in book.sent, f"push {identity} is made twice"
        book.sent[identity] = SentPush(
            payload=Payload(
                data=np.frombuffer(payload, dtype=np.uint8),
                compressor=self.case.compressor if header.compressor else RAW,
            ),
            base_version=header.base_version,
            samples=header.samples,
            elements=list(self.elements[index]),
            made=self.step_now,
        )

    def share(self, header: data_pb2.PushHeader, payload: bytes) -> bool:
        """Puts a gradient where its shard can read it, if the worker is on the shard's host."""
        is_near = bool(self.case.shares) and self.case.shares[self.rank]
        is_gradient = Role(int(header.role)) is Role.GRADIENT
        if not payload or not is_near or header.compressor or not is_gradient:
            return False
        spec = self.layout.slices[header.slice]
        self.segment[spec.start : spec.stop] = np.frombuffer(payload, np.float32)
        self.shards[spec.shard].segments[self.rank, self.incarnation] = self.segment
        plan = self.case.rule.plan(header.step)
        header.shared, header.may_wait = True, plan.block and plan.pull
        return True

    def end_push(self, header: data_pb2.PushHeader, verdict: Verdict) -> None:
        """Enters the verdict on a push in the ledger."""
        what = f"step {header.step}, slice {header.slice}"
        self.network.note(f"{self.name}: {what}: {verdict.name}")
        identity = (self.rank, header.step, self.incarnation)
        if not is_load(header):
            self.ledger.books[header.slice].sent[identity].verdict = verdict

    def wait_for_push(self, index: int) -> Program:
        """Waits until the last push of a slice is acknowledged; then books its residual."""
        yield from super().wait_for_push(index)
        feedback = self.exchange.payloads.feedback[index]
        if self.case.captures_s and index in self._pushed and feedback is not None:
            self.residuals.note(self.rank, index, self._pushed[index], feedback.state)

    def send_residual(self, shard: SimulatedShard, request: pb.SendResidualRequest) -> None:
        """Sends a residual once: it may be lost, doubled or late."""

        def arrive() -> None:
            with contextlib.suppress(ReplacedError):
                shard.take_residual(request)

        what = f"{self.name}: residual of slice {request.slice}, {shard.name}"
        message = Message(worker=self.rank, shard=shard.index, is_answer=False, what=what)
        self.network.send(message, arrive)

    def begin_pull(self, header: data_pb2.PullHeader) -> None:
        """Records that a pull is sent."""
        self.recorder.note(
            self.name,
            What.PULL_SENT,
            worker=self.rank,
            slice=header.slice,
            version=header.min_version,
        )

    def end_pull(self, call: PullCall, reply: data_pb2.PullReply) -> None:
        """Checks weights that have landed."""
        index, version = call.header.slice, reply.version
        self.network.note(f"{self.name}: version {version}, slice {index} lands")
        self.recorder.note(
            self.name, What.PULL_LANDED, worker=self.rank, slice=index, version=version
        )
        self.ledger.books[index].landed(
            self.rank,
            self.incarnation,
            call.header.clock,
            version,
            call.weights.copy(),
            is_estimate=bool(reply.fingerprint),
        )
