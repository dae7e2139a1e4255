"""A few daemon threads and a queue.

`ThreadPoolExecutor` would be it, but the interpreter joins its threads before any exit handler
runs, so that a script that ends while a call waits could not end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
JOIN_TIMEOUT_S = 2.0


class Crew:
    """Threads that make calls in the order in which they were submitted."""

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
        """Queues a call; its result, or what it raised, will be in `done`."""
        self._queue.put((done, call))

    def close(self) -> None:
        """Lets the threads end after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Waits for the threads; a thread inside gRPC when the interpreter ends would abort it."""
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
