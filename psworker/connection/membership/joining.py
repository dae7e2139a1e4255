"""Joins the shards of a job, as this process joins first and as it returns later.

Several processes can be one worker: the leader of the group joins, and the others take its rank and
incarnation. Each opens connections of its own for its slices. So a shard knows one worker per
group: it counts one push per slice and step, from whichever connection it comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pscore.errors import (
    NotOverError,
    PacelineError,
    ProtocolVersionError,
    RankTakenError,
    ShardMapError,
    StateLostError,
)
from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.text import counted
from psworker.connection.shard_link import Link
from psworker.group.worker_group import WorkerGroup

log = logging.getLogger("paceline")
LEAVE_TIMEOUT_S = 3.0
RANK_RETRY_S = 0.2
FORMER_MAX = 32  # Former incarnations of this process that are sent.
GIVEN = "PACELINE_SERVERS (or servers=)"  # Where a worker has its addresses from.
SAY_AFTER_S = 5.0  # A wait is reported after this, and then each time it has doubled.
FIRST_TIMEOUT_S = 5.0  # Timeout of each first call: the address may not be a shard's.


@dataclass(slots=True)
class JobMember:
    """This process as a member of a job."""

    job: str
    num_workers: int  # Number of workers of the job; the maximum of an elastic one.
    min_workers: int  # Minimum of an elastic job; 0: it is not elastic.
    restart: int  # Number of restarts of this worker.
    run_id: str  # Identity of its launch; empty: not known.
    rank: int  # 0-based rank of this worker; -1: the first shard decides.
    incarnation: int = 0  # Random number of this membership; 0: none yet.
    # Incarnations of this process before this one, oldest first.
    former: list[int] = field(default_factory=list)
    after: int = 0  # The incarnation under which this process finished a run of the job; 0: none.
    process: int = 0  # Local rank of this process in its group.
    num_processes: int = 1  # Size of that.
    waits: str = ""  # A description of the shard that does not answer; the other shards report it.
    rests: bool = False  # Whether it waits for others, and pushes no step before they have come.
    asks: bool = False  # Whether it asks meanwhile where others wait for it.
    # Seconds without a message after which the shards declare this worker lost.
    lease_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_s / 5

    def heartbeat(self, *, wants_live: bool = False) -> pb.HeartbeatRequest:
        """Returns a message that renews the lease; its answer may name the live workers."""
        return pb.HeartbeatRequest(
            job=self.job,
            worker=self.rank,
            incarnation=self.incarnation,
            waiting_for=self.waits,
            rests=self.rests,
            wants_live=wants_live,
            process=self.process,
            num_processes=self.num_processes,
        )

    def renew(self) -> None:
        """Draws a new incarnation; it does not depend on `random`, which scripts seed."""
        if self.incarnation:
            self.former = [*self.former, self.incarnation][-FORMER_MAX:]
        self.incarnation = 1 + secrets.randbits(62)


@dataclass(slots=True)
class Known:
    """State of a job that the shards reported when this worker joined."""

    life: int = 0  # The life of the job, on the first shard.
    progress: dict[str, int] = field(default_factory=dict)  # Step of each table that the job had.
    rounds: dict[str, int] = field(default_factory=dict)  # The next round of each barrier.
    modes: dict[str, str] = field(default_factory=dict)  # Mode of each table that the job had.
    former_modes: dict[str, str] = field(default_factory=dict)  # The ones before, if they changed.
    mends: bool = False  # Whether the shards restore a job of which one of them has lost its part.
    continues: bool = False  # Whether the first shard had the job under way.
    anew: bool = False  # Whether the former job had ended there.
    # Whether other workers may have passed what this one's script calls before its first step.
    under_way: bool = False

    @property
    def tables(self) -> dict[str, str]:
        """Mode of each table that had made updates, by name."""
        return {name: self.modes.get(name, "") for name in self.progress}

    def add(self, reply: pb.JoinReply, *, is_first: bool) -> None:
        """Adds a shard's answer; the first shard counts the lives and the rounds."""
        self.progress |= {name: step for name, step in reply.progress.items()}
        if is_first:
            self.modes, self.former_modes = dict(reply.modes), dict(reply.former_modes)
            self.life, self.mends = reply.life, reply.mends
            self.continues, self.anew = bool(reply.progress), reply.anew
            self.under_way = reply.under_way
            if reply.news:
                log.warning("worker %d: %s", reply.rank, reply.news)
            self.rounds |= reply.rounds


