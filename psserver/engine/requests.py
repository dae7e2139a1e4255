"""Pushes and pulls of one shard: checked, decided under one lock, and executed by slice queues.

Transports (gRPC in control.py, sockets in data_socket.py) bring headers and payloads from any
thread and get their answers through a `Reply`. All decisions are made under the engine's lock. The
numeric work of large slices is not done under it; that of small ones is, where its caller holds it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import numpy as np
import structlog

from pscore.compressors.none import NoCompression
from pscore.contents import FLAT
from pscore.errors import DecodeError, RemoteProtocolError
from pscore.json_text import COUNT_MAX
from pscore.net import wire
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import data_pb2
from pscore.types import SAMPLES_MAX, ByteArray, Pull, Push, Role, Verdict
from psserver.decisions.orders import Acknowledge, Action, Answer, Skip, Update
from psserver.decisions.progress import Token
from psserver.decisions.shard import Actions, Address, Job, Shard
from psserver.decisions.slice_clock import LOADS, SliceClock
from psserver.decisions.table import Table
from psserver.engine.counters import Counters
from psserver.engine.job import Reply, Request, RunningJob, RunningTable
from psserver.engine.placement import Placement
from psserver.engine.slice_queue import SliceQueue
from psserver.engine.trace import note_push, note_round
from psserver.slices.base import Asked, Payload, Store

log = structlog.get_logger()
RAW = NoCompression()
NO_BYTES: ByteArray = np.empty(0, np.uint8)
STEPS_MAX = 1 << 48  # Most steps of a job.
VERDICTS = [data_pb2.Verdict.Name(int(verdict)) for verdict in Verdict]
ROLES = tuple(Role)


@dataclass(slots=True, kw_only=True)
class Requests:
    """The data path of one shard."""

    shard: Shard
    jobs: Mapping[str, RunningJob]
    now: Callable[[], float]
    broke: Callable[[BaseException], None]  # Called when a queue fails.
    lock: threading.RLock
    counters: Counters
    waiting: dict[Request, None] = field(default_factory=dict)  # Unanswered pulls, oldest first.
    # Called with actions before they are executed.
    on_decided: Callable[[Job, Actions], None] | None = None
    timeline: Timeline | None = None
    placement: Placement = field(default_factory=Placement)

    # ----- requests

    def admit(self, header: data_pb2.PushHeader | data_pb2.PullHeader, nbytes: int) -> None:
        """Refuses a push or pull whose payload cannot be right, before memory is taken for it.

        Raises:
            PacelineError: Its sender or slice is not known, or it is longer than any payload.
        """
        with self.lock:
            _, table, _, address = self._address(header.sender, header.slice)
            content, compressor = table.spec.content, table.spec.compressor
        part = table.specs[address.slice]
        longest = content.request_nbytes_max
        if isinstance(header, data_pb2.PushHeader):
            longest = content.push_nbytes_max(part, table.optimizer, compressor)
        if nbytes > longest:
            what = f"a slice of {part.numel} elements"
            raise DecodeError(f"{nbytes} bytes for {what} ({_of(header)})")

    def on_push(
        self,
        header: data_pb2.PushHeader,
        data: ByteArray,
        reply: Reply,
        release: Callable[[], None] | None = None,
        *,
        here: bool = False,
        pull_wait_s: float | None = None,
    ) -> None:
        """Decides on a push and starts the work that follows; may answer before it returns.

        Args:
            data: `(nbytes,) uint8`, its payload; empty if it is in shared memory.
            release: Called when the payload is no longer needed.
            here: This thread may execute the work.
            pull_wait_s: The longest wait of the pull in the header, in seconds; None: there is
                none.

        Raises:
            PacelineError: The push is refused; nothing was counted.
        """
        idle: list[SliceQueue] = []
        with self.lock:
            begin_ns = 0 if self.timeline is None else self.timeline.now_ns()
            job, table, clock, address = self._address(header.sender, header.slice)
            worker = header.sender.worker
            request = Request(job, address, clock, worker, reply, release=release)
            request.is_shared = header.shared
            if header.shared:
                data = _shared_grad(job, table, address, worker)
            store = job.queue(address).store
            try:
                push = _push(header, table)
                request.payload = _payload(table, header, data)
                store.check(request.payload, push)
            except DecodeError as problem:
                raise DecodeError(f"{problem} ({_of(header)})") from None
            if push.role not in LOADS:
                request.step = push.step
            former = table.spec
            asked = None
            if pull_wait_s is not None:
                header.pull.sender.CopyFrom(header.sender)
                header.pull.slice = header.slice
                asked = _asked(header.pull, table, NO_BYTES)
            actions = self.shard.decide_push(job.job, address, push, request, self.now())
            if asked is not None and pull_wait_s is not None:
                also = Request(job, address, clock, worker, reply, asked=asked)
                actions += self._decide_pull(header.pull, also, pull_wait_s)
            if table.spec is not former:  # Its steps are counted from another origin now.
                job.recorder.note_table(table)
            if self.timeline is not None:
                note_push(self.timeline, begin_ns, address, push, data.nbytes)
            job.job.counters.pushed_nbytes += data.nbytes
            job.job.counters.raw_pushed_nbytes += (
                4 * store.numel if header.compressor else data.nbytes
            )
            self.counters.received_nbytes += data.nbytes
            # Compressed data takes longer to add than to receive.
            steps_here = here and self.placement.steps_on_receive_thread and not header.compressor
            self.execute(job, actions, idle if steps_here else None)
        for queue in idle:
            queue.run()

    def on_pull(
        self, header: data_pb2.PullHeader, reply: Reply, wait_s: float, data: ByteArray = NO_BYTES
    ) -> None:
        """Decides on a pull; it is answered when it can be, at the latest after `wait_s` seconds.

        A late answer says what the pull waits for.

        Args:
            wait_s: The longest wait, in seconds.
            data: `(nbytes,) uint8`, its payload.

        Raises:
            PacelineError: The pull is refused.
        """
        with self.lock:
            job, table, clock, address = self._address(header.sender, header.slice)
            asked = _asked(header, table, data)
            request = Request(job, address, clock, header.sender.worker, reply, asked=asked)
            self.execute(job, self._decide_pull(header, request, wait_s))

    def put_off(self) -> None:
        """Answers the pulls that have waited long enough with the reason of their wait."""
        with self.lock:
            now_s = self.now()
            for request in [r for r in self.waiting if r.deadline_s <= now_s]:
                if request.clock.forget(request):
                    del self.waiting[request]
                    text = self.shard.waiting_for(request.job.job, request.address)
                    self.counters.pulled(request.job.name, is_answered=False)
                    request.reply.pulled(
                        data_pb2.PullReply(ready=False, waiting_for=text), (), None
                    )

    def forget(self, is_gone: Callable[[Reply], bool]) -> None:
        """Drops the waiting pulls whose requester is gone."""
        with self.lock:
            for request in [r for r in self.waiting if is_gone(r.reply)]:
                request.clock.forget(request)
                del self.waiting[request]

    def note_refused(self) -> None:
        """Counts a refused push."""
        with self.lock:
            self.counters.num_pushes_refused += 1

    # ----- execution

    def execute(
        self, job: RunningJob, actions: Actions, idle: list[SliceQueue] | None = None
    ) -> None:
        """Appends each slice's actions to its queue, in order; called under the lock.

        Args:
            actions: In the order in which they were decided.
            idle: Receives the queues that the caller has to run, without the lock; None: none.
        """
        if self.on_decided is not None:
            self.on_decided(job.job, actions)
        for address, group in itertools.groupby(actions, key=itemgetter(0)):
            table = job.tables[address.table]
            batch = [action for _, action in group]
            for action in batch:
                self._count(action)
                if self.timeline is not None and isinstance(action, Update):
                    self._note_round(self.timeline, table, address, action)
            queue, work = table.queues[address.slice], table.with_scheduled(address.slice, batch)
            if idle is None:
                queue.submit(work)
            elif queue.append(work):
                idle.append(queue)

    def _note_round(
        self, timeline: Timeline, table: RunningTable, address: Address, update: Update
    ) -> None:
        """Records the round that an update has closed, in a mode whose rounds have a window."""
        times = table.table.clocks[address.slice].window.closed
        if table.table.spec.rule.window_s is not None and times is not None:
            note_round(timeline, address, update.version, times)

    def _count(self, action: Action) -> None:
        if isinstance(action, Update):
            self.counters.num_updates += 1
        elif isinstance(action, Answer):
            assert isinstance(action.token, Request)
            self.waiting.pop(action.token, None)
            self.counters.pulled(action.token.job.name, is_answered=True)
        elif isinstance(action, Acknowledge):
            request = action.token
            assert isinstance(request, Request)
            self.counters.pushed(request.job.name, action.verdict)
            if request.step >= 0:
                request.job.residuals.pushed(request.address, request.worker)
            if action.verdict is Verdict.ACCEPTED:
                staleness = request.clock.staleness.get(request.worker)
                if staleness is not None:
                    self.counters.staleness.observe(staleness)

    # ----- Completion: called by the queues

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push."""
        assert isinstance(token, Request)
        assert token.payload is not None
        token.taken_s = self.now()
        return token.payload

    def keep(self, token: Token, payload: Payload) -> None:
        """Replaces the payload of a push, and frees the memory of the former one."""
        assert isinstance(token, Request)
        if payload is not token.payload and token.release is not None:
            token.release()
            token.release = None
        token.payload = payload

    def done(self, token: Token) -> None:
        """Frees a payload's memory."""
        assert isinstance(token, Request)
        token.payload = None
        if token.release is not None:
            token.release()
        self.counters.times_s.append(self.now() - token.taken_s)

    def make_acknowledgement(self, action: Acknowledge) -> Callable[[], None]:
        """Returns the answer to a push."""
        assert isinstance(action.token, Request)
        request = action.token
        is_requested = False
        if request.step >= 0 and request.job.residuals.is_collecting:
            with self.lock:
                is_requested = request.job.residuals.is_requested(
                    request.address, request.worker, request.step
                )
        verdict, version = VERDICTS[action.verdict], max(0, action.version)
        reply = data_pb2.PushReply(verdict=verdict, version=version, send_residual=is_requested)
        return partial(request.reply.pushed, reply)

    def make_answer(self, action: Answer, store: Store) -> Callable[[], None]:
        """Returns the answer to a pull, with the numbers that the store reads for it."""
        request = action.token
        assert isinstance(request, Request)
        reply = data_pb2.PullReply(
            ready=True, version=action.version, clock=action.clock, counted=1 + action.counted
        )
        reading = store.answer(action, request.asked, reply)
        with self.lock:
            request.job.job.counters.pulled_nbytes += reading.nbytes
            request.job.job.counters.raw_pulled_nbytes += reading.raw_nbytes
            self.counters.sent_nbytes += reading.nbytes
        return partial(request.reply.pulled, reply, reading.arrays, reading.release)

    # ----- inside

    def _decide_pull(self, header: data_pb2.PullHeader, request: Request, wait_s: float) -> Actions:
        """Decides on a pull, which waits for `wait_s` seconds at most."""
        pull = Pull(
            worker=request.worker,
            clock=header.clock,
            min_version=header.min_version,
            with_state=header.with_state,
            begins=header.begins,
            is_look=header.look,
        )
        request.deadline_s = self.now() + wait_s
        self.waiting[request] = None
        actions = self.shard.decide_pull(request.job.job, request.address, pull, request)
        if pull.begins:
            _note_missing(request, [action for _, action in actions if isinstance(action, Skip)])
        return actions

    def _address(
        self, sender: data_pb2.Sender, index: int
    ) -> tuple[RunningJob, Table, SliceClock, Address]:
        job = self.shard.heard(sender.job, sender.worker, sender.incarnation, self.now())
        table = job.table(sender.table)
        clock = table.clock(index)
        return self.jobs[job.name], table, clock, Address(job.name, table.index, index)


