"""The invariants can fail: with the service broken on purpose, some seed says so.

Each mutation is one that a suite of limits and convergence tests does not notice (STYLE.md 2.9).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pscore.rules.base import Rule
from psserver.decisions.membership import Membership
from psserver.decisions.open_steps import OpenSteps
from psserver.decisions.orders import Acknowledge, Action, Add, Answer
from psserver.decisions.progress import Progress
from psserver.decisions.slice_clock import SliceClock
from psserver.slices.store import SliceStore
from psserver.slices.weights import Weights
from pssim.case import Case
from pssim.faulty import simulate
from psworker.connection.accounts.missed import Missed
from psworker.replica.replica import Replica
from tests.sim.draws import draw, draw_elastic

SEEDS = 40


def first_failure(name: str, drawn: Callable[[str, int], Case] = draw) -> str:
    """Returns what the first seed that fails says."""
    for seed in range(SEEDS):
        try:
            simulate(drawn(name, seed))
        except AssertionError as problem:
            return str(problem) or "an assertion"
    return ""


class Otherwise:
    """A rule as a clock sees it, with some answers replaced; the ledger knows the real one."""

    def __init__(self, rule: Rule, **answers: Any) -> None:
        self._rule = rule
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return self._answers[name] if name in self._answers else getattr(self._rule, name)


@pytest.fixture
def clocks_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Returns a function that gives every clock a rule with other answers."""
    original = SliceClock.__init__

    def replace_answers(**answers: Any) -> None:
        def init(self: SliceClock, rule: Any, *others: Any) -> None:
            original(self, Otherwise(rule, **answers), *others)  # type: ignore[arg-type]

        monkeypatch.setattr(SliceClock, "__init__", init)

    return iter([replace_answers]).__next__()  # type: ignore[return-value]


def test_collecting_by_arrival_instead_of_by_step_is_caught(
    clocks_with: Callable[..., None],
) -> None:
    clocks_with(by_step=False)
    assert first_failure("ssd")


def test_staleness_that_is_not_scaled_is_caught(clocks_with: Callable[..., None]) -> None:
    clocks_with(scale=lambda staleness: 1.0)
    assert first_failure("staleness")


def test_reads_beyond_the_bound_are_caught(clocks_with: Callable[..., None]) -> None:
    clocks_with(readable=lambda clocks, worker, clock, min_version: clocks.version >= min_version)
    assert first_failure("ssp")


def test_reads_without_the_own_push_are_caught(clocks_with: Callable[..., None]) -> None:
    clocks_with(readable=lambda clocks, worker, clock, min_version: True)
    assert "misses its step" in first_failure("asgd")


def test_more_open_steps_than_the_rule_allows_are_caught(
    clocks_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers keep to the bound by themselves, so one that does not wait for its pull is needed."""
    monkeypatch.setattr("psworker.replica.replica.Replica.land", lambda self, index: iter(()))
    monkeypatch.setattr("psworker.replica.pulls.Pulls.has_landed", lambda self, index: True)
    clocks_with(steps_open=lambda: 1 << 30)
    assert first_failure("od")


def test_counting_a_duplicate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "__contains__", lambda self, step: False)
    assert "counted twice" in first_failure("asgd")


def test_acknowledging_what_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SliceClock._count

    def drop_some(self: SliceClock, push: Any, token: Any) -> list[Action]:
        actions = original(self, push, token)
        if push.step == 2:
            return [action for action in actions if isinstance(action, Acknowledge)]
        return actions

    monkeypatch.setattr(SliceClock, "_count", drop_some)
    assert first_failure("asgd")


def test_answering_before_the_update_is_done_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SliceClock.push

    def answers_first(self: SliceClock, *arguments: Any) -> list[Action]:
        actions = original(self, *arguments)
        return sorted(actions, key=lambda action: not isinstance(action, Answer))

    monkeypatch.setattr(SliceClock, "push", answers_first)
    assert first_failure("ssgd")


def test_overwriting_weights_that_are_on_their_way_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Weights, "spare", lambda self, **_: self._newest)
    assert "got other weights" in first_failure("asgd")


def test_a_gradient_that_enters_with_a_wrong_weight_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = OpenSteps.fill

    def heavier(self: OpenSteps, step: int) -> list[Action]:
        return [
            Add(
                token=action.token,
                open_step=action.open_step,
                push=action.push,
                weight=action.weight * 2,
                is_first=action.is_first,
            )
            if isinstance(action, Add)
            else action
            for action in original(self, step)
        ]

    monkeypatch.setattr(OpenSteps, "fill", heavier)
    assert first_failure("ssgd")


def test_never_closing_a_step_of_a_dead_worker_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SliceClock, "recheck", lambda self: [])
    assert "virtual seconds" in first_failure("ssgd")


def test_steps_that_close_with_too_few_workers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "wanted", lambda self: 0)
    assert "a step closed with" in first_failure("ssgd", draw_elastic)


def test_a_first_step_that_some_slices_have_closed_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that comes back begins with the step of its first pulls, even if these differ."""
    monkeypatch.setattr(Replica, "begin", lambda self, push_pull: self.fetch(0, push_pull))
    assert "is not in slices" in first_failure("cd", draw_elastic)


def test_a_step_that_is_late_without_a_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Missed, "late", lambda self, rank, index, rule: None)
    assert "steps were late" in first_failure("ssgd")


def test_a_bit_of_a_weight_that_flips_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SliceStore.update

    def flips(self: SliceStore, action: Any) -> None:
        original(self, action)
        self.weights.view(np.uint8)[17] ^= 1

    monkeypatch.setattr(SliceStore, "update", flips)
    assert "got other weights" in first_failure("ssgd")
