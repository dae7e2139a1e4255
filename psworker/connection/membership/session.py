"""A worker's part in a job: it declares tables, waits at barriers, rejoins, and leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import WeakSet

from pscore.content import Content
from pscore.errors import LOST, ConfigError, ShardMapError, StateLostError
from pscore.net.credentials import ANYONE, Credentials
from pscore.observe import spans
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.table_spec import TableSpec, content_from_proto
from pscore.types import Origin
from psworker.connection.accounts.pace import Pace
from psworker.connection.membership.heartbeats import Heartbeats
from psworker.connection.membership.joining import JobMember, Joining, Known
from psworker.connection.membership.mending_wait import MendingWait
from psworker.connection.membership.passed_calls import PassedCalls
from psworker.connection.membership.refilling import Refilling
from psworker.connection.shard_link import Link
from psworker.group.worker_group import WorkerGroup
from psworker.transports.interrupts import takes_effect

log = logging.getLogger("paceline")
SHORT_WAIT_MS = 200  # Within a step of others; then steps need not wait for this worker.
BARRIER_WAIT_MS = 5_000  # After this long the shard answers with the workers that are missing.
_forks: list[int] = []  # Longer in a process that was forked from this one.
os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))
_finished: dict[str, int] = {}  # By job: incarnation under which this process has finished last.


class AgreedTable(NamedTuple):
    """A table as the shards have it."""

    number: int  # Its index at the shards.
    origin: Origin  # Where its steps begin.
    content: Content
    is_new: bool  # Whether a shard did not have it: no slice has weights then.
    has_weights: bool  # Whether all slices have.


class AnswersUnderWay(Protocol):
    """The waits of one table."""

    def meet(self) -> None:
        """Meets workers that come or end, if they wait for this one."""
        ...


class PushesUnderWay(Protocol):
    """The pushes of one table."""

    @property
    def answers(self) -> AnswersUnderWay:
        """The waits for answers to them."""
        ...

    def flush(self) -> None:
        """Waits until every push is acknowledged."""
        ...


class Session:
    """This process as a worker of one job, or as one of the processes that are a worker.

    Attributes:
        num_workers: Number of workers of the job; the maximum of an elastic one.
        min_workers: Minimum of an elastic job; 0: it is not elastic.
        links: One per shard, in the order of the shards.
        timeline: The spans of this process; None: none are recorded.
        heartbeats: Renew the leases, and carry what this worker reports.
        lease_s: Seconds without a message after which the shards declare this worker lost.
        residual_senders: By table; they send the residuals that a checkpoint needs.
        pushes: The pushes of each table that this membership has declared.
        refilling: Fills shards that have come back empty.
        peer_host: Address at which this worker listens for others; empty: that from which it
            reaches the first shard.
        peer_ports: Ports of which it takes the first that is free; 0: any.
        passed: Asks whether others have passed what this worker's script calls.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        job: str,
        rank: int,
        num_workers: int,
        min_workers: int = 0,
        restart: int = 0,
        run_id: str = "",
        patience_s: float = 30.0,
        data_plane: str = "auto",
        credentials: Credentials = ANYONE,
        group: WorkerGroup | None = None,
    ) -> None:
        """Joins every shard, and starts to renew the leases.

        Args:
            servers: Addresses in the order of the shards.
            rank: Rank of this worker; -1: the first shard decides.
            num_workers: Number of workers of the job; the maximum of an elastic one.
            min_workers: Minimum of an elastic job; 0: it is not elastic.
            run_id: The same for all workers of a launch, another for the next; empty: not known.
            patience_s: Seconds without an answer that are an error.
            data_plane: `auto`, `local`, `tcp` or `grpc` (psworker/transports).
            credentials: Token and certificates for the connections.
            group: The processes that are this worker; None: this process alone.

        Raises:
            ServerUnavailableError: An address does not answer.
            ShardMapError: The addresses are not the shards of one cluster, in order.
            RemoteProtocolError: A shard refuses this worker.
        """
        self.job = job
        self._pid, self._num_forks, self._has_left = os.getpid(), len(_forks), False
        self._has_tables = False  # Else it has taken no part in the job's run.
        self.num_workers = num_workers
        self.min_workers = min_workers
        self.links = [
            Link(address, patience_s=patience_s, credentials=credentials) for address in servers
        ]
        self.group = group or WorkerGroup()
        self.timeline: Timeline | None = None
        self.peer_host, self.peer_ports = "", range(1)
        self.pace = Pace()
        after = _finished.get(job, 0)
        self._member = JobMember(job, num_workers, min_workers, restart, run_id, rank, after=after)
        self._member.process, self._member.num_processes = self.group.rank, self.group.size
        self._joining = Joining(self._member, self.links, self.group, patience_s, data_plane)
        self._mending = MendingWait(job, patience_s)
        self.heartbeats = Heartbeats(self._member, self.links, self.pace)
        self.refilling = Refilling(
            self._member, self.links, self._joining, self.group, self.heartbeats
        )
        self.residual_senders = self.heartbeats.residual_senders
        self.passed = PassedCalls(self._member, self.links, self.heartbeats, self.refilling.specs)
        self.pushes: WeakSet[PushesUnderWay] = WeakSet()
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_links)
            self._joining.join()
            undo.pop_all()
        self.lease_s = self._member.lease_s
        self.passed.came_late = self.passed.at_start = self._joining.known.under_way
        self.heartbeats.start()
        self.group.watch.on_lost = lambda why: self._leave_shards(why, failed=True)

    @property
    def rank(self) -> int:
        """0-based rank of this worker; in an elastic job `rejoin` may change it."""
        return self._member.rank

    @property
    def incarnation(self) -> int:
        """Random number that distinguishes this membership from former ones of the same rank."""
        return self._member.incarnation

    @property
    def process_rank(self) -> int:
        """0-based rank of this process among those of all workers."""
        return self.rank * self.group.size + self.group.rank

    @property
    def num_processes(self) -> int:
        """Number of processes of all workers; the maximum of an elastic job."""
        return self.num_workers * self.group.size

    @property
    def waits(self) -> str:
        """A description of the shard that does not answer; the other shards report it."""
        return self._member.waits

    @waits.setter
    def waits(self, text: str) -> None:
        self._member.waits = text

    @property
    def known(self) -> Known:
        """The state of the job when this worker joined."""
        return self._joining.known

    def define(self, spec: TableSpec, *, again: bool = False, adopts: bool = False) -> AgreedTable:
        """Declares a table at every shard; returns it as the job has it.

        A worker that is lost before it has a table, because it was stopped for longer than its
        lease or a shard was restarted, rejoins here.

        Args:
            again: Whether this worker has seen an update of it: a shard without it has lost that.
            adopts: Whether the first shard's table may have its weights in slices of another
                length: its first worker, or a checkpoint, has chosen them.

        Raises:
            JobMismatchError: The job's table of this name is a different one; names the difference.
            StateLostError: A shard does not know a table that was declared before, and none
                restores it in time.
            ShardMapError: The shards number their tables differently.
            ReplacedError: This worker has to rejoin, and has a table already.
        """
        request = pb.DefineRequest(
            job=self.job, table=spec.to_proto(), adopts=adopts, held=spec.is_held
        )
        while True:
            request.worker, request.incarnation = self.rank, self.incarnation
            try:
                found = self._declare(request, again=again)
            except LOST as problem:
                if self._has_tables:
                    raise  # There is more to bring back.
                self.group.require_alone(problem)
                log.warning("worker %d rejoins, before its first step: %s", self.rank, problem)
                self.rejoin()
            except StateLostError as problem:
                self._await_mending(problem)  # When it is restored, all have to join again.
            else:
                self._has_tables, self._mending = True, self._mending.over()
                self.refilling.specs[found.number] = replace(spec, content=found.content)
                return found

    def _declare(self, request: pb.DefineRequest, *, again: bool) -> AgreedTable:
        """Declares a table by the present membership, as `define` does."""
        name, tables, origins, contents = request.table.name, set(), [], []
        is_new, has_weights = False, True
        step = self._joining.known.progress.get(name)
        for link in self.links:
            reply = link.call(link.control.Define, request)
            request.number = reply.table  # One for all shards: the first one's.
            if request.adopts:
                request.table.content.CopyFrom(reply.content)
            tables.add(reply.table)
            contents.append(content_from_proto(reply))
            origins.append((reply.clock, reply.step))
            is_new |= reply.created
            has_weights &= reply.has_weights
            is_known = step is not None or again  # Another one may have declared it before.
            if is_known and not reply.has_weights:  # A shard without slices has nothing to lose.
                known = "" if step is None else f"; other shards have them at step {step}"
                raise StateLostError(
                    f"the shard at {link.address} is without the weights of {name!r} of job "
                    f"{self.job!r}: it was started again, or the job was forgotten there{known}. "
                    f"Restore a checkpoint with `psserver restore DIR --job {self.job}`, or run "
                    f"`psserver forget {self.job}` to start over; with --state-dir shards keep "
                    "what they have"
                )
        if len(tables) != 1:
            raise ShardMapError(
                f"table {name!r} has different numbers on different shards: {tables}"
            )
        return AgreedTable(
            number=int(tables.pop()),
            origin=Origin(*max(origins)),  # A shard may have no slice of the table.
            content=contents[0],
            is_new=is_new,
            has_weights=has_weights,
        )

    def rejoin(self) -> None:
        """Joins the job again as a new incarnation, after having been declared lost.

        In an elastic job another worker may have taken the rank; then this worker gets another one.
        Where a shard has lost its part of the job, it waits until that is restored.

        Raises:
            PacelineError: Another process holds the rank, or a shard does not answer.
        """
        while True:
            try:
                self._joining.rejoin()
            except StateLostError as problem:
                self._await_mending(problem)
            else:
                self.heartbeats.failure = None
                self.passed.came_late |= self._joining.known.under_way
                self.pushes.clear()  # Those under way may never be answered.
                return

    def _await_mending(self, problem: StateLostError) -> None:
        """Waits a moment where the shards restore what one of them has lost.

        Raises:
            StateLostError: They do not, or not in time; or this is a group, which would have to
                agree on that.
        """
        if not (self._joining.known.mends and self.group.is_alone):
            raise problem
        self._mending.wait(problem)

    def barrier(self, name: str, *, holds: bool = False) -> None:
        """Waits until every worker that is still in the job has reached the same barrier.

        Args:
            holds: Whether no other worker joins from then on until these meet again, at whichever
                barrier: they change the job together.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        self.agree(name, 0.0, holds=holds)

    def meet_or_pass(
        self, name: str, value: float = 0.0, *, holds: bool = False
    ) -> tuple[list[str], float]:
        """Waits as `agree` does between two steps, unless workers wait for each other elsewhere.

        Others that came late, and begin behind the barrier, are not waited for, unless it `holds`.

        Args:
            value: This process's value, 0 or more.
            holds: As for `barrier`.

        Returns:
            No place and the largest value, once all have met; or the places at which others wait
            for this worker: it came late, and they have passed this barrier. Then it has not been
            there.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        largest = self.group.largest(value)

        def wait() -> tuple[list[str], float]:
            number = self._joining.known.rounds.get(name, 0)
            arrival = self._arrival(name, number, largest, holds=holds)
            with self.passed.asked() as passed:
                reply = self._await_round(arrival, meets=True, passed=passed)
                if reply.done:
                    self._joining.known.rounds[name] = number + 1
                    return [], reply.value
                self.refilling.arrivals.pop(name, None)
                return passed.places, 0.0

        if settled := self.passed.settled(name):
            return settled, 0.0
        places, value = self.group.led(wait)
        self.passed.note(name, places)
        if places and name not in places:  # Else they wait for this worker's tensor.
            text = "worker %d does not wait at %s: the others have passed it, and wait for %s"
            log.warning(text, self.rank, name, ", ".join(places))
        return list(places), float(value)

    def agree(self, name: str, value: float, *, holds: bool = False) -> float:
        """Waits as `barrier` does, and returns the maximum of all processes' values.

        Args:
            value: This process's value, 0 or more.
            holds: As for `barrier`.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        largest = self.group.largest(value)

        def wait() -> float:
            number = self._joining.known.rounds.get(name, 0)
            self._joining.known.rounds[name] = number + 1
            arrival = self._arrival(name, number, largest, holds=holds)
            return self._await_round(arrival).value

        return float(self.group.led(wait))

    def agree_at(
        self, name: str, number: int, value: float, *, meets: bool = False, holds: bool = False
    ) -> tuple[float, int]:
        """Waits as `agree` does, in a round that has a number of its own.

        A worker that comes when the others have passed that round does not wait.

        Args:
            number: Number of the round, at least that of the one before.
            value: This worker's value, 0 or more; in a group its leader's counts.
            meets: Whether this worker is between two steps, and meets workers that come meanwhile:
                they wait for it before they reach the barrier. If it came late, and has made no
                step, it waits no longer than `meet_or_pass`.
            holds: As for `barrier`.

        Returns:
            The largest value of the round, 0 if it is no longer known; and the number of the
            newest round at which a worker has arrived.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        arrival = self._arrival(name, number, value, holds=holds)

        def wait() -> tuple[float, int]:
            is_late = meets and self.passed.at_start
            with self.passed.asked() if is_late else contextlib.nullcontext() as passed:
                reply = self._await_round(arrival, meets=meets, passed=passed)
            return reply.value, reply.newest

        largest, newest = self.group.led(wait)
        return float(largest), int(newest)

    def pass_by(self, name: str, number: int, value: float) -> None:
        """Arrives at a round as `agree_at` does, and does not wait; in a group the leader arrives.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        if self.group.is_leader:
            first, request = self.links[0], self._arrival(name, number, value)
            self._note_arrival(request)
            first.call(first.control.Barrier, request)

    def _arrival(
        self, name: str, number: int, value: float, *, holds: bool = False
    ) -> pb.BarrierRequest:
        """Returns the request with which this worker arrives at a round of a barrier."""
        return pb.BarrierRequest(
            job=self.job,
            worker=self.rank,
            incarnation=self.incarnation,
            name=name,
            round=number,
            value=value,
            holds=holds,
        )

    def _note_arrival(self, request: pb.BarrierRequest) -> None:
        """Keeps an arrival for a first shard that comes back empty: others may wait for it."""
        kept = self.refilling.arrivals[request.name] = pb.BarrierRequest()
        kept.CopyFrom(request)

    def _await_round(
        self,
        request: pb.BarrierRequest,
        *,
        meets: bool = False,
        passed: PassedCalls | None = None,
    ) -> pb.BarrierReply:
        """Waits at the first shard until every worker has arrived, and returns its answer.

        With `passed` it also returns, not `done`, when others wait for this worker elsewhere.
        """
        first = self.links[0]
        meets |= request.holds  # Workers that change the job are between two steps.
        self._note_arrival(request)
        request.wait_ms = SHORT_WAIT_MS
        started_s, silent_ms = time.monotonic(), 0
        with self.heartbeats.resting() as rest:
            while True:
                try:
                    with takes_effect():
                        reply: pb.BarrierReply = first.call(first.control.Barrier, request)
                except LOST as problem:
                    self.refilling.mend(problem)
                    continue
                if reply.done or request.withdraws:
                    return reply
                for pushes in list(self.pushes) if meets else ():
                    pushes.answers.meet()
                silent_ms += request.wait_ms
                if silent_ms >= BARRIER_WAIT_MS:
                    waited_s, silent_ms = time.monotonic() - started_s, 0
                    text = "worker %d has waited %.0f s for %s"
                    log.warning(text, self.rank, waited_s, reply.waiting_for)
                rest()
                request.wait_ms = BARRIER_WAIT_MS
                if passed is not None:
                    request.wait_ms = passed.wait_ms
                    passed.ask(request)
                    self._part_with_late(request)

    def _part_with_late(self, arrival: pb.BarrierRequest) -> None:
        """Asks the other shards too to part with workers that have begun behind a change.

        Pushes of those are of the weights before the change.
        """
        if arrival.holds and arrival.excuses:
            request = pb.BarrierRequest(withdraws=True)
            request.MergeFrom(arrival)
            for link in self.links[1:]:
                link.call(link.control.Barrier, request)

    def meet(self, request: pb.MeetRequest) -> pb.MeetReply:
        """Reports this worker to the directory of a table's peers, on the first shard.

        Args:
            request: Its job, rank and incarnation are set here.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        request.job, request.peer.rank = self.job, self.rank
        request.peer.incarnation = self.incarnation
        reply: pb.MeetReply = self.links[0].call(self.links[0].control.Meet, request)
        return reply

    def require_own(self) -> None:
        """Raises ConfigError in a process forked from the worker: both have its connections."""
        if len(_forks) != self._num_forks:
            raise ConfigError(
                f"process {os.getpid()} was forked from worker {self.rank} of job {self.job!r} "
                f"(process {self._pid}), which alone takes part in it; start processes that train "
                'with `psworker run`, or with multiprocessing.get_context("spawn")'
            )

    def check(self) -> None:
        """Raises the error that ends the heartbeats, if there is one.

        Raises:
            PacelineError: This worker is no longer part of the job.
            ThreadError: It sends no more heartbeats.
        """
        self.group.watch.check()
        if (failure := self.heartbeats.broken or self.heartbeats.failure) is not None:
            raise failure
        for link in self.links:
            link.require_whole()

    def live(self) -> list[int]:
        """Returns the ranks of the workers that take part now, in order.

        Raises:
            PacelineError: The first shard does not answer.
        """
        return list(self.beat(wants_live=True).live)

    def beat(self, *, wants_live: bool = False) -> pb.HeartbeatReply:
        """Returns the first shard's answer to a heartbeat that is not part of the regular ones.

        Raises:
            PacelineError: The first shard does not answer.
        """
        first, request = self.links[0], self._member.heartbeat(wants_live=wants_live)
        reply: pb.HeartbeatReply = first.call(first.control.Heartbeat, request)
        return reply

    def leave(self, reason: str = "finished", *, failed: bool = False) -> None:
        """Leaves the job at every shard; no worker waits for this one any more.

        Args:
            failed: Whether the worker did not finish: an elastic job may wait for a replacement.
        """
        if self._has_left:
            return
        self._has_left = True
        self.group.watch.leave(reason, failed=failed)
        self._leave_shards(reason, failed=failed)
        if self._has_tables and not failed:
            _finished[self.job] = self.incarnation
        self._close_links()
        self.heartbeats.join()
        if self.timeline is not None:
            self.timeline.write()
        spans.flush("psworker")

    def _leave_shards(self, reason: str, *, failed: bool) -> None:
        """Leaves at every shard, once; a group's leader does, or all if it is lost."""
        if self.heartbeats.is_over:
            return
        self.heartbeats.end()
        if self.group.is_leader or failed:
            for link in self.links:
                self._joining.leave(link, reason, failed=failed)

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
