"""Calls on daemon threads: each has an outcome, also where its thread fails."""

from concurrent.futures import Future

import pytest

from pscore.errors import ThreadError
from psworker.transports.daemon_threads import DaemonExecutor
from tests.integration.command import join_threads

WAIT_S = 200.0


def test_an_error_of_a_call_reaches_its_owner_and_the_next_call_is_made() -> None:
    executor = DaemonExecutor(1, "push")
    failed: Future[None] = Future()
    executor.start(lambda: [][1], failed.set_exception)
    assert isinstance(failed.exception(WAIT_S), IndexError)
    done: Future[int] = Future()
    executor.submit(lambda: 3, done)
    assert done.result(WAIT_S) == 3
    executor.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_fails_the_calls_that_wait_and_those_that_come_later() -> None:
    executor = DaemonExecutor(1, "push")
    begun: Future[None] = Future()
    taken: Future[int] = Future()
    taken.set_result(1)  # A second result raises on the thread.
    waiting: Future[int] = Future()

    def call() -> int:
        begun.result(WAIT_S)
        return 2

    executor.submit(call, taken)
    executor.submit(lambda: 3, waiting)
    begun.set_result(None)
    for later in (waiting, Future[int]()):
        if later is not waiting:
            executor.submit(lambda: 4, later)
        with pytest.raises(ThreadError, match="thread 'push' of this process ended"):
            later.result(WAIT_S)
    join_threads("push")
