"""The answer to a request: a small future, since each slice has two of them in each step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class RequestFuture(Future[T]):
    """A future without a lock of its own, which cannot be cancelled.

    The parent's holds eleven objects, a condition among them. Those of all slices outlive a step,
    and with 2,500 slices Python's search for garbage then takes a third of a worker's time. Here
    the interpreter's lock is enough: one operation on a list or an attribute is not divided.

    Callbacks are called in the order in which they were added, before a thread that began to wait
    after them goes on. The error of one is raised where the outcome is set, after the others.
    `concurrent.futures.wait` and `as_completed` refuse these futures: they want the parent's lock.
    """

    def __init__(self) -> None:  # The parent's is what costs.
        """Starts without an outcome."""
        self._outcome: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._behind: list[Callable[[Future[T]], object]] = []  # Callbacks not called yet.

    def __repr__(self) -> str:
        """Returns its state, as text."""
        return f"<RequestFuture {'done' if self._is_done else 'pending'}>"

    def cancel(self) -> bool:
        """Returns False: a request that has left is answered."""
        return False

    def cancelled(self) -> bool:
        """Returns False."""
        return False

    def running(self) -> bool:
        """Returns whether there is no outcome yet."""
        return not self._is_done

    def done(self) -> bool:
        """Returns whether there is an outcome."""
        return self._is_done

    def result(self, timeout: float | None = None) -> T:
        """Returns the outcome, or raises its error; waits for it.

        Raises:
            TimeoutError: It has not come within `timeout` seconds.
        """
        if not self._is_done:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        outcome: Any = self._outcome
        found: T = outcome
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error, or None; waits as `result` does."""
        if not self._is_done:
            self._wait(timeout)
        return self._error

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Calls a function with this answer when there is an outcome; at once if there is one."""
        self._behind.append(fn)
        if self._is_done:  # Asked behind the append: `_end` may have found no callback.
            self._call()

    def remove_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Forgets a function that was to be called; none if it has been called already."""
        with suppress(ValueError):
            self._behind.remove(fn)

    def set_result(self, result: T) -> None:
        """Sets the outcome, once."""
        self._require_open()
        self._outcome = result
        self._end()

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets the error, once."""
        self._require_open()
        self._error = exception
        self._end()

    def _require_open(self) -> None:
        if self._is_done:
            raise InvalidStateError("it has an outcome")

    def _end(self) -> None:
        self._is_done = True
        self._call()

    def _call(self) -> None:
        """Calls each callback once, on whichever thread takes it from the list."""
        while self._behind:
            try:
                fn = self._behind.pop(0)
            except IndexError:  # Another thread has taken it.
                return
            try:
                fn(self)
            finally:  # Also the others, when it has raised an error.
                self._call()

    def _wait(self, timeout: float | None) -> None:
        came = threading.Event()

        def wake(_: Future[T]) -> None:
            came.set()

        self.add_done_callback(wake)
        if not came.wait(timeout):
            self.remove_done_callback(wake)
            if not self._is_done:
                raise TimeoutError
