"""File descriptors of one shard: how many it may have, and what happens when there are no more.

A shard takes as many as the system lets it have (up to `WANTED`). Some are kept from newcomers, so
that what runs already (journals, segments, connections of gRPC) still gets the few that it needs.
Where there are none at all, `Spare` gives up one that it holds for this, so that whoever waits at a
listener can be accepted and closed; else he would wait there, and the listener would never be idle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

WANTED = 1 << 16
KEPT_MAX = 64  # From newcomers; a quarter of them where there are few.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> int:
    """Takes as many as this process may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    with contextlib.suppress(OSError, ValueError):  # Not allowed, in some containers.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """Returns how many this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def is_scarce(number: int) -> bool:
    """Whether a new descriptor is one of the last: the system gives the lowest that is free."""
    most = limit()
    return number >= most - min(KEPT_MAX, most // 4)


def are_there_any() -> bool:
    """Whether this process can open anything now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno not in EXHAUSTED
    return True


class Spare:
    """One descriptor that is held in order to be given up."""

    def __init__(self) -> None:
        """Opens it."""
        self._number = -1
        self._take()

    def turn_away(self, listener: socket.socket) -> bool:
        """Accepts and closes the first who waits at a listener; returns whether that was possible.

        Raises:
            OSError: The listener is closed.
        """
        if self._number < 0:
            self._take()
        self.close()
        try:
            listener.accept()[0].close()
        except OSError as problem:
            if problem.errno not in EXHAUSTED:
                raise
            return False
        finally:
            self._take()
        return True

    def close(self) -> None:
        """Closes it."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            self._number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
