"""Slice queues: order, additions and updates in one, and the report of a failed action."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscore.types import Push, Role, Verdict
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Update
from psserver.engine.placement import Placement
from psserver.engine.slice_queue import CopyOut, SliceQueue, Work, execute

PUSH = Push(worker=0, step=0, base_version=0)
LOAD = Load(token=1, role=Role.WEIGHTS, version=0)


class BrokenStore:
    """A slice of `numel` elements whose every action fails."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def load(self, action: Load, payload: object) -> None:
        raise AssertionError("an invariant")


class Completion:
    """Hears of failures."""

    def __init__(self) -> None:
        self.problems: list[BaseException | None] = []

    def payload(self, token: object) -> None:
        return None

    def broke(self, problem: BaseException | None) -> None:
        self.problems.append(problem)


def make_queue(numel: int, completion: Completion, pool: ThreadPoolExecutor) -> SliceQueue:
    store: Any = BrokenStore(numel)
    anybody: Any = completion
    return SliceQueue(store, anybody, pool)


def test_a_failure_on_the_callers_thread_is_told_and_raised() -> None:
    completion = Completion()
    with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError, match="an invariant"):
        make_queue(Placement().inline_numel_max, completion, pool).submit([LOAD])
    assert [str(problem) for problem in completion.problems] == ["an invariant"]


def test_a_failure_on_the_pool_is_told() -> None:
    completion = Completion()
    with ThreadPoolExecutor(1) as pool:
        queue = make_queue(Placement().inline_numel_max + 1, completion, pool)
        queue.submit([LOAD])
    assert [str(problem) for problem in completion.problems] == ["an invariant"]
    assert queue.is_busy  # Stuck for good: those that wait for it must not be told otherwise.


# ----- order


class Words:
    """A store and a completion that write down what is asked of them."""

    def __init__(self, numel: int = 16) -> None:
        self.numel = numel
        self.said: list[str] = []
        self.meanwhile: Callable[[], None] | None = None

    def payload(self, token: object) -> object:
        return token

    def done(self, token: object) -> None:
        self.said.append(f"done {token}")

    def hold(self, action: Hold, payload: object) -> str:
        return f"a copy of {payload}"

    def seal(self) -> None:
        raise AssertionError

    def note_late(self, action: Acknowledge) -> None:
        pass

    def keep(self, token: object, payload: object) -> None:
        self.said.append(f"keep {payload} for {token}")

    def make_acknowledgement(self, action: Acknowledge) -> Callable[[], None]:
        return lambda: self.said.append(f"ack {action.token}")

    def make_answer(self, action: Answer, store: object) -> Callable[[], None]:
        return lambda: self.said.append(f"answer {action.token}")

    def broke(self, problem: BaseException | None) -> None:
        raise AssertionError(problem)

    def load(self, action: Load, payload: object) -> None:
        self.said.append(f"load {payload}")

    def add(self, action: Add, payload: object) -> None:
        self.said.append(f"add {payload} to {action.open_step}")
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def update(self, action: Update) -> None:
        self.said.append(f"update {action.open_step}")

    def add_and_update(self, terms: list[tuple[Add, object]], update: Update) -> None:
        self.said.append(f"add {[payload for _, payload in terms]} and update {update.open_step}")


def add(token: str, open_step: int = 0) -> Add:
    return Add(token=token, open_step=open_step, push=PUSH, weight=1.0, is_first=True)


def update(open_step: int = 0) -> Update:
    return Update(open_step=open_step, scale=1.0, present=-1, hyper=np.zeros((1, 1)), version=1)


def ack(token: str) -> Acknowledge:
    return Acknowledge(token=token, verdict=Verdict.ACCEPTED, version=0)


def answer(token: str) -> Answer:
    return Answer(token=token, worker=0, version=1, with_state=False)


def words_of(actions: list[Work]) -> list[str]:
    words: Any = Words()
    execute(actions, words, words)
    said: list[str] = words.said
    return said


def test_actions_are_carried_out_in_their_order() -> None:
    actions: list[Work] = [
        LOAD,
        ack("a"),
        add("b"),
        Hold(token="c", push=PUSH),
        update(),
        answer("d"),
    ]
    assert words_of(actions) == [
        "load 1",
        "done 1",
        "ack a",
        "add b to 0",
        "done b",
        "keep a copy of c for c",
        "update 0",
        "answer d",
    ]


def test_additions_and_their_update_are_one() -> None:
    assert words_of([add("a"), add("b"), update(), ack("b")]) == [
        "add ['a', 'b'] and update 0",
        "done a",
        "done b",
        "ack b",
    ]


def test_only_additions_to_the_same_open_step_are_one_with_an_update() -> None:
    assert words_of([add("a"), add("x", 1), ack("x"), add("b"), ack("b"), update()]) == [
        "add a to 0",
        "done a",
        "add x to 1",
        "done x",
        "add ['b'] and update 0",
        "done b",
        "ack x",
        "ack b",
    ]


def test_acknowledgements_let_the_update_go_first_and_an_answer_does_not() -> None:
    assert words_of([add("a"), ack("a"), update()]) == ["add ['a'] and update 0", "done a", "ack a"]
    assert words_of([add("a"), ack("a"), add("b"), ack("b"), update(), answer("p")]) == [
        "add ['a', 'b'] and update 0",
        "done a",
        "done b",
        "ack a",
        "ack b",
        "answer p",
    ]
    assert words_of([add("a"), answer("p"), update()]) == [
        "add a to 0",
        "done a",
        "answer p",
        "update 0",
    ]


def test_the_update_of_another_open_step_is_not_taken_for_it() -> None:
    assert words_of([add("a", 1), ack("a"), update(0), update(1)]) == [
        "add a to 1",
        "done a",
        "ack a",
        "update 0",
        "update 1",
    ]


