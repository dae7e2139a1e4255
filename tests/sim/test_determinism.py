"""The same seed gives the same bits in every synchronous mode, for any order of arrival."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from pscore.rules import ASGD, RULES, SSGD
from pscore.rules.base import Rule
from pssim.case import Case
from pssim.faulty import Outcome, simulate
from pssim.network import MessageFaults
from tests.sim.draws import draw_rule

# Modes whose workers exchange models are in tests/paper/test_decentralised.py.
SERVED = sorted(name for name, rule in RULES.items() if not rule.gossip)

WORKERS = 3
ARRIVALS = 3  # Orders of arrival that are compared.


def collects_all(rule: Rule) -> bool:
    """Whether each update is made of one gradient of each worker."""
    return rule.by_step and rule.least(WORKERS, WORKERS) == WORKERS


def synchronous() -> list[Rule]:
    """Returns a few rules of each name that collect all gradients of a step."""
    rules: list[Rule] = []
    for name in SERVED:
        rng = random.Random(name)
        found = {rule for rule in (draw_rule(name, WORKERS, rng) for _ in range(20))}
        rules += sorted(filter(collects_all, found), key=str)[:6]
    return rules


def training(rule: Rule, seed: int) -> Case:
    """The same training, with another order of arrival for each seed."""
    rng = random.Random(seed)
    return Case(
        seed=seed,
        rule=rule,
        num_shards=2,
        steps=(6,) * WORKERS,
        compute_s=tuple(rng.uniform(0.01, 0.5) for _ in range(WORKERS)),
        dies_s=(None,) * WORKERS,
        back_s=(None,) * WORKERS,
        samples=(1.0, 3.0, 2.0),
        faults=MessageFaults(drop=0.1, duplicate=0.1, delay_s_max=0.2, until_s=5.0),
        quadratic=True,
    )


def outcomes(rule: Rule) -> list[Outcome]:
    return [simulate(training(rule, seed)) for seed in range(ARRIVALS)]


@pytest.mark.parametrize("rule", synchronous(), ids=str)
def test_the_order_of_arrival_changes_no_bit(rule: Rule) -> None:
    first, *others = outcomes(rule)
    assert first.num_updates > 0
    for other in others:
        assert np.array_equal(first.weights, other.weights)
        for mine, yours in zip(first.workers, other.workers, strict=True):
            assert torch.equal(mine.replica.weights, yours.replica.weights)


def test_every_synchronous_rule_is_compared() -> None:
    names = {rule.name for rule in synchronous()}
    assert {"ssgd", "ssp", "od", "ssd", "cd", "local", "slowmo", "diloco"} <= names


def test_the_comparison_can_tell() -> None:
    """An asynchronous mode does depend on the order of arrival."""
    first, second, _ = outcomes(ASGD())
    assert not np.array_equal(first.weights, second.weights)


def test_adding_in_the_order_of_arrival_would_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "psserver.decisions.open_steps.sorted", lambda ranks: list(ranks)[::-1], raising=False
    )
    changed = simulate(training(SSGD(), 0))
    monkeypatch.undo()
    assert not np.array_equal(changed.weights, simulate(training(SSGD(), 0)).weights)


def test_one_seed_is_one_run() -> None:
    """Two runs of one case agree in every message, so that a failing seed can be seen again."""
    case = replace(training(SSGD(), 7), quadratic=False)
    assert simulate(case, trace=True).trace == simulate(case, trace=True).trace