def _note_missing(request: Request, skipped: Sequence[Skip]) -> None:
    """Logs that a slice lacks steps that the others have, where a worker continues behind those.

    Workers that have ended in the middle of a step leave as many as the mode lets them be ahead.
    More are missing where a shard was started on an old copy of its state.
    """
    for action in skipped:
        if 0 < action.former < action.version - request.clock.rule.steps_open():
            log.error(
                "this shard lacks steps that the others have: its state is an old one; all go back "
                "to one step by `psserver restore`, from a checkpoint",
                job=request.job.job.name,
                slice=request.address.slice,
                at=action.former,
                continues_at=action.version,
            )


def _shared_grad(job: RunningJob, table: Table, address: Address, worker: int) -> ByteArray:
    """Returns the slice in a worker's segment.

    Raises:
        RemoteProtocolError: The worker has attached none.
    """
    grads = job.tables[address.table].shared_grads.get(worker)
    if grads is None:
        raise RemoteProtocolError(f"worker {worker} has not attached a segment for its gradients")
    spec = table.specs[address.slice]
    return grads[spec.start : spec.stop].view(np.uint8)


def _asked(header: data_pb2.PullHeader, table: Table, data: ByteArray) -> Asked:
    """Returns the rest of a pull's request.

    Raises:
        RemoteProtocolError: It asks for the estimate of a slice whose pulls are not compressed.
        DecodeError: Its payload cannot be of this slice, or its worker begins at no step of a job.
    """
    if header.begins and header.clock > STEPS_MAX:
        raise DecodeError(f"worker {header.sender.worker} begins at step {header.clock}")
    part = table.specs[header.slice]
    wanted = table.spec.content.read_request(data, part, table.layout)
    if not header.estimate or header.with_state or header.look:
        return Asked(wanted=wanted, is_shared=header.shared)
    if table.spec.pull_compressor.is_raw or not part.compress:
        raise RemoteProtocolError(
            f"worker {header.sender.worker} asks for an estimate of slice {header.slice} of "
            f"{table.spec.name!r}, whose pulls are not compressed"
        )
    return Asked(
        wanted=wanted,
        is_shared=header.shared,
        held=header.held,
        compressor=table.spec.pull_compressor,
    )


