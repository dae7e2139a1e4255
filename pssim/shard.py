"""One simulated shard: the real `Shard`, `Intake`, `Lane` and `SliceStore`, called as by a daemon.

What a daemon's transports and its driver do around them is done here, on simulated time and in one
thread: slices are so small that the lanes carry everything out at once.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pscore.errors import PacelineError
from pscore.memory.segment import WeightsMap
from pscore.net import wire
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ByteArray, FloatArray, Role, Verdict
from psserver.decisions.membership import Member
from psserver.decisions.orders import Acknowledge, Action, Answer, Update
from psserver.decisions.shard import Actions, Job, Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table, TableSpec
from psserver.durability.journal_dir import Vault
from psserver.durability.recovery import Recovery, Room, resume
from psserver.engine.counters import Tally
from psserver.engine.requests import LOADS, Intake, Request
from psserver.engine.slice_queue import INLINE_NUMEL_MAX, Lane
from psserver.slices.store import SliceStore
from pssim.case import Case
from pssim.events import Recorder, What
from pssim.ledger import Identity, Ledger
from pssim.network import Network

JOB = "job"
LEASE_S = 3.0
TICK_S = 0.5
PULL_WAIT_S = 1.0

NUMBERS = itertools.count()
Result: TypeAlias = bytes | PacelineError
Respond: TypeAlias = Callable[[Result], None]


class NoThreads(Executor):
    """Small slices are carried out at once; a simulation has no threads."""

    def submit(self, *args: object, **kwargs: object) -> Any:
        """Raises: nothing may be left to a thread."""
        raise AssertionError("a slice of the simulation is too large")


class Courier:
    """Takes one answer out; identity and role are the request's, for the ledger."""

    def __init__(
        self, answer: Respond, identity: Identity, role: Role, send_later: Callable[..., None]
    ) -> None:
        self.identity = identity
        self.role = role
        self.number = next(NUMBERS)
        self._answer = answer
        self._send_later = send_later

    def pushed(self, reply: data_pb2.PushReply) -> None:
        """Answers a push."""
        self._answer(wire.encode(reply.SerializeToString()))

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull."""

        def send() -> None:
            parts = [wire.as_bytes(array) for array in arrays]
            self._answer(wire.encode(reply.SerializeToString(), *parts))

        if release is None:
            send()
        else:  # A slow reader: what was leased must stay as it is until it has left.
            self._send_later(send, release)


def nothing(result: Result) -> None:
    """Answers nobody."""


def spoil(store: SliceStore) -> None:
    """Fills all that a journal does not name with NaN, as if it had been written half."""
    assert store.journal is not None
    for cell in store.journal.pool._free:
        cell.array.fill(np.nan)
    for buffer in store._weights._buffers:
        if buffer is not store._weights._newest:
            buffer.array.fill(np.nan)


class InOrder(set[Request]):
    """Requests in the order in which they came: a set's own order differs from run to run."""

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(super().__iter__(), key=_number))


def _number(request: Request) -> int:
    assert isinstance(request.reply, Courier)
    return request.reply.number


class WatchedIntake(Intake):
    """Tells the ledger what was decided, before it is carried out."""

    __slots__ = ("ledger", "name", "note", "recorder")
    ledger: Ledger
    note: Callable[[str], None]
    name: str
    recorder: Recorder

    def carry_out(self, job: Job, actions: Actions, idle: list[Lane] | None = None) -> None:
        """Carries actions out, after the ledger has checked them."""
        expected = job.membership.expected()
        for address, action in actions:
            token = getattr(action, "token", None)
            identity, role = (-1, -1, -1), Role.GRADIENT
            if token is not None:
                assert isinstance(token, Request)
                assert isinstance(token.reply, Courier)
                identity, role = token.reply.identity, token.reply.role
            clock = job.table(address.table).clock(address.slice)
            if isinstance(action, Update):
                self.ledger.enough(job.membership.members.values())
                self.note(f"slice {address.slice} has version {action.version}")
            self.ledger.decided(address.slice, action, identity, role, clock, expected)
            self._record(address.slice, action, identity, role)
        super().carry_out(job, actions, idle)

    def _record(self, index: int, action: Action, identity: Identity, role: Role) -> None:
        note, worker = self.recorder.note, identity[0]
        if isinstance(action, Update):
            note(self.name, What.UPDATED, slice=index, version=action.version)
        elif isinstance(action, Acknowledge) and role not in LOADS:
            is_late = action.verdict is Verdict.TOO_LATE
            what = What.PUSH_TOO_LATE if is_late else What.PUSH_COUNTED
            note(self.name, what, worker=worker, step=identity[1], slice=index)
        elif isinstance(action, Answer):
            what, version = What.PULL_ANSWERED, action.version
            note(self.name, what, worker=worker, slice=index, version=version)


