"""One simulated shard: the engine of a shard's process, in virtual time and without threads.

The parts of a process around its engine are here as far as a simulation needs them: requests
arrive as calls, answers leave through a function, and a crash ends one engine and starts the next
one on the journals that it left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from pscore.errors import PacelineError
from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, FloatArray, Origin, Role
from psserver.decisions.membership import Member, Presence
from psserver.decisions.orders import Action, Add
from psserver.decisions.shard import Actions, Job, Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.job import Request
from psserver.engine.resume import recover
from psserver.engine.views import ResidualRequest
from psserver.slices.base import Store
from psserver.slices.store import SliceStore

JOB = "job"
Result: TypeAlias = bytes | PacelineError
Respond: TypeAlias = Callable[[Result], None]
# Called with two functions: the first one sends an answer, the second one releases its weights.
SendLater: TypeAlias = Callable[[Callable[[], None], Callable[[], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The sender of a push or pull, and which one of its requests it is."""

    worker: int  # Rank.
    step: int  # Step of a push on the wire, clock of a pull.
    # Incarnation of the worker; None for a push that an earlier process has acknowledged.
    incarnation: int | None
    role: Role = Role.GRADIENT  # Role of a push.


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One action that a shard has decided and is about to execute."""

    shard: str
    job: Job
    slice: int
    clock: SliceClock  # The state of the slice after the decision.
    action: Action
    sender: Sender | None  # The request that it concerns; None for an update or a skip.


class ShardObserver(Protocol):
    """Sees what the shards decide."""

    def decided(self, decision: Decision) -> None:
        """Called with each action in the order of the decisions, before it is executed."""


class SimulatedReply:
    """Sends the answer to one request."""

    def __init__(self, respond: Respond, sender: Sender, send_later: SendLater | None) -> None:
        """Waits for the answer.

        Args:
            sender: The request, for the observers.
            send_later: Delays answers that lie in leased weights; None: they are sent at once.
        """
        self.sender = sender
        self._respond = respond
        self._send_later = send_later

    def pushed(self, reply: data_pb2.PushReply) -> None:
        """Answers a push."""
        self._respond(wire.encode(reply.SerializeToString()))

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull: at once, or later from weights that must not change until then."""

        def send() -> None:
            parts = [wire.as_bytes(array) for array in arrays]
            self._respond(wire.encode(reply.SerializeToString(), *parts))

        if release is None:
            send()
        elif self._send_later is None:
            send()
            release()
        else:
            self._send_later(send, release)


