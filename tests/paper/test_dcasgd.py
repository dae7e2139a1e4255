"""Delay-compensated ASGD: the equation and where W_bak is taken, by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rules import DCASGD
from pscore.rules.base import Memory
from psserver.decisions.orders import Answer
from tests.harness import SLICES, Cluster, Vector, assert_follows, quadratic
from tests.paper.history import History
from tests.unit.psserver.ordered import last_of

GROUP = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}


def memory(weights: float) -> Memory:
    return Memory(weights=np.full(1, weights, np.float32))


def compensated(rule: DCASGD, worker: int, grad: float, kept: Memory) -> float:
    array = np.full(1, grad, np.float32)
    rule.compensate(array, worker, kept)
    return float(array[0])


def move(kept: Memory, weights: float) -> None:
    kept.weights[0] = weights


def test_by_hand() -> None:
    """g~ = 1/2 + 2 * 1/4 * (3 - 1) = 3/2."""
    rule, kept = DCASGD(variance_control=2.0), memory(1.0)
    rule.on_pull(0, kept)
    move(kept, 3.0)
    assert compensated(rule, 0, 0.5, kept) == 1.5
    assert compensated(rule, 0, -0.5, kept) == 0.5  # -1/2 + 2 * 1/4 * 2.


def test_the_adaptive_lambda_by_hand() -> None:
    """decay 3/4: MS = 1/4 * 4 = 1; lambda = 2; g~ = 2 + 2 * 4 * 1/4. Then MS = 3/4 + 1/4 * 16."""
    rule = DCASGD(adaptive=True, adaptive_control=2.0, decay=0.75)
    kept = memory(0.0)
    rule.on_pull(0, kept)
    move(kept, 0.25)
    assert compensated(rule, 0, 2.0, kept) == pytest.approx(4.0, rel=1e-6)
    assert compensated(rule, 0, 4.0, kept) == pytest.approx(4.0 + 8.0 / 4.75**0.5, rel=1e-6)
    # Another worker's mean square is its own.
    rule.on_pull(1, kept)
    move(kept, 0.5)
    assert compensated(rule, 1, 2.0, kept) == pytest.approx(4.0, rel=1e-6)


def test_each_worker_has_its_own_copy_and_it_is_taken_at_the_pull() -> None:
    """Not at the push, and not shared: STYLE.md 1.4 (1). Lambda 1, gradients 1."""
    rule, kept = DCASGD(variance_control=1.0), memory(1.0)
    rule.on_pull(0, kept)
    move(kept, 2.0)
    rule.on_pull(1, kept)
    move(kept, 4.0)
    assert compensated(rule, 0, 1.0, kept) == 1.0 + (4 - 1)
    assert compensated(rule, 1, 1.0, kept) == 1.0 + (4 - 2)
    # Worker 0 has pushed; another's update lands before worker 0 pulls: no drift after that.
    move(kept, 8.0)
    rule.on_pull(0, kept)
    assert compensated(rule, 0, 1.0, kept) == 1.0
    assert compensated(rule, 1, 1.0, kept) == 1.0 + (8 - 2)


@pytest.mark.parametrize("with_state", [False, True])
def test_a_look_is_not_a_pull_to_train_on(with_state: bool) -> None:
    cluster = Cluster(DCASGD(variance_control=1.0), lambda *_: np.ones(12), num_workers=1)
    store = cluster.shard.stores[0]
    pulled = Answer(token=0, worker=0, version=0, with_state=with_state)
    store.read(pulled)
    taken = last_of(store.export())["memory.weights_backup.0"].copy()
    store.weights[:] += 1.0
    seen, *_ = store.read(pulled._replace(is_look=True))
    assert seen is store.weights
    np.testing.assert_array_equal(last_of(store.export())["memory.weights_backup.0"], taken)
    store.read(pulled)
    np.testing.assert_array_equal(last_of(store.export())["memory.weights_backup.0"], taken + 1.0)


class Model(History):
    """W = W - lr V, V from g + lambda g g (W - W_bak[m])."""

    def __init__(self, cluster: Cluster, rule: DCASGD) -> None:
        super().__init__(cluster, rule)
        self.square = np.zeros_like(self.grads)

    def arrive(self, worker: int, index: int, grad: Vector, staleness: int) -> None:
        part = SLICES[index]
        control: Vector | float = self.rule.variance_control
        if self.rule.adaptive:
            mean = self.rule.decay * self.square[worker, part] + (1 - self.rule.decay) * grad**2
            self.square[worker, part] = mean
            control = self.rule.adaptive_control / np.sqrt(mean + 1e-7)
        drift = self.weights[part] - self.views[worker, part]
        self.step(index, grad + control * grad * grad * drift)


@pytest.mark.parametrize(
    "rule",
    [
        DCASGD(variance_control=0.5),
        DCASGD(adaptive=True),
        DCASGD(adaptive=True, adaptive_control=0.5, decay=0.0),
    ],
    ids=str,
)
def test_it_follows_the_equation_for_200_steps(rule: DCASGD) -> None:
    cluster = Cluster(
        rule, quadratic, num_workers=4, group=GROUP, seed=5, speeds=(1.0, 1.0, 0.6, 0.2)
    ).train()
    assert_follows(cluster, *Model(cluster, rule).follow())


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dcasgd.decay is 1.0"):
        DCASGD(decay=1.0)
    with pytest.raises(ConfigError, match=r"dcasgd.variance_control is -1"):
        DCASGD(variance_control=-1.0)
