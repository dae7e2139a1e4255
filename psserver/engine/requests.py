"""Pushes and pulls of one shard: checked, decided under one lock, carried out by the queues.

Transports (gRPC in control.py, sockets in data_socket.py) bring headers and payloads from any
thread and get their answers through a `Reply`. All decisions are made under the engine's lock; the
numeric work of large slices is not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pscore.compressors.none import NoCompression
from pscore.errors import DecodeError, RemoteProtocolError
from pscore.net import wire
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import COUNT_MAX
from pscore.types import SAMPLES_MAX, ByteArray, FloatArray, Pull, Push, Role, Verdict
from psserver.decisions.orders import Acknowledge, Action, Answer, Skip, Update
from psserver.decisions.progress import Token
from psserver.decisions.shard import Actions, Address, Job, Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table
from psserver.engine.counters import Tally
from psserver.engine.residuals import Debts
from psserver.engine.slice_queue import SliceQueue, Work
from psserver.engine.trace import note_push
from psserver.slices.pool import Buffer
from psserver.slices.store import Payload, SliceStore

RAW = NoCompression()
STEPS_MAX = 1 << 48  # Of a job.
VERDICTS = {verdict: data_pb2.Verdict.Name(int(verdict)) for verdict in Verdict}
LOADS = (Role.WEIGHTS, Role.STATE)


class Reply(Protocol):
    """Where an answer goes; called once per request, from any thread."""

    def pushed(self, reply: data_pb2.PushReply) -> None:
        """Answers a push."""

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull.

        Args:
            reply: The header.
            arrays: What follows it.
            release: Called when the arrays have been sent. None: they are only valid during the
                call.
        """


@dataclass(slots=True, eq=False)
class Request:
    """One push or pull that is under way; it is its own token."""

    job: Job
    address: Address
    clock: SliceClock
    worker: int
    reply: Reply
    payload: Payload | None = None
    release: Callable[[], None] | None = None  # Gives the payload's memory back.
    step: int = -1  # Of a push of a gradient.
    is_shared: bool = False  # The payload lies in the worker's segment, or the answer in ours.
    held: int | None = None  # Of a compressed pull: the estimate that the worker has.
    deadline_s: float = 0.0  # Of a pull: then it is told what is missing.
    taken_s: float = 0.0  # When a queue began with the payload.


@dataclass(frozen=True, slots=True, kw_only=True)
class AtVersion:
    """Something to be done right behind one slice's update to a version."""

    version: int
    work: Work


