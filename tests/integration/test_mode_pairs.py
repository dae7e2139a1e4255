"""Every change from one mode to another: all is equal that the next mode demands to be so."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from pscore.errors import ConfigError
from pscore.rules import RULES, parse_mode
from tests.inside import table_of, wrapped_by
from tests.integration.cluster import Shards, Station

Array = npt.NDArray[Any]
NUMEL, STEPS, LR, MOMENTUM = 40, 3, 0.05, 0.9
ARGUMENTS = {
    "od": "(warmup=0)",
    "ssd": "(steps=2, warmup=0)",
    "cd": "(steps=2, warmup=0)",
    "local": "(steps=2)",
    "slowmo": "(steps=2, slow_lr=0.8, slow_momentum=0.6)",
    "diloco": "(steps=2, outer_lr=0.5, outer_momentum=0.6)",
    "delayed_nesterov": "(steps=2)",
}
MODES = [name + ARGUMENTS.get(name, "") for name in RULES]
# By arrival: no model here.
ORDERED = [name for name, rule in RULES.own.items() if not (rule().by_step or rule.gossip)]


def is_possible(former: str, mode: str) -> bool:
    """Returns whether a running job can change: the shards' optimizer would stay, or move."""
    before, after = parse_mode(former), parse_mode(mode)
    return before.outer_optimizer == after.outer_optimizer or bool(before.gossip or after.gossip)


@cache
def way() -> list[str]:
    """Returns a way over every possible ordered pair of modes: an Euler tour."""
    ahead = {a: [b for b in MODES if b != a and is_possible(a, b)] for a in MODES}
    found, stack = [], [MODES[0]]
    while stack:
        if ahead[stack[-1]]:
            stack.append(ahead[stack[-1]].pop())
        else:
            found.append(stack.pop())
    return found[::-1]


def gradient(rank: int, number: int) -> Array:
    """Returns a small common part, and a large one that the two workers' mean does not have."""
    common, apart = np.random.default_rng(number).standard_normal((2, NUMEL))
    grad: Array = (0.1 * common + (1 - 2 * rank) * apart).astype(np.float32)
    return grad


@dataclass
class Leg:
    """One worker's steps in one mode."""

    models: list[Array]  # Its model before the first step, and after each.
    momentum: Array  # That of the optimizer before the first step: the shards', or its own.
    refused: dict[str, str]  # The message of a change to each mode that is not possible.


def momentum_of(optimizer: psworker.DistributedOptimizer, weight: torch.nn.Parameter) -> Array:
    """Returns the momentum on the shards, or here if this worker runs the optimizer; or zeros."""
    if table_of(optimizer).rule.outer_optimizer:
        state = wrapped_by(optimizer).state.get(weight, {})
    else:
        state = optimizer.state_dict()["state"].get(0, {})
    found: Array = state.get("momentum_buffer", torch.zeros(NUMEL)).numpy().copy()
    return found


def work(me: Station) -> list[Leg]:
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM), [("weight", weight)], mode=way()[0]
    )
    legs: list[Leg] = []
    for mode in way():
        if legs:
            optimizer.set_mode(mode)
        psworker.barrier("changed")  # Else in some modes one pulls what the other has pushed.
        leg = Leg([weight.detach().numpy().copy()], momentum_of(optimizer, weight), {})
        psworker.barrier("read")
        for _ in range(STEPS):
            weight.grad = torch.from_numpy(gradient(me.rank, STEPS * len(legs) + len(leg.models)))
            optimizer.step()
            leg.models.append(weight.detach().numpy().copy())
        for other in MODES if mode not in way()[: len(legs)] else ():
            if not is_possible(mode, other):
                with pytest.raises(ConfigError) as problem:
                    optimizer.set_mode(other)
                leg.refused[other] = str(problem.value)
        legs.append(leg)
    psworker.shutdown()
    return legs


