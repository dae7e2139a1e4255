"""File descriptors of a listening process: its limit, and its behaviour when none is left.

A process raises its limit as far as the system allows (up to `WANTED`). Some descriptors are kept
from new connections, so that what already runs (journals, segments, connections of gRPC) still
gets the few that it needs. If there are none at all, `SpareDescriptor` gives up one that it holds
for this purpose: the first connection in the queue is accepted and closed. Otherwise it would stay
in the queue, and the listener would never be idle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

WANTED = 1 << 16
KEPT_MAX = 64  # Descriptors kept from new connections; a quarter of all where there are few.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> int:
    """Raises this process's limit of descriptors to `WANTED` if it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    with contextlib.suppress(OSError, ValueError):  # Not allowed, in some containers.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """Returns the number of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def is_scarce(number: int) -> bool:
    """Returns whether a new descriptor is one of the last; the system gives the lowest free one."""
    most = limit()
    return number >= most - min(KEPT_MAX, most // 4)


def are_there_any() -> bool:
    """Returns whether this process can open a file now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno not in EXHAUSTED
    return True


class SpareDescriptor:
    """One descriptor in reserve, to be given up when no other is left."""

    def __init__(self) -> None:
        self._number = -1
        self._open()

    def turn_away(self, listener: socket.socket) -> bool:
        """Accepts and closes the first connection in a queue; returns whether that was possible.

        Raises:
            OSError: The listener is closed.
        """
        if self._number < 0:
            self._open()
        self.close()
        try:
            listener.accept()[0].close()
        except OSError as problem:
            if problem.errno not in EXHAUSTED:
                raise
            return False
        finally:
            self._open()
        return True

    def close(self) -> None:
        """Closes it."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
