"""Lanes: what becomes of an action that fails, inline and on the pool."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pscore.types import Role
from psserver.clock import Load
from psserver.lanes import INLINE_NUMEL_MAX, Lane

LOAD = Load(token=1, role=Role.WEIGHTS, version=0)


class BrokenStore:
    """A slice of `numel` elements whose every action fails."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def load(self, action: Load, payload: object) -> None:
        raise AssertionError("an invariant")


class Desk:
    """Hears of failures."""

    def __init__(self) -> None:
        self.problems: list[BaseException | None] = []

    def payload(self, token: object) -> None:
        return None

    def broke(self, problem: BaseException | None) -> None:
        self.problems.append(problem)


def make_lane(numel: int, desk: Desk, pool: ThreadPoolExecutor) -> Lane:
    store: Any = BrokenStore(numel)
    anybody: Any = desk
    return Lane(store, anybody, pool)


def test_a_failure_on_the_callers_thread_is_told_and_raised() -> None:
    desk = Desk()
    with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError, match="an invariant"):
        make_lane(INLINE_NUMEL_MAX, desk, pool).submit([LOAD])
    assert [str(problem) for problem in desk.problems] == ["an invariant"]


def test_a_failure_on_the_pool_is_told() -> None:
    desk = Desk()
    with ThreadPoolExecutor(1) as pool:
        lane = make_lane(INLINE_NUMEL_MAX + 1, desk, pool)
        lane.submit([LOAD])
    assert [str(problem) for problem in desk.problems] == ["an invariant"]
    assert lane.is_busy  # It is stuck for good: what waits for it must not be told otherwise.
