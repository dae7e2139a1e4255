"""One worker among its peers: listens, sends, meets the others, and drives its gossip."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from pscore.errors import RemoteProtocolError
from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.types import FloatArray
from psworker.connection.membership.session import Session
from psworker.gossip.base import Gathering, Gossip, Meet, Steps, Tag, TorchSum, Wait, Want
from psworker.peers.links import PeerLinks
from psworker.peers.long_wait import LongWait
from psworker.peers.mailbox import Mailbox
from psworker.peers.own_end import make_secret, open_listener
from psworker.peers.patience import is_cut_off
from psworker.peers.process_group import GroupSums
from psworker.peers.service import PeerService

log = logging.getLogger("paceline")
T = TypeVar("T")
LOOK_S = 0.25  # From one look at the epoch to the next while a message is waited for.
MEET_S, MEET_S_MAX = 0.01, 0.2  # From one question to the directory to the next.
FLUSH_S = 10.0  # Longest wait for acknowledgements when a worker parts.


class Peers:
    """This worker's connections to the workers with which it exchanges numbers.

    Attributes:
        gossip: The state machine that decides what is sent; set by `drive`.
        epoch: Epoch of the directory, as this worker knows it; 0: it has not met anyone.
        distance: To the last average of all models, relative to the norm of the average.
        has_parted: Whether this worker exchanges nothing any more.
        is_short: Whether the job had fewer workers than its least when this worker last asked.
    """

    def __init__(self, session: Session, table: int, *, keeps_links: bool = False) -> None:
        """Listens for peers; nothing is answered before a gossip starts.

        Args:
            keeps_links: Whether connections stay open to workers that the directory does not list:
                it may have been lost with its shard, and arrays under way have to arrive.

        Raises:
            ConfigError: This worker cannot listen.
        """
        self._session = session
        self.epoch = self._since = 0
        self._met_beats = 0  # Heartbeats answered before the last meeting.
        self.distance = 0.0
        self.gossip: Gossip | None = None
        self.has_parted = self.is_short = False
        self._mailbox = Mailbox()
        self._heard_s = time.monotonic()
        self._service = PeerService(session.job, make_secret(), self._mailbox)
        self._listener, self._own = open_listener(session, self._service)
        self._links = PeerLinks(session, self._own.host, keeps=keeps_links)
        self._service.is_listed = self._is_listed
        self._sums = GroupSums(self._own.host, self._links.host_of)
        self.table = table
        self._listener.start()

    @property
    def table(self) -> int:
        """Index of the table; another one where the job was declared again."""
        return self._service.table

    @table.setter
    def table(self, table: int) -> None:
        self._service.table = table

    def restart(self, table: int) -> None:
        """Begins again under the session's new incarnation: this worker has met nobody.

        Args:
            table: Index of the table, which the job may have got anew.
        """
        self.table = table
        self.epoch = self._since = 0

    def announce(self) -> None:
        """Reports to the directory that this worker takes part; it stops for no meeting yet."""
        peer = _stopped(self._own, Meet(-1))
        self._session.meet(control_pb2.MeetRequest(table=self.table, peer=peer))

    def drive(self, gossip: Gossip) -> None:
        """Starts a gossip: it meets the other workers.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        self.gossip, self.epoch, self._since, self.has_parted = gossip, 0, 0, False
        self.run(gossip.start())
        self._service.on_offer = gossip.on_offer
        self._session.heartbeats.peer_reports[self.table] = self.report

    def run(self, waits: Steps[T]) -> T:
        """Drives a generator of the gossip to its end, and returns its result.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        self._require_sound()
        self._require_enough()
        result = self._drive(waits)
        if self.gossip is not None and (refused := self.gossip.stats.refused):
            others = ", ".join(map(str, sorted(refused)))
            log.warning(
                "worker %d mixes without the models of workers %s, which hold NaN or Inf",
                self._session.rank,
                others,
            )
            refused.clear()
        return result

    def _drive(self, waits: Steps[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = self._await(waits.send(answer))
        except StopIteration as end:
            result: T = end.value
            return result

    def report(self) -> control_pb2.PeerReport:
        """Returns this worker's last exchanges, for status."""
        gossip = self.gossip
        assert gossip is not None
        return control_pb2.PeerReport(
            table=self.table,
            step=gossip.number,
            partner=gossip.stats.partner,
            age_s=time.monotonic() - self._heard_s,
            staleness=gossip.stats.staleness,
            distance=self.distance,
            num_exchanges=gossip.stats.num_exchanges,
        )

    def part(self) -> None:
        """Reports to the others that this worker exchanges nothing any more.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        assert self.gossip is not None
        self._flush(lambda: True)
        self.run(self.gossip.part())
        self._flush(self.say_parted)
        self._service.on_offer = None
        self.gossip.end()
        self.has_parted = True
        self._session.heartbeats.peer_reports.pop(self.table, None)

    def say_parted(self) -> bool:
        """Reports to the directory that this worker has parted, which a restarted shard forgets.

        Returns:
            Whether workers have met without this one.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        assert self.gossip is not None
        return bool(self._meet(Meet(self.gossip.number, waits=False, parts=True)))

    def _flush(self, moved: Callable[[], bool]) -> None:
        """Waits, not for long, until everything that was sent is acknowledged.

        Args:
            moved: Called when the members have changed; returns whether to wait no longer.
        """
        deadline_s = time.monotonic() + FLUSH_S
        with LongWait(self._session, lambda: "the acknowledgement of what it has sent") as wait:
            while self._links.is_waiting and time.monotonic() < deadline_s:
                if self.has_moved and moved():
                    return
                self._require_sound()
                wait.check()
                time.sleep(MEET_S)

    def close(self) -> None:
        """Closes all connections."""
        self._session.heartbeats.peer_reports.pop(self.table, None)
        self._links.close()
        self._sums.leave()
        self._listener.stop()

    # ----- Post

    @property
    def has_moved(self) -> bool:
        """Whether the members have changed, or the directory was lost, since this worker asked."""
        link = self._session.links[0]
        reported = link.epochs.get(self.table, 0)
        # A directory that is behind is of a restarted shard, unless its answer is of before ours.
        is_lost = reported < self.epoch and link.num_beats > self._met_beats + 1
        return is_lost or reported > self.epoch

    def members(self) -> list[int]:
        """Returns the ranks of the members that this worker knows, in order."""
        return self._links.members

    @property
    def incarnations(self) -> dict[int, int]:
        """Incarnation of each worker that this one has met, by rank."""
        return self._links.incarnations

    def open_store(self) -> int:
        """Opens this worker's store for torch.distributed, once; returns its port."""
        return self._sums.port

    def is_far(self, to: int) -> bool:
        """Returns whether a worker is outside this data centre, by the kernel's round trips."""
        return self._links.is_far(to)

    def give(self, to: int, tag: Tag, values: FloatArray) -> None:
        """Sends an array, if the worker is there."""
        header = data_pb2.Give(
            sender=self._sender(), epoch=tag.epoch, kind=tag.kind, round=tag.round, part=tag.part
        )
        self._links.send(to, data_pb2.Envelope(give=header), values)

    def offer(self, to: int, number: int, part: int, values: FloatArray) -> None:
        """Sends a snapshot; the gossip gets the answer, or None if there will be none."""
        gossip = self.gossip
        assert gossip is not None
        header = data_pb2.Offer(sender=self._sender(), number=number, slice=part)
        on_answer = partial(self._answered, gossip, number, part)
        if not self._links.send(to, data_pb2.Envelope(offer=header), values, on_answer):
            gossip.on_answer(number, part, None)

    def _require_sound(self) -> None:
        """Raises the error that makes a wait for other workers pointless (`require_answers`).

        Raises:
            PacelineError: A member does not answer, or a thread of this worker has failed.
        """
        if self._service.failure is not None:
            raise self._service.failure
        self._links.require_answers()

    def _require_enough(self) -> None:
        """Waits for the first shard where this worker is cut off, with too few others.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        session = self._session
        silent_s, least = session.links[0].silent_s, session.min_workers
        if is_cut_off(silent_s, session.lease_s, self._links.num_reached, least):
            session.live()

    def _answered(self, gossip: Gossip, number: int, part: int, values: FloatArray | None) -> None:
        self._heard_s = time.monotonic()
        try:
            gossip.on_answer(number, part, values)
        except RemoteProtocolError as problem:
            log.warning("worker %d drops an answer: %s", self._session.rank, problem)
            gossip.on_answer(number, part, None)
        self._mailbox.notify()

    def _is_listed(self, sender: data_pb2.Sender) -> bool:
        return self._links.incarnations.get(sender.worker) == sender.incarnation

    def _sender(self) -> data_pb2.Sender:
        session = self._session
        return data_pb2.Sender(
            job=session.job, table=self.table, worker=session.rank, incarnation=session.incarnation
        )

    def _await(self, wanted: Wait) -> Any:
        if isinstance(wanted, Want):
            return self._want(wanted)
        if isinstance(wanted, Meet):
            return self._meet(wanted)
        if isinstance(wanted, TorchSum):
            return self._add(wanted)

        def is_there() -> bool:
            if not (wanted.is_over() or self.has_moved):
                self._mailbox.wait(LOOK_S)
            return wanted.is_over() or self.has_moved

        self._watched(lambda: f"the answer of worker {wanted.partner} to an exchange", is_there)
        return None

    def _want(self, wanted: Want) -> FloatArray | None:
        """Returns an array; None if the members change before it comes."""
        found: list[FloatArray | None] = []

        def take() -> bool:
            sender = self._links.incarnations.get(wanted.source, 0)
            values = self._mailbox.take(sender, wanted.tag, LOOK_S if wanted.waits else 0.0)
            if values is None and wanted.waits and not self.has_moved:
                return False
            found.append(values)
            return True

        source = wanted.source
        self._watched(lambda: f"step {wanted.tag.round} of worker {source}", take, [source])
        self._heard_s = time.monotonic()
        return found[0]

    def _add(self, wanted: TorchSum) -> FloatArray | str | None:
        """Returns a sum by torch.distributed, or why it failed; None if the members change."""
        assert self.gossip is not None
        total = self._sums.add(wanted, self._session.rank, self.gossip.model.weights.device)
        others = [rank for rank in wanted.members if rank != self._session.rank]
        named = ", ".join(map(str, others))
        what = f"step {wanted.round} of workers {named}, by {wanted.backend}"

        def is_there() -> bool:
            futures.wait([total], LOOK_S)
            return total.done() or self.has_moved

        self._watched(lambda: what, is_there, others)
        found = total.result() if total.done() else None
        if isinstance(found, str):
            log.info("worker %d got no sum for %s: %s", self._session.rank, what, found)
        self._heard_s = time.monotonic()
        return found

    def _watched(
        self, name: Callable[[], str], is_there: Callable[[], bool], ranks: Sequence[int] = ()
    ) -> None:
        """Repeats a short wait until it succeeds; reports a long one by its name.

        Args:
            ranks: The workers whose models it waits for.

        Raises:
            PacelineError: This worker is no longer part of the job.
        """
        with LongWait(self._session, name, ranks) as wait:
            while not is_there():
                self._require_sound()
                wait.check()

    def _meet(self, wanted: Meet) -> list[Gathering]:
        """Asks the directory until all have stopped, or once."""
        gatherings: list[Gathering] = []
        stopped: set[int] = set()  # Epochs under which it has stopped here.
        delay_s, first, awaited = MEET_S, self.epoch, "other workers"

        def ask() -> bool:
            nonlocal awaited, delay_s
            request = control_pb2.MeetRequest(
                table=self.table,
                epoch=self.epoch,
                since=self._since,
                peer=_stopped(self._own, wanted),
                parts=wanted.parts and not wanted.waits,
                again=wanted.again and self.epoch == first,
            )
            reply = self._session.meet(request)
            self.epoch, awaited, self.is_short = reply.epoch, reply.waiting_for, reply.short
            stopped.add(request.epoch)
            self._met_beats = self._session.links[0].num_beats
            self._links.update(reply.peers)
            for meeting in reply.meetings:
                gatherings.append(_gathering(meeting))
                self._since = meeting.epoch
                if wanted.is_first and meeting.epoch in stopped:
                    self.epoch = meeting.epoch
                    return True
            if wanted.parts and any(self._session.rank in found.leaving for found in gatherings):
                return True  # If the others die now, no worker meets again.
            is_known = self._since == self.epoch
            is_known |= not (wanted.waits or request.epoch != self.epoch)
            absent = set(range(wanted.needs_all)) - set(self._links.members)
            if absent and not any(absent <= found.positions.keys() for found in gatherings):
                awaited = awaited or _gone(absent)
                is_known = False
            if is_known and not (wanted.needs_least and self.is_short):
                return True
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, MEET_S_MAX)
            return False

        self._watched(lambda: f"{awaited} to know who takes part", ask)
        self._mailbox.keep(self._links.incarnations.values(), self.epoch)
        return gatherings


def _gathering(meeting: control_pb2.Meeting) -> Gathering:
    """Returns a meeting of workers as the gossips read it."""
    positions = {one.rank: one.position for one in meeting.peers}
    leaving = frozenset(one.rank for one in meeting.peers if one.parts)
    return Gathering(meeting.epoch, positions, leaving)


def _gone(absent: Collection[int]) -> str:
    """Returns the words for workers that are needed and that the directory does not list."""
    ranks = " and ".join(str(rank) for rank in sorted(absent))
    return f"rank {ranks}, which has not come back (if it has ended, start it again),"


def _stopped(own: control_pb2.Peer, wanted: Meet) -> control_pb2.Peer:
    """Returns this worker as it stops for a meeting."""
    peer = control_pb2.Peer(position=wanted.position, parts=wanted.parts, stays=wanted.stays)
    peer.MergeFrom(own)
    return peer
