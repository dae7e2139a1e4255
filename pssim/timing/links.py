"""Things that serve one piece of work after another: links of hosts, threads, codecs.

A `Turns` is one direction of a link: connections with bytes to send take turns, piece by piece.
`Servers` are threads that take the oldest work first. Both add up how long they were busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from pscore.timing.deployment import Deployment
from pssim.network import Loop

PIECE_NBYTES = 128 << 10  # The least part of a message that a link carries at once.
PIECES_MAX = 6  # Parts of one message; a larger message has larger parts.

Call = Callable[[], None]


class Turns:
    """One direction of a link: it carries one piece at a time, of each connection in turn."""

    def __init__(self, loop: Loop, rate: float) -> None:
        """Starts idle.

        Args:
            rate: Bytes per second.
        """
        self.busy_s = 0.0  # Seconds in which it carried something.
        self._loop = loop
        self._rate = rate
        self._waiting: dict[Hashable, deque[tuple[float, Call]]] = {}  # In the order of turns.
        self._is_busy = False

    def carry(self, connection: Hashable, nbytes: float, done: Call) -> None:
        """Carries one piece after those of the same connection; `done` is called at its end."""
        self._waiting.setdefault(connection, deque()).append((nbytes, done))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        connection = next(iter(self._waiting))
        pieces = self._waiting[connection]
        nbytes, done = pieces.popleft()
        if not pieces:
            del self._waiting[connection]
        seconds = nbytes / self._rate
        self.busy_s += seconds
        self._is_busy = True
        self._loop.after(seconds, partial(self._end, connection, done))

    def _end(self, connection: Hashable, done: Call) -> None:
        self._is_busy = False
        if connection in self._waiting:  # It goes behind all others.
            self._waiting[connection] = self._waiting.pop(connection)
        done()
        if self._waiting and not self._is_busy:
            self._next()


class Servers:
    """Threads that take the oldest work first."""

    def __init__(self, loop: Loop, number: int = 1, cores: Servers | None = None) -> None:
        """Starts idle.

        Args:
            number: Threads.
            cores: The cores on which they run, with others; None: each has one of its own.
        """
        self.busy_s = 0.0  # Seconds in which they worked, added up.
        self._loop = loop
        self._free = number
        self._cores = cores
        self._waiting: deque[tuple[float, Call]] = deque()

    def work(self, seconds: float, done: Call) -> None:
        """Works for some seconds when a thread is free; `done` is called at the end."""
        self._waiting.append((seconds, done))
        if self._free:
            self._next()

    def _next(self) -> None:
        seconds, done = self._waiting.popleft()
        self._free -= 1
        self.busy_s += seconds
        run = self._loop.after if self._cores is None else self._cores.work
        run(seconds, partial(self._end, done))

    def _end(self, done: Call) -> None:
        self._free += 1
        done()
        while self._free and self._waiting:
            self._next()


class HostLinks:
    """The links between hosts: each has one, full duplex; memory carries what stays on a host."""

    def __init__(self, loop: Loop, deployment: Deployment) -> None:
        self._loop = loop
        self._one_way_s = deployment.round_trip_s / 2
        self._memory = deployment.rates.memory
        rates = {host: deployment.payload_rate(host) for host in deployment.hosts}
        self.out = {host: Turns(loop, rate) for host, rate in rates.items()}
        self.into = {host: Turns(loop, rate) for host, rate in rates.items()}

    def send(
        self, source: int, target: int, connection: Hashable, nbytes: float, deliver: Call
    ) -> None:
        """Sends a message from one host to another; `deliver` is called when all of it is there.

        Args:
            connection: Messages of one connection arrive in the order of sending.
            nbytes: Bytes of the message; 0: it takes no bandwidth.
        """
        if source == target:
            self._loop.after(nbytes / self._memory, deliver)
            return
        arrive = partial(self._loop.after, self._one_way_s, deliver)
        if not nbytes:
            arrive()
            return
        number = max(1, min(PIECES_MAX, int(nbytes // PIECE_NBYTES)))
        for piece in range(number):
            done: Call = arrive if piece == number - 1 else _nothing
            carried = partial(self.into[target].carry, connection, nbytes / number, done)
            self.out[source].carry(connection, nbytes / number, carried)


def _nothing() -> None:
    """Does nothing."""
