"""Threads that report an unexpected error to those who wait for them.

A thread that just ends leaves others waiting for its work. So every thread of Paceline is made
here, with a function that fails these waits (tests/house/test_threads.py). The error then goes on
to `threading.excepthook`: a worker prints it once, and a shard ends (psserver/process/daemon.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pscore.errors import ThreadError


class OwnedThread(threading.Thread):
    """A daemon thread whose owner learns of an error that ends it."""

    def __init__(
        self, body: Callable[[], None], name: str, on_failure: Callable[[ThreadError], None]
    ) -> None:
        """Does not start yet.

        Args:
            body: The work of the thread. An exception that it raises is a bug.
            name: Name of the thread (ARCHITECTURE.md, threads).
            on_failure: Fails the waits for the thread; called on it when `body` has raised.
        """
        super().__init__(name=name, daemon=True)
        self._body = body
        self._on_failure = on_failure

    def run(self) -> None:
        """Runs the body."""
        try:
            self._body()
        except BaseException as problem:
            self._on_failure(failure(self.name, problem))
            raise


def failure(name: str, problem: BaseException) -> ThreadError:
    """Returns the error by which a thread that has failed is known to others."""
    error = ThreadError(
        f"thread {name!r} of this process ended by {type(problem).__name__}: {problem}; this is a "
        "bug in Paceline"
    )
    error.__cause__ = problem
    return error