@dataclass(slots=True, kw_only=True)
class Requests:
    """The data path of one shard."""

    shard: Shard
    now: Callable[[], float]
    broke: Callable[[BaseException | None], None]
    lock: threading.RLock
    tally: Tally
    queues: dict[tuple[int, int, int], SliceQueue] = field(
        default_factory=dict
    )  # Job id, table, slice.
    shared: dict[tuple[int, int, int], FloatArray] = field(default_factory=dict)  # ..., worker.
    # What is to be done right behind the update to a version: by job id, table, slice.
    at_version: dict[tuple[int, int, int], list[AtVersion]] = field(default_factory=dict)
    debts: Debts = field(default_factory=Debts)
    waiting: dict[Request, None] = field(default_factory=dict)  # Unanswered pulls, oldest first.
    # Called with a table whose steps are counted from elsewhere now.
    note_table: Callable[[Job, Table], None] = lambda job, table: None
    # Called with actions before they are carried out.
    on_decided: Callable[[Job, Actions], None] | None = None
    timeline: Timeline | None = None
    step_on_receive_thread: bool = False

    # ----- requests

    def admit(self, header: data_pb2.PushHeader, nbytes: int) -> None:
        """Refuses a push whose payload cannot be right, before memory is taken for it.

        Raises:
            PacelineError: Its sender or slice is not known, or it is longer than any payload.
        """
        with self.lock:
            _, table, address = self._address(header.sender, header.slice)
            compressor = table.spec.compressor
        numel = table.specs[address.slice].numel
        num_arrays = 1 + len(table.optimizer.state_names)
        longest = compressor.payload_nbytes_max(numel)
        if nbytes > max(longest, num_arrays * 4 * numel):
            raise DecodeError(f"{nbytes} bytes for a slice of {numel} elements ({_of(header)})")

    def on_push(
        self,
        header: data_pb2.PushHeader,
        data: ByteArray,
        reply: Reply,
        release: Callable[[], None] | None = None,
        *,
        here: bool = False,
    ) -> None:
        """Takes one push; its answer may come before this returns.

        Args:
            header: What it is.
            data: `(nbytes,) uint8`, its payload; empty if it lies in shared memory.
            reply: Where the answer goes.
            release: Called when the payload is no longer needed.
            here: This thread may carry out what it leads to.

        Raises:
            PacelineError: The push is refused; nothing was counted.
        """
        idle: list[SliceQueue] = []
        with self.lock:
            begin_ns = 0 if self.timeline is None else self.timeline.now_ns()
            job, table, address = self._address(header.sender, header.slice)
            clock, worker = table.clock(header.slice), header.sender.worker
            request = Request(job, address, clock, worker, reply, release=release)
            request.is_shared = header.shared
            if header.shared:
                data = self._shared_grad(job, table, address, worker)
            store = self.queues[id(job), address.table, address.slice].store
            try:
                push = _push(header, table)
                request.payload = _payload(table, header, data)
                store.check(request.payload, push.role)
            except DecodeError as problem:
                raise DecodeError(f"{problem} ({_of(header)})") from None
            if push.role not in LOADS:
                request.step = push.step
            was = table.spec
            actions = self.shard.decide_push(job, address, push, request)
            if table.spec is not was:
                self.note_table(job, table)
            if self.timeline is not None:
                note_push(self.timeline, begin_ns, address, push, data.nbytes)
            job.counters.pushed_nbytes += data.nbytes
            self.tally.received_nbytes += data.nbytes
            # What was just received is in this core's cache; what is compressed takes longer to
            # add than to receive.
            steps_here = here and self.step_on_receive_thread and not header.compressor
            self.execute(job, actions, idle if steps_here else None)
        for queue in idle:
            queue.run()

    def on_pull(self, header: data_pb2.PullHeader, reply: Reply, wait_s: float) -> None:
        """Takes one pull; answered when it can be, or told what is missing after `wait_s`.

        Raises:
            PacelineError: The pull is refused.
        """
        with self.lock:
            job, table, address = self._address(header.sender, header.slice)
            pull = Pull(
                worker=header.sender.worker,
                clock=header.clock,
                min_version=header.min_version,
                with_state=header.with_state,
                begins=header.begins,
                is_look=header.look,
            )
            if pull.begins and pull.clock > STEPS_MAX:
                raise DecodeError(f"worker {pull.worker} begins at step {pull.clock}")
            request = Request(job, address, table.clock(header.slice), pull.worker, reply)
            request.deadline_s = self.now() + wait_s
            request.is_shared = header.shared
            if header.estimate and not (header.with_state or header.look):
                request.held = _held(header, table)
            self.waiting[request] = None
            self.execute(job, self.shard.decide_pull(job, address, pull, request))

    def put_off(self) -> None:
        """Tells the pulls that have waited long enough what is missing."""
        with self.lock:
            now_s = self.now()
            for request in [r for r in self.waiting if r.deadline_s <= now_s]:
                if request.clock.forget(request):
                    del self.waiting[request]
                    text = self.shard.waiting_for(request.job, request.address)
                    self.tally.pulled(request.job.name, is_answered=False)
                    request.reply.pulled(
                        data_pb2.PullReply(ready=False, waiting_for=text), (), None
                    )

    def forget(self, reply_of: Callable[[Reply], bool]) -> None:
        """Drops the waiting pulls whose requester has gone."""
        with self.lock:
            for request in [r for r in self.waiting if reply_of(r.reply)]:
                request.clock.forget(request)
                del self.waiting[request]

    def forget_job(self, key: int) -> None:
        """Frees what belongs to the job with this id."""
        self.queues = {entry: queue for entry, queue in self.queues.items() if entry[0] != key}
        self.shared = {entry: grads for entry, grads in self.shared.items() if entry[0] != key}
        self.debts.forget_job(key)

    # ----- carrying out

    def execute(self, job: Job, actions: Actions, idle: list[SliceQueue] | None = None) -> None:
        """Gives each slice's actions to its queue, in order; called under the lock.

        Args:
            job: Whose they are.
            actions: In the order in which they were decided.
            idle: Takes the queues that the caller has to run, without the lock; None: none.
        """
        if self.on_decided is not None:
            self.on_decided(job, actions)
        for address, group in itertools.groupby(actions, key=lambda item: item[0]):
            queue = self.queues[id(job), address.table, address.slice]
            batch = [action for _, action in group]
            for action in batch:
                self._count(action)
            work = self._with_work_at_version((id(job), address.table, address.slice), batch)
            if idle is None:
                queue.submit(work)
            elif queue.append(work):
                idle.append(queue)

    def _with_work_at_version(
        self, key: tuple[int, int, int], batch: list[Action]
    ) -> Sequence[Work]:
        """Puts what is at_version for a slice behind the update that it waits for."""
        at_version = self.at_version.get(key)
        if not at_version:
            return batch
        queue: list[Work] = []
        for action in batch:
            queue.append(action)
            if isinstance(action, Update | Skip):
                former = action.former if isinstance(action, Skip) else action.version - 1
                queue += [e.work for e in at_version if former < e.version <= action.version]
        return queue

    def note_refused(self) -> None:
        """Counts a push that was refused."""
        with self.lock:
            self.tally.num_pushes_refused += 1

    def _count(self, action: Action) -> None:
        if isinstance(action, Update):
            self.tally.num_updates += 1
        elif isinstance(action, Answer):
            assert isinstance(action.token, Request)
            self.waiting.pop(action.token, None)
            self.tally.pulled(action.token.job.name, is_answered=True)
        elif isinstance(action, Acknowledge):
            request = action.token
            assert isinstance(request, Request)
            self.tally.pushed(request.job.name, action.verdict)
            if request.step >= 0:
                self.debts.pushed(request.job, request.address, request.worker)
            if action.verdict is Verdict.ACCEPTED:
                staleness = request.clock.staleness.get(request.worker)
                if staleness is not None:
                    self.tally.staleness.observe(staleness)

    # ----- Completion: what the queues call

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push."""
        assert isinstance(token, Request)
        assert token.payload is not None
        token.taken_s = self.now()
        return token.payload

    def keep(self, token: Token, payload: Payload) -> None:
        """Takes a payload in the place of the push's own, whose memory is free after this."""
        assert isinstance(token, Request)
        if payload is not token.payload and token.release is not None:
            token.release()
            token.release = None
        token.payload = payload

    def done(self, token: Token) -> None:
        """Lets a payload's memory go."""
        assert isinstance(token, Request)
        token.payload = None
        if token.release is not None:
            token.release()
        self.tally.times_s.append(self.now() - token.taken_s)

    def acknowledge(self, action: Acknowledge) -> None:
        """Answers a push."""
        assert isinstance(action.token, Request)
        request = action.token
        is_asked = False
        if request.step >= 0 and self.debts.is_asking:
            with self.lock:
                is_asked = self.debts.is_asked(
                    request.job, request.address, request.worker, request.step
                )
        request.reply.pushed(
            data_pb2.PushReply(
                verdict=VERDICTS[action.verdict], version=max(0, action.version), owe=is_asked
            )
        )

    def answer(self, action: Answer, store: SliceStore) -> None:
        """Answers a pull: by reference, from a leased buffer, or with a copy of the state."""
        request = action.token
        assert isinstance(request, Request)
        if request.held is not None:
            self._answer_estimate(action, store, request, request.held)
            return
        arrays = store.read(action)
        self._note_sent(request, sum(array.nbytes for array in arrays))
        reply = data_pb2.PullReply(ready=True, version=action.version, clock=action.clock)
        if action.with_state:
            reply.counts.extend(store.counts.tolist())
            request.reply.pulled(reply, arrays, None)
            return
        if request.is_shared and (number := store.mapped()):
            reply.buffer = number
            request.reply.pulled(reply, (), None)
            return
        buffer = store.lease()
        request.reply.pulled(reply, [buffer.array], _releaser(store, buffer))

    # ----- inside

    def _answer_estimate(
        self, action: Answer, store: SliceStore, request: Request, held: int
    ) -> None:
        """Answers a compressed pull: by the deltas that the worker lacks, or by the whole."""
        with self.lock:
            compressor = request.job.table(request.address.table).spec.pull_compressor
        estimate = store.estimate(action, compressor)
        reply = data_pb2.PullReply(ready=True, version=action.version, clock=action.clock)
        parts = estimate.answer(held, reply)
        self._note_sent(request, sum(part.nbytes for part in parts))
        # Nobody writes into deltas, so they may be sent when there is time.
        request.reply.pulled(reply, parts, None if reply.whole else _nothing)

    def _note_sent(self, request: Request, nbytes: int) -> None:
        with self.lock:
            request.job.counters.pulled_nbytes += nbytes
            self.tally.sent_nbytes += nbytes

    def _address(self, sender: data_pb2.Sender, index: int) -> tuple[Job, Table, Address]:
        job = self.shard.heard(sender.job, sender.worker, sender.incarnation, self.now())
        table = job.table(sender.table)
        table.clock(index)
        return job, table, Address(sender.job, sender.table, index)

    def _shared_grad(self, job: Job, table: Table, address: Address, worker: int) -> ByteArray:
        grads = self.shared.get((id(job), address.table, worker))
        if grads is None:
            raise RemoteProtocolError(f"worker {worker} has attached no segment for its gradients")
        spec = table.specs[address.slice]
        return grads[spec.start : spec.stop].view(np.uint8)