class SimulatedShard:
    """One shard of a simulated job."""

    def __init__(
        self,
        index: int,
        num_shards: int,
        *,
        now: Callable[[], float],
        lease_s: float,
        observers: Sequence[ShardObserver] = (),
        send_later: SendLater | None = None,
        folder: Path | None = None,
    ) -> None:
        """Starts the shard's first process.

        Args:
            now: Returns the virtual time in seconds.
            lease_s: Seconds of silence after which a worker is lost.
            send_later: Delays answers that lie in leased weights; None: they are sent at once.
            folder: Journals; None: nothing survives a crash.
        """
        self.index = index
        self.name = f"shard {index}"  # `shard 0`.
        # Error in a slice's queue, which only a bug can cause.
        self.problem: BaseException | None = None
        # Shared gradients of workers on its host, `(numel,) float32`, by rank and incarnation.
        self.segments: dict[tuple[int, int], FloatArray] = {}
        self._num_shards = num_shards
        self._now = now
        self._lease_s = lease_s
        self._observers = observers
        self._send_later = send_later
        self._folder = folder
        self._journals: JournalDir | None = None
        self._process = 0  # Number of processes that have crashed.
        self.engine = self._start()  # The engine of its process; another one after a crash.

    def _start(self) -> Engine:
        if self._folder is not None:
            self._journals = JournalDir(self._folder)
        return Engine(
            Shard(self.index, self._num_shards, self._lease_s),
            now=self._now,
            journals=self._journals,
            broke=self._broke,
            on_decided=self._decided,
        )

    def close(self) -> None:
        """Closes the journals."""
        if self._journals is not None:
            self._journals.close()

    # ----- requests

    def join(self, member: Member, num_workers: int, min_workers: int = 0) -> None:
        """Admits a worker, which is heard of now; raises PacelineError if it is refused."""
        member.heard_s = self._now()
        self.engine.join(JOB, num_workers, member, min_workers)

    def define(self, rank: int, incarnation: int, spec: TableSpec) -> tuple[int, Origin]:
        """Creates the table or finds it; returns its number and where its steps are counted from.

        Raises:
            PacelineError: The worker is not part of the job, or the table differs.
        """
        job = self.engine.heard(JOB, rank, incarnation)
        table = self.engine.define(job, spec)
        return table.index, table.origin

    def heartbeat(self, rank: int, incarnation: int) -> tuple[ResidualRequest, ...]:
        """Renews a lease; returns the residuals that the worker has still to send.

        Raises:
            ReplacedError: The worker is no longer part of the job.
        """
        job = self.engine.heard(JOB, rank, incarnation)
        return job.heartbeat(rank, "", {}, {}).residual_requests

    def take_residual(self, request: pb.SendResidualRequest) -> None:
        """Receives a worker's residual of a slice, as `service/control.py` does.

        Raises:
            PacelineError: It is refused.
        """
        job = self.engine.heard(JOB, request.worker, request.incarnation)
        arrays = {array.name: array.data for array in request.arrays}
        job.take_residual(request.table, request.slice, request.worker, request.step, arrays)

    def leave(self, rank: int, incarnation: int) -> None:
        """Ends a worker's part in the job."""
        self.engine.leave(JOB, rank, incarnation, "finished")

    def push(self, frame: bytes, respond: Respond) -> None:
        """Receives a push; `respond` is called when it is acknowledged.

        Raises:
            PacelineError: The push is refused.
        """
        raw, payload = wire.decode(frame)
        header = data_pb2.PushHeader.FromString(bytes(raw))
        data = np.frombuffer(payload, dtype=np.uint8)
        self.engine.requests.admit(header, data.nbytes)
        if header.shared:  # A transport attaches the memory when it connects.
            rank = header.sender.worker
            segment = self.segments[rank, header.sender.incarnation]
            self.engine.share(self.engine.jobs[JOB], header.sender.table, rank, segment)
        reply = self._reply(respond, header.sender, header.step, Role(header.role))
        self.engine.requests.on_push(header, data, reply)

    def pull(self, frame: bytes, respond: Respond, wait_s: float) -> None:
        """Receives a pull; `respond` is called with the weights, or with the reason of a wait.

        Args:
            wait_s: Seconds after which the answer is what the pull waits for; ticks look at it.

        Raises:
            PacelineError: The pull is refused.
        """
        raw, payload = wire.decode(frame)
        header = data_pb2.PullHeader.FromString(bytes(raw))
        reply = self._reply(respond, header.sender, header.clock, Role.GRADIENT)
        self.engine.requests.on_pull(header, reply, wait_s, np.frombuffer(payload, dtype=np.uint8))

    def tick(self) -> None:
        """Declares silent workers lost, and answers pulls that have waited too long."""
        self.engine.tick()
        self.engine.tick_windows()

    # ----- a crash

    def crash(self, poison: Callable[[Store], None]) -> None:
        """Kills the process and starts another one at once; only its journals are left.

        Answers of the killed process that are not on the network yet are never sent.

        Args:
            poison: Called with each slice before it resumes, to overwrite memory that is in no
                journal.
        """
        assert self._journals is not None
        instance = self._journals.instance
        self._journals.close()
        self._process += 1
        self.engine = self._start()
        recover(self.engine, poison)
        assert self._journals.instance == instance

    def _reply(
        self, respond: Respond, sender: data_pb2.Sender, step: int, role: Role
    ) -> SimulatedReply:
        process = self._process

        def respond_if_alive(result: Result) -> None:
            if process == self._process:
                respond(result)

        who = Sender(worker=sender.worker, step=step, incarnation=sender.incarnation, role=role)
        return SimulatedReply(respond_if_alive, who, self._send_later)

    # ----- the state

    @property
    def is_over(self) -> bool:
        """Whether every worker that has joined has left or is lost."""
        job = self.engine.shard.jobs.get(JOB)
        return job is not None and job.membership.is_idle

    def lost(self) -> set[int]:
        """Returns the ranks of the workers that are declared lost."""
        job = self.engine.shard.jobs.get(JOB)
        members = job.membership.members.values() if job is not None else ()
        return {member.rank for member in members if member.presence is Presence.LOST}

    def slices(self) -> Iterator[tuple[int, Table, SliceClock, SliceStore]]:
        """Yields index, table, clock and store of each slice."""
        for job in self.engine.jobs.values():
            for running in job.tables.values():
                for index, clock in running.table.clocks.items():
                    store = running.queues[index].store
                    assert isinstance(store, SliceStore)
                    yield index, running.table, clock, store

    def _decided(self, job: Job, actions: Actions) -> None:
        for address, action in actions:
            decision = Decision(
                shard=self.name,
                job=job,
                slice=address.slice,
                clock=job.table(address.table).clock(address.slice),
                action=action,
                sender=_sender_of(action),
            )
            for observer in self._observers:
                observer.decided(decision)

    def _broke(self, problem: BaseException) -> None:
        self.problem = problem


def _sender_of(action: Action) -> Sender | None:
    """Returns the sender of the request that an action concerns."""
    request = getattr(action, "token", None)
    if request is None:
        return None
    assert isinstance(request, Request)
    if isinstance(request.reply, SimulatedReply):
        return request.reply.sender
    assert isinstance(action, Add)  # A push that the journal held.
    return Sender(worker=action.push.worker, step=action.push.step, incarnation=None)
