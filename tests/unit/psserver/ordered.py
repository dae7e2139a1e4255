"""Checks, as tests run, that the locks of a shard are taken in their order (engine.py states it).

Inside `ordered` each module of the order makes locks that note, thread by thread, which others are
held already. A wrong order is found by being run once: no two threads have to meet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

LAST = 6
RANKS: dict[str, tuple[int, str]] = {  # By module that makes the lock.
    "psserver.engine.engine": (1, "engine"),
    "psserver.engine.slice_queue": (2, "slice queue"),
    "psserver.slices.weights": (3, "weights"),
    "psserver.rows.store": (3, "places of rows"),
    "psserver.rows.mapped": (LAST, "reserved bytes"),
    "pscore.net.send_queue": (4, "connection"),
    "pscore.net.budget": (5, "budget"),
    "psserver.slices.arena": (LAST, "arena"),
    "psserver.engine.capture": (3, "capture"),
    "pscore.net.listener": (LAST, "pending connections"),
    "psserver.publish.ring": (LAST, "ring"),
    "psserver.publish.publication": (LAST, "publication"),
    "pscore.net.tls": (LAST, "TLS"),
    "pscore.net.shared_rate": (LAST, "shared rate"),
    "pscore.observe.timeline": (LAST, "timeline"),
}


@dataclass(slots=True)
class Record:
    """The locks that threads have taken.

    Attributes:
        nested: Pairs of names: a lock that was held, and one that was taken meanwhile.
        found: Locks taken out of order, each with the line of the product.
    """

    nested: set[tuple[str, str]] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    held: Any = field(default_factory=threading.local)  # `locks`: of this thread, in order.

    def locks(self) -> list[OrderedLock]:
        """Returns the locks that this thread holds."""
        if not hasattr(self.held, "locks"):
            self.held.locks = []
        locks: list[OrderedLock] = self.held.locks
        return locks


class OrderedLock:
    """A lock that knows its place in the order."""

    def __init__(self, lock: Any, rank: int, name: str, record: Record) -> None:
        """Wraps `lock`; violations go to `record`."""
        self._lock = lock
        self.rank = rank
        self.name = name
        self._record = record

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock, and notes a violation before it waits."""
        held = self._record.locks()
        if self not in held:
            self._record.nested |= {(other.name, self.name) for other in held}
            if wrong := [other.name for other in held if other.rank >= self.rank]:
                self._record.found.append(f"{self.name} taken under {wrong} at {_line()}")
        is_taken: bool = self._lock.acquire(blocking, timeout)
        if is_taken:
            held.append(self)
        return is_taken

    def release(self) -> None:
        """Releases the lock."""
        self._record.locks().remove(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self in self._record.locks()


class Threading:
    """The module `threading`, but for its locks."""

    def __init__(self, rank: int, name: str, record: Record) -> None:
        """Makes locks of one place in the order."""
        self._make = rank, name, record

    def Lock(self) -> OrderedLock:  # noqa: N802 - a name of `threading`
        return OrderedLock(threading.Lock(), *self._make)

    def RLock(self) -> OrderedLock:  # noqa: N802 - a name of `threading`
        return OrderedLock(threading.RLock(), *self._make)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


@contextmanager
def ordered() -> Iterator[Record]:
    """Yields the record of all locks that a shard made from now on takes."""
    record = Record()
    with ExitStack() as patched:
        for module, (rank, name) in RANKS.items():
            fake = Threading(rank, name, record)
            patched.enter_context(patch.object(import_module(module), "threading", fake))
        yield record


def _line() -> str:
    """Returns the line that takes a lock."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def last_of(portions: Iterator[dict[str, np.ndarray] | None]) -> dict[str, np.ndarray]:
    """Returns the arrays of a copy; nothing happens to the slice between its portions."""
    *_, arrays = portions
    assert arrays is not None
    return arrays
