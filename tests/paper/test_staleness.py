"""Staleness-aware SGD (n-softsync): the equation, by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rules import Staleness
from pscore.types import Push
from psserver.decisions.orders import Action, Add, Update
from psserver.decisions.slice_clock import SliceClock
from tests.harness import SLICES, Cluster, Vector, assert_follows, quadratic
from tests.paper.history import History
from tests.participants import Listed

GROUP = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
HYPER = np.zeros((1, 6))


def make_clock(rule: Staleness, num_workers: int) -> tuple[SliceClock, list[int]]:
    live = list(range(num_workers))
    clock = SliceClock(rule, Listed(lambda: live, num_workers))
    clock.version = 0
    return clock, live


def push(clock: SliceClock, worker: int, step: int, base: int) -> list[Action]:
    message = Push(worker=worker, step=step, base_version=base, hyper=HYPER)
    return clock.push(message, f"{worker}.{step}")


def scales(actions: list[Action]) -> list[float]:
    return [a.weight for a in actions if isinstance(a, Add)]


def updates(actions: list[Action]) -> list[float]:
    return [a.scale for a in actions if isinstance(a, Update)]


def test_a_gradient_counts_in_inverse_proportion_to_its_staleness() -> None:
    """n = N = 4, so that each is an update of its own."""
    clock, _ = make_clock(Staleness(splits=4), 4)
    assert scales(push(clock, 0, 0, base=0)) == [1.0]  # tau = 0.
    assert scales(push(clock, 1, 0, base=0)) == [1.0]  # tau = 1.
    assert scales(push(clock, 2, 0, base=0)) == [0.5]  # tau = 2.
    assert scales(push(clock, 3, 0, base=0)) == [1 / 3]
    assert scales(push(clock, 0, 1, base=1)) == [1 / 3]  # It had pulled version 1: tau = 3.
    assert scales(push(clock, 1, 1, base=5)) == [1.0]


@pytest.mark.parametrize(("splits", "wanted"), [(1, 5), (2, 2), (3, 1), (5, 1)])
def test_an_update_takes_the_floor_of_workers_over_n(splits: int, wanted: int) -> None:
    clock, _ = make_clock(Staleness(splits=splits), 5)
    for number in range(wanted - 1):
        assert updates(push(clock, 0, number, base=0)) == []  # From any workers.
    assert updates(push(clock, 0, wanted - 1, base=0)) == [1 / wanted]


def test_the_mean_is_over_the_gradients_and_not_over_their_scales() -> None:
    """c = 2: (1/2) * (g_0 / 2 + g_1 / 1)."""
    clock, _ = make_clock(Staleness(splits=2), 4)
    for step in range(4):
        push(clock, 0, step, base=0)
    assert clock.version == 2
    assert scales(push(clock, 1, 0, base=0)) == [0.5]
    last = push(clock, 2, 0, base=1)
    assert (scales(last), updates(last)) == ([1.0], [0.5])


def test_a_gradient_is_scaled_before_the_momentum() -> None:
    """lr 1, m 1/2, g = 1, tau = 0 and 2: V = 1, then V = 1/2 + 1/2 and W = -2."""
    cluster = Cluster(Staleness(splits=2), lambda *_: np.ones(12), num_workers=2,
                      group={"lr": 1.0, "momentum": 0.5})  # fmt: skip
    shard = cluster.shard
    worker = cluster.workers[0]
    for step, base in ((0, 0), (1, 1), (2, 0)):
        message = Push(worker=0, step=step, base_version=base, samples=1.0, hyper=cluster.rows(0))
        worker.exchange.push(0, message, worker.grads[0].fill_(1.0), compress=False)
        while cluster.turn(0, "request", "answer"):
            pass
    # V: 1, 3/2, then tau = 2: 3/4 + 1/2 = 5/4; W = -(1 + 3/2 + 5/4).
    assert shard.stores[0].weights.tolist() == [-3.75] * 6


def test_the_rest_of_an_update_is_made_when_no_other_worker_comes() -> None:
    clock, live = make_clock(Staleness(), 3)
    push(clock, 0, 0, base=0)
    push(clock, 1, 0, base=0)
    live.remove(2)
    assert updates(clock.recheck()) == [0.5]


class Model(History):
    """W = W - lr * V, V from (1/c) sum g / max(1, tau)."""

    def __init__(self, cluster: Cluster, rule: Staleness) -> None:
        super().__init__(cluster, rule)
        self.per_update = cluster.num_workers // rule.splits
        self.waiting: list[list[Vector]] = [[] for _ in SLICES]

    def arrive(self, worker: int, index: int, grad: Vector, staleness: int) -> None:
        self.waiting[index].append(grad / staleness if staleness > 0 else 1.0 * grad)
        self.close(index)

    def close(self, index: int) -> None:
        waiting = self.waiting[index]
        if waiting and len(waiting) >= min(self.per_update, max(1, len(self.live))):
            self.step(index, np.sum(waiting, axis=0) / len(waiting))
            waiting.clear()

    def left(self) -> None:
        for index in range(len(SLICES)):
            self.close(index)


@pytest.mark.parametrize(
    "splits", [2, *(pytest.param(splits, marks=pytest.mark.slow) for splits in (1, 5))]
)
def test_it_follows_the_equation_for_200_steps(splits: int) -> None:
    rule = Staleness(splits=splits)
    cluster = Cluster(
        rule, quadratic, num_workers=5, group=GROUP, seed=splits, speeds=(1.0, 1.0, 1.0, 0.5, 0.2)
    ).train()
    model = Model(cluster, rule)
    assert_follows(cluster, *model.follow())
    assert max(model.staleness) > 1
    assert 0.5 * splits < np.mean(model.staleness) < 1.5 * splits  # "n on average".


def test_more_updates_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"staleness.splits is 3, must be at most the 2 workers"):
        make_clock(Staleness(splits=3), 2)
