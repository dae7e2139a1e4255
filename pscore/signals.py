"""Signals that a process reads from a pipe, where it waits for other things too.

A handler in Python would run late, if at all: the signal may interrupt another thread, or come just
before the main thread begins to wait. The handler in C writes the signal's number into the pipe at
once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def signal_pipe(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Turns signals into bytes of a pipe, and yields both ends; handlers of others write too."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    former_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _ignore) for number in numbers}
    try:
        yield read_fd, write_fd
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(write_fd)
        os.close(read_fd)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte in the pipe is what counts."""
