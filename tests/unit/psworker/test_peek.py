"""Looks between the steps of several workers: the equations hold as they do without them."""

import importlib

import numpy as np
import pytest
import torch

from pscore.rules import RULES, DelayedNesterov, parse_mode
from pscore.rules.base import Rule
from tests.harness import Cluster, assert_follows, quadratic
from tests.paper import test_delayed_nesterov
from tests.paper.history import History
from tests.paper.inner import Inner, sgd

GROUP = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
STEPS = 60

MODES = [
    name + arguments
    for name, rule in RULES.own.items()
    for arguments in rule.examples
    if not rule.gossip  # tests/paper/test_decentralised.py has those.
]
# Synchronous modes have the same bits in every order. The others have a model that replays the
# events, `Model` in their paper test; delayed_nesterov's test is below.
SYNCHRONOUS = [mode for mode in MODES if parse_mode(mode).by_step]
REPLAYED = [
    mode
    for mode in MODES
    if mode not in SYNCHRONOUS and parse_mode(mode).name != DelayedNesterov.name
]


def model_of(cluster: Cluster, rule: Rule) -> History:
    """Returns the model in the paper test of a rule."""
    module = importlib.import_module(f"tests.paper.test_{rule.name}")
    model: History = module.Model(cluster, rule)
    return model


def train(rule: Rule, *, looks: bool) -> Cluster:
    inner = Inner(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    return Cluster(
        rule,
        quadratic,
        num_workers=4,
        steps=STEPS,
        group=GROUP,
        seed=5,
        inner=inner if rule.outer_optimizer else None,
        speeds=(1.0, 1.0, 0.6, 0.2),
        looks=looks,
    ).train()


def test_delayed_nesterov_follows_its_equation() -> None:
    rule = parse_mode("delayed_nesterov(steps=4)")
    assert isinstance(rule, DelayedNesterov)
    cluster = train(rule, looks=True)
    assert_follows(cluster, *test_delayed_nesterov.follow(cluster, rule, sgd(0.05)))


@pytest.mark.parametrize("mode", REPLAYED)
def test_an_asynchronous_mode_follows_its_equation(mode: str) -> None:
    rule = parse_mode(mode)
    cluster = train(rule, looks=True)
    assert_follows(cluster, *model_of(cluster, rule).follow())


@pytest.mark.slow
@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_synchronous_mode_has_the_same_bits(mode: str) -> None:
    without, with_looks = (train(parse_mode(mode), looks=looks) for looks in (False, True))
    assert np.array_equal(without.seen(), with_looks.seen())
    assert np.array_equal(without.flat_weights(), with_looks.flat_weights())
    last_step_is_in = parse_mode(mode).plan(STEPS - 1).push is not None
    for worker in with_looks.workers if last_step_is_in else ():
        assert np.array_equal(worker.looked, with_looks.flat_weights())
