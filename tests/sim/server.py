"""One simulated shard: the real `Shard`, `Requests`, `SliceQueue` and `SliceStore` of a daemon.

What a daemon's transports and its engine do around them is done here, on simulated time and in one
thread: slices are so small that the queues carry everything out at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pscore.errors import PacelineError
from pscore.net import wire
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, FloatArray, Role
from psserver.decisions.membership import Member
from psserver.decisions.orders import Update
from psserver.decisions.shard import Actions, Job, Shard
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.job import Request
from psserver.engine.requests import Requests
from psserver.slices.base import Store
from psserver.slices.store import SliceStore
from tests.sim.case import Case
from tests.sim.ledger import Identity, Ledger
from tests.sim.loop import Network

JOB = "job"
LEASE_S = 3.0
TICK_S = 0.5
PULL_WAIT_S = 1.0

Result: TypeAlias = bytes | PacelineError
Answer: TypeAlias = Callable[[Result], None]


class Courier:
    """Takes one answer out; identity and role are the request's, for the ledger."""

    def __init__(
        self, answer: Answer, identity: Identity, role: Role, send_later: Callable[..., None]
    ) -> None:
        self.identity = identity
        self.role = role
        self._answer = answer
        self._send_later = send_later

    def pushed(self, reply: data_pb2.PushReply) -> None:
        self._answer(wire.encode(reply.SerializeToString()))

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        def send() -> None:
            parts = [wire.as_bytes(array) for array in arrays]
            self._answer(wire.encode(reply.SerializeToString(), *parts))

        if release is None:
            send()
        else:  # A slow reader: what was leased must stay as it is until it has left.
            self._send_later(send, release)


def nothing(result: Result) -> None:
    """Answers nobody."""


