"""Looks between the steps of several workers: the equations hold as they do without them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pscore.rules import RULES, DelayedNesterov, parse_mode
from pscore.rules.base import Rule
from tests.harness import Cluster, assert_follows, quadratic
from tests.paper import test_asgd, test_dcasgd, test_delayed_nesterov, test_ssp, test_staleness
from tests.paper.history import History
from tests.paper.inner import Inner, sgd

GROUP = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
STEPS = 60

# Of each mode that depends on workers' speeds, a model that replays the events.
MODELS: dict[str, Callable[[Cluster, Any], History]] = {
    "asgd": lambda cluster, rule: test_asgd.Model(cluster),
    "staleness(splits=2)": lambda cluster, rule: test_staleness.Model(cluster, 2),
    "dcasgd(variance_control=0.5)": test_dcasgd.Model,
    "dcasgd(adaptive=True)": test_dcasgd.Model,
    "ssp(bound=2)": lambda cluster, rule: test_ssp.Model(cluster),
}
# The others have the same bits in every order.
SYNCHRONOUS = (
    "ssgd",
    "ssp(bound=0)",
    "od(warmup=5)",
    "od(warmup=5, local=none)",
    "od(warmup=5, local=mirror)",
    "ssd(steps=3, warmup=5)",
    "ssd(steps=4, warmup=5, local=glu)",
    "ssd(steps=4, warmup=5, spread=2)",
    "cd(steps=3, warmup=5)",
    "local(steps=4, warmup=5)",
    "slowmo(steps=4, warmup=5)",
    "diloco(steps=4, warmup=5)",
)


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


def test_every_mode_is_here() -> None:
    exchanging = {name for name, rule in RULES.items() if rule.gossip}  # test_decentralised.py.
    names = {parse_mode(mode).name for mode in (*MODELS, *SYNCHRONOUS)}
    assert names | {DelayedNesterov.name} == RULES.keys() - exchanging


def test_delayed_nesterov_follows_its_equation() -> None:
    rule = parse_mode("delayed_nesterov(steps=4)")
    assert isinstance(rule, DelayedNesterov)
    cluster = train(rule, looks=True)
    assert_follows(cluster, *test_delayed_nesterov.follow(cluster, rule, sgd(0.05)))


@pytest.mark.parametrize("mode", MODELS)
def test_an_asynchronous_mode_follows_its_equation(mode: str) -> None:
    rule = parse_mode(mode)
    cluster = train(rule, looks=True)
    assert_follows(cluster, *MODELS[mode](cluster, rule).follow())


@pytest.mark.slow
@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_synchronous_mode_has_the_same_bits(mode: str) -> None:
    without, with_looks = (train(parse_mode(mode), looks=looks) for looks in (False, True))
    assert np.array_equal(without.seen(), with_looks.seen())
    assert np.array_equal(without.flat_weights(), with_looks.flat_weights())
    last_step_is_in = parse_mode(mode).plan(STEPS - 1).push is not None
    for worker in with_looks.workers if last_step_is_in else ():
        assert np.array_equal(worker.looked, with_looks.flat_weights())