def _nothing() -> None:
    """Nothing has to be given back."""


def _held(header: data_pb2.PullHeader, table: Table) -> int:
    """Returns the estimate that a worker has.

    Raises:
        RemoteProtocolError: There is none of this slice.
    """
    if table.spec.pull_compressor.is_raw or not table.specs[header.slice].compress:
        raise RemoteProtocolError(
            f"worker {header.sender.worker} asks for an estimate of slice {header.slice} of "
            f"{table.spec.name!r}, whose pulls are not compressed"
        )
    return header.held


def _releaser(store: SliceStore, buffer: Buffer) -> Callable[[], None]:
    return lambda: store.release(buffer)


def _of(header: data_pb2.PushHeader) -> str:
    """Returns which push it is, for messages."""
    worker, index, step = header.sender.worker, header.slice, header.step
    return f"push of worker {worker}, slice {index}, step {step}"


def _push(header: data_pb2.PushHeader, table: Table) -> Push:
    """Returns what a header says, checked.

    Raises:
        DecodeError: A number in it is out of its range.
    """
    if not 0 <= header.role < len(Role):
        raise DecodeError(f"role of a push is {header.role}, must be 0..{len(Role) - 1}")
    role = Role(header.role)
    num_segments = len(table.specs[header.slice].segments)
    if len(header.counts) not in (0, num_segments):
        raise DecodeError(f"{len(header.counts)} counts of steps for {num_segments} segments")
    if role is Role.STATE and header.step > COUNT_MAX:
        raise DecodeError(f"a state of step {header.step}, beyond {COUNT_MAX}")
    if not 0 <= header.samples <= SAMPLES_MAX:
        raise DecodeError(f"weight of a push is {header.samples}, must be 0..{SAMPLES_MAX:g}")
    num_hyper = len(table.optimizer.hyper_names)
    hyper = None
    if role not in LOADS:
        hyper = wire.unpack_hyper(header.hyper, table.spec.num_groups, num_hyper)
    return Push(
        worker=header.sender.worker,
        step=header.step,
        base_version=header.base_version,
        role=role,
        samples=header.samples,
        present=wire.unpack_bits(header.present, num_segments),
        hyper=hyper,
        may_wait=header.may_wait and header.shared,
    )


def _payload(table: Table, header: data_pb2.PushHeader, data: ByteArray) -> Payload:
    """Returns the payload with its compressor: the job's, or none where a push says so.

    Raises:
        RemoteProtocolError: The push is compressed by another one.
    """
    if header.compressor not in ("", table.spec.compressor.name):
        raise RemoteProtocolError(
            f"worker {header.sender.worker} pushed step {header.step} compressed by "
            f"{header.compressor!r}, the job has {str(table.spec.compressor)!r}"
        )
    return Payload(
        data=data,
        compressor=table.spec.compressor if header.compressor else RAW,
        counts=tuple(header.counts),
        is_borrowed=header.shared,
    )
