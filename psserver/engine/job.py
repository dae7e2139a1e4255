"""A job at run time: all that the engine holds for it beside the decisions."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from pscore.errors import RemoteProtocolError
from pscore.memory.segment import Segment
from pscore.pb.ps.v1 import data_pb2
from pscore.timing.auto import auto_candidates
from pscore.timing.deployment import TimedSlice
from pscore.types import ByteArray, FloatArray
from psserver.decisions import passed_calls
from psserver.decisions.auto_mode import ModeReport
from psserver.decisions.directory import Peer, PeerReport
from psserver.decisions.membership import Member, compare_left_out, first_of
from psserver.decisions.orders import Acknowledge, Action, Answer, Load, Skip, Update
from psserver.decisions.shard import Address, Job, Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import NAMED_MAX, Table
from psserver.decisions.worker_reports import ReportedPace, StageReport, accepted, fastest_s
from psserver.durability.recovery import JobRecorder
from psserver.engine.barrier_waits import BarrierWaits
from psserver.engine.residuals import Arrays, JobResiduals
from psserver.engine.slice_queue import JournalAgain, Seal, SliceQueue, SwitchRule, Work
from psserver.engine.views import HeartbeatView, MeetView, ResidualRequest, Saves, Welcome
from psserver.engine.waits import Waits
from psserver.slices.base import Asked, Payload
from psserver.stores import kind_of

WHOLE = Asked()
log = structlog.get_logger()


class Reply(Protocol):
    """Sends the answer of one request; called once, from any thread."""

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
            release: Called when the arrays have been sent. None: they are only valid during the
                call.
        """


@dataclass(slots=True, eq=False)
class Request:
    """One push or pull that is under way; it is its own token."""

    job: RunningJob
    address: Address
    clock: SliceClock
    worker: int
    reply: Reply
    payload: Payload | None = None
    release: Callable[[], None] | None = None  # Frees the payload's memory.
    step: int = -1  # Step of a push of a gradient.
    is_shared: bool = False  # Payload in the worker's segment.
    asked: Asked = WHOLE  # The rest of a pull's request.
    deadline_s: float = 0.0  # Deadline of a pull: the answer then says what it waits for.
    taken_s: float = 0.0  # Time at which a queue began with the payload.


@dataclass(frozen=True, slots=True, kw_only=True)
class AtVersion:
    """Work to be done right behind one slice's update to a version."""

    version: int
    work: Work


# Sees the weights of a slice change, under the engine's lock; returns work on the weights that the
# action leads to or shows. It is done behind the answers to the pulls that the action has made
# readable, and before the weights change again. None: there is none.
Observe = Callable[[int, Load | Update | Skip | Answer], Work | None]


