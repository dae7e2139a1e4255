"""The connections of a worker to the other members, as the directory lists them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pscore.errors import ConfigError, PacelineError, RemoteProtocolError, TransportError
from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.types import FloatArray
from psworker.connection.accounts.trace import note_exchange
from psworker.connection.membership.session import Session
from psworker.peers.link import OnAnswer, PeerLink
from psworker.peers.patience import silence_limit_s

log = logging.getLogger("paceline")


class PeerLinks:
    """One connection to each other member."""

    def __init__(self, session: Session, own_host: str, *, keeps: bool = False) -> None:
        """Begins without a connection.

        Args:
            own_host: The address at which this worker listens.
            keeps: Whether a connection stays open when the directory does not list its worker.
        """
        self._keeps = keeps
        self.members: list[int] = []  # Ranks of the members, with this worker's, in order.
        self.incarnations: dict[int, int] = {}  # By rank, also of workers that are gone.
        self._session = session
        self._own_host = own_host
        self._limit_s = session.links[0].patience.limit_s
        self._links: dict[int, PeerLink] = {}  # By rank.
        self._cut: set[int] = set()  # Ranks whose link was replaced, for want of an answer.
        self._open: set[Any] = set()  # Calls that are not acknowledged.

    @property
    def is_waiting(self) -> bool:
        """Whether a member has yet to acknowledge something."""
        return bool(self._open and self._links)

    @property
    def num_reached(self) -> int:
        """Number of other members to which there is a connection."""
        return sum(link.is_connected for link in list(self._links.values()))

    def update(self, peers: Iterable[control_pb2.Peer]) -> None:
        """Connects to new members, and closes the connections to those that are gone."""
        now = {peer.rank: peer for peer in peers if peer.rank != self._session.rank}
        for rank, link in list(self._links.items()):
            is_gone = rank not in now and not self._keeps
            if is_gone or (rank in now and _endpoint(now[rank]) != _endpoint(link.peer)):
                self._links.pop(rank).close(waits=False)  # It may be connecting to a dead host.
                self._cut.discard(rank)
        self.incarnations |= {rank: peer.incarnation for rank, peer in now.items()}
        for rank, peer in now.items():
            if rank not in self._links:
                self._links[rank] = PeerLink(peer, self._own_host)
        self.members = sorted([*now, self._session.rank])

    def send(
        self,
        to: int,
        envelope: data_pb2.Envelope,
        values: FloatArray,
        on_answer: OnAnswer | None = None,
    ) -> bool:
        """Sends an array; returns whether the worker is a member, and was reached if it was cut."""
        link = self._links.get(to)
        if link is None or (on_answer is not None and to in self._cut and link.is_new):
            return False
        self._cut.discard(to)
        call = link.send(envelope, values, on_answer)
        timeline = self._session.timeline
        if timeline is not None:
            note_exchange(timeline, call, to, envelope, values.nbytes)
        self._open.add(call)
        call.add_done_callback(self._open.discard)
        return True

    def require_answers(self) -> None:
        """Gives up offers to members that are silent for a lease, and bounds other waits for them.

        The directory lists such a member: it reaches the first shard, and this worker does not
        reach it. An offer is given up as if the other was busy. A worker that depends on another
        one's answer cannot continue beside it; so one of the two ends, that of the higher rank,
        which has the shorter limit. The others then meet without it.

        Raises:
            ThreadError: A thread of a connection has failed.
            TransportError: A member has not acknowledged a message for too long.
            ConfigError: Its address leads nowhere from here.
            RemoteProtocolError: It has refused this worker for a lease, or an array.
        """
        session = self._session
        for rank, link in list(self._links.items()):
            silent_s, problem = link.silent_s, link.problem
            where = f"worker {rank} at {link.address}"
            if link.failure is not None:
                raise link.failure
            if link.refusal is not None:
                raise _about(link.refusal, f"{where} has refused an array of {session.rank}")
            if silent_s < session.lease_s:
                continue
            if isinstance(problem, ConfigError | RemoteProtocolError):
                raise _about(problem, f"worker {session.rank} cannot reach {where}")
            if link.has_offers_alone:
                log.warning("%s has not answered for %.0f s: exchange given up", where, silent_s)
                self._cut.add(rank)
                self._links[rank] = PeerLink(link.peer, self._own_host)
                link.close(waits=False)
            elif silent_s >= silence_limit_s(session.rank, rank, session.lease_s, self._limit_s):
                raise TransportError(
                    f"{where} has not answered worker {session.rank} for {silent_s:.0f} s "
                    f"({problem or 'though there is a connection'}): see to the network and the "
                    "firewalls between the two; the others continue without the one that ends"
                )

    def is_far(self, rank: int) -> bool:
        """Returns whether a member is outside this data centre; False where there is no link."""
        return rank in self._links and self._links[rank].is_far

    def host_of(self, rank: int) -> str:
        """Returns the address at which another member listens."""
        return self._links[rank].peer.host

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.is_over = True
        for link in self._links.values():
            link.close()
        self._links.clear()


def _endpoint(peer: control_pb2.Peer) -> tuple[Any, ...]:
    """Returns the part that changes when a worker listens anew, as a changed mode makes it do."""
    return peer.incarnation, peer.host, peer.port, peer.local, peer.certificate, peer.secret


def _about(problem: PacelineError, what: str) -> PacelineError:
    """Returns an error of the same kind that says what it is about."""
    return type(problem)(f"{what}: {problem}")
