"""The connections of a worker to the other members, as the directory lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.types import FloatArray
from psworker.connection.session import Session
from psworker.connection.trace import note_exchange
from psworker.peers.link import OnAnswer, PeerLink


class PeerLinks:
    """One connection to each other member.

    Attributes:
        members: Ranks of the members, with this worker's, in order.
        incarnations: By rank, also of workers that are gone.
    """

    def __init__(self, session: Session) -> None:
        """Begins without a connection.

        Args:
            session: This worker's part in the job.
        """
        self.members: list[int] = []
        self.incarnations: dict[int, int] = {}
        self._session = session
        self._token = session.links[0].credentials.token
        self._links: dict[int, PeerLink] = {}  # By rank.
        self._open: set[Any] = set()  # Calls that are not acknowledged.

    @property
    def is_waiting(self) -> bool:
        """Whether a member has yet to acknowledge something."""
        return bool(self._open and self._links)

    def update(self, peers: Iterable[control_pb2.Peer]) -> None:
        """Connects to new members, and closes the connections to those that are gone."""
        now = {peer.rank: peer for peer in peers if peer.rank != self._session.rank}
        for rank, link in list(self._links.items()):
            if rank not in now or _endpoint(now[rank]) != _endpoint(link.peer):
                self._links.pop(rank).close()
        self.incarnations |= {rank: peer.incarnation for rank, peer in now.items()}
        for rank, peer in now.items():
            if rank not in self._links:
                self._links[rank] = PeerLink(peer, self._token)
        self.members = sorted([*now, self._session.rank])

    def send(
        self,
        to: int,
        envelope: data_pb2.Envelope,
        values: FloatArray,
        on_answer: OnAnswer | None = None,
    ) -> bool:
        """Sends an array; returns whether the worker is a member."""
        link = self._links.get(to)
        if link is None:
            return False
        call = link.send(envelope, values, on_answer)
        timeline = self._session.timeline
        if timeline is not None:
            note_exchange(timeline, call, to, envelope, values.nbytes)
        self._open.add(call)
        call.add_done_callback(self._open.discard)
        return True

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
    return peer.incarnation, peer.host, peer.port, peer.local, peer.certificate