class PlaceWait:
    """A worker's wait for a free place in a job; it begins with the first refusal."""

    def __init__(self, job: str, patience_s: float) -> None:
        """Starts no wait yet; one ends with an error after `patience_s` seconds."""
        self._job = job
        self._patience_s = patience_s
        self._started_s: float | None = None
        self._say_s = SAY_AFTER_S

    def wait(self, problem: RankTakenError) -> None:
        """Reports the wait in growing intervals.

        Raises:
            RankTakenError: The wait was too long; names the job and the time. A `NotOverError` if
                `problem` is one.
        """
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        waited_s = now_s - self._started_s
        if waited_s >= self._patience_s:
            more = ", or allow more workers with --elastic MIN:MAX"
            raise type(problem)(
                f"job {self._job!r} has had no free rank for {waited_s:.0f} s: {problem}; wait "
                f"longer with PACELINE_TIMEOUT_S{'' if isinstance(problem, NotOverError) else more}"
            ) from problem
        if waited_s >= self._say_s:
            self._say_s *= 2
            log.warning(
                "this worker has waited %.0f s for a free rank in job %r: %s",
                waited_s,
                self._job,
                problem,
            )


class Joining:
    """Joins a member to every shard, or to none; all processes of its group make each call."""

    def __init__(
        self,
        member: JobMember,
        links: Sequence[Link],
        group: WorkerGroup,
        patience_s: float,
        data_plane: str,
    ) -> None:
        """Sends nothing yet.

        Args:
            member: This worker; its rank and lease are set by a join.
            patience_s: Seconds to wait for a rank that another process still holds.
            data_plane: `auto`, `local`, `tcp` or `grpc` (psworker/transports).
        """
        self.known = Known()  # State of the job that the shards reported.
        self._member = member
        self._links = links
        self._group = group
        self._patience_s = patience_s
        self._data_plane = data_plane
        self._lacking: Link | None = None  # The shard that refused the last join without the job.

    def join(self) -> None:
        """Joins for the first time.

        Raises:
            ShardMapError: The links are not the shards of one cluster, in order.
            PacelineError: A shard refuses this worker, or does not answer.
            GroupError: A process of the group has ended.
        """
        self._adopt(self._group.led(self._join_first))

    def rejoin(self) -> None:
        """Joins as a new incarnation; in an elastic job another rank will do.

        Raises:
            PacelineError: Another process holds the rank, or a shard does not answer.
            GroupError: A process of the group has ended.
        """
        self._group.watch.check()
        self._adopt(self._group.led(self._join_again))

    def leave(self, link: Link, reason: str, *, failed: bool) -> None:
        """Leaves the job at one shard, if it answers."""
        request = pb.LeaveRequest(
            job=self._member.job,
            worker=self._member.rank,
            incarnation=self._member.incarnation,
            reason=reason,
            failed=failed,
        )
        link.patience.limit_s = 0.0
        try:
            link.call(link.control.Leave, request, timeout_s=LEAVE_TIMEOUT_S)
        except PacelineError as error:
            log.info("could not leave the job at %s: %s", link.address, error)

    def join_emptied(self, link: Link) -> int:
        """Joins a shard that has come back empty, as the member that the other shards know.

        Returns:
            The number of the shard's process.

        Raises:
            PacelineError: The shard refuses this worker, or does not answer.
        """
        request = self._request(returns=True, life=self.known.life)
        request.refills = True
        return int(link.call(link.control.Join, request).instance)

    def connect(self, link: Link) -> None:
        """Opens the data plane of a shard again."""
        link.open(self._data_plane)

    def _join_first(self) -> dict[str, Any]:
        check_shards(self._links)
        if self._member.rank < 0 and self._member.min_workers:
            self._join_at_any_rank(returns=False)
        else:
            self._member.renew()
            self._join_all(returns=False)
        return self._identity()

    def _join_again(self) -> dict[str, Any]:
        member = self._member
        member.renew()
        try:
            self._join_all(returns=True)
        except RankTakenError as problem:
            if not member.min_workers:
                raise
            log.warning("worker %d takes another rank: %s", member.rank, problem)
            self._join_at_any_rank(returns=True)
        return self._identity()

    def _identity(self) -> dict[str, Any]:
        """Returns the identity of this worker at the shards."""
        return {
            "rank": self._member.rank,
            "incarnation": self._member.incarnation,
            "lease_s": self._member.lease_s,
            "progress": self.known.progress,
            "life": self.known.life,
            "modes": self.known.modes,
            "former_modes": self.known.former_modes,
            "under_way": self.known.under_way,
            "instances": [link.instance for link in self._links],
        }

    def _adopt(self, identity: dict[str, Any]) -> None:
        """Copies the leader's identity, and connects to the shards' data planes."""
        if self._group.is_leader:
            return
        member = self._member
        member.rank, member.incarnation = identity["rank"], identity["incarnation"]
        member.lease_s, self.known.progress = identity["lease_s"], identity["progress"]
        self.known.life, self.known.modes = identity["life"], identity["modes"]
        self.known.under_way = identity["under_way"]
        self.known.former_modes = identity["former_modes"]
        for link, instance in zip(self._links, identity["instances"], strict=True):
            link.joined(instance, member.rank, member.incarnation)
            link.open(self._data_plane)

    def _join_at_any_rank(self, *, returns: bool) -> None:
        """Joins at a rank that the first shard chooses.

        Shards do not notice a lost worker at the same moment: its rank may be free at one shard and
        not yet at another. And a job may be full until a worker leaves.

        Raises:
            RankTakenError: No rank became free in time.
            PacelineError: A shard refuses this worker for another reason, or does not answer.
        """
        place = PlaceWait(self._member.job, self._patience_s)
        while True:
            self._member.rank = -1
            self._member.renew()
            for link in self._links:
                link.patience.limit_s = self._patience_s  # `leave` has set it to 0.
            try:
                self._join_all(returns=returns)
            except RankTakenError as problem:
                place.wait(problem)
                time.sleep(RANK_RETRY_S * random.uniform(0.5, 1.0))
            else:
                return

    def _join_all(self, *, returns: bool) -> None:
        """Joins every shard, or none of them; one that lacks the job is asked before the others."""
        if self._lacking is not None:
            with contextlib.suppress(RankTakenError):  # Below it is waited for.
                self._join_one(self._lacking, returns=returns)
            self._lacking = None
        with contextlib.ExitStack() as undo:
            for link in self._links:
                try:
                    self._join_patiently(link, returns=returns)
                except StateLostError:
                    self._lacking = link
                    raise
                why = "it could not join every shard"
                undo.callback(self.leave, link, why, failed=True)
                link.open(self._data_plane)
            undo.pop_all()

    def _join_patiently(self, link: Link, *, returns: bool) -> None:
        """Joins one shard; waits while a dead worker may have the rank, and for shards that lag.

        The process that had this rank may have been killed a moment ago: the first shard tells it
        from one that lives, by its heartbeats. The other shards may lag behind the first one. A
        worker of an elastic job does not wait for one rank: it may take another. Each shard may
        still have workers of the run before this one, which end at one shard after the other.
        """
        is_first = link is self._links[0]
        waits = not is_first and not self._member.min_workers
        is_first_ask = is_first and not returns and self._member.rank >= 0
        asks_s = time.monotonic() if is_first_ask else None
        run = PlaceWait(self._member.job, self._patience_s)
        until_s = time.monotonic() + (self._patience_s if waits else 0.0)
        while True:
            try:
                self._join_one(link, returns=returns, asks_s=asks_s)
            except NotOverError as problem:
                run.wait(problem)
            except RankTakenError:
                if time.monotonic() >= until_s:
                    raise
            else:
                return
            time.sleep(RANK_RETRY_S)
            self._renew_leases_before(link)

    def _renew_leases_before(self, link: Link) -> None:
        """Renews the leases at the shards that were joined before this one.

        Another shard may need a whole lease to declare the former process lost. The threads that
        send heartbeats start when all shards have been joined.
        """
        request = self._member.heartbeat()
        for joined in self._links[: self._links.index(link)]:
            with contextlib.suppress(PacelineError):  # The next request raises it as well.
                joined.beat(request, timeout_s=self._member.interval_s)

    def _join_one(self, link: Link, *, returns: bool, asks_s: float | None = None) -> None:
        member, is_first = self._member, link is self._links[0]
        request = self._request(returns=returns, life=0 if is_first else self.known.life)
        request.continues = not is_first and self.known.continues
        request.anew = not is_first and self.known.anew
        if asks_s is not None:
            request.waited_ms = 1 + round(1000 * (time.monotonic() - asks_s))
        reply = link.call(link.control.Join, request)
        member.rank, member.lease_s = reply.rank, reply.lease_s
        link.joined(reply.instance, member.rank, member.incarnation)
        self.known.add(reply, is_first=is_first)

    def _request(self, *, returns: bool, life: int) -> pb.JoinRequest:
        """Returns the request to join one shard; `life` is the job's on the first one."""
        member = self._member
        return pb.JoinRequest(
            job=member.job,
            rank=member.rank,
            num_workers=member.num_workers,
            min_workers=member.min_workers,
            incarnation=member.incarnation,
            former=member.former,
            after=member.after,
            restart=member.restart,
            run_id=member.run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            protocol=wire.PROTOCOL,
            returns=returns,
            life=life,
        )


