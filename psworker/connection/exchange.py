"""The worker's network edge for one table: slices out, slices in, over one data plane per shard.

`Exchange` is the `Outbox` of a replica. It keeps a future for each slice that is on its way; a
slice has at most one push and one pull under way, so what is in flight is bounded by the size of
the model. A gradient must stay as it is until its push is acknowledged: until then it is what is
sent again after a failure, and with shared memory the shard reads it where it lies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import GradientError, PacelineError
from pscore.memory.segment import Segment
from pscore.net import wire
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.types import FloatArray, Push, Role
from psworker.compression.pull_estimate import Held
from psworker.connection.missed import Missed
from psworker.connection.payloads import Payloads
from psworker.connection.residuals import Debts
from psworker.connection.session import Session
from psworker.connection.trace import note_payload, note_pull, note_push
from psworker.connection.traffic import Traffic, pulled_nbytes
from psworker.model.device import is_on_device
from psworker.replica.ports import Landing
from psworker.transports import PullCall, PushCall, Transport
from psworker.transports.socket import SocketTransport

log = logging.getLogger("paceline")
T = TypeVar("T")
WAIT_MS = 5_000  # A pull that cannot be answered by then is told what is missing.
SAY_AFTER_S = 7.0  # Longer than a pull waits: what the shard says of it comes first.
SILENT_S = 3.0  # A shard that has answered no heartbeat for so long hangs, or is gone.
RAW = NoCompression()


class Exchange:
    """Pushes and pulls of one table.

    Attributes:
        grads: `(layout.numel,) float32` on the host: what lies in it is pushed without a copy to
            shards on this host. None unless asked for.
        missed: Steps of this worker that did not count whole.
        origin: Where the steps of training are counted from.
        payloads: What is made of gradients, and what error feedback owes.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        layout: Layout,
        rule: Rule,
        compressor: Compressor,
        optimizer: Optimizer,
        num_groups: int,
        *,
        pull_compressor: Compressor = RAW,
        share: bool = False,
    ) -> None:
        """Declares the table at every shard.

        Args:
            session: This worker's part in the job.
            name: Of the table.
            layout: Its slices.
            rule: Its mode.
            compressor: Of its pushes.
            optimizer: That the shards run.
            num_groups: Parameter groups.
            pull_compressor: Of what it pulls (pscore/estimate.py).
            share: Whether gradients and weights lie in shared memory where that can be.

        Raises:
            JobMismatchError: The job's table of this name is another one; says in what.
        """
        self.session = session
        self.layout = layout
        self.compressor = compressor
        self.pull_compressor = pull_compressor
        self.traffic = Traffic()
        self.missed = Missed(len(layout.slices))
        self._counting = threading.Lock()  # Several threads make pushes.
        self._timeline = session.timeline
        self._name = name
        self._num_changes = 0  # Of the mode.
        self._define = partial(
            session.define,
            name,
            layout,
            rule,
            compressor,
            optimizer,
            num_groups,
            pull_compressor,
        )
        self.table, self.origin = self._define()
        self.grads: FloatArray | None = None
        self._segment: Segment | None = None
        self._shared: set[int] = set()  # Shards that have mapped `grads`.
        self._held = self._make_held()
        self._pushes: dict[int, Future[data_pb2.PushReply]] = {}
        self._pulls: dict[int, tuple[PullCall, Landing]] = {}
        self._pulled_steps: dict[int, int] = {}  # That its last pull waits for.
        if share:
            self._share()
        self.payloads = Payloads(layout, compressor, self.grads, self._key)
        self._debts = Debts(session, self.table, layout, self.payloads.feedback, self._pushes)

    @property
    def compresses_pulls(self) -> bool:
        """Whether what is pulled in training is an estimate of the weights."""
        return not self.pull_compressor.is_raw

    # ----- Outbox

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends one slice; `grad` must stay as it is until `acknowledged(index)`."""
        self.acknowledged(index)
        feedback = self.payloads.choose(index, push.present, grad, compress=compress or flush)
        self._debts.begin(index, push.step)
        shared = feedback is None and push.present != 0 and self._is_shared(index, grad)
        payload = self.payloads.prepare(index, push, grad, feedback, flush=flush)
        compressor = self.compressor.name if feedback is not None and not flush else ""
        sender = self._sender()  # Now: when it leaves, this worker may have come back as another.

        def make() -> tuple[data_pb2.PushHeader, Sequence[memoryview]]:
            return self._make(index, push, sender, payload, compressor, shared=shared)

        call = PushCall(make=make, slice=index, is_shared=shared, waits=is_on_device(grad))
        if self._timeline is not None:
            note_push(self._timeline, call, self._sender(), index, push, grad.nbytes)
        self._pushes[index] = call.done
        self.missed.sent(index, push.step)
        self._transport(index).push(call)

    def pull(
        self, index: int, clock: int, min_version: int, landing: Landing, *, with_state: bool
    ) -> None:
        """Asks for one slice: for the weights, or for the estimate that stands for them."""
        header = data_pb2.PullHeader(
            sender=self._sender(),
            slice=index,
            clock=clock,
            min_version=min_version,
            with_state=with_state,
            wait_ms=WAIT_MS,
            begins=landing.begins,
            look=landing.is_look,
        )
        state = [tensor.numpy() for tensor in landing.state] if with_state else []
        call = PullCall(
            header=header, weights=landing.weights.numpy(), state=state, is_late=landing.is_late
        )
        held = self._held[index]
        if held is not None and not (with_state or landing.exact or landing.is_look):
            header.estimate, header.held, call.held = True, held.fingerprint, held
        if self._timeline is not None:
            note_pull(self._timeline, call)
        self._pulls[index] = (call, landing)
        self._pulled_steps[index] = max(clock, min_version) - 1
        self._transport(index).pull(call)

    def maps_weights(self, index: int) -> bool:
        """Whether a slice's weights are in shared memory, and pulled as they are."""
        return self.layout.slices[index].shard in self._shared and self._held[index] is None

    def maps_grads(self, indices: Iterable[int]) -> bool:
        """Whether the shards of slices have mapped `grads`: pushes are acknowledged soon then."""
        return all(self.layout.slices[index].shard in self._shared for index in indices)

    # ----- waiting

    def run(self, waits: Iterable[int]) -> None:
        """Drives a replica's generator: waits for each pull it asks for.

        Raises:
            PacelineError: A pull or push was refused, or nobody answers.
        """
        for index in waits:
            call, landing = self._pulls[index]
            step = self._pulled_steps.get(index, -1)
            what = "the first weights" if step < 0 else f"the weights after step {step}"
            reply = self._wait(call.done, index, what)
            while call.fetch is not None and not call.fetch():
                call.done, call.fetch = Future(), None
                self._transport(index).pull(call)
                reply = self._wait(call.done, index, what)
            landing.counts = np.array(reply.counts, dtype=np.int64) if reply.counts else None
            landing.version, landing.clock = reply.version, reply.clock
            self.traffic.pulled_nbytes += pulled_nbytes(reply, landing)
            self.traffic.num_pulls += 1

    def has_landed(self, index: int) -> bool:
        """Whether no pull of a slice is under way."""
        return index not in self._pulls or self._pulls[index][0].done.done()

    def is_busy(self) -> bool:
        """Whether a push has not been acknowledged yet."""
        return any(not future.done() for future in self._pushes.values())

    def acknowledged(self, index: int) -> None:
        """Waits until the last push of a slice is acknowledged: its gradient is free again."""
        future = self._pushes.pop(index, None)
        if future is not None:
            what = f"room for step {self.missed.pushed.get(index, 0)}"
            reply = self._wait(future, index, what)
            if reply.verdict == data_pb2.VERDICT_TOO_LATE:
                self.traffic.num_too_late += 1
                self.missed.late(self.session.rank, index)
            self._debts.settle(index, reply)

    def flush(self) -> None:
        """Waits until every push is acknowledged."""
        for index in list(self._pushes):
            self.acknowledged(index)

    def give_up_step(self, step: int, problem: BaseException) -> None:
        """Gives up the step under way, and says what came of it (`Missed.give_up`)."""
        unanswered = [i for i, push in self._pushes.items() if not _is_answered(push)]
        came = self.missed.give_up(step, unanswered)
        why = str(problem) or type(problem).__name__
        log.warning("worker %d comes back, %s: %s", self.session.rank, came, why)

    def _wait(self, future: Future[T], index: int, what: str) -> T:
        if self._timeline is None or future.done():
            return self._await(future, index, what)
        begin_ns = self._timeline.now_ns()
        try:
            return self._await(future, index, what)
        finally:
            self._timeline.span("wait", begin_ns, what=f"{what} of slice {index}")

    def _await(self, future: Future[T], index: int, what: str) -> T:
        self.session.require_own()
        started_s, say_s = time.monotonic(), SAY_AFTER_S
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    self.session.check()
                    self._raise_failed()
                text, is_silent = self._in_words(index, what)
                self.session.waits = text if is_silent else ""
                waited_s = time.monotonic() - started_s
                if waited_s >= say_s:
                    say_s *= 2
                    log.warning(
                        "worker %d has waited %.0f s for %s", self.session.rank, waited_s, text
                    )
        finally:
            self.session.waits = ""

    def _raise_failed(self) -> None:
        """Raises what kept a push here: others' answers, and ours, may wait for it for ever."""
        for future in self._pushes.values():
            if future.done() and (problem := future.exception()) is not None:
                raise problem

    def _in_words(self, index: int, what: str) -> tuple[str, bool]:
        """Returns what is waited for, and whether that is a shard that does not answer."""
        shard = self.layout.slices[index].shard
        link = self.session.links[shard]
        where = f"{what} of slice {index} of {self._name!r} from shard {shard} at {link.address}"
        if link.silent_s >= SILENT_S:
            return f"{where}, which has not answered for {link.silent_s:.0f} s", True
        return f"{where}, which waits for {link.waiting_for or 'others'}", False

    def restart(self) -> None:
        """Forgets what was under way, which may have been counted; what is owed stays owed."""
        self.table, self.origin = self._define(again=True)
        self._pushes.clear()
        self._pulls.clear()
        self._held = self._make_held()
        self.payloads.restart()
        self._debts.restart(self.table)
        self._attach()

    def ask_origin(self) -> None:
        """Asks the shards where steps are counted from now: somebody has loaded a state."""
        self.table, self.origin = self._define(again=True)

    def change(self, rule: Rule, step: int) -> None:
        """Changes the table's rule, on every shard and for every worker.

        Args:
            rule: The new mode.
            step: Of training, at which this worker is.
        """
        self.flush()
        self._num_changes += 1
        self.session.step_aside(self.table, self._num_changes, step)
        self.session.barrier("mode")
        self.session.change(self.table, self._num_changes, rule)
        name, layout, _, *others = self._define.args
        self._define = partial(self.session.define, name, layout, rule, *others)
        self.ask_origin()

    # ----- loading

    def load(
        self, index: int, role: Role, arrays: list[FloatArray], counts: list[int], step: int = 0
    ) -> None:
        """Uploads weights, or weights and state as they are at a step, of one slice."""
        header = data_pb2.PushHeader(
            sender=self._sender(),
            slice=index,
            step=step,
            role=data_pb2.Role.Name(int(role)),
            counts=counts,
        )
        parts = [wire.as_bytes(np.ascontiguousarray(array)) for array in arrays]
        self.acknowledged(index)
        call = PushCall(make=lambda: (header, parts), slice=index)
        self._pushes[index] = call.done
        self._transport(index).push(call)

    # ----- error feedback

    def compressor_state(self) -> dict[str, FloatArray]:
        """Returns what error feedback keeps, `(layout.numel,)` each; pushes must be flushed."""
        return self.payloads.state()

    def load_compressor_state(self, state: Mapping[str, FloatArray]) -> None:
        """Replaces what error feedback keeps; of a layout for any number of shards."""
        self.payloads.load(state)

    def _make_held(self) -> list[Held | None]:
        """Returns what is held of each slice's estimate; None where pulls are not compressed."""
        who = f"worker {self.session.rank}"
        return [
            Held(self.pull_compressor, spec.numel, f"slice {spec.index} of {who}")
            if spec.compress and self.compresses_pulls
            else None
            for spec in self.layout.slices
        ]

    def _key(self, index: int) -> str:
        """Returns what tells a slice's random numbers from others'."""
        return f"{self.session.job}/{self.table}/{self.session.rank}/{index}"

    # ----- shared memory

    def _share(self) -> None:
        """Puts the gradients into memory that the shards of this host can map."""
        nbytes = 4 * self.layout.numel
        if not any(link.transport.shares_memory for link in self.session.links):
            self.grads = np.zeros(self.layout.numel, dtype=np.float32)
            return
        try:
            segment = Segment.create(nbytes)
        except OSError as problem:
            log.warning("no shared memory for %d bytes of gradients: %s", nbytes, problem)
            self.grads = np.zeros(self.layout.numel, dtype=np.float32)
            return
        self.grads = segment.floats(0, self.layout.numel)
        self._segment = segment
        self._attach()

    def _attach(self) -> None:
        """Passes the gradients' memory to each shard that can map it."""
        if self._segment is None:
            return
        for shard, link in enumerate(self.session.links):
            transport = link.transport
            if isinstance(transport, SocketTransport) and transport.shares_memory:
                try:
                    specs = self.layout.of_shard(shard)
                    transport.attach(self._sender(), self._segment, specs)
                    self._shared.add(shard)
                except PacelineError as problem:
                    log.warning("no shared memory with %s: %s", link.address, problem)

    def _is_shared(self, index: int, grad: torch.Tensor) -> bool:
        """Whether a slice's gradient lies, or will lie, where its shard can read it."""
        spec = self.layout.slices[index]
        if spec.shard not in self._shared or self.grads is None:
            return False
        home = self.grads.ctypes.data + 4 * spec.start
        return is_on_device(grad) or grad.data_ptr() == home

    # ----- inside

    def _transport(self, index: int) -> Transport:
        self.session.require_own()
        return self.session.links[self.layout.slices[index].shard].transport

    def _sender(self) -> data_pb2.Sender:
        session = self.session
        return data_pb2.Sender(
            job=session.job,
            table=self.table,
            worker=session.rank,
            incarnation=session.incarnation,
        )

    def _make(
        self,
        index: int,
        push: Push,
        sender: data_pb2.Sender,
        payload: Callable[[], memoryview],
        compressor: str,
        *,
        shared: bool,
    ) -> tuple[data_pb2.PushHeader, Sequence[memoryview]]:
        """Returns header and payload of one push."""
        spec = self.layout.slices[index]
        header = data_pb2.PushHeader(
            sender=sender,
            slice=index,
            step=push.step,
            base_version=push.base_version,
            role=data_pb2.Role.Name(int(push.role)),
            samples=push.samples,
            present=wire.pack_bits(push.present, len(spec.segments)),
            hyper=() if push.hyper is None else push.hyper.ravel().tolist(),
            shared=shared,
            may_wait=shared and push.may_wait,
            compressor=compressor,
        )
        begin_ns = 0 if self._timeline is None else self._timeline.now_ns()
        try:
            data = payload()
        except GradientError as problem:  # Only now: it was on a device. So the step still ends.
            self.payloads.refuse(problem)
            header.present, header.compressor = wire.pack_bits(0, len(spec.segments)), ""
            header.shared = header.may_wait = False
            return header, ()
        if self._timeline is not None and compressor:
            note_payload(self._timeline, begin_ns, index, push, data.nbytes, compressor)
        nbytes = data.nbytes if push.present else 0
        with self._counting:
            self.traffic.num_pushes += 1
            self.traffic.pushed_nbytes += nbytes
        return header, () if shared or push.present == 0 else (data,)


def _is_answered(push: Future[data_pb2.PushReply]) -> bool:
    return push.done() and push.exception() is None
