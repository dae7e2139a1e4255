"""Checkpoints during training on a faulty network: each residual in one is the worker's own."""

import random
from dataclasses import replace
from typing import Any

import pytest

from pscore.compressors import COMPRESSORS
from psserver.engine.residuals import ResidualCollection
from pssim.case import Case
from pssim.faulty import simulate
from tests.sim.draws import draw

SEEDS = 8
RULES = ("asgd", "ssd", "ssgd")


def draw_captures(name: str, seed: int) -> Case:
    """Returns a case like `draw`'s whose workers keep residuals, with checkpoints during training.

    No shard crashes: its copies for a checkpoint would be gone with it.
    """
    rng, case = random.Random(f"captures {name} {seed}"), draw(name, seed)
    kinds = sorted(kind for kind in COMPRESSORS if COMPRESSORS[kind]().state_names)
    return replace(
        case,
        compressor=COMPRESSORS[rng.choice(kinds)](),
        captures_s=tuple(rng.uniform(0.1, 1.5) for _ in range(6)),
        crashes=(),
        quadratic=True,
    )


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


def test_a_checkpoint_that_waits_for_no_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResidualCollection, "missing", lambda self: [])
    assert "has no residual of slice" in first_failure("ssgd")


def test_a_residual_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: ResidualCollection, index: int, rank: int, step: int, arrays: Any) -> None:
        self.arrays[index, rank], self.steps[index, rank] = arrays, self.step

    monkeypatch.setattr(ResidualCollection, "take", take)
    assert "never had this residual" in first_failure("ssgd")
