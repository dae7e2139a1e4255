"""A worker's part in a job: it joins every shard, keeps its leases, declares tables, and leaves."""

from __future__ import annotations

import contextlib
import json
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

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
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
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.base import Rule
from pscore.types import Origin
from psworker.connection.left_out import LeftOut
from psworker.connection.shard_link import Link
from psworker.connection.waits import PlaceWait, refuse_forked

log = logging.getLogger("paceline")
BARRIER_WAIT_MS = 5_000
LEAVE_TIMEOUT_S = 3.0
RANK_RETRY_S = 0.2
FORMER_MAX = 32  # Incarnations of this process that a shard is told.
RAW = NoCompression()
# Called once by every worker at its start: who comes late goes through where others have been.
AT_START = ("begin", "load_state_dict")
FIRST_TIMEOUT_S = 5.0  # Of one attempt of the first call: what listens there may be no shard.


class Debtor(Protocol):
    """What owes something of one table."""

    def owe(self, step: int, slices: Sequence[int]) -> None:
        """Sends what it owes of some slices after `step`, if it has not gone on."""


@dataclass(slots=True)
class Known:
    """What shards have said of a job when this worker joined.

    Attributes:
        life: Of the job, on the first shard.
        progress: Step of each table that the job had.
        rounds: The next one of each barrier.
    """

    life: int = 0
    progress: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    def take(self, reply: pb.JoinReply, *, is_first: bool) -> None:
        """Takes a shard's answer; the first shard counts the lives and the rounds."""
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
        rank: 0-based, of this worker.
        num_workers: Workers of the job; the most of an elastic one.
        min_workers: The least of an elastic job; 0: it is not elastic.
        links: One per shard, in the order of the shards.
        timeline: Where spans are recorded; None: nowhere.
        left_out: By table; steps that its script has left out, where all workers make all steps.
        debtors: By table; what owes something that a checkpoint needs.
        waits: For which shard that does not answer, in words; the others pass it on to people.
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
            rank: Of this worker; -1 lets the first shard decide.
            num_workers: Workers of the job; the most of an elastic one.
            min_workers: The least of an elastic job; 0: it is not elastic.
            restart: How often this worker has been started again.
            patience_s: How long nobody may answer, in seconds.
            data_plane: `auto`, `local`, `tcp` or `grpc` (psworker/transports).
            credentials: What to connect with.

        Raises:
            ServerUnavailableError: Nobody answers at an address.
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
        self.debtors: WeakValueDictionary[int, Debtor] = WeakValueDictionary()
        self._teller: threading.Thread | None = None
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
        self._telling = threading.Lock()
        # One for each shard: one that hangs costs no lease at another.
        self._hearts = [
            threading.Thread(target=self._beat, args=(link,), name="heartbeat", daemon=True)
            for link in self.links
        ]
        for heart in self._hearts:
            heart.start()

    # ----- what a job needs

    def define(
        self, name: str, layout: Layout, rule: Rule, compressor: Compressor, optimizer: Optimizer,
        num_groups: int, pull_compressor: Compressor = RAW, *, again: bool = False,
    ) -> tuple[int, Origin]:  # fmt: skip
        """Declares a table at every shard; returns its index, and where its steps begin.

        Raises:
            JobMismatchError: The job's table of this name is another one; says in what.
            StateLostError: It has been declared before (`again`), and a shard does not know it.
        """
        table = pb.Table(
            name=name,
            tensors=[
                pb.Tensor(
                    name=t.name, shape=t.shape, dtype=t.dtype, group=t.group, compress=t.compress
                )
                for t in layout.tensors
            ],
            num_shards=layout.num_shards,
            rule=_plugin(rule),
            compressor=_plugin(compressor),
            pull_compressor=_plugin(pull_compressor),
            optimizer=optimizer.name,
            num_groups=num_groups,
            fingerprint=layout.fingerprint,
        )
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
        return int(tables.pop()), Origin(*max(origins))  # A shard may have no slice of it.

    def step_aside(self, table: int, number: int, step: int) -> None:
        """Tells the shards not to wait for this worker's pushes until change `number` of the mode.

        Args:
            table: The table.
            number: Of the change, counted by this worker.
            step: Of training, at which this worker is.
        """
        self._change(pb.ChangeRequest(table=table, number=number, step=step))

    def change(self, table: int, number: int, rule: Rule) -> None:
        """Gives a table another mode; every worker has stepped aside, and each calls it.

        Raises:
            JobMismatchError: Another worker has named another mode.
            ConfigError: The mode does not fit the job.
        """
        self._change(pb.ChangeRequest(table=table, number=number, rule=_plugin(rule)))

    def _change(self, request: pb.ChangeRequest) -> None:
        request.job, request.worker = self.job, self.rank
        request.incarnation = self.incarnation
        for link in self.links:
            link.call(link.control.Change, request)

    def rejoin(self) -> None:
        """Comes back to the job after having been declared lost, as a new incarnation.

        In an elastic job another worker may have the rank; then this one has another from now on.

        Raises:
            PacelineError: Another process holds the rank, or nobody answers.
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
        """Waits until every worker that is still there has come to the same barrier.

        Raises:
            PacelineError: This worker is no longer part of the job, or nobody answers.
        """
        self.agree(name, 0.0)

    def agree(self, name: str, value: float) -> float:
        """Waits as `barrier` does, and returns the largest value that a worker has brought there.

        Args:
            name: Of the barrier.
            value: This worker's, 0 or more.

        Raises:
            PacelineError: This worker is no longer part of the job, or nobody answers.
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
        """Refuses a process that was forked from the worker (psworker/connection/waits.py)."""
        refuse_forked(self._pid, self.rank, self.job)

    def check(self) -> None:
        """Raises what a heartbeat was refused with, if one was.

        Raises:
            PacelineError: This worker is no longer part of the job.
        """
        if self._failure is not None:
            raise self._failure

    def live(self) -> list[int]:
        """Returns the ranks of the workers that take part now, in order.

        Raises:
            PacelineError: Nobody answers.
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
        """Leaves the job at every shard; nobody waits for this worker any more.

        Args:
            reason: Why, for people.
            failed: It has not come to its end: an elastic job may wait for another.
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
        """Leaves the job at one shard, if that answers."""
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
            log.info("could not say good-bye to %s: %s", link.address, error)

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
        """Draws another incarnation; a script that seeds `random` does not draw the same."""
        if self.incarnation:
            self._former = [*self._former, self.incarnation][-FORMER_MAX:]
        self.incarnation = 1 + secrets.randbits(62)

    def _join_at_any_rank(self, *, returns: bool) -> None:
        """Joins at a rank that the first shard gives.

        Shards do not lose a worker at the same moment: on one its rank may be free, on another not
        yet. And a job may be full until somebody leaves.

        Raises:
            RankTakenError: No rank has become free in time.
            PacelineError: A shard refuses this worker for another reason, or does not answer.
        """
        place = PlaceWait(self.job, self._patience_s)
        while True:
            self.rank = -1
            self._renew()
            for link in self.links:
                link.patience.limit_s = self._patience_s  # Else as it was when it took its leave.
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
        """Joins one shard; where the first let it in, the others will when they find out why.

        They may not have noticed yet that the process is gone that had its rank. A worker of an
        elastic job does not wait for one rank: it may have another.
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
            else:
                return

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

        Meanwhile this worker may be on its way back, at some shards and not yet at this one.
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
                self._tell_debts(link.beat(request, timeout_s=self._interval_s))
            except PacelineError as error:
                if link.joined_as == joined_as and incarnation == self.incarnation:
                    self._failure = error

    def _tell_debts(self, asked: Sequence[pb.Owing]) -> None:
        """Has what a shard asks for sent, in a thread of its own: leases are renewed meanwhile."""
        debts = [(self.debtors.get(owing.table), owing) for owing in asked]

        def tell() -> None:
            for debtor, owing in debts:
                if debtor is not None:
                    debtor.owe(owing.step, owing.slices)

        with self._telling:
            if debts and (self._teller is None or not self._teller.is_alive()):
                self._teller = threading.Thread(target=tell, name="debts", daemon=True)
                self._teller.start()

    def _close_links(self) -> None:
        for link in self.links:
            link.close()


def _plugin(plugin: Rule | Compressor) -> pb.Plugin:
    return pb.Plugin(name=plugin.name, arguments=json.dumps(plugin.arguments()))
