"""Connections of gRPC: those of strangers are closed before they take the last places.

gRPC refuses connections beyond a number, and closes none of them for a newcomer, so peers that
connect and say nothing could keep all workers and probes out. This module looks for the accepted
sockets among the file descriptors of the process, and shuts down those whose peers have proved
nothing: the peer has shown no token or, where none is needed, has named no live worker. Those that
never called go first, and not one that reads a checkpoint. When the others alone take nearly
all places, the oldest of these go too, as a worker connects again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from pscore.net import crowd, sockets
from psserver.access.authorizer import CONTROL, DATA, HEALTH

OWN_DESCRIPTORS = Path("/proc/self/fd")
# Answers to these name a live worker.
WORKERS_PROOFS = {
    *(CONTROL + name for name in ("Join", "Define", "Heartbeat")),
    *(DATA + name for name in ("Push", "Pull")),
}

GRPC_SHARE = 4  # Connections of gRPC get one of so many file descriptors at most.

Peer = tuple[str, int]  # Address and port.


class Callers:
    """The peers on one port of gRPC."""

    def __init__(self, num_max: int, *, needs_token: bool) -> None:
        """Knows nobody yet.

        Args:
            num_max: Number of connections that gRPC accepts; a quarter is kept from strangers, and
                a sixteenth for newcomers.
            needs_token: Whether a call other than health is answered only with a token.
        """
        self._limit = num_max * 3 // 4
        self._known_max = num_max - num_max // 16
        self._needs_token = needs_token
        # By gRPC's name for them: those that have proved something, and others that have called.
        self._known: dict[str, Peer] = {}
        self._heard: dict[str, Peer] = {}
        # By inode, in order of arrival: our sockets; None: one of another port, or that listens.
        self._seen: dict[int, Peer | None] = {}

    def note_call(self, method: str, peer: str, *, is_answered: bool) -> None:
        """Notes that an admitted call begins, or that it was answered and not refused.

        Args:
            peer: Other end of the connection, as gRPC names it; it has no address of IP if the
                connection is over, or is a Unix socket.
        """
        if not peer.startswith(("ipv4:", "ipv6:")):
            return
        if self._needs_token:
            is_proof = not method.startswith(HEALTH)
        else:
            is_proof = is_answered and method in WORKERS_PROOFS
        kept = self._known if is_proof else self._heard
        if peer not in kept:
            kept[peer] = _named(peer)

    def make_room(self, port: int) -> int:
        """Closes connections to a port if there are too many, of strangers first; returns how many.

        Any thread may call it, one at a time. Only sockets that are new since the last call are
        looked at, so thousands of strangers that stay cost little.
        """
        noted = self._known, self._heard
        numbers = [int(name) for name in os.listdir(OWN_DESCRIPTORS)]
        if len(numbers) <= self._limit and max(map(len, noted)) <= 2 * self._limit:
            return 0
        own = _sockets(numbers)
        new = {inode: _caller(own[inode], port) for inode in own if inode not in self._seen}
        kept = {inode: peer for inode, peer in self._seen.items() if inode in own}
        self._seen = kept | new
        accepted = {peer: own[inode] for inode, peer in self._seen.items() if peer is not None}
        for peers in noted:
            for name, peer in tuple(peers.items()):
                if peer not in accepted:
                    del peers[name]  # One that has come meanwhile is noted at its next call.
        excess = len(accepted) - self._limit
        if excess <= 0:
            return 0
        known, heard = (set(tuple(peers.values())) for peers in noted)
        strangers = [(peer, peer[0]) for peer in accepted if peer not in known]
        closing = crowd.to_close([it for it in strangers if it[0] not in heard], excess)
        callers = [it for it in strangers if it[0] in heard]
        closing += crowd.to_close(callers, excess - len(closing))
        others = [(peer, peer[0]) for peer in accepted if peer in known]
        closing += crowd.to_close(others, max(0, len(others) - self._known_max))
        for peer in closing:
            with contextlib.suppress(OSError), _copy_of(accepted[peer]) as copy:
                if _peer(*copy.getpeername()[:2]) == peer:  # It may be another one by now.
                    copy.shutdown(socket.SHUT_RDWR)
        return len(closing)


def defer_silent(port: int) -> None:
    """Leaves new connections to a port of gRPC to the kernel until something comes on them."""
    for number in _sockets([int(name) for name in os.listdir(OWN_DESCRIPTORS)]).values():
        with contextlib.suppress(OSError), _copy_of(number) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and (
                copy.family != socket.AF_UNIX and copy.getsockname()[1] == port
            ):
                sockets.defer_silent(copy)


def _sockets(numbers: Sequence[int]) -> dict[int, int]:
    """Returns the sockets among our descriptors, by inode, which no other socket has later."""
    found: dict[int, int] = {}
    for number in sorted(numbers):
        with contextlib.suppress(OSError):  # Closed meanwhile.
            about = os.fstat(number)
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = number
    return found


def _caller(number: int, port: int) -> Peer | None:
    """Returns the peer of a socket that one of our ports has accepted; None if it is another."""
    with contextlib.suppress(OSError), _copy_of(number) as copy:
        if copy.family != socket.AF_UNIX and copy.getsockname()[1] == port:
            return _peer(*copy.getpeername()[:2])
    return None


def _copy_of(number: int) -> socket.socket:
    """Returns a copy of one of our sockets; the original may be closed meanwhile.

    Raises:
        OSError: It is closed, or another file has its number.
    """
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _peer(host: str, port: int) -> Peer:
    """Returns a peer; the address of IPv4 in one of IPv6 is that of IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), port


def _named(peer: str) -> Peer:
    """Returns a peer by gRPC's name for it, such as `ipv6:%5B::1%5D:7070`."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _peer(host.strip("[]"), int(port))