def spoil(store: Store) -> None:
    """Fills all that a journal does not name with NaN, as if it had been written half."""
    assert isinstance(store, SliceStore)
    assert store.journal is not None
    for cell in store.journal.pool._free:
        cell.array.fill(np.nan)
    for buffer in store.copies._buffers:
        if buffer is not store.copies._newest:
            buffer.array.fill(np.nan)


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
        self._send_later = send_later
        self._ledger = ledger
        self._folder = folder
        self._journals: JournalDir | None = None
        self._life = 0  # Counts the processes of this shard.
        self.engine = self._begin()

    def _begin(self) -> Engine:
        """Is a new process."""
        if self._folder is not None:
            self._journals = JournalDir(self._folder)
        return Engine(
            Shard(self.index, self._case.num_shards, LEASE_S),
            now=self._now,
            journals=self._journals,
            broke=self._broke,
            on_decided=self._decided,
        )

    @property
    def shard(self) -> Shard:
        return self.engine.shard

    @property
    def requests(self) -> Requests:
        return self.engine.requests

    def _decided(self, job: Job, actions: Actions) -> None:
        """Tells the ledger what was decided, before it is carried out."""
        expected = job.membership.expected()
        for address, action in actions:
            token = getattr(action, "token", None)
            identity, role = (-1, -1, -1), Role.GRADIENT
            if isinstance(token, Request):
                if isinstance(token.reply, Courier):
                    identity, role = token.reply.identity, token.reply.role
                else:  # A payload that was held: a former process has answered already.
                    push = getattr(action, "push")  # noqa: B009
                    book = self._ledger.books[address.slice]
                    identity = book.accepted[push.worker, push.step]
            clock = job.table(address.table).clock(address.slice)
            if isinstance(action, Update):
                self._ledger.enough(job.membership.members.values())
                self._note(f"slice {address.slice} has version {action.version}")
            self._ledger.decided(address.slice, action, identity, role, clock, expected)

    def close(self) -> None:
        """Lets go of what it keeps open, when the simulation is over."""
        if self._journals is not None:
            self._journals.close()

    # ----- death

    def crash(self) -> None:
        """Is killed, and started again at once: what is not in the vault is gone."""
        assert self._journals is not None
        self._note("is killed, and comes back")
        instance = self._journals.instance
        self._journals.close()
        self._life += 1
        self.engine = self._begin()
        self.engine.recover(spoil)
        assert self._journals.instance == instance
        self.check()

    def _alive(self, answer: Answer) -> Answer:
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
        self.engine.join(JOB, self._case.num_workers, member, self._case.min_workers)

    def define(self, rank: int, incarnation: int, spec: TableSpec) -> None:
        self.engine.define(self.engine.heard(JOB, rank, incarnation), spec)

    def heartbeat(self, rank: int, incarnation: int) -> None:
        self.engine.heard(JOB, rank, incarnation)

    def leave(self, rank: int, incarnation: int) -> None:
        self.engine.leave(JOB, rank, incarnation, "finished")

    def push(self, frame: bytes, answer: Answer) -> None:
        raw, payload = wire.decode(frame)
        header = data_pb2.PushHeader.FromString(bytes(raw))
        identity = (header.sender.worker, header.step, header.sender.incarnation)
        courier = Courier(self._alive(answer), identity, Role(header.role), self._send_later)
        data = np.frombuffer(payload, dtype=np.uint8)
        before = self._num_parked()
        self.requests.admit(header, data.nbytes)
        if header.shared:  # As `Engine.attach` has done, when the connection was made.
            segment = self.segments[header.sender.worker, header.sender.incarnation]
            job = self.engine.jobs[JOB]
            self.engine.share(job, header.sender.table, header.sender.worker, segment)
        self.requests.on_push(header, data, courier)
        if self._num_parked() > before:
            self._note(f"the push of worker {header.sender.worker} waits")

    def pull(self, frame: bytes, answer: Answer) -> None:
        raw, _ = wire.decode(frame)
        header = data_pb2.PullHeader.FromString(bytes(raw))
        identity = (header.sender.worker, header.clock, header.sender.incarnation)
        courier = Courier(self._alive(answer), identity, Role.GRADIENT, self._send_later)
        self.requests.on_pull(header, courier, PULL_WAIT_S)

    # ----- time

    def tick(self) -> None:
        for _, member in self.engine.tick():
            self._note(f"worker {member.rank} is lost")

    @property
    def is_over(self) -> bool:
        """Whether everybody who came has gone."""
        job = self.shard.jobs.get(JOB)
        return job is not None and job.membership.is_idle

    # ----- invariants

    def stores(self) -> dict[int, Store]:
        tables = self.engine.jobs[JOB].tables.values()
        return {i: queue.store for table in tables for i, queue in table.queues.items()}

    def check(self) -> None:
        """What holds after every event: no more is kept than the rule's open steps need."""
        if self.problem is not None:
            raise self.problem
        rule, workers = self._case.rule, self._case.num_workers
        open_max = rule.steps_open() if rule.by_step else 1
        for job in self.shard.jobs.values():
            for table in job.tables.values():
                table.check_invariants()
                for index, clock in table.clocks.items():
                    store = self.engine.jobs[job.name].tables[table.index].queues[index].store
                    assert clock.version == self._ledger.books[index].version or (
                        clock.version == -1
                    )
                    sums = open_max * (1 + workers) + 1  # With those that are held.
                    buffers = 2 + self.num_leased_max
                    assert isinstance(store, SliceStore)
                    store.check_invariants(
                        sums_max=open_max,
                        cells_max=sums + buffers + len(store.state) + 1,
                        buffers_max=buffers,
                    )
                    assert len(clock.parking) <= workers, f"{len(clock.parking)} pushes parked"

    def settled(self) -> None:
        """What holds when nothing is under way any more."""
        assert not self.requests.waiting
        for job in self.shard.jobs.values():
            for table in job.tables.values():
                for index, clock in table.clocks.items():
                    store = self.engine.jobs[job.name].tables[table.index].queues[index].store
                    assert clock.num_waiting == 0
                    cells = store.nbytes // (4 * store.numel)
                    assert isinstance(store, SliceStore)
                    store.check_invariants(
                        sums_max=0, cells_max=cells, buffers_max=cells, is_idle=True
                    )
                    self._ledger.books[index].settled(store.weights)

    def _num_parked(self) -> int:
        return sum(
            len(clock.parking)
            for job in self.shard.jobs.values()
            for table in job.tables.values()
            for clock in table.clocks.values()
        )

    def _note(self, text: str) -> None:
        self._network.note(f"    {self.name}: {text}")

    def _broke(self, problem: BaseException | None) -> None:
        self.problem = problem
