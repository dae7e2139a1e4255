"""One shard, driven: workers, tables and time. `Requests` handles the pushes and pulls.

Everything that the state machines decide is decided under one lock, whatever thread it comes from.
Time, threads and the pace of `tick` come from outside: a shard's process gives the monotonic clock
and an executor, a simulator in one thread gives virtual time and none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor

import structlog

from pscore.errors import LimitError, RemoteProtocolError
from pscore.memory.segment import Segment, WeightsMap
from pscore.observe.timeline import Timeline
from pscore.optimizers import warm_up
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray
from psserver.decisions.limits import Budget
from psserver.decisions.membership import Member
from psserver.decisions.shard import Actions, Address, Job, Shard
from psserver.decisions.table import Table
from psserver.durability.journal_dir import Vault
from psserver.durability.recovery import Recovery, Room, resume
from psserver.engine.barrier_waits import BarrierWaits
from psserver.engine.counters import Tally
from psserver.engine.host_memory import require_host_memory
from psserver.engine.requests import Requests
from psserver.engine.slice_queue import SliceQueue, SwitchRule
from psserver.engine.trace import TimedStore
from psserver.engine.views import Figures, JobView, figures_of, view_of
from psserver.engine.waits import Waits
from psserver.slices.store import SliceStore

log = structlog.get_logger()


class Engine:
    """One shard: decisions, numbers and journals, without a network."""

    def __init__(
        self,
        shard: Shard,
        *,
        now: Callable[[], float],
        executor: Executor | None = None,
        step_on_receive_thread: bool = False,
        vault: Vault | None = None,
        broke: Callable[[BaseException], None] | None = None,
        on_decided: Callable[[Job, Actions], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts without jobs.

        The owner calls `tick` about once a second, and `recover` before anything else if there is
        a vault.

        Args:
            shard: The decisions.
            now: The clock, in seconds, never falling: of leases, waits and measured times.
            executor: Does the numeric work of large slices. None: the thread whose call leads to
                the work does it, before the call returns.
            step_on_receive_thread: Whether a thread that has received a gradient also adds it and
                makes the step that follows (`Requests.on_push`).
            vault: Where everything is kept that outlives the process.
            broke: Called from any thread when a queue fails, which only a bug can cause.
            on_decided: Called under the lock with each job's actions, in the order in which they
                were decided and before they are carried out.
            timeline: Where spans are recorded; None: nowhere.
        """
        self.shard = shard
        self.now = now
        self.started_s = now()
        self.tally = Tally()
        self.budget = Budget(shard.limits.under_way_nbytes)
        self.lock = threading.RLock()
        self._broke = broke
        self._executor = executor
        self.recovery = Recovery(vault, shard)
        self._timeline = timeline
        self.requests = Requests(
            shard=shard,
            now=now,
            broke=self.broke,
            lock=self.lock,
            tally=self.tally,
            note_table=self.recovery.note_table,
            on_decided=on_decided,
            timeline=timeline,
            step_on_receive_thread=step_on_receive_thread,
        )
        self._owners: dict[int, Job] = {}  # Keeps the ids of jobs from being used again.
        self._weights: dict[tuple[int, int], Segment] = {}  # By (id of the job), table.
        self.barriers = BarrierWaits(shard, self.lock, self.recovery.note)
        self.waits = Waits(shard, self.barriers)

    # ----- workers and tables

    def join(
        self, name: str, num_workers: int, member: Member, min_workers: int = 0, life: int = 0
    ) -> Job:
        """Takes a worker into a job (`Shard.decide_join`)."""
        with self.lock:
            job, actions = self.shard.decide_join(name, num_workers, member, min_workers, life)
            self._part_with(job, member.rank)
            self.forget_ended()
            self._owners[id(job)] = job
            self.recovery.note(job)
            self.requests.execute(job, actions)
            news = member.news if len(job.life.told) == 1 else ""
        self.barriers.wake_all(job)
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
        if self._executor is not None:  # The weights are on their way meanwhile.
            self._executor.submit(warm_up, table.optimizer)
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
            self.requests.execute(job, actions)

    def change(self, job: Job, index: int, rank: int, rule: Rule) -> None:
        """Gives a table another mode, unless a worker before this one has done so."""
        with self.lock:
            try:
                actions = self.shard.change(job, index, rank, rule)
            finally:
                self.recovery.note_table(job, job.table(index))  # Who is aside, if it is refused.
            if actions is None:
                return
            self.requests.execute(job, actions)
            for part in job.table(index).clocks:
                self._change_lane(job, job.table(index), part)
            name = job.table(index).spec.name
        log.info("mode changed", job=job.name, table=name, mode=str(rule))

    def _change_lane(self, job: Job, table: Table, index: int) -> None:
        clocks = {rank: steps.clock for rank, steps in table.clocks[index].counted.items()}
        change = SwitchRule(rule=table.spec.rule, epoch=table.epoch, clocks=clocks)
        self.requests.queues[id(job), table.index, index].submit([change])

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
            queue = SliceQueue(store, self.requests, self._executor)
            self.requests.queues[id(job), table.index, index] = queue

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
            self.share(job, table, sender.worker, grads.floats(0, numel))
            grads.close()
            return self._weights[id(job), sender.table]

    def share(self, job: Job, table: Table, rank: int, grads: FloatArray) -> None:
        """Reads the shared pushes of a worker to a table from `grads`, `(numel,) float32`."""
        with self.lock:
            self.requests.shared[id(job), table.index, rank] = grads

    # ----- after a SIGKILL

    def recover(self, inspect: Callable[[SliceStore], None] | None = None) -> list[str]:
        """Goes on with the jobs in the vault, exactly where they were; returns their names.

        Args:
            inspect: Called with each slice as its journal left it, before it resumes.
        """
        with self.lock:
            jobs = self.recovery.take_up(self.now(), self._allocate)
            for job in jobs:
                self._owners[id(job)] = job
                for table in job.tables.values():
                    for index, clock in table.clocks.items():
                        store = self.requests.queues[id(job), table.index, index].store
                        if inspect is not None:
                            inspect(store)
                        journal = store.journal
                        is_behind = journal is not None and journal.record.epoch < table.epoch
                        actions = resume(job, table, table.specs[index], store, clock)
                        self.requests.execute(job, actions)
                        if is_behind:
                            self._change_lane(job, table, index)
                self.requests.debts.take_up(job, self.recovery.owed(job))
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
        self.recovery.note_owed(job, self.requests.debts.kept_of(id(job)))

    def forget_ended(self) -> None:
        """Frees the numbers of jobs that have been replaced."""
        with self.lock:
            for key, job in list(self._owners.items()):
                if self.shard.jobs.get(job.name) is not job:
                    del self._owners[key]
                    self.requests.forget_job(key)
                    self.recovery.forget(key)
                    for entry in [entry for entry in self._weights if entry[0] == key]:
                        del self._weights[entry]

    @property
    def is_busy(self) -> bool:
        """Whether any queue has work."""
        with self.lock:
            return any(queue.is_busy for queue in self.requests.queues.values())

    def stores(self, job: Job) -> list[SliceStore]:
        """Returns the slices of a job."""
        with self.lock:
            return [queue.store for key, queue in self.requests.queues.items() if key[0] == id(job)]

    # ----- membership

    def leave(
        self, name: str, rank: int, incarnation: int, reason: str, *, failed: bool = False
    ) -> None:
        """Lets a worker go, and goes on without it."""
        with self.lock:
            job = self.shard.jobs.get(name)
            actions = self.shard.decide_leave(name, rank, incarnation, reason, failed=failed)
            if job is None:
                return
            log.info("worker left", job=name, worker=rank, reason=reason)
            self._part_with(job, rank)
            self.recovery.note(job)
            self.requests.execute(job, actions)
        self.barriers.wake_all(job)

    def suspect(self, sender: data_pb2.Sender) -> None:
        """Is told that a bulk connection of a worker has ended, perhaps with the worker."""
        with self.lock:
            job = self.shard.jobs.get(sender.job)
            if job is not None:
                job.membership.suspect(sender.worker, sender.incarnation, self.now())

    def tick(self) -> list[tuple[Job, Member]]:
        """Declares silent workers lost and logs long waits; called about once a second.

        Returns the workers that are declared lost, each with its job.
        """
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
                self.requests.execute(job, own)
                self.barriers.wake_all(job)
            self.forget_ended()
            self.recovery.settle(self.requests.debts.kept_of)
            self.waits.look(self.now())
            self.requests.put_off()
            return lost

    def _part_with(self, job: Job, rank: int) -> None:
        """Unmaps what a worker has shared."""
        for key in [k for k in self.requests.shared if k[0] == id(job) and k[2] == rank]:
            del self.requests.shared[key]

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
        """Passes on that a queue has failed."""
        if self._broke is not None and problem is not None:
            self._broke(problem)
