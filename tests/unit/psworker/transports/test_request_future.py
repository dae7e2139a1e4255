"""The small future: outcomes, waits, and callbacks that are called once from any thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from functools import partial

import pytest

from psworker.transports.request_future import RequestFuture


def test_an_outcome_is_set_once_and_waited_for() -> None:
    answer = RequestFuture[int]()
    assert (answer.running(), answer.done()) == (True, False)
    assert repr(answer) == "<RequestFuture pending>"
    with pytest.raises(TimeoutError):
        answer.result(timeout=0.0)
    with pytest.raises(TimeoutError):
        answer.exception(timeout=0.0)
    setter = threading.Thread(target=answer.set_result, args=(7,))
    setter.start()
    assert answer.result() == 7
    setter.join()
    assert (answer.running(), answer.done(), answer.exception()) == (False, True, None)
    assert (answer.cancel(), answer.cancelled()) == (False, False)
    with pytest.raises(InvalidStateError):
        answer.set_result(8)
    with pytest.raises(InvalidStateError):
        answer.set_exception(ValueError())


def test_an_error_is_raised_where_the_outcome_is_wanted() -> None:
    answer, problem = RequestFuture[int](), ValueError("refused")
    answer.set_exception(problem)
    assert answer.exception() is problem
    with pytest.raises(ValueError, match="refused"):
        answer.result()


def test_callbacks_come_in_order_and_at_once_when_there_is_an_outcome() -> None:
    answer, called = RequestFuture[int](), list[int]()

    def note(number: int, done: Future[int]) -> None:
        called.append(number + done.result())

    for number in range(3):
        answer.add_done_callback(partial(note, number))
    assert not called
    answer.set_result(10)
    answer.add_done_callback(lambda done: called.append(done.result()))
    assert called == [10, 11, 12, 10]


def test_a_callback_that_raises_keeps_no_other_from_being_called() -> None:
    answer, called = RequestFuture[int](), list[int]()

    def fail(_: object) -> None:
        raise ValueError("a mistake")

    answer.add_done_callback(fail)
    answer.add_done_callback(lambda done: called.append(done.result()))
    with pytest.raises(ValueError, match="a mistake"):
        answer.set_result(5)
    assert (called, answer.result()) == ([5], 5)


def test_a_callback_may_add_another() -> None:
    answer, called = RequestFuture[int](), list[str]()

    def first(done: Future[int]) -> None:
        called.append("first")
        done.add_done_callback(lambda _: called.append("third"))
        called.append("after")

    answer.add_done_callback(first)
    answer.add_done_callback(lambda _: called.append("second"))
    answer.set_result(1)
    assert called == ["first", "second", "third", "after"]


def test_asyncio_can_await_an_answer() -> None:
    async def wait() -> int:
        answer = RequestFuture[int]()
        threading.Timer(0.01, answer.set_result, (3,)).start()
        return await asyncio.wrap_future(answer)

    assert asyncio.run(wait()) == 3


def test_a_wait_that_is_over_leaves_nothing_behind() -> None:
    answer = RequestFuture[int]()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.0)
    called = list[int]()
    answer.add_done_callback(lambda done: called.append(done.result()))
    answer.set_result(1)
    assert called == [1]


def test_each_callback_is_called_once_by_many_threads() -> None:
    """Threads add callbacks and wait while another one sets the outcome."""
    called, lock = Counter[tuple[int, int, int]](), threading.Lock()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(200):
            answer, start = RequestFuture[int](), threading.Barrier(4)

            def count(key: tuple[int, int, int]) -> None:
                with lock:
                    called[key] += 1

            def add(
                thread: int,
                turn: int = turn,
                answer: RequestFuture[int] = answer,
                start: threading.Barrier = start,
            ) -> None:
                start.wait()
                for number in range(5):
                    key = turn, thread, number
                    answer.add_done_callback(lambda _, key=key: count(key))  # type: ignore[misc]
                assert answer.result(timeout=60.0) == turn

            threads = [threading.Thread(target=add, args=(thread,)) for thread in range(3)]
            for thread in threads:
                thread.start()
            start.wait()
            answer.set_result(turn)
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert called == {
        (t, thread, n): 1 for t in range(200) for thread in range(3) for n in range(5)
    }


def test_a_removed_callback_is_not_called() -> None:
    answer, called = RequestFuture[int](), list[str]()

    def first(_: object) -> None:
        called.append("first")

    answer.add_done_callback(first)
    answer.add_done_callback(lambda _: called.append("second"))
    answer.remove_done_callback(first)
    answer.remove_done_callback(first)  # Once more: nothing happens.
    answer.set_result(1)
    assert called == ["second"]
