"""A worker's part in a job: it joins the shards, renews leases, declares tables, and leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from pscore.errors import (
    PacelineError,
    ProtocolVersionError,
    RankTakenError,
    ShardMapError,
    StateLostError,
)
from pscore.net import wire
from pscore.net.credentials import ANYONE, Credentials
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec, plugin_to_proto
from pscore.types import Origin
from psworker.connection.left_out import LeftOut
from psworker.connection.places import PlaceWait, refuse_forked
from psworker.connection.shard_link import Link

log = logging.getLogger("paceline")
BARRIER_WAIT_MS = 5_000
LEAVE_TIMEOUT_S = 3.0
RANK_RETRY_S = 0.2
FORMER_MAX = 32  # Former incarnations of this process that are sent.
# Barriers that each worker passes once at its start; a late worker passes them alone.
AT_START = ("begin", "load_state_dict")
FIRST_TIMEOUT_S = 5.0  # Of each first call: the address may not be a shard's.


class ResidualSender(Protocol):
    """Sends the residuals of one table."""

    def send_after(self, step: int, slices: Sequence[int]) -> None:
        """Sends residuals as they are after `step`, unless a later step has been pushed."""


@dataclass(slots=True)
class Known:
    """State of a job that the shards reported when this worker joined.

    Attributes:
        life: The life of the job, on the first shard.
        progress: Step of each table that the job had.
        rounds: The next round of each barrier.
    """

    life: int = 0
    progress: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    def take(self, reply: pb.JoinReply, *, is_first: bool) -> None:
        """Adds a shard's answer; the first shard counts the lives and the rounds."""
        self.progress |= {name: step for name, step in reply.progress.items()}
        if is_first:
            self.life = reply.life
            if reply.news:
                log.warning("worker %d: %s", reply.rank, reply.news)
            self.rounds |= {n: r for n, r in reply.rounds.items() if n not in AT_START}


def _without_weights(address: str, job: str, table: str, step: int | None) -> StateLostError:
    known = "" if step is None else f"; other shards have them at step {step}"
    return StateLostError(
        f"the shard at {address} is without the weights of {table!r} of job {job!r}: it was "
        f"started again, or the job was forgotten there{known}. Restore a checkpoint with "
        f"`psserver restore DIR --job {job}`, or run `psserver forget {job}` and begin anew; with "
        "--state-dir shards keep what they have"
    )