@dataclass
class Expected:
    """A leg in float64: the mean of the models, and of the momenta of their optimizers.

    The gradients do not depend on the weights, so both follow from their means at the start.
    """

    mode: str
    number: int  # Of its first step.
    weights: Array
    momentum: Array

    def run(self) -> list[Array]:
        """Returns the global model before the first step, and after each."""
        rule, models = parse_mode(self.mode), [self.weights]
        start, outer = self.weights, np.zeros(NUMEL)
        for step in range(STEPS):
            grads = [gradient(rank, self.number + step + 1).astype(np.float64) for rank in (0, 1)]
            self.momentum = MOMENTUM * self.momentum + sum(grads) / 2
            self.weights = self.weights - LR * self.momentum
            if rule.name in ("slowmo", "diloco") and self._ends_round(step):
                move = start - self.weights
                if rule.name == "slowmo":
                    outer = 0.6 * outer + move / LR
                    self.weights = start - 0.8 * LR * outer
                else:
                    outer = 0.6 * outer + move
                    self.weights = start - 0.5 * (move + 0.6 * outer)
                start = self.weights
            models.append(self.weights)
        return models

    def _ends_round(self, step: int) -> bool:
        """Returns whether a round of two steps of training ends; the last one ends early."""
        return (self.number + step) % 2 == 1 or step == STEPS - 1


@pytest.mark.slow
def test_every_mode_changes_to_every_other_or_says_what_to_do_instead(shards: Shards) -> None:
    first, second = shards.run(work)
    pairs = set(zip(way(), way()[1:], strict=False))
    assert len(pairs) == sum(is_possible(a, b) for a in MODES for b in MODES if a != b)
    for index, (mode, leg, other) in enumerate(zip(way(), first, second, strict=True)):
        what = f"leg {index}: {way()[index - 1]} to {mode}"
        rule = parse_mode(mode)
        assert np.array_equal(leg.models[0], other.models[0]), what
        if not rule.outer_optimizer or rule.name == "allreduce":
            assert np.array_equal(leg.momentum, other.momentum), what
        momentum = (leg.momentum.astype(np.float64) + other.momentum) / 2
        expected = Expected(mode, STEPS * index, leg.models[0].astype(np.float64), momentum)
        models = expected.run()
        if rule.name == "allreduce":  # As in one process from here on.
            for ours, theirs, model in zip(leg.models, other.models, models, strict=True):
                assert np.array_equal(ours, theirs), what
                np.testing.assert_allclose(ours, model, rtol=0, atol=1e-5, err_msg=what)
        if index + 1 < len(first) and rule.name not in ORDERED:
            after = first[index + 1]
            what = f"{what} to {way()[index + 1]}"
            np.testing.assert_allclose(after.models[0], models[-1], rtol=0, atol=2e-5, err_msg=what)
            found = (after.momentum.astype(np.float64) + second[index + 1].momentum) / 2
            np.testing.assert_allclose(found, expected.momentum, rtol=0, atol=1e-4, err_msg=what)
    refused = {
        (mode, to): text
        for mode, leg in zip(way(), first, strict=True)
        for to, text in leg.refused.items()
    }
    assert len(refused) == sum(not is_possible(a, b) for a in MODES for b in MODES)
    for pair, text in refused.items():
        assert "save state_dict() and start a new job" in text, pair


def load_own_state(me: Station) -> tuple[list[Array], float]:
    """Trains alone, loads that state into all-reduce, and trains; the last worker loads none."""
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    inner = torch.optim.Adam([weight], lr=LR)
    for step in range(7) if me.rank < me.num_workers - 1 else ():
        weight.grad = torch.from_numpy(gradient(me.rank, step))
        inner.step()
    state = inner.state_dict()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adam([weight], lr=LR), [("weight", weight)], mode="allreduce"
    )
    optimizer.load_state_dict(state)
    loaded = float(wrapped_by(optimizer).state[weight]["step"])
    models = []
    for step in range(STEPS):
        weight.grad = torch.from_numpy(gradient(me.rank, step))
        optimizer.step()
        models.append(weight.detach().numpy().copy())
    psworker.shutdown()
    return models, loaded


@pytest.mark.slow
def test_different_states_that_are_loaded_leave_the_models_of_all_reduce_equal(
    shards: Shards,
) -> None:
    found = shards.run(load_own_state, num_workers=4)
    for models, step in found:
        assert step == 7.0, "the mean of those that have a state, and exact where they are equal"
        for ours, theirs in zip(models, found[0][0], strict=True):
            assert np.array_equal(ours, theirs)