class Server:
    """One shard."""

    def __init__(
        self,
        index: int,
        case: Case,
        ledger: Ledger,
        network: Network,
        now: Callable[[], float],
        send_later: Callable[..., None],
        recorder: Recorder,
        folder: Path | None = None,
    ) -> None:
        self.index = index
        self.name = f"shard {index}"
        self.problem: BaseException | None = None
        self.segments: dict[tuple[int, int], FloatArray] = {}  # By rank and incarnation.
        self.num_leased = 0
        self.num_leased_max = 0
        self._case = case
        self._network = network
        self._now = now
        self._pool = NoThreads()
        self._send_later = send_later
        self._recorder = recorder
        self._ledger = ledger
        self._folder = folder
        self._vault: Vault | None = None
        self._life = 0  # Counts the processes of this shard.
        self._begin()

    def _begin(self) -> None:
        """Is a new process."""
        self.shard = Shard(self.index, self._case.num_shards, LEASE_S)
        self.intake = WatchedIntake(
            self.shard, self._pool, self._now, self._broke, threading.RLock(), Tally()
        )
        self.intake.waiting = InOrder()
        self.intake.ledger = self._ledger
        self.intake.note = self._note
        self.intake.name, self.intake.recorder = self.name, self._recorder
        if self._folder is not None:
            self._vault = Vault(self._folder)
        self.recovery = Recovery(self._vault, self.shard)
        self.intake.note_table = self.recovery.note_table

    def close(self) -> None:
        """Lets go of what it keeps open, when the simulation is over."""
        if self._vault is not None:
            self._vault.close()

    # ----- death

    def crash(self) -> None:
        """Is killed, and started again at once: what is not in the vault is gone."""
        assert self._vault is not None
        self._note("is killed, and comes back")
        instance = self._vault.instance
        self._vault.close()
        self._life += 1
        self._begin()
        for job in self.recovery.take_up(self._now(), self._allocate):
            for table in job.tables.values():
                for index, clock in table.clocks.items():
                    store = self.intake.lanes[id(job), table.index, index].store
                    spoil(store)
                    actions = resume(job, table, table.specs[index], store, clock)
                    self._introduce(index, clock)
                    self.intake.carry_out(job, actions)
        assert self._vault.instance == instance
        self.check()

    def _introduce(self, index: int, clock: SliceClock) -> None:
        """Tells the ledger whose the payloads are that were held; they are answered already."""
        book = self._ledger.books[index]
        for bin_ in clock._bins.values():
            for push, request in bin_.held.values():
                assert isinstance(request, Request)
                identity = book.accepted[push.worker, push.step]
                request.reply = Courier(nothing, identity, Role.GRADIENT, self._send_later)

    def _alive(self, answer: Respond) -> Respond:
        """Returns `answer` for as long as this process lives."""
        life = self._life

        def answer_if_alive(result: Result) -> None:
            if life == self._life:
                answer(result)

        return answer_if_alive

    # ----- requests; each is answered by a call of `answer`

    def join(
        self,
        rank: int,
        incarnation: int,
        *,
        former: tuple[int, ...],
        restart: int,
        returns: bool,
    ) -> None:
        """Admits a worker."""
        member = Member(
            rank=rank,
            incarnation=incarnation,
            former=former,
            restart=restart,
            host="host",
            pid=rank,
            heard_s=self._now(),
            returns=returns,
        )
        job = self.shard.join(JOB, self._case.num_workers, member, self._case.min_workers)
        self.recovery.note(job)
        self.intake.carry_out(job, self.shard.recheck(job))

    def define(self, rank: int, incarnation: int, spec: TableSpec) -> None:
        """Creates the table, or finds it."""
        job = self.shard.heard(JOB, rank, incarnation, self._now())
        table, created = self.shard.define(job, spec)
        if created:
            self._allocate(job, table, self.recovery.make_room(job, table))

    def _allocate(self, job: Job, table: Table, room: Room) -> None:
        layout = WeightsMap(list(table.specs.values()))
        for index, part in table.specs.items():
            assert part.numel <= INLINE_NUMEL_MAX
            store = SliceStore(
                part,
                table.spec.rule,
                table.optimizer,
                layout.buffers(room.weights, index),
                layout.versions(room.weights, index),
                room.journals.get(index),
                room.stamps.get(index),
            )
            lane = Lane(store, self.intake, self._pool)
            self.intake.lanes[id(job), table.index, index] = lane

    def heartbeat(self, rank: int, incarnation: int) -> None:
        """Renews a lease."""
        self.shard.heard(JOB, rank, incarnation, self._now())

    def leave(self, rank: int, incarnation: int) -> None:
        """Ends a worker's part in the job."""
        actions = self.shard.leave(JOB, rank, incarnation, "finished")
        self.recovery.note(self.shard.jobs[JOB])
        self.intake.carry_out(self.shard.jobs[JOB], actions)

    def push(self, frame: bytes, answer: Respond) -> None:
        """Receives a push."""
        raw, payload = wire.decode(frame)
        header = data_pb2.PushHeader.FromString(bytes(raw))
        identity = (header.sender.worker, header.step, header.sender.incarnation)
        courier = Courier(self._alive(answer), identity, Role(header.role), self._send_later)
        data = np.frombuffer(payload, dtype=np.uint8)
        before = self._num_parked()
        self.intake.admit(header, data.nbytes)
        if header.shared:  # As `Driver.attach` has done, when the connection was made.
            job = self.shard.jobs[JOB]
            segment = self.segments[header.sender.worker, header.sender.incarnation]
            self.intake.shared[id(job), header.sender.table, header.sender.worker] = segment
        self.intake.push(header, data, courier)
        if self._num_parked() > before:
            self._note(f"the push of worker {header.sender.worker} waits")

    def pull(self, frame: bytes, answer: Respond) -> None:
        """Receives a pull."""
        raw, _ = wire.decode(frame)
        header = data_pb2.PullHeader.FromString(bytes(raw))
        identity = (header.sender.worker, header.clock, header.sender.incarnation)
        courier = Courier(self._alive(answer), identity, Role.GRADIENT, self._send_later)
        self.intake.pull(header, courier, PULL_WAIT_S)

    # ----- time

    def tick(self) -> None:
        """Declares silent workers lost, and answers pulls that have waited too long."""
        lost, actions = self.shard.tick(self._now())
        for job, member in lost:
            self._note(f"worker {member.rank} is lost")
            self.recovery.note(job)
            self.intake.carry_out(job, actions)
            actions = []
        self.intake.put_off()

    @property
    def is_over(self) -> bool:
        """Whether everybody who came has gone."""
        job = self.shard.jobs.get(JOB)
        return job is not None and job.membership.is_idle

    # ----- invariants

    def stores(self) -> dict[int, SliceStore]:
        """Returns the stores by slice."""
        return {key[2]: lane.store for key, lane in self.intake.lanes.items()}

    def check(self) -> None:
        """What holds after every event: no more is kept than the rule's open steps need."""
        if self.problem is not None:
            raise self.problem
        rule, workers = self._case.rule, self._case.num_workers
        open_max = rule.steps_open() if rule.by_step else 1
        for job in self.shard.jobs.values():
            for table in job.tables.values():
                for index, clock in table.clocks.items():
                    store = self.intake.lanes[id(job), table.index, index].store
                    assert clock.version == self.intake.ledger.books[index].version or (
                        clock.version == -1
                    )
                    assert len(store._bins) <= open_max, f"{len(store._bins)} sums are open"
                    sums = open_max * (1 + workers) + 1  # With those that are held.
                    arrays = 2 + self.num_leased_max + len(store.state) + 1
                    assert store._pool.nbytes <= 4 * store.numel * (sums + arrays)
                    assert len(clock._parked) <= workers, f"{len(clock._parked)} pushes parked"
                    assert len(store._weights._buffers) <= 2 + self.num_leased_max
                    if rule.by_step:
                        newest = max(clock._bins, default=0)
                        assert newest < max(clock.version, 0) + open_max

    def settled(self) -> None:
        """What holds when nothing is under way any more."""
        assert not self.intake.waiting
        for job in self.shard.jobs.values():
            for table in job.tables.values():
                for index, clock in table.clocks.items():
                    store = self.intake.lanes[id(job), table.index, index].store
                    assert not store._bins, f"sums {list(store._bins)} never became an update"
                    assert clock.num_waiting == 0
                    assert all(buffer.leases == 0 for buffer in store._weights._buffers)
                    self.intake.ledger.books[index].settled(store.weights)

    def _num_parked(self) -> int:
        return sum(
            len(clock._parked)
            for job in self.shard.jobs.values()
            for table in job.tables.values()
            for clock in table.clocks.values()
        )

    def _note(self, text: str) -> None:
        self._network.note(f"    {self.name}: {text}")

    def _broke(self, problem: BaseException | None) -> None:
        self.problem = problem
