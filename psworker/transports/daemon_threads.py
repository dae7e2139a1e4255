"""An executor of daemon threads.

`ThreadPoolExecutor` does not fit: the interpreter joins its threads before it runs exit handlers,
so a script could not exit while a call blocks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
JOIN_TIMEOUT_S = 2.0


class DaemonExecutor:
    """Daemon threads that make calls in the order of their submission."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts the threads."""
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T], done: Future[T]) -> None:
        """Queues a call; `done` gets its result or its exception."""
        self._queue.put((done, call))

    def close(self) -> None:
        """Ends the threads after the calls that are queued."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Waits for the threads; one inside gRPC when the interpreter ends would abort it."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as problem:  # noqa: BLE001 - the future carries it to its owner
                future.set_exception(problem)