class Session:
    """This process as a worker of one job.

    Attributes:
        job: Name of the job.
        rank: 0-based rank of this worker.
        num_workers: Number of workers of the job; the maximum of an elastic one.
        min_workers: Minimum of an elastic job; 0: it is not elastic.
        links: One per shard, in the order of the shards.
        timeline: The spans of this process; None: none are recorded.
        left_out: By table; counts of steps left out, in modes where all workers make all steps.
        residual_senders: By table; they send the residuals that a checkpoint needs.
        waits: A description of the shard that does not answer; the other shards report it.
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
        patience_s: float = 30.0,
        data_plane: str = "auto",
        credentials: Credentials = ANYONE,
    ) -> None:
        """Joins every shard, and starts to renew the leases.

        Args:
            servers: Addresses in the order of the shards.
            job: Name of the job.
            rank: Rank of this worker; -1: the first shard decides.
            num_workers: Number of workers of the job; the maximum of an elastic one.
            min_workers: Minimum of an elastic job; 0: it is not elastic.
            restart: Number of restarts of this worker.
            patience_s: Seconds without an answer that are an error.
            data_plane: `auto`, `local`, `tcp` or `grpc` (psworker/transports).
            credentials: Token and certificates for the connections.

        Raises:
            ServerUnavailableError: An address does not answer.
            ShardMapError: The addresses are not the shards of one cluster, in order.
            RemoteProtocolError: A shard refuses this worker.
        """
        self.job = job
        self._pid = os.getpid()
        self.num_workers = num_workers
        self.min_workers = min_workers
        self.incarnation = 0  # None yet.
        self._former: list[int] = []  # Incarnations of this process before this one.
        self.links = [
            Link(address, patience_s=patience_s, credentials=credentials) for address in servers
        ]
        self.rank = rank
        self.timeline: Timeline | None = None
        self._restart = restart
        self._patience_s = patience_s
        self._data_plane = data_plane
        self.waits = ""
        self.left_out: WeakValueDictionary[int, LeftOut] = WeakValueDictionary()
        self.residual_senders: WeakValueDictionary[int, ResidualSender] = WeakValueDictionary()
        self._residual_thread: threading.Thread | None = None
        self._known = Known()
        self._stop = threading.Event()
        self._failure: PacelineError | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_links)
            self._check_shards()
            if rank < 0 and min_workers:
                self._join_at_any_rank(returns=False)
            else:
                self._renew()
                self._join_all(returns=False)
            undo.pop_all()
        self._residual_lock = threading.Lock()
        # One for each shard: one that hangs costs no lease at another.
        self._hearts = [
            threading.Thread(target=self._beat, args=(link,), name="heartbeat", daemon=True)
            for link in self.links
        ]
        for heart in self._hearts:
            heart.start()

    # ----- what a job needs

    def define(self, spec: TableSpec, *, again: bool = False) -> tuple[int, Origin]:
        """Declares a table at every shard; returns its index, and where its steps begin.

        Args:
            spec: The declaration.
            again: Whether the job has this table already.

        Raises:
            JobMismatchError: The job's table of this name is a different one; names the difference.
            StateLostError: A shard does not know a table that was declared before.
        """
        name, table = spec.name, spec.to_proto()
        request = pb.DefineRequest(
            job=self.job, worker=self.rank, incarnation=self.incarnation, table=table
        )
        tables, origins = set(), []
        for link in self.links:
            reply = link.call(link.control.Define, request)
            tables.add(reply.table)
            origins.append((reply.clock, reply.step))
            step = self._known.progress.get(name)
            if (again and reply.created) or (step is not None and not reply.has_weights):
                raise _without_weights(link.address, self.job, name, step)
        if len(tables) != 1:
            raise ShardMapError(f"table {name!r} has other numbers on other shards: {tables}")
        return int(tables.pop()), Origin(*max(origins))  # A shard may have no slice of the table.

    def step_aside(self, table: int, number: int, step: int) -> None:
        """Tells the shards not to wait for this worker's pushes until mode change `number` is done.

        Args:
            table: Index of the table.
            number: Number of the change, counted by this worker.
            step: The step of training at which this worker is.
        """
        self._change(pb.ChangeRequest(table=table, number=number, step=step))

    def change(self, table: int, number: int, rule: Rule) -> None:
        """Gives a table another mode; every worker calls it, after all have stepped aside.

        Raises:
            JobMismatchError: Another worker has named another mode.
            ConfigError: The mode does not fit the job.
        """
        self._change(pb.ChangeRequest(table=table, number=number, rule=plugin_to_proto(rule)))

    def _change(self, request: pb.ChangeRequest) -> None:
        request.job, request.worker = self.job, self.rank
        request.incarnation = self.incarnation
        for link in self.links:
            link.call(link.control.Change, request)

    def rejoin(self) -> None:
        """Joins the job again as a new incarnation, after having been declared lost.

        In an elastic job another worker may have taken the rank; then this worker gets another one.

        Raises:
            PacelineError: Another process holds the rank, or a shard does not answer.
        """
        self._renew()
        try:
            self._join_all(returns=True)
        except RankTakenError as problem:
            if not self.min_workers:
                raise
            log.warning("worker %d takes another rank: %s", self.rank, problem)
            self._join_at_any_rank(returns=True)
        self._failure = None

    def barrier(self, name: str = "barrier") -> None:
        """Waits until every worker that is still in the job has reached the same barrier.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        self.agree(name, 0.0)

    def agree(self, name: str, value: float) -> float:
        """Waits as `barrier` does, and returns the maximum of all workers' values.

        Args:
            name: Name of the barrier.
            value: This worker's value, 0 or more.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        number = self._known.rounds.get(name, 0)
        self._known.rounds[name] = number + 1
        link = self.links[0]
        request = pb.BarrierRequest(
            job=self.job,
            worker=self.rank,
            incarnation=self.incarnation,
            name=name,
            round=number,
            wait_ms=BARRIER_WAIT_MS,
            value=value,
        )
        started_s = time.monotonic()
        while not (reply := link.call(link.control.Barrier, request)).done:
            waited_s = time.monotonic() - started_s
            log.warning(
                "worker %d has waited %.0f s for %s", self.rank, waited_s, reply.waiting_for
            )
        return float(reply.value)

    def require_own(self) -> None:
        """Refuses a process that was forked from the worker (psworker/connection/places.py)."""
        refuse_forked(self._pid, self.rank, self.job)

    def check(self) -> None:
        """Raises the error with which a heartbeat was refused, if there is one.

        Raises:
            PacelineError: This worker is no longer part of the job.
        """
        if self._failure is not None:
            raise self._failure

    def live(self) -> list[int]:
        """Returns the ranks of the workers that take part now, in order.

        Raises:
            PacelineError: The first shard does not answer.
        """
        request = pb.HeartbeatRequest(
            job=self.job,
            worker=self.rank,
            incarnation=self.incarnation,
            waiting_for=self.waits,
            wants_live=True,
        )
        first = self.links[0]
        return list(first.call(first.control.Heartbeat, request).live)

    def leave(self, reason: str = "finished", *, failed: bool = False) -> None:
        """Leaves the job at every shard; no worker waits for this one any more.

        Args:
            reason: The reason, for people.
            failed: Whether the worker did not finish: an elastic job may wait for a replacement.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        for link in self.links:
            self._take_leave(link, reason, failed=failed)
        self._close_links()
        for heart in self._hearts:
            if threading.current_thread() is not heart:
                heart.join(LEAVE_TIMEOUT_S)
        if self.timeline is not None:
            self.timeline.write()

    # ----- inside

    def _take_leave(self, link: Link, reason: str, *, failed: bool) -> None:
        """Leaves the job at one shard, if it answers."""
        request = pb.LeaveRequest(
            job=self.job,
            worker=self.rank,
            incarnation=self.incarnation,
            reason=reason,
            failed=failed,
        )
        link.patience.limit_s = 0.0
        try:
            link.call(link.control.Leave, request, timeout_s=LEAVE_TIMEOUT_S)
        except PacelineError as error:
            log.info("could not leave the job at %s: %s", link.address, error)

    def _check_shards(self) -> None:
        """Checks that the addresses are the shards of one cluster, in their order."""
        replies = [
            link.call(
                link.control.Describe,
                pb.DescribeRequest(),
                timeout_s=min(FIRST_TIMEOUT_S, max(1.0, link.patience.limit_s)),
            )
            for link in self.links
        ]
        listed = ", ".join(
            f"{link.address} is shard {reply.shard} of {reply.num_shards}"
            for link, reply in zip(self.links, replies, strict=True)
        )
        for link, reply in zip(self.links, replies, strict=True):
            if reply.protocol != wire.PROTOCOL:
                raise ProtocolVersionError(
                    f"{link.address} speaks protocol {reply.protocol} (paceline {reply.version}), "
                    f"this worker speaks {wire.PROTOCOL}: install one version on both sides"
                )
        if len({reply.cluster for reply in replies}) > 1:
            raise ShardMapError(f"the servers were not started together: {listed}")
        if any(reply.num_shards != len(replies) for reply in replies):
            raise ShardMapError(
                f"{len(replies)} server addresses for {replies[0].num_shards} shards: {listed}"
            )
        if [reply.shard for reply in replies] != list(range(len(replies))):
            raise ShardMapError(f"the servers are not in the order of their shards: {listed}")

    def _renew(self) -> None:
        """Draws a new incarnation; it does not depend on `random`, which scripts seed."""
        if self.incarnation:
            self._former = [*self._former, self.incarnation][-FORMER_MAX:]
        self.incarnation = 1 + secrets.randbits(62)

    def _join_at_any_rank(self, *, returns: bool) -> None:
        """Joins at a rank that the first shard chooses.

        Shards do not notice a lost worker at the same moment: its rank may be free at one shard and
        not yet at another. And a job may be full until a worker leaves.

        Raises:
            RankTakenError: No rank became free in time.
            PacelineError: A shard refuses this worker for another reason, or does not answer.
        """
        place = PlaceWait(self.job, self._patience_s)
        while True:
            self.rank = -1
            self._renew()
            for link in self.links:
                link.patience.limit_s = self._patience_s  # `_take_leave` has set it to 0.
            try:
                self._join_all(returns=returns)
            except RankTakenError as problem:
                place.wait(problem)
                time.sleep(RANK_RETRY_S * random.uniform(0.5, 1.0))
            else:
                return

    def _join_all(self, *, returns: bool) -> None:
        """Joins every shard, or none of them."""
        with contextlib.ExitStack() as undo:
            for link in self.links:
                self._join_patiently(link, returns=returns)
                why = "it could not join every shard"
                undo.callback(self._take_leave, link, why, failed=True)
                link.open(self._data_plane)
            undo.pop_all()

    def _join_patiently(self, link: Link, *, returns: bool) -> None:
        """Joins one shard; waits for shards that lag behind the first one.

        They may not have noticed yet that the process that had this rank is gone. A worker of an
        elastic job does not wait for one rank: it may take another.
        """
        waits = link is not self.links[0] and not self.min_workers
        until_s = time.monotonic() + (self._patience_s if waits else 0.0)
        while True:
            try:
                self._join(link, returns=returns)
            except RankTakenError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(RANK_RETRY_S)
                self._renew_leases_before(link)
            else:
                return

    def _renew_leases_before(self, link: Link) -> None:
        """Renews the leases at the shards that were joined before this one.

        Another shard may need a whole lease to declare the former process lost. The threads that
        send heartbeats start when all shards have been joined.
        """
        request = pb.HeartbeatRequest(
            job=self.job, worker=self.rank, incarnation=self.incarnation, waiting_for=self.waits
        )
        for joined in self.links[: self.links.index(link)]:
            with contextlib.suppress(PacelineError):  # The next request raises it as well.
                joined.beat(request, timeout_s=self._interval_s)

    def _join(self, link: Link, *, returns: bool) -> None:
        reply = link.call(
            link.control.Join,
            pb.JoinRequest(
                job=self.job,
                rank=self.rank,
                num_workers=self.num_workers,
                min_workers=self.min_workers,
                incarnation=self.incarnation,
                former=self._former,
                restart=self._restart,
                host=socket.gethostname(),
                pid=os.getpid(),
                protocol=wire.PROTOCOL,
                returns=returns,
                life=0 if link is self.links[0] else self._known.life,
            ),
        )
        self.rank = reply.rank
        link.instance, link.joined_as = reply.instance, (self.rank, self.incarnation)
        self._interval_s = reply.lease_s / 5
        self._known.take(reply, is_first=link is self.links[0])

    def _beat(self, link: Link) -> None:
        """Renews the lease at one shard until the session ends; other messages renew it too.

        This worker may be rejoining meanwhile, at some shards already and not yet at this one.
        """
        while not self._stop.wait(self._interval_s):
            joined_as = link.joined_as
            rank, incarnation = joined_as
            request = pb.HeartbeatRequest(
                job=self.job, worker=rank, incarnation=incarnation, waiting_for=self.waits
            )
            if link is self.links[0]:
                for table, counted in dict(self.left_out).items():
                    steps, count, since = counted.report
                    request.left_out.add(table=table, steps=steps, count=count, since=since)
            try:
                self._send_residuals(link.beat(request, timeout_s=self._interval_s))
            except PacelineError as error:
                if link.joined_as == joined_as and incarnation == self.incarnation:
                    self._failure = error

    def _send_residuals(self, requests: Sequence[pb.ResidualRequest]) -> None:
        """Sends the requested residuals from a separate thread, so heartbeats continue."""
        wanted = [(self.residual_senders.get(request.table), request) for request in requests]

        def send() -> None:
            for sender, request in wanted:
                if sender is not None:
                    sender.send_after(request.step, request.slices)

        with self._residual_lock:
            if wanted and (self._residual_thread is None or not self._residual_thread.is_alive()):
                self._residual_thread = threading.Thread(target=send, name="residuals", daemon=True)
                self._residual_thread.start()

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
