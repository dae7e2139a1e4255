"""Renews a worker's leases at the shards, and sends the residuals that their replies request."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from pscore.errors import LOST, PacelineError, ThreadError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.threads import OwnedThread
from psworker.connection.accounts.left_out import LeftOut
from psworker.connection.accounts.pace import Pace
from psworker.connection.accounts.reports import Reports
from psworker.connection.membership.joining import LEAVE_TIMEOUT_S, JobMember
from psworker.connection.shard_link import Link

log = logging.getLogger("paceline")


class ResidualSender(Protocol):
    """Sends the residuals of one table."""

    def send_after(self, step: int, slices: Sequence[int]) -> None:
        """Sends residuals as they are after `step`, unless a later step has been pushed."""


class Heartbeats:
    """One thread per shard: a shard that hangs costs no lease at another.

    Attributes:
        failure: The error with which a heartbeat was refused; None: none was.
        broken: The error of a thread that sends no more heartbeats; None: all do.
        left_out: By table; counts of steps left out, sent to the first shard.
        reports: The values that the script reports, sent to the first shard.
        residual_senders: By table; they send the residuals that a checkpoint needs.
        peer_reports: By table; they describe this worker's last exchanges with its peers.
        stage_reports: One, of a worker of a pipeline: it describes its part.
        awaits: Ranks of the workers whose models this one waits for, sent to the first shard.
        joins_again: Joins a shard that has come back empty, if the workers fill it; returns whether
            it has.
    """

    def __init__(self, member: JobMember, links: Sequence[Link], pace: Pace) -> None:
        """Starts no thread yet: the shards have to be joined first.

        Args:
            pace: The sums of this worker's steps and waits, sent to the first shard.
        """
        self.failure: PacelineError | None = None
        self.broken: ThreadError | None = None
        self.left_out: WeakValueDictionary[int, LeftOut] = WeakValueDictionary()
        self.reports = Reports()
        self.residual_senders: WeakValueDictionary[int, ResidualSender] = WeakValueDictionary()
        self.peer_reports: dict[int, Callable[[], pb.PeerReport]] = {}
        self.stage_reports: list[Callable[[], pb.StageReport]] = []
        self.awaits: tuple[int, ...] = ()
        self.joins_again: Callable[[Link], bool] = lambda link: False
        self._member = member
        self._pace = pace
        self._links = links
        self._end = threading.Event()
        self._is_due = [threading.Event() for _ in links]  # Set: the next one does not wait.
        self._residual_lock = threading.Lock()
        self._residual_thread: threading.Thread | None = None
        self._threads = [
            OwnedThread(partial(self._run, link, is_due), "heartbeat", self._fail)
            for link, is_due in zip(links, self._is_due, strict=True)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether `end` has been called."""
        return self._end.is_set()

    def hurry(self, *, all_shards: bool = False) -> None:
        """Sends the next heartbeat to the first shard, or to all, now: an answer may end a wait."""
        for is_due in self._is_due if all_shards else self._is_due[:1]:
            is_due.set()

    @contextlib.contextmanager
    def resting(self) -> Iterator[Callable[[], None]]:
        """Context manager around a wait for other workers that is no part of a step.

        Its value is to be called when the wait lasts: steps that need not wait for every worker
        then do not wait for this one, because those that are behind may be in them.
        """
        try:
            yield lambda: self._report(rests=True)
        finally:
            self._report(rests=False)

    def _report(self, *, rests: bool) -> None:
        """Reports to every shard now whether this worker pushes no step before others have come."""
        if self._member.rests != rests:
            self._member.rests = rests
            for is_due in self._is_due:
                is_due.set()

    def end(self) -> None:
        """Sends no more heartbeats; one may be under way."""
        self._end.set()
        for is_due in self._is_due:
            is_due.set()

    def join(self) -> None:
        """Waits a limited time for the threads, once `end` has been called."""
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(LEAVE_TIMEOUT_S)

    def _fail(self, error: ThreadError) -> None:
        self.broken = error

    def _run(self, link: Link, is_due: threading.Event) -> None:
        """Renews the lease at one shard until the session ends; other messages renew it too.

        This worker may be rejoining meanwhile, at some shards already and not yet at this one.
        """
        member = self._member
        while True:
            is_due.wait(member.interval_s)
            is_due.clear()
            if self.is_over:
                return
            joined_as = link.joined_as
            rank, incarnation = joined_as
            request = pb.HeartbeatRequest(
                job=member.job,
                worker=rank,
                incarnation=incarnation,
                waiting_for=member.waits,
                rests=member.rests,
                asks=member.asks,
                data_plane=link.data_plane,
                reached=[one.reached for one in self._links],
                process=member.process,
                num_processes=member.num_processes,
            )
            if link is self._links[0]:
                request.awaits.extend(self.awaits)
                request.peers.extend(report() for report in list(self.peer_reports.values()))
                for table, counted in dict(self.left_out).items():
                    steps, count, since = counted.report
                    request.left_out.add(table=table, steps=steps, count=count, since=since)
                request.reported.update(self.reports.values)
                for describe in list(self.stage_reports):
                    request.stage.CopyFrom(describe())
                request.pace.CopyFrom(self._pace.message())
            try:
                self._send_residuals(link.beat(request, timeout_s=member.interval_s))
                if link is self._links[0]:
                    self._pace.fastest_s = link.fastest_step_s
            except PacelineError as error:
                is_present = link.joined_as == joined_as and incarnation == member.incarnation
                if is_present and not (isinstance(error, LOST) and self.joins_again(link)):
                    self.failure = error

    def _send_residuals(self, requests: Sequence[pb.ResidualRequest]) -> None:
        """Sends the requested residuals from a separate thread, so heartbeats continue."""
        wanted = [(self.residual_senders.get(request.table), request) for request in requests]

        def send() -> None:
            for sender, request in wanted:
                if sender is not None:
                    sender.send_after(request.step, request.slices)

        with self._residual_lock:
            if wanted and (self._residual_thread is None or not self._residual_thread.is_alive()):
                self._residual_thread = OwnedThread(send, "residuals", _note_unsent)
                self._residual_thread.start()


def _note_unsent(error: ThreadError) -> None:
    """Logs that a checkpoint lacks residuals; the shard refuses it when its time is over."""
    log.error("the residuals that a checkpoint needs are not sent: %s", error)