@dataclass(slots=True, eq=False)
class RunningTable:
    """A table at run time."""

    table: Table
    weights: Segment  # Weights of all slices, as workers of this host map them.
    queues: Mapping[int, SliceQueue]  # By slice.
    shared_grads: dict[int, FloatArray] = field(default_factory=dict)  # `(numel,)`, by rank.
    observers: list[Observe] = field(default_factory=list)
    _at_version: dict[int, list[AtVersion]] = field(default_factory=dict)  # By slice.
    _quiet: dict[int, tuple[int, bool]] = field(default_factory=dict)  # By slice: version, sealed.
    _is_journaled: bool = field(init=False)  # Whether any slice has a journal.

    def __post_init__(self) -> None:
        self._is_journaled = any(q.store.journal is not None for q in self.queues.values())

    def attach(self, rank: int, fd: int, nbytes: int) -> None:
        """Maps the gradients of a worker, `(numel,) float32` in a segment of `nbytes`.

        Raises:
            RemoteProtocolError: The segment is not of the table's size, or cannot be mapped.
        """
        numel = self.table.layout.numel
        if nbytes != 4 * numel:
            raise RemoteProtocolError(f"segment of {nbytes} bytes, {4 * numel} wanted")
        try:
            grads = Segment.attach(os.dup(fd), nbytes)
        except OSError as problem:
            raise RemoteProtocolError(f"cannot map the worker's segment: {problem}") from None
        self.shared_grads[rank] = grads.floats(0, numel)
        grads.close()

    def switch_rule(self, index: int) -> None:
        """Gives a slice's store the table's rule, behind all actions under the former one."""
        clocks = {rank: steps.clock for rank, steps in self.table.clocks[index].counted.items()}
        change = SwitchRule(rule=self.table.spec.rule, epoch=self.table.epoch, clocks=clocks)
        self.queues[index].submit([change])

    def seal_quiet(self) -> None:
        """Queues the hash of each slice without an update since the last call, once a version."""
        for index, clock in self.table.clocks.items() if self._is_journaled else ():
            version, is_sealed = self._quiet.get(index, (-1, True))
            is_quiet = version == clock.version
            if is_quiet and not is_sealed:
                self.queues[index].submit([Seal()])
            self._quiet[index] = clock.version, is_quiet

    def journal_again(self) -> None:
        """Queues another attempt to journal the slices whose journals have ended."""
        for queue in self.queues.values():
            journal = queue.store.journal
            if journal is not None and not journal.is_on:
                queue.submit([JournalAgain()])

    @property
    def num_exposed(self) -> int:
        """Number of slices that would be lost with this process; all without journals."""
        journals = [queue.store.journal for queue in self.queues.values()]
        return sum(journal is None or not journal.is_on for journal in journals)

    def count_held(self) -> dict[str, int]:
        """Returns counts of the things that its slices hold beside weights, by name."""
        found: Counter[str] = Counter()
        kind = kind_of(self.table.spec.content.name)
        for queue in self.queues.values():
            found.update(kind.count_held(queue.store))
        return dict(found)

    def do_at_version(self, index: int, entry: AtVersion) -> None:
        """Schedules work behind a later update of a slice."""
        self._at_version.setdefault(index, []).append(entry)

    def cancel(self, index: int, entry: AtVersion) -> None:
        """Cancels scheduled work, or forgets that it was done."""
        entries = self._at_version[index]
        entries.remove(entry)
        if not entries:
            del self._at_version[index]

    @property
    def has_scheduled(self) -> bool:
        """Whether work waits for an update of a slice."""
        return bool(self._at_version)

    def with_scheduled(self, index: int, batch: list[Action]) -> Sequence[Work]:
        """Returns a slice's actions with the scheduled work behind its updates."""
        entries = self._at_version.get(index, ())
        if not (entries or self.observers):
            return batch
        works: list[Work] = []
        behind: list[Work] = []  # The observers' work.
        for action in batch:
            if not isinstance(action, Answer | Acknowledge):
                works += behind
                behind = []
            works.append(action)
            if isinstance(action, Update | Skip):
                former = action.former if isinstance(action, Skip) else action.version - 1
                works += [e.work for e in entries if former < e.version <= action.version]
            if isinstance(action, Load | Update | Skip | Answer):
                shown = (observe(index, action) for observe in self.observers)
                behind += [work for work in shown if work is not None]
        return [*works, *behind]


