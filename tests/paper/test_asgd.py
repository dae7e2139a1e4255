"""Asynchronous SGD: the equation, by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.rules import ASGD
from pscore.types import Pull, Push
from psserver.decisions.orders import Answer, Update
from psserver.decisions.slice_clock import SliceClock
from tests.harness import Cluster, Vector, assert_follows, quadratic
from tests.paper.history import History
from tests.participants import Listed

GROUP = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
HYPER = np.zeros((1, 6))


def test_every_gradient_is_an_update_and_a_worker_waits_for_its_own_only() -> None:
    clock = SliceClock(ASGD(), Listed(lambda: [0, 1, 2], 3))
    clock.version = 0
    pull = Pull(worker=0, clock=1, min_version=0)
    assert clock.pull(pull, "pull") == []
    other = clock.push(Push(worker=1, step=0, base_version=0, hyper=HYPER), "other")
    assert [a.version for a in other if isinstance(a, Update)] == [1]
    assert not [a for a in other if isinstance(a, Answer)]
    own = clock.push(Push(worker=0, step=0, base_version=0, hyper=HYPER), "own")
    assert [a.version for a in own if isinstance(a, Update | Answer)] == [2, 2]


def test_by_hand() -> None:
    """Two workers from W = 1, lr 1/2, gradient w: an old gradient counts in full."""
    weights, views = 1.0, [1.0, 1.0]
    weights -= views[0] / 2  # 1/2
    weights -= views[1] / 2  # 0, from weights that are gone.
    assert weights == 0.0
    cluster = Cluster(ASGD(), lambda worker, step, w: w, num_workers=2, steps=1,
                      start=np.ones(12), group={"lr": 0.5}, speeds=(1.0, 0.0))  # fmt: skip
    late = cluster.workers[1]
    while not late.seen:
        cluster.turn(1)
    cluster.train(events=200)
    assert cluster.flat_weights().tolist() == [0.5] * 12
    cluster.speeds = (1.0, 1.0)
    cluster.train()
    assert cluster.flat_weights().tolist() == [0.0] * 12


class Model(History):
    def arrive(self, worker: int, index: int, grad: Vector, staleness: int) -> None:
        self.step(index, grad)


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_the_equation_for_200_steps(seed: int) -> None:
    cluster = Cluster(
        ASGD(), quadratic, num_workers=4, group=GROUP, seed=seed, speeds=(1.0, 1.0, 0.6, 0.2)
    ).train()
    model = Model(cluster, ASGD())
    assert_follows(cluster, *model.follow())
    assert max(model.staleness) > 3