def _of(header: data_pb2.PushHeader | data_pb2.PullHeader) -> str:
    """Describes a push or pull, for messages."""
    worker, index = header.sender.worker, header.slice
    if isinstance(header, data_pb2.PullHeader):
        return f"pull of worker {worker}, slice {index}"
    return f"push of worker {worker}, slice {index}, step {header.step}"


def _push(header: data_pb2.PushHeader, table: Table) -> Push:
    """Returns the push that a header describes.

    Raises:
        DecodeError: A number in it is out of range.
    """
    if not 0 <= header.role < len(Role):
        raise DecodeError(f"role of a push is {header.role}, must be 0..{len(Role) - 1}")
    role = ROLES[header.role]
    num_segments = len(table.specs[header.slice].segments)
    if (counts := header.counts) and len(counts) != num_segments:
        raise DecodeError(f"{len(counts)} counts of steps for {num_segments} segments")
    if counts and not 0 <= min(counts) <= max(counts) <= COUNT_MAX:
        raise DecodeError(f"a count of steps is not in 0..{COUNT_MAX}")
    if role is Role.LAST_MODEL and table.spec.rule.round_role is not Role.MODEL:
        raise DecodeError(f"a worker's last model, but mode {table.spec.rule.name} keeps no models")
    if role is Role.REFILL and (
        header.base_version > STEPS_MAX or table.spec.content.name != FLAT.name
    ):
        raise DecodeError(f"worker {header.sender.worker} cannot fill this slice with its version")
    if role is Role.STATE and header.step > COUNT_MAX:
        raise DecodeError(f"a state of step {header.step}, beyond {COUNT_MAX}")
    if not 0 <= header.samples <= SAMPLES_MAX:
        raise DecodeError(f"weight of a push is {header.samples}, must be 0..{SAMPLES_MAX:g}")
    if header.minibatch > COUNT_MAX:
        raise DecodeError(f"minibatch {header.minibatch} of a push is beyond {COUNT_MAX}")
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
        minibatch=header.minibatch - 1,
    )


def _payload(table: Table, header: data_pb2.PushHeader, data: ByteArray) -> Payload:
    """Returns the payload with its compressor: the job's, or none if the push names none.

    Raises:
        RemoteProtocolError: The push is compressed by another compressor, or is to be decoded from
            shared memory, where its worker can change it behind the check of its content.
    """
    if header.shared and header.compressor:
        raise RemoteProtocolError(
            f"worker {header.sender.worker} pushed step {header.step} compressed by "
            f"{header.compressor!r} in shared memory: compressed payloads are sent"
        )
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
