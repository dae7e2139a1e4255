"""One shard without its network: workers, tables and time; `Requests` has the pushes and pulls.

All decisions are made under one lock, on any thread. Time, threads and the pace of `tick` come from
outside: a shard's process gives the monotonic clock and an executor, a simulator in one thread
gives virtual time and none.

Not ideal: all jobs of a shard share the one lock, so a job with many small slices delays the
decisions of the others. Locks by job would need an order between jobs, tables and membership.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor

import structlog

from pscore.errors import LimitError
from pscore.memory.segment import Segment, WeightsMap
from pscore.net.budget import Budget
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray
from psserver.decisions.membership import Member
from psserver.decisions.shard import Actions, Address, Job, Shard, close_windows
from psserver.decisions.table import Table
from psserver.durability.journal_dir import JournalDir
from psserver.durability.recovery import JobRecorder, Recovery, TableMemory
from psserver.engine.counters import Counters
from psserver.engine.host_memory import require_host_memory
from psserver.engine.job import RunningJob, RunningTable
from psserver.engine.placement import Placement
from psserver.engine.requests import Requests
from psserver.engine.slice_queue import SliceQueue
from psserver.engine.trace import Tracer
from psserver.engine.views import CopiesView, DefinedTable, Saves
from psserver.slices.base import NO_OBSERVER
from psserver.stores import kind_of
from psserver.stores.base import SliceMemory

log = structlog.get_logger()


class Engine:
    """One shard: decisions, numbers and journals.

    Attributes:
        on_table: Called under the lock with each new table, before its slices change.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        now: Callable[[], float],
        executor: Executor | None = None,
        placement: Placement | None = None,
        journals: JournalDir | None = None,
        broke: Callable[[BaseException], None] = lambda problem: None,
        on_decided: Callable[[Job, Actions], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts without jobs.

        The owner calls `tick` about once a second. If there are journals, it calls `recover`
        (resume.py) before anything else.

        Args:
            now: The clock, in seconds, never falling: of leases, waits and measured times.
            executor: Does the numeric work of large slices. None: the thread whose call leads to
                the work does it, before the call returns.
            placement: Decides which thread does which work; None: the default thresholds.
            journals: The folder of all data that outlives the process.
            broke: Called from any thread when a slice's queue fails, which only a bug can cause.
            on_decided: Called under the lock with each job's actions, in the order in which they
                were decided and before they are executed.
        """
        self.shard = shard
        self.now = now
        self.started_s = now()
        self.num_mended = 0  # Jobs that were set back because another shard had lost its part.
        self.copies: CopiesView | None = None  # Of checkpoints at a second place.
        self.counters = Counters()
        self.budget = Budget(shard.limits.under_way_nbytes)
        self.placement = Placement() if placement is None else placement
        # Order of a shard's locks: engine, slice queue, weights or capture, connection, budget. A
        # thread takes one only if it holds none that comes later. All other locks are leaves: no
        # lock is taken under them. tests/unit/psserver/engine/test_lock_order.py checks it.
        self.lock = threading.RLock()
        self.jobs: dict[str, RunningJob] = {}
        self.recovery = Recovery(journals, shard)
        self._executor = executor
        self.requests = Requests(
            shard=shard,
            jobs=self.jobs,
            now=now,
            broke=broke,
            lock=self.lock,
            counters=self.counters,
            on_decided=on_decided,
            timeline=timeline,
            placement=self.placement,
        )
        self.on_table: Callable[[RunningJob, RunningTable], None] = lambda job, table: None
        self._timeline = timeline

    # ----- jobs

    def join(
        self, name: str, num_workers: int, member: Member, min_workers: int = 0, life: int = 0
    ) -> RunningJob:
        """Adds a worker to a job (`Shard.decide_join`), which the first one creates."""
        with self.lock:
            if member.refills and name not in self.jobs:
                self.recovery.remove_lost(name)
            decided, actions = self.shard.decide_join(name, num_workers, member, min_workers, life)
            job = self._running(decided)
            job.part_with(member.rank)
            job.recorder.note()
            self.requests.execute(job, actions)
            job.barriers.wake_all()
            news = member.news if len(decided.life.told) == 1 else ""
        if news:
            log.warning(news)
        log.info("worker joined", job=name, worker=member.rank, host=member.host, pid=member.pid)
        return job

    def heard(self, name: str, rank: int, incarnation: int) -> RunningJob:
        """Renews a worker's lease and returns its job.

        Raises:
            RemoteProtocolError: The worker is not part of the job.
        """
        with self.lock:
            return self.jobs[self.shard.heard(name, rank, incarnation, self.now()).name]

    def leave(
        self, name: str, rank: int, incarnation: int, reason: str, *, failed: bool = False
    ) -> None:
        """Removes a worker from its job, whose open steps no longer wait for it."""
        with self.lock:
            job = self.jobs.get(name)
            actions = self.shard.decide_leave(name, rank, incarnation, reason, failed=failed)
            if job is None:
                return
            log.info("worker left", job=name, worker=rank, reason=reason)
            job.part_with(rank)
            job.recorder.note()
            self.requests.execute(job, actions)
            job.barriers.wake_all()

    def suspect(self, sender: data_pb2.Sender) -> None:
        """Shortens the lease of a worker whose connection has ended (`Membership.suspect`)."""
        with self.lock:
            job = self.shard.jobs.get(sender.job)
            if job is not None:
                job.membership.suspect(sender.worker, sender.incarnation, self.now())

    def forget(self, name: str, *, is_forced: bool) -> tuple[bool, int]:
        """Frees a job (`Lifetimes.forget`); returns whether it was here, and its memory."""
        with self.lock:
            found, nbytes = self.shard.lifetimes.forget(name, is_forced=is_forced)
            self.recovery.remove_lost(name)
            self._close_ended()
        log.info("job forgotten", job=name, nbytes=nbytes, was_there=found)
        return found, nbytes

    def _running(self, decided: Job) -> RunningJob:
        """Returns the job at run time, after those that it replaces are closed."""
        self._close_ended()
        if decided.name not in self.jobs:
            recorder = self.recovery.recorder(decided)
            self.jobs[decided.name] = RunningJob(
                decided, self.shard, recorder, self.lock, self.now()
            )
        return self.jobs[decided.name]

    def _close_ended(self) -> None:
        """Closes the jobs that the shard has replaced or freed, and logs those that could go on."""
        for expired, reason in self.shard.lifetimes.expired:
            running = self.jobs.get(expired.name)
            has_checkpoint = expired.life.is_restored or (running and running.saves.has_any)
            log.warning(
                "an interrupted job is freed; a checkpoint of it was taken"
                if has_checkpoint
                else "an interrupted job is freed, of which this shard has seen no checkpoint: its "
                "weights are lost",
                job=expired.name,
                step=expired.step,
                reason=reason,
            )
        self.shard.lifetimes.expired.clear()
        for name, job in list(self.jobs.items()):
            if self.shard.jobs.get(name) is not job.job:
                del self.jobs[name]
                job.close()

    # ----- tables

    def define(
        self,
        job: RunningJob,
        spec: TableSpec,
        *,
        adopts: bool = False,
        number: int | None = None,
    ) -> DefinedTable:
        """Returns the table that `spec` declares; a new one gets memory for this shard's slices.

        Args:
            adopts: Whether the job's table may have its weights in slices of another length.
            number: Index of the table on the first shard; None: this is the first one.

        Raises:
            JobMismatchError: The job has a table of this name that differs.
            LimitError: There is no memory for it.
            ConfigError: The declaration is not one that a shard can serve.
        """
        with self.lock:
            table, is_new = self.shard.define(job.job, spec, adopts=adopts, number=number)
            if is_new:
                self._allocate(job, table)
            view = DefinedTable(
                index=table.index,
                is_new=is_new,
                origin=table.spec.origin,
                has_weights=table.has_weights,
                content=table.spec.content,
            )
        if not is_new:
            return view
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
        return view

    def _allocate(self, job: RunningJob, table: Table) -> None:
        """Makes a new table, if need be in memory of jobs that have ended.

        Raises:
            LimitError: There is no memory for it; the job no longer has the table.
        """
        self._close_ended()  # Jobs that had to make room for it.
        try:
            what = f"table {table.spec.name!r} on shard {self.shard.index}"
            require_host_memory(what, table.memory_nbytes, self._free_one)
            memory = job.recorder.make_memory(table, self._free_one)
        except LimitError:
            del job.job.tables[table.spec.name]
            raise
        self._add_table(job, table, memory)

    def _add_table(self, job: RunningJob, table: Table, memory: TableMemory) -> None:
        """Makes the stores and queues of a table in `memory`, whose weights workers can map."""
        layout = WeightsMap(list(table.specs.values()))
        queues: dict[int, SliceQueue] = {}
        for index, part in table.specs.items():
            address, timeline = Address(job.name, table.index, index), self._timeline
            own = SliceMemory(
                buffers=layout.buffers(memory.weights, index),
                versions=layout.versions(memory.weights, index),
                stamps=memory.stamps.get(index),
                journal=memory.journals.get(index),
            )
            seen = NO_OBSERVER if timeline is None else Tracer(timeline, address, part.numel)
            store = kind_of(table.spec.content.name).make(table, part, own, seen)
            queues[index] = SliceQueue(store, self.requests, self._executor, self.placement)
        job.tables[table.index] = running = RunningTable(table, memory.weights, queues)
        self.on_table(job, running)

    def _free_one(self) -> bool:
        """Frees the memory of the job that ended first; returns whether any has ended."""
        is_freed = self.shard.lifetimes.free_one()
        self._close_ended()
        return is_freed

    def step_aside(
        self,
        job: RunningJob,
        index: int,
        rank: int,
        change: tuple[int, ...],
        rule: Rule | None = None,
    ) -> None:
        """Closes the steps of a table without a worker that waits for a change (`Shard`)."""
        with self.lock:
            actions = self.shard.step_aside(job.job, index, rank, change, rule)
            job.recorder.note_table(job.job.table(index))
            self.requests.execute(job, actions)

    def rest(self, job: RunningJob, rank: int, *, rests: bool) -> None:
        """Records whether a worker waits for others, and pushes no step before."""
        with self.lock:
            self.requests.execute(job, self.shard.rest(job.job, rank, self.now(), rests=rests))

    def change(self, job: RunningJob, index: int, rank: int, rule: Rule) -> None:
        """Gives a table another mode, unless another worker has already done so."""
        with self.lock:
            try:
                actions = self.shard.change(job.job, index, rank, rule)
            finally:  # A refusal too changes which workers are aside.
                job.recorder.note_table(job.job.table(index))
            if actions is None:
                return
            self.requests.execute(job, actions)
            running = job.tables[index]
            for part in running.queues:
                running.switch_rule(part)
            name = running.table.spec.name
        log.info("mode changed", job=job.name, table=name, mode=str(rule))

    # ----- memory that workers of this host share

    def attach(self, sender: data_pb2.Sender, fd: int, nbytes: int) -> Segment:
        """Maps a worker's gradients, and returns the segment of the weights for it to map.

        Raises:
            RemoteProtocolError: The segment is not of the table's size, or cannot be mapped.
        """
        with self.lock:
            job = self.heard(sender.job, sender.worker, sender.incarnation)
            running = job.table(sender.table)
            running.attach(sender.worker, fd, nbytes)
            return running.weights

    def share(self, job: RunningJob, index: int, rank: int, grads: FloatArray) -> None:
        """Reads a worker's shared pushes to a table from `grads`, `(numel,) float32`."""
        with self.lock:
            job.table(index).shared_grads[rank] = grads

    # ----- jobs from a journal or a checkpoint

    def begin_recovered(
        self, decided: Job, recorder: JobRecorder, tables: list[tuple[Table, TableMemory]]
    ) -> None:
        """Makes a job of its journal (resume.py)."""
        job = RunningJob(decided, self.shard, recorder, self.lock, self.now())
        for table, memory in tables:
            self._add_table(job, table, memory)
        self.jobs[job.name] = job

    def begin_restored(self, name: str, num_workers: int, min_workers: int) -> RunningJob:
        """Makes a job without workers, whose tables come from a checkpoint (restore.py)."""
        with self.lock:
            job = self._running(self.shard.restore(name, num_workers, [], min_workers))
            job.recorder.note()
            return job

    # ----- time

    def tick(self, away_s: float = 0.0) -> list[tuple[RunningJob, Member]]:
        """Declares silent workers lost, logs long waits, and has quiet slices hashed.

        The owner calls it about once a second.

        Args:
            away_s: Seconds since the last call in which this process was stopped, or did nothing
                else: messages of healthy workers wait in its sockets.

        Returns the workers that are declared lost, each with its job.
        """
        with self.lock:
            self.counters.settle()
            now_s = self.now()
            found, actions = self.shard.tick(now_s, away_s)
            lost = [(self.jobs[job.name], member) for job, member in found]
            for job, member in lost:
                log.warning(
                    "worker lost",
                    job=job.name,
                    worker=member.rank,
                    host=member.host,
                    pid=member.pid,
                    silent_s=round(now_s - member.heard_s, 1),
                )
                job.part_with(member.rank)
            for job in dict(lost):
                job.recorder.note()
                own = [item for item in actions if item[0].job == job.name]
                self.requests.execute(job, own)
                job.barriers.wake_all()
            self._close_ended()
            for job in self.jobs.values():
                if not job.residuals.has_kept:
                    job.recorder.drop_residuals()
                job.recorder.note_again()
                job.waits.look(now_s)
                for table in job.tables.values():
                    table.seal_quiet()
                    table.journal_again()
            self.requests.put_off()
            return lost

    def tick_windows(self) -> bool:
        """Closes the rounds whose windows are over; returns whether any table has windows."""
        with self.lock:
            jobs = [job for job in self.jobs.values() if job.job.has_windows]
            for job in jobs:
                if actions := close_windows(job.job, self.now()):
                    self.requests.execute(job, actions)
            return bool(jobs)

    # ----- views

    @property
    def is_busy(self) -> bool:
        """Whether any slice's queue has work."""
        with self.lock:
            return any(job.is_busy for job in self.jobs.values())

    def note_saved(self, name: str) -> None:
        """Records that this shard has given its part of a whole checkpoint of a job."""
        with self.lock:
            if name in self.jobs:
                self.jobs[name].saves = Saves(has_any=True, since_s=self.now())

    def note_copies(self, copies: CopiesView) -> None:
        """Records how copies of checkpoints at a second place fare."""
        with self.lock:
            self.copies = copies
