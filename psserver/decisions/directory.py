"""The directory of one table's peers: workers that exchange models with each other.

A state machine without a clock or a network. Each change of the members is a new *epoch*. Workers
that depend on each other, step by step, stop when they learn of it and *meet*: each reports its
position, the number of steps behind it, and when all have done so under the newest epoch, all know
all positions. So they agree from which step on the graph is that of the new members, and which of
them still needs the result of a step that others have ended. A worker may miss a meeting whose end
was followed at once by another change; so the last meetings are kept for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pscore.errors import LimitError

MEETINGS_MAX = 64  # That are kept; a worker that has missed more starts over.
CERTIFICATE_NBYTES_MAX = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One worker as its peers know it."""

    rank: int
    incarnation: int
    host: str
    port: int  # TCP.
    local: str = ""  # Name of its abstract Unix socket.
    certificate: bytes = b""  # PEM; empty: without TLS.
    secret: str = field(default="", repr=False)  # With which others say hello to it.
    position: int = -1  # Steps or rounds behind it; -1: it has just come.
    parts: bool = False  # It exchanges nothing after the next meeting.
    stays: bool = False  # It parts only where no other is behind it.

    @property
    def endpoint(self) -> tuple[int, str, int, str, bytes, str]:
        """The part that distinguishes one process from another."""
        return (self.incarnation, self.host, self.port, self.local, self.certificate, self.secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """The last exchanges of a worker with its peers, for status and metrics."""

    table: int
    step: int
    partner: int  # Rank; -1: none yet.
    age_s: float  # Since the partner's last model or answer.
    staleness: int  # Mixes between the last read and write of its model.
    distance: float  # To the last average, relative to the norm of the average.
    num_exchanges: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """The members of an epoch, each with its position when all had stopped."""

    epoch: int
    peers: tuple[Peer, ...]  # In the order of the ranks.


@dataclass(slots=True)
class Directory:
    """The peers of one table."""

    epoch: int = 0  # Counts the changes of the members.
    peers: dict[int, Peer] = field(default_factory=dict)  # The members, by rank.
    _parted: set[int] = field(default_factory=set)  # Incarnations that exchange no more.
    _stopped: set[int] = field(default_factory=set)  # Ranks, under the newest epoch.
    _meetings: deque[Meeting] = field(default_factory=lambda: deque(maxlen=MEETINGS_MAX))

    def keep(self, live: Mapping[int, int]) -> None:
        """Drops the members that are no longer live; `live` has incarnations by rank."""
        over = self._parted - set(live.values())  # Somebody may still wait for its last words.
        self._parted -= over
        gone = [rank for rank, peer in self.peers.items() if live.get(rank) != peer.incarnation]
        for rank in gone:
            del self.peers[rank]
        if gone or (over and self.peers):
            self._begin_epoch()

    def arrive(
        self,
        peer: Peer,
        epoch: int,
        expected: Iterable[int],
        since: int = 0,
        *,
        is_short: bool = False,
        again: bool = False,
    ) -> list[int]:
        """Records that a worker has stopped under an epoch, or that it is new.

        Args:
            epoch: The epoch that it knows; another than the newest is not counted.
            expected: Ranks that take part or have yet to join.
            since: Epoch of the last meeting that it knows.
            is_short: Whether the job waits for more workers than those: then no worker meets.
            again: Whether an exchange under that epoch has failed at the worker: a new one begins.

        Returns:
            The ranks that have yet to stop; empty once the newest epoch has met.

        Raises:
            LimitError: The certificate is too long.
        """
        if len(peer.certificate) > CERTIFICATE_NBYTES_MAX:
            raise LimitError(f"certificate of {len(peer.certificate)} bytes of a peer")
        # After a restart of the shard the directory is empty, and the workers know a later epoch.
        self.epoch = max(self.epoch, epoch)
        known = self.peers.get(peer.rank)
        if peer.parts and peer.incarnation in self._parted:
            return []  # It asks again for the meeting in which it has parted.
        if known is None or known.endpoint != peer.endpoint or known.parts != peer.parts:
            self.peers[peer.rank] = peer
            self._parted.discard(peer.incarnation)
            self._begin_epoch()
        elif peer.parts and self.has_met and since == self.newest:
            self._begin_epoch()  # It stayed in that meeting, and asks again.
        elif again and epoch == self.epoch and self.has_met:
            self._begin_epoch()
        elif epoch == self.epoch and peer.rank not in self._stopped:
            self.peers[peer.rank] = peer
            self._stopped.add(peer.rank)
        return self._missing(expected, is_short=is_short)

    def part(self, rank: int, incarnation: int) -> None:
        """Records that a worker exchanges nothing any more, though it is live."""
        self._parted.add(incarnation)
        if rank in self.peers and self.peers[rank].incarnation == incarnation:
            del self.peers[rank]
            self._begin_epoch()

    def has_parted(self, incarnation: int) -> bool:
        """Returns whether a worker has parted."""
        return incarnation in self._parted

    def _missing(self, expected: Iterable[int], *, is_short: bool) -> list[int]:
        """Returns the ranks that have yet to stop; records the meeting if there are none."""
        if self.newest and any(peer.position >= 0 for peer in self.peers.values()):
            # Training is under way: a worker that has joined the job meanwhile begins an epoch when
            # it comes here, and nobody waits for its start.
            expected = [rank for rank in expected if rank in self.peers]
        missing = [rank for rank in expected if rank not in self._stopped]
        if not (missing or is_short) and self.newest != self.epoch:
            last = min((p.position for p in self.members() if p.position >= 0), default=0)
            there = tuple(
                replace(peer, parts=peer.parts and not (peer.stays and peer.position > last))
                for peer in self.members()
            )
            self._meetings.append(Meeting(self.epoch, there))
            for peer in there:
                if peer.parts:
                    self._parted.add(peer.incarnation)
                    del self.peers[peer.rank]
        return [] if self.has_met else missing

    @property
    def has_met(self) -> bool:
        """Whether all members have stopped under the newest epoch, and know that."""
        return self.newest == self.epoch > 0

    @property
    def newest(self) -> int:
        """Epoch of the last meeting; 0: there was none."""
        return self._meetings[-1].epoch if self._meetings else 0

    def members(self) -> tuple[Peer, ...]:
        """Returns the members in the order of the ranks."""
        return tuple(self.peers[rank] for rank in sorted(self.peers))

    def since(self, epoch: int) -> tuple[Meeting, ...]:
        """Returns the meetings after that of `epoch`, the oldest first."""
        return tuple(meeting for meeting in self._meetings if meeting.epoch > epoch)

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._stopped.clear()
