"""Ctrl-C inside a step takes effect where the step waits for a shard, or at its end.

An exception between two instructions of a request would leave half of it behind, and a script that
catches it, or a notebook whose cell is run again, would wait for ever for its answer.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class _CtrlC:
    """Whether Ctrl-C waits, in the main thread, which alone gets it."""

    is_held = False
    has_come = False
    is_waiting = False  # Whether the step waits for a shard.


def _note(number: int, frame: Any) -> None:
    """Notes Ctrl-C; the second one takes effect at once."""
    if _CtrlC.is_waiting or _CtrlC.has_come:
        raise KeyboardInterrupt
    _CtrlC.has_come = True


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Context manager: Ctrl-C waits; a script's own handler of the signal stays as it is.

    Raises:
        KeyboardInterrupt: It has come inside.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    _CtrlC.is_held, _CtrlC.has_come = True, False
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        _CtrlC.is_held = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _CtrlC.has_come:
            raise KeyboardInterrupt


@contextlib.contextmanager
def takes_effect() -> Iterator[None]:
    """Context manager: a wait that Ctrl-C may end.

    Raises:
        KeyboardInterrupt: It has come before or inside.
    """
    if not _CtrlC.is_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    _CtrlC.is_waiting = True
    try:
        if _CtrlC.has_come:
            raise KeyboardInterrupt
        yield
    finally:
        _CtrlC.is_waiting = False