class RunningJob:
    """One job, from its first worker until its numbers are freed."""

    def __init__(
        self, job: Job, shard: Shard, recorder: JobRecorder, lock: threading.RLock, now_s: float
    ) -> None:
        """Starts without tables.

        Args:
            job: The decisions about it; read and changed only under the lock.
        """
        self.job = job
        self.name = job.name
        self.recorder = recorder
        self.tables: dict[int, RunningTable] = {}
        self.residuals = JobResiduals(job)
        self.barriers = BarrierWaits(shard, job, lock, recorder.note)
        self.waits = Waits(shard, job, self.barriers)
        self.saves = Saves(has_any=False, since_s=now_s)
        self._lock = lock
        self._is_kept = shard.limits.is_kept

    def table(self, index: int) -> RunningTable:
        """Returns a table by its index; raises UnknownJobError if the job has no such table."""
        return self.tables[self.job.table(index).index]

    def queue(self, address: Address) -> SliceQueue:
        """Returns the queue of a slice."""
        return self.tables[address.table].queues[address.slice]

    @property
    def exposed(self) -> dict[int, int]:
        """By table: number of slices that would be lost with this process though it has journals.

        Empty if the shard keeps no journals.
        """
        if not self._is_kept:
            return {}
        return {index: running.num_exposed for index, running in self.tables.items()}

    @property
    def is_busy(self) -> bool:
        """Whether any queue has work; under the lock."""
        tables = self.tables.values()
        return any(queue.is_busy for table in tables for queue in table.queues.values())

    def part_with(self, rank: int) -> None:
        """Unmaps the gradients that a worker has shared."""
        for table in self.tables.values():
            table.shared_grads.pop(rank, None)

    def close(self) -> None:
        """Frees the numbers and deletes the journal."""
        self.tables.clear()
        self.recorder.close()

    # ----- answers to workers, each of one moment

    def welcome(self, member: Member) -> Welcome:
        """Returns the state of the job for a worker that has just joined."""
        with self._lock:
            held = self.job.membership.members[member.rank]
            return Welcome(
                rank=member.rank,
                num_workers=self.job.membership.num_workers,
                lease_s=self.job.membership.lease_s,
                rounds=self.job.barriers.next_rounds(),
                news=member.news,
                progress=self.job.progress,
                life=self.job.life.number,
                modes={name: str(table.spec.rule) for name, table in self.job.tables.items()},
                former_modes={
                    name: str(table.former)
                    for name, table in self.job.tables.items()
                    if table.former is not None
                },
                anew=self.job.life.is_anew,
                under_way=held.came_late,
            )

    def choose_mode(
        self, index: int, rank: int, step: int, report: ModeReport, risk: str, *, decides: bool
    ) -> tuple[int, str]:
        """Records a worker's report for the choice of the mode, or decides it.

        Args:
            decides: Whether all workers have reported at this step.

        Returns:
            1 and the place of the mode among `auto_candidates`, 0 if none was chosen yet; and the
            choice as a sentence. A table in another mode has got that from a script.

        Raises:
            ConfigError: The step or the risk is not one.
        """
        with self._lock:
            choice, table = self.job.choice, self.job.table(index)
            if not decides:
                host = self.job.membership.members[rank].host
                choice.report(step, rank, replace(report, host=host))
            else:
                members = self.job.membership
                parts = [TimedSlice(s.shard, s.numel, s.compress) for s in table.layout.slices]
                num_state = len(table.optimizer.state_names)
                before = choice.text
                choice.decide(step, members.live(), parts, num_state, risk)
                if choice.text != before:
                    log.info(choice.text, job=self.name)
                    self.recorder.note()
            modes = [one.mode for one in auto_candidates(self.job.membership.num_workers)]
            number = 1 + modes.index(choice.mode) if choice.mode in modes else 0
            return number, choice.text

    def heartbeat(
        self,
        rank: int,
        waiting_for: str,
        left_out: Mapping[int, tuple[int, int, int]],
        reported: Mapping[str, float],
        peers: Sequence[PeerReport] = (),
        pace: ReportedPace | None = None,
        data_plane: str = "",
        stage: StageReport | None = None,
        reached: Sequence[int] = (),
        awaits: Sequence[int] = (),
    ) -> HeartbeatView:
        """Records the report of a worker, and returns the state of the job for it.

        Args:
            waiting_for: The shard that does not answer it; empty if none.
            left_out: By table: steps, count and first step of its pushes that came too late.
            pace: Pace of its steps and waits; None: it reports it to another shard.
            data_plane: Name of that between it and this shard; empty: not chosen yet.
            stage: Its part in a pipeline; None: it has none, or reports it to another shard.
            reached: The number of each shard that answers it; else 0.
            awaits: Ranks of the workers whose models it waits for.
        """
        with self._lock:
            self.waits.note(rank, waiting_for)
            members, live = self.job.membership.members, tuple(self.job.membership.live())
            member = members[rank]
            member.reported = accepted(reported)
            if peers:
                member.peers = tuple(peers)
            if pace is not None:
                member.pace = pace
            if data_plane:
                member.data_plane = data_plane
            if stage is not None:
                member.stage = stage
            member.reached, member.awaits = tuple(reached), tuple(awaits)
            return HeartbeatView(
                waiting_for=self.waits.longest,
                residual_requests=tuple(
                    ResidualRequest(table=table, step=step, slices=tuple(slices))
                    for table, step, slices in self.residuals.requests(rank)
                ),
                live=live,
                first=first_of(self.job.membership),
                uneven=compare_left_out(self.job.membership, rank, left_out)
                or self._unlike(is_first=pace is not None),
                epochs={table: self.job.directory(table).epoch for table in self.job.directories},
                fastest_step_s=fastest_s(members[rank].pace for rank in live),
                others_ended=passed_calls.have_ended(self.job.membership),
            )

    def _unlike(self, *, is_first: bool) -> str:
        """Returns on the first shard which workers have unlike hyper-parameters; else nothing."""
        tables = self.job.tables.values() if is_first else ()
        return next(filter(None, (table.unlike(self.job.membership) for table in tables)), "")

    def others_of(self, rank: int) -> passed_calls.Others:
        """Returns what the others do for which a worker waits."""
        with self._lock:
            return passed_calls.others_of(self.job, rank, self.barriers.names)

    def meet(
        self, table: int, peer: Peer, epoch: int, since: int, *, again: bool = False
    ) -> MeetView:
        """Records a peer that has stopped under an epoch (`Directory.arrive`).

        Args:
            since: Epoch of the last meeting that it knows.
            again: Whether an exchange under that epoch has failed.

        Raises:
            UnknownJobError: The job has no such table.
        """
        with self._lock:
            members, directory = self.job.membership, self.job.directory(table)
            expected, is_short = self.job.expected_peers(table), members.is_short
            missing = directory.arrive(peer, epoch, expected, since, is_short=is_short, again=again)
            awaited = ", ".join(members.describe(rank) for rank in missing[:NAMED_MAX])
            if is_short or not (awaited or directory.has_met):
                awaited = members.shortage()
            return MeetView(
                epoch=directory.epoch,
                meetings=directory.since(since),
                peers=directory.members(),
                waiting_for=awaited,
                is_short=is_short,
            )

    def part(self, table: int, rank: int, incarnation: int) -> MeetView:
        """Records that a worker exchanges nothing with its peers any more; returns the others.

        Raises:
            UnknownJobError: The job has no such table.
        """
        with self._lock:
            directory = self.job.directory(table)
            directory.part(rank, incarnation)
            return MeetView(
                epoch=directory.epoch, meetings=(), peers=directory.members(), waiting_for=""
            )

    def take_residual(
        self, table: int, index: int, rank: int, step: int, arrays: Mapping[str, bytes]
    ) -> None:
        """Receives a worker's residual of a slice after `step`.

        Raises:
            PacelineError: There is no such slice, or it is not the state of its compressor.
        """
        with self._lock:
            self.residuals.take(self.job.table(table), index, rank, step, arrays)

    def residuals_for(self, table: int, rank: int) -> dict[int, Arrays]:
        """Returns the residuals that a checkpoint had of a rank, by slice.

        Raises:
            UnknownJobError: The job has no such table.
        """
        with self._lock:
            kept = self.residuals.kept(self.job.table(table).index, rank)
            return {index: dict(arrays) for index, arrays in kept.items()}