def test_several_updates_follow_each_other() -> None:
    assert words_of([add("a", 0), update(0), add("b", 1), ack("b"), update(1), answer("p")]) == [
        "add ['a'] and update 0",
        "done a",
        "add ['b'] and update 1",
        "done b",
        "ack b",
        "answer p",
    ]


def test_later_submissions_run_later() -> None:
    words: Any = Words()
    with ThreadPoolExecutor(1) as pool:
        queue = SliceQueue(words, words, pool)
        words.meanwhile = lambda: queue.submit([answer("later")])
        queue.submit([add("a"), answer("now")])
    assert words.said == ["add a to 0", "done a", "answer now", "answer later"]
    assert not queue.is_busy


def test_the_thread_that_submits_to_an_idle_queue_runs_it() -> None:
    words: Any = Words(Placement().inline_numel_max + 1)
    with ThreadPoolExecutor(1) as pool:
        queue = SliceQueue(words, words, pool)
        assert queue.append([ack("first")])
        assert not queue.append([ack("second")])
        queue.submit([ack("third")])
        assert words.said == []
        queue.run()
    assert words.said == ["ack first", "ack second", "ack third"]
    assert not queue.is_busy


def test_nothing_submitted_is_nothing_done() -> None:
    words: Any = Words()
    with ThreadPoolExecutor(1) as pool:
        queue = SliceQueue(words, words, pool)
        queue.submit([])
    assert words.said == []
    assert not queue.is_busy


def test_many_threads_submit_to_one_queue_and_each_order_is_kept() -> None:
    """Large slices run on the pool: no two actions of a slice at once, no action lost."""
    words: Any = Words(Placement().inline_numel_max + 1)
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(4) as callers:
        queue = SliceQueue(words, words, pool)
        tokens = [[f"{caller}.{number}" for number in range(100)] for caller in range(4)]

        def submit_all(own: list[str]) -> None:
            for token in own:
                queue.submit([ack(token)])

        list(callers.map(submit_all, tokens))
    for caller, own in enumerate(tokens):
        mine = [said for said in words.said if said.startswith(f"ack {caller}.")]
        assert mine == [f"ack {token}" for token in own]


def test_a_copy_is_of_what_is_there_between_two_actions() -> None:
    words: Any = Words()
    words.export = lambda mark: iter([{"said": np.array(len(words.said))}])
    taken: list[int] = []
    copy = CopyOut(take=lambda arrays: taken.append(int(arrays["said"])))
    execute([ack("a"), copy, ack("b")], words, words)
    assert taken == [1]


@pytest.mark.parametrize("is_followed", [False, True])
def test_actions_that_come_meanwhile_are_before_the_next_portion_of_a_copy(
    is_followed: bool,
) -> None:
    """And the thread that began the copy is free again: it may be the one that receives."""
    words: Any = Words(1 << 20)
    words.journal = SimpleNamespace(number=1, is_on=True)
    tasks: list[Callable[[], None]] = []
    queue = SliceQueue(words, words, SimpleNamespace(submit=tasks.append))  # type: ignore[arg-type]
    if is_followed:
        queue.follow(lambda kept: False)
        words.said.clear()

    def portions(mark: object) -> Iterator[dict[str, np.ndarray] | None]:
        for number in range(3):
            words.said.append(f"portion {number}")
            yield None
        yield {}

    words.export = portions
    assert queue.append([CopyOut(take=lambda arrays: words.said.append("whole"))])
    queue.run()
    assert words.said == ["portion 0"]
    queue.submit([ack("a")])
    while tasks:
        tasks.pop(0)()
    assert words.said == ["portion 0", "portion 1", "ack a", "portion 2", "whole"]
    assert not queue.is_busy


# ----- another process follows


class Shipped:
    """Another process that gets the slice when `keep` is called."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.waiting: list[Callable[[], None]] = []

    def ship(self, kept: Callable[[], None]) -> bool:
        self.words.said.append("ship")
        self.waiting.append(kept)
        return True

    def keep(self) -> None:
        self.waiting.pop()()


class JournalWords(Words):
    """Words with a journal, whose record changes with each addition, and answers that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.is_on, self.journal = 0, True, self

    def add(self, action: Add, payload: object) -> None:
        self.number += 1
        super().add(action, payload)


def test_answers_and_later_actions_wait_until_the_other_process_has_the_changes() -> None:
    words: Any = JournalWords()
    queue, other = SliceQueue(words, words, None), Shipped(words)
    queue.follow(other.ship)
    queue.submit([add("a"), ack("a"), answer("p"), add("b"), ack("b")])
    assert (words.said, queue.is_busy) == (["ship"], True)
    other.keep()
    assert words.said == ["ship", "add a to 0", "done a", "ship"]
    other.keep()
    assert words.said[4:] == ["ack a", "answer p", "add b to 0", "done b", "ship"]
    queue.submit([answer("q")])
    other.keep()
    assert words.said[9:] == ["ack b", "answer q"]  # Nothing has changed: nothing is sent.
    assert not queue.is_busy
    queue.submit([add("c"), ack("c")])
    queue.follow(None)
    queue.submit([answer("r")])
    assert words.said[11:] == ["add c to 0", "done c", "ship"]
    other.keep()  # It goes on without the other process.
    assert words.said[14:] == ["ack c", "answer r"]


def test_a_queue_at_work_is_followed_from_its_next_action_on() -> None:
    words: Any = JournalWords()
    queue, other = SliceQueue(words, words, None), Shipped(words)
    words.meanwhile = lambda: queue.follow(other.ship)
    queue.submit([add("a"), ack("a")])
    assert words.said == ["add a to 0", "done a", "ack a", "ship"]
    other.keep()
    assert not queue.is_busy
