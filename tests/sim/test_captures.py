"""Checkpoints during training on a faulty network: each residual in one is the worker's own."""

from typing import Any

import pytest

from psserver.engine.residuals import ResidualCollection
from pssim.case import draw_captures
from pssim.faulty import simulate

SEEDS = 8
RULES = ("asgd", "ssd", "ssgd")


def first_failure(name: str) -> str:
    """Returns the message of the first seed that fails; empty if none does."""
    for seed in range(SEEDS):
        try:
            simulate(draw_captures(name, seed))
        except AssertionError as problem:
            return str(problem) or "an assertion"
    return ""


@pytest.mark.parametrize("name", RULES)
def test_a_complete_checkpoint_has_the_residuals_of_its_step(name: str) -> None:
    captures = [simulate(draw_captures(name, seed)).captures for seed in range(SEEDS)]
    assert sum(len(one.done) for one in captures) >= SEEDS // 2


def test_a_checkpoint_that_waits_for_no_residual_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ResidualCollection, "missing", lambda self: [])
    assert "has no residual of slice" in first_failure("ssgd")


def test_a_residual_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: ResidualCollection, index: int, rank: int, step: int, arrays: Any) -> None:
        self.arrays[index, rank], self.steps[index, rank] = arrays, self.step

    monkeypatch.setattr(ResidualCollection, "take", take)
    assert "never had this residual" in first_failure("ssgd")
