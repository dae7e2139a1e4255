"""Requests of one table that leave together: several small ones in one system call."""

from __future__ import annotations

from pscore.placement import WORKER
from psworker.transports import Transport


class Together:
    """A context in which requests leave together, on data planes where that is faster.

    They have left at its end, at a wait in it, and when their gradients are many bytes.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._holding: dict[Transport, None] = {}  # The data planes that keep requests.
        self._nbytes = 0  # Of the gradients that these are about.

    def __enter__(self) -> None:
        """Begins to keep requests."""
        self._depth += 1

    def __exit__(self, *problem: object) -> None:
        """Sends them, unless another such context is around this one."""
        self._depth -= 1
        if not self._depth:
            self.let_go()

    def note(self, transport: Transport, nbytes: int = 0) -> None:
        """Notes a request just before it leaves.

        Args:
            nbytes: Bytes of its gradient; 0: it is a pull, which may leave with its push.
        """
        if not self._depth:
            return
        if nbytes and self._nbytes >= WORKER.together_nbytes_max:
            self.let_go()
        self._nbytes += nbytes
        if transport not in self._holding:
            self._holding[transport] = None
            transport.hold()

    def let_go(self) -> None:
        """Sends the requests that are kept."""
        self._nbytes = 0
        for transport in list(self._holding):  # One whose call is interrupted stays there.
            transport.let_go()
            del self._holding[transport]
