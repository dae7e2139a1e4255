"""An executor of daemon threads.

A thread that fails fails all calls, also those that come later.

`ThreadPoolExecutor` does not fit: the interpreter joins its threads before it runs exit handlers,
so a script could not exit while a call blocks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pscore.errors import ThreadError
from pscore.threads import OwnedThread

T = TypeVar("T")
OnFailure = Callable[[BaseException], None]
JOIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PendingCall:
    """One call, and the functions of its owner that get its outcome."""

    call: Callable[[], Any]
    on_result: Callable[[Any], None]
    on_failure: OnFailure


class DaemonExecutor:
    """Daemon threads that make calls in the order of their submission."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts the threads."""
        self._queue: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._failure: ThreadError | None = None
        self._threads = [OwnedThread(self._work, name, self._fail) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T], done: Future[T]) -> None:
        """Queues a call; `done` gets its result or its exception."""
        self._put(PendingCall(call, done.set_result, done.set_exception))

    def start(self, call: Callable[[], None], on_failure: OnFailure) -> None:
        """Queues a call whose result comes by other means; `on_failure` gets its exception."""
        self._put(PendingCall(call, lambda _: None, on_failure))

    def close(self) -> None:
        """Ends the threads after the calls that are queued."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Waits for the threads; one inside gRPC when the interpreter ends would abort it."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _put(self, work: PendingCall) -> None:
        self._queue.put(work)
        if self._failure is not None:
            self._fail(self._failure)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                result = work.call()
            except BaseException as problem:  # noqa: BLE001 - the owner of the call gets it
                work.on_failure(problem)
            else:
                work.on_result(result)

    def _fail(self, error: ThreadError) -> None:
        """Fails the calls that are queued, and those that come later."""
        self._failure = error
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._queue.get_nowait()
                if work is not None:
                    work.on_failure(error)
