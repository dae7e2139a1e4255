"""Drives one shard: who takes part, which tables there are, and time; the data path is `Intake`'s.

Everything that the state machines decide is decided under one lock, whatever thread it comes from.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from pscore.errors import LimitError, RemoteProtocolError
from pscore.memory.segment import Segment, WeightsMap
from pscore.net.budget import Budget
from pscore.observe.timeline import Timeline
from pscore.optimizers import warm_up
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from psserver.decisions.membership import Member
from psserver.decisions.shard import Address, Job, Shard
from psserver.decisions.table import Table, TableSpec
from psserver.durability.journal_dir import Vault
from psserver.durability.recovery import Recovery, Room, resume
from psserver.engine.counters import Tally
from psserver.engine.host_memory import require_host_memory
from psserver.engine.requests import Intake
from psserver.engine.slice_queue import Change, Lane
from psserver.engine.trace import TimedStore
from psserver.engine.views import Figures, JobView, figures_of, view_of
from psserver.engine.waits import Waits
from psserver.slices.store import SliceStore

log = structlog.get_logger()
WAIT_S_MAX = 10.0
FEW_THREADS = 2


class Driver:
    """One shard in this process's event loop."""

    def __init__(
        self,
        shard: Shard,
        *,
        num_threads: int = 2,
        vault: Vault | None = None,
        now: Callable[[], float] = time.monotonic,
        broke: Callable[[BaseException], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts without jobs.

        Args:
            shard: The decisions.
            num_threads: Threads for the numeric work of large slices.
            vault: Where everything is kept that outlives the process.
            now: The clock of leases, in seconds.
            broke: Called from any thread when a lane fails, which only a bug can cause.
            timeline: Where spans are recorded; None: nowhere.
        """
        self.shard = shard
        self.now = now
        self.started_s = now()
        self.tally = Tally()
        self.budget = Budget(shard.limits.under_way_nbytes)
        self.lock = threading.RLock()
        self._broke = broke
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lane")
        self.intake = Intake(shard, self._pool, now, self.broke, self.lock, self.tally)
        self.intake.has_few_threads = num_threads <= FEW_THREADS
        self._timeline = self.intake.timeline = timeline
        self.recovery = Recovery(vault, shard)
        self.intake.note_table = self.recovery.note_table
        self._owners: dict[int, Job] = {}  # Keeps the ids of jobs from being used again.
        self._weights: dict[tuple[int, int], Segment] = {}  # By (id of the job), table.
        self._barriers: dict[tuple[int, str], list[asyncio.Future[bool]]] = {}
        self.waits = Waits(shard, self._barriers)

    # ----- workers and tables

    def join(
        self, name: str, num_workers: int, member: Member, min_workers: int = 0, life: int = 0
    ) -> Job:
        """Takes a worker into a job (`Shard.join`)."""
        with self.lock:
            job = self.shard.join(name, num_workers, member, min_workers, life)
            self._part_with(job, member.rank)
            self.forget_ended()
            self._owners[id(job)] = job
            self.recovery.note(job)
            self.intake.carry_out(job, self.shard.recheck(job))
            news = member.news if len(job.life.told) == 1 else ""
        self._ring(job)
        if news:
            log.warning(news)
        log.info("worker joined", job=name, worker=member.rank, host=member.host, pid=member.pid)
        return job

    def forget(self, name: str, *, is_forced: bool) -> tuple[bool, int]:
        """Forgets a job (`Lifetimes.forget`); returns whether it was here, and its memory."""
        with self.lock:
            found, nbytes = self.shard.lifetimes.forget(name, is_forced=is_forced)
            self.recovery.forget_lost(name)
            self.forget_ended()
        log.info("job forgotten", job=name, nbytes=nbytes, was_there=found)
        return found, nbytes

    def heard(self, name: str, rank: int, incarnation: int) -> Job:
        """Renews a worker's lease and returns its job.

        Raises:
            RemoteProtocolError: The worker is not part of the job.
        """
        with self.lock:
            return self.shard.heard(name, rank, incarnation, self.now())

    def define(self, job: Job, spec: TableSpec) -> tuple[Table, bool]:
        """Makes or finds a table, and allocates this shard's slices of it."""
        with self.lock:
            table, created = self.shard.define(job, spec)
            if not created:
                return table, False
            self._make_room(job, table)
        self._pool.submit(warm_up, table.optimizer)  # While the weights are on their way.
        log.info(
            "table defined",
            job=job.name,
            table=spec.name,
            mode=str(spec.rule),
            compression=str(spec.compressor),
            optimizer=spec.optimizer,
            tensors=len(spec.tensors),
            slices=len(table.specs),
            nbytes=table.nbytes,
        )
        return table, True

    def step_aside(self, job: Job, index: int, rank: int, change: tuple[int, ...]) -> None:
        """Lets the steps of a table close without a worker that waits for a change of its mode."""
        with self.lock:
            actions = self.shard.step_aside(job, index, rank, change)
            self.recovery.note_table(job, job.table(index))
            self.intake.carry_out(job, actions)

    def change(self, job: Job, index: int, rank: int, rule: Rule) -> None:
        """Gives a table another mode, unless a worker before this one has done so."""
        with self.lock:
            try:
                actions = self.shard.change(job, index, rank, rule)
            finally:
                self.recovery.note_table(job, job.table(index))  # Who is aside, if it is refused.
            if actions is None:
                return
            self.intake.carry_out(job, actions)
            for part in job.table(index).clocks:
                self._change_lane(job, job.table(index), part)
            name = job.table(index).spec.name
        log.info("mode changed", job=job.name, table=name, mode=str(rule))

    def _change_lane(self, job: Job, table: Table, index: int) -> None:
        clocks = {rank: steps.clock for rank, steps in table.clocks[index].counted.items()}
        change = Change(rule=table.spec.rule, epoch=table.epoch, clocks=clocks)
        self.intake.lanes[id(job), table.index, index].submit([change])

    def _make_room(self, job: Job, table: Table) -> None:
        """Makes the stores of a new table.

        Raises:
            LimitError: There is no memory for them.
        """
        self.forget_ended()  # Those that had to make room for it.
        try:
            what = f"table {table.spec.name!r} on shard {self.shard.index}"
            require_host_memory(what, table.memory_nbytes, self._free_one)
            room = self.recovery.make_room(job, table, self._free_one)
        except LimitError:
            del job.tables[table.spec.name]
            raise
        self._allocate(job, table, room)

    def _free_one(self) -> bool:
        """Frees the memory of the job that ended first; returns whether any has ended."""
        is_freed = self.shard.lifetimes.free_one()
        self.forget_ended()
        return is_freed

    def _allocate(self, job: Job, table: Table, room: Room) -> None:
        """Makes the stores of a table, their weights in memory that workers can map."""
        layout = WeightsMap(list(table.specs.values()))
        self._weights[id(job), table.index] = room.weights
        for index, part in table.specs.items():
            what = (
                part,
                table.spec.rule,
                table.optimizer,
                layout.buffers(room.weights, index),
                layout.versions(room.weights, index),
                room.journals.get(index),
                room.stamps.get(index),
            )
            if self._timeline is None:
                store = SliceStore(*what)
            else:
                address = Address(job.name, table.index, index)
                store = TimedStore(*what, timeline=self._timeline, address=address)
            lane = Lane(store, self.intake, self._pool)
            self.intake.lanes[id(job), table.index, index] = lane

    def attach(self, sender: data_pb2.Sender, fd: int, nbytes: int) -> Segment:
        """Maps a worker's gradients, and returns the segment of the weights for it to map.

        Raises:
            RemoteProtocolError: The segment is not of the table's size, or cannot be mapped.
        """
        with self.lock:
            job = self.heard(sender.job, sender.worker, sender.incarnation)
            table = job.table(sender.table)
            numel = table.layout.numel
            if nbytes != 4 * numel:
                raise RemoteProtocolError(f"segment of {nbytes} bytes, {4 * numel} wanted")
            try:
                grads = Segment.attach(fd, nbytes)
            except OSError as problem:
                raise RemoteProtocolError(f"cannot map the worker's segment: {problem}") from None
            key = (id(job), sender.table, sender.worker)
            self.intake.shared[key] = grads.floats(0, numel)
            grads.close()
            return self._weights[id(job), sender.table]

    # ----- after a SIGKILL

    def take_up(self) -> list[str]:
        """Goes on with the jobs in the vault, exactly where they were; returns their names."""
        with self.lock:
            jobs = self.recovery.take_up(self.now(), self._allocate)
            for job in jobs:
                self._owners[id(job)] = job
                for table in job.tables.values():
                    for index, clock in table.clocks.items():
                        store = self.intake.lanes[id(job), table.index, index].store
                        journal = store.journal
                        is_behind = journal is not None and journal.record.epoch < table.epoch
                        actions = resume(job, table, table.specs[index], store, clock)
                        self.intake.carry_out(job, actions)
                        if is_behind:
                            self._change_lane(job, table, index)
                self.intake.debts.take_up(job, self.recovery.owed(job))
        return [job.name for job in jobs]

    # ----- checkpoints

    def begin_restored(self, name: str, num_workers: int, min_workers: int) -> Job:
        """Makes a job without workers, whose tables come from a checkpoint."""
        job = self.shard.restore(name, num_workers, [], min_workers)
        self.forget_ended()
        self._owners[id(job)] = job
        self.recovery.note(job)
        return job

    def note_owed(self, job: Job) -> None:
        """Writes down what the workers of a restored job have still to claim."""
        self.recovery.note_owed(job, self.intake.debts.kept_of(id(job)))

    def forget_ended(self) -> None:
        """Frees the numbers of jobs that have been replaced."""
        with self.lock:
            for key, job in list(self._owners.items()):
                if self.shard.jobs.get(job.name) is not job:
                    del self._owners[key]
                    self.intake.forget_job(key)
                    self.recovery.forget(key)
                    for entry in [entry for entry in self._weights if entry[0] == key]:
                        del self._weights[entry]

    @property
    def is_busy(self) -> bool:
        """Whether any lane has work."""
        with self.lock:
            return any(lane.is_busy for lane in self.intake.lanes.values())

    def stores(self, job: Job) -> list[SliceStore]:
        """Returns the slices of a job."""
        with self.lock:
            return [lane.store for key, lane in self.intake.lanes.items() if key[0] == id(job)]

    # ----- membership

    def leave(
        self, name: str, rank: int, incarnation: int, reason: str, *, failed: bool = False
    ) -> None:
        """Lets a worker go, and goes on without it."""
        with self.lock:
            job = self.shard.jobs.get(name)
            actions = self.shard.leave(name, rank, incarnation, reason, failed=failed)
            if job is None:
                return
            log.info("worker left", job=name, worker=rank, reason=reason)
            self._part_with(job, rank)
            self.recovery.note(job)
            self.intake.carry_out(job, actions)
        self._ring(job)

    def suspect(self, sender: data_pb2.Sender) -> None:
        """Is told that a bulk connection of a worker has ended, perhaps with the worker."""
        with self.lock:
            job = self.shard.jobs.get(sender.job)
            if job is not None:
                job.membership.suspect(sender.worker, sender.incarnation, self.now())

    def tick(self) -> None:
        """Declares silent workers lost and tells who waits for what; called once a second."""
        with self.lock:
            self.tally.settle()
            lost, actions = self.shard.tick(self.now())
            for job, member in lost:
                log.warning(
                    "worker lost",
                    job=job.name,
                    worker=member.rank,
                    host=member.host,
                    pid=member.pid,
                    silent_s=round(self.now() - member.heard_s, 1),
                )
                self._part_with(job, member.rank)
            for job in {id(job): job for job, _ in lost}.values():
                self.recovery.note(job)
                own = [item for item in actions if item[0].job == job.name]
                self.intake.carry_out(job, own)
                self._ring(job)
            self.forget_ended()
            self.recovery.settle(self.intake.debts.kept_of)
            self.waits.look(self.now())
            self.intake.put_off()

    def _part_with(self, job: Job, rank: int) -> None:
        """Unmaps what a worker has shared."""
        for key in [k for k in self.intake.shared if k[0] == id(job) and k[2] == rank]:
            del self.intake.shared[key]

    async def barrier(
        self, job: Job, name: str, number: int, rank: int, wait_s: float, value: float = 0.0
    ) -> tuple[bool, str, float]:
        """Arrives at a barrier with `value`, and waits up to `wait_s` for the others.

        Returns whether it is open, what it waits for, and the largest value of all workers.
        """
        with self.lock:
            awaited = self.shard.barrier(job, name, number, rank, value)
            self.recovery.note(job)
        deadline_s = self.now() + min(wait_s, WAIT_S_MAX)
        if not awaited:
            self._ring(job)
        while awaited and (left_s := deadline_s - self.now()) > 0:
            bell: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            with self.lock:
                bells = self._barriers.setdefault((id(job), name), [])
            bells.append(bell)
            try:
                await asyncio.wait([bell], timeout=left_s)
            finally:
                bells.remove(bell)
                if not bells:
                    with self.lock:
                        del self._barriers[id(job), name]
            with self.lock:
                awaited = self.shard.barrier(job, name, number, rank, value)
                if not awaited:
                    self.recovery.note(job)
        with self.lock:
            return not awaited, awaited, job.barriers.agreed(name, number)

    def _ring(self, job: Job) -> None:
        """Wakes everybody who waits at a barrier of `job`."""
        for key in [key for key in self._barriers if key[0] == id(job)]:
            for bell in self._barriers[key]:
                if not bell.done():
                    bell.set_result(True)

    # ----- for people

    def status(self) -> list[JobView]:
        """Returns every job as it is at this moment."""
        with self.lock:
            now_s = self.now()
            return [view_of(job, self.waits, now_s) for job in self.shard.jobs.values()]

    def figures(self) -> Figures:
        """Returns the numbers of the metrics page, all of one moment."""
        with self.lock:
            self.tally.settle()
            return figures_of(self.shard, self.tally)

    def broke(self, problem: BaseException | None) -> None:
        """Passes on that a lane has failed."""
        if self._broke is not None and problem is not None:
            self._broke(problem)