def check_shards(links: Sequence[Link]) -> None:
    """Checks that the links lead to the shards of one cluster, in their order.

    Raises:
        ProtocolVersionError: A shard speaks another version of the protocol.
        ShardMapError: The links are not the shards of one cluster, in order.
        ServerUnavailableError: A shard does not answer.
    """
    replies = [
        link.call(
            link.control.Describe,
            pb.DescribeRequest(),
            timeout_s=min(FIRST_TIMEOUT_S, max(1.0, link.patience.limit_s)),
        )
        for link in links
    ]
    for link, reply in zip(links, replies, strict=True):
        if reply.moved_to:
            link.describe()
    listed = ", ".join(
        f"{link.address} is shard {reply.shard} of {reply.num_shards}"
        for link, reply in zip(links, replies, strict=True)
    )
    for link, reply in zip(links, replies, strict=True):
        if reply.protocol != wire.PROTOCOL:
            raise ProtocolVersionError(
                f"{link.address} speaks protocol {reply.protocol} (paceline {reply.version}), "
                f"this worker speaks {wire.PROTOCOL}: install one version on both sides"
            )
    if len({reply.cluster for reply in replies}) > 1:
        raise ShardMapError(
            f"the servers were not started together: {listed}; name those of one cluster in "
            f"{GIVEN}, or start them with one --cluster"
        )
    if any(reply.num_shards != len(replies) for reply in replies):
        raise ShardMapError(
            f"{counted(len(replies), 'server')} for {counted(replies[0].num_shards, 'shard')}: "
            f"{listed}; name every shard once in {GIVEN}"
        )
    shards = [reply.shard for reply in replies]
    if len(set(shards)) < len(shards):
        raise ShardMapError(
            f"two of the servers are the same shard: {listed}; start each with a --shard-index of "
            f"its own, and name each once in {GIVEN}"
        )
    if shards != sorted(shards):
        raise ShardMapError(
            f"the servers are not in the order of their shards: {listed}; sort the addresses in "
            f"{GIVEN} by that number"
        )
