"""Stale synchronous parallel: the updates that a read must hold, by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rules import SSP
from pscore.types import Pull, Push
from psserver.decisions.orders import Answer, Update
from psserver.decisions.slice_clock import SliceClock
from tests.harness import Cluster, Vector, assert_follows, quadratic
from tests.paper.history import History
from tests.participants import Listed

GROUP = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
HYPER = np.zeros((1, 6))


class Bench:
    def __init__(self, bound: int) -> None:
        self.live = [0, 1]
        self.clock = SliceClock(SSP(bound=bound), Listed(lambda: self.live, 2))
        self.clock.version = 0

    def push(self, worker: int, step: int) -> list[str]:
        message = Push(worker=worker, step=step, base_version=0, hyper=HYPER)
        actions = self.clock.push(message, (worker, step))
        return [str(a.token) for a in actions if isinstance(a, Answer)]

    def pull(self, worker: int, clock: int) -> bool:
        token = f"{worker} at {clock}"
        actions = self.clock.pull(Pull(worker=worker, clock=clock, min_version=0), token)
        return any(isinstance(action, Answer) for action in actions)


def test_a_read_waits_for_the_slowest_within_the_bound() -> None:
    """s = 2: the fast worker reads at clocks 1 and 2, and waits at 3 until the other is at 1."""
    bench = Bench(2)
    for clock in (1, 2):
        bench.push(0, clock - 1)
        assert bench.pull(0, clock)
    bench.push(0, 2)
    assert not bench.pull(0, 3)
    assert bench.push(1, 0) == ["0 at 3"]


def test_the_lead_reaches_the_bound_and_does_not_pass_it() -> None:
    cluster = Cluster(SSP(bound=3), quadratic, steps=40, speeds=(1.0, 1.0, 0.02), seed=1).train()
    clocks, leads = [0] * 3, []
    for event in cluster.log:
        if event.kind == "push" and event.slice == 0:
            clocks[event.worker] += 1
        elif event.kind == "answer" and event.slice == 0:
            leads.append(clocks[event.worker] - min(clocks))
    assert max(leads) == 3


def test_a_read_holds_the_readers_own_writes() -> None:
    bench = Bench(5)
    assert not bench.pull(0, 1)
    assert bench.push(1, 0) == []
    assert bench.push(0, 0) == ["0 at 1"]


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    bench = Bench(0 + 1)
    bench.push(0, 0)
    bench.push(0, 1)
    assert not bench.pull(0, 2)
    bench.live.remove(1)
    assert [a for a in bench.clock.recheck() if isinstance(a, Answer)]


def test_writes_are_updates_on_arrival() -> None:
    clock = Bench(3).clock
    message = Push(worker=1, step=0, base_version=0, hyper=HYPER)
    assert [a.scale for a in clock.push(message, "t") if isinstance(a, Update)] == [1.0]


def test_a_bound_of_zero_is_synchronous() -> None:
    bench = Bench(0)
    bench.push(0, 0)
    assert bench.clock.version == 0
    bench.push(1, 0)
    assert bench.clock.version == 1


class Model(History):
    """Every update before clock c - s is in a read at clock c, and the reader's own all are."""

    def __init__(self, cluster: Cluster, rule: SSP) -> None:
        super().__init__(cluster, rule)
        self.leads: list[int] = []

    def arrive(self, worker: int, index: int, grad: Vector, staleness: int) -> None:
        self.step(index, grad)

    def read(self, worker: int, index: int) -> None:
        assert self.clocks[worker, index] == self.computed[worker]
        slowest = min(self.clocks[other, index] for other in self.live)
        self.leads.append(int(self.clocks[worker, index] - slowest))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_it_follows_the_equation_for_200_steps(seed: int) -> None:
    cluster = Cluster(
        SSP(bound=2), quadratic, num_workers=4, group=GROUP, seed=seed, speeds=(1.0, 1.0, 0.5, 0.1)
    ).train()
    model = Model(cluster, SSP(bound=2))
    assert_follows(cluster, *model.follow())
    assert max(model.leads) == 2


def test_a_bound_below_minus_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssp.bound is -2, must be in -1"):
        SSP(bound=-2)
