"""SlowMo: the slow step, by hand and over 200 steps with a schedule."""

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.optimizers.base import DeviceStep, SliceStep
from pscore.optimizers.slowmo import SlowMo as SlowStep
from pscore.rules import SlowMo
from pscore.types import SegmentTable
from tests.harness import NUMEL, Cluster, Vector, assert_follows, quadratic
from tests.paper.inner import Inner
from tests.paper.overlapped import Rounds
from tests.paper.rounds import WORKERS, model


class Bench:
    """One element of the shard's weights."""

    def __init__(self, weight: float) -> None:
        self.weights = np.array([weight], np.float32)
        self.buffer = np.zeros(1, np.float32)
        self.counts = np.zeros(1, np.int64)

    def step(self, moved: float, scale: float, row: list[float]) -> float:
        segments = SegmentTable(bounds=np.array([[0, 1]]), groups=np.zeros(1, np.int64))
        out, ones = np.empty_like(self.weights), np.ones(1, np.int64)
        grad = np.array([moved], np.float32)
        SlowStep().step(SliceStep(
            self.weights, out, grad, scale, [self.buffer], segments, self.counts, ones,
            np.array([row]),
        ))  # fmt: skip
        self.weights = out
        return float(out[0])


def test_the_slow_step_by_hand() -> None:
    """lr 1/2, slow_lr 2, slow_momentum 1/4. D = 3/2: u = 3, W = 8 - 2 * 1/2 * 3."""
    bench = Bench(8.0)
    assert bench.step(3.0, 0.5, [0.5, 2.0, 0.25]) == 5.0
    # D = 1/2: u = 3/4 + 1, W = 5 - 7/4.
    assert bench.step(1.0, 0.5, [0.5, 2.0, 0.25]) == 3.25


def test_the_momentum_of_earlier_rounds_follows_the_learning_rate() -> None:
    """u is in units of gradients: lr from 1/2 to 1/4 halves what the first round still moves."""
    bench = Bench(8.0)
    assert bench.step(1.0, 1.0, [0.5, 1.0, 0.5]) == 7.0  # u = 2.
    assert bench.step(0.0, 1.0, [0.25, 1.0, 0.5]) == 6.75  # u = 1, times 1/4.


def test_a_learning_rate_of_zero_divides_nothing() -> None:
    bench = Bench(8.0)
    bench.step(1.0, 1.0, [0.5, 1.0, 0.5])
    assert bench.step(0.0, 1.0, [0.0, 1.0, 0.5]) == 7.0
    assert bench.buffer.tolist() == [1.0]


def test_a_round_that_ends_with_a_learning_rate_of_zero_counts() -> None:
    """Its earlier steps have moved the weights by 3; the momentum adds 0 times u, and decays."""
    bench = Bench(8.0)
    bench.step(1.0, 1.0, [0.5, 1.0, 0.5])
    assert bench.step(3.0, 1.0, [0.0, 1.0, 0.5]) == 4.0
    assert bench.buffer.tolist() == [1.0]
    assert bench.step(0.0, 1.0, [0.5, 1.0, 0.5]) == 3.75  # u = 1/2, times 1/2.


@pytest.mark.parametrize("overlap", ["none", "mirror", "blend", "late", "eager"])
@pytest.mark.parametrize("still", [{0}, {3, 7}, {4, 8}, {9}, {14, 19, 24}, set(range(10, 15))])
def test_rounds_with_steps_that_do_not_move_follow_the_equation(
    overlap: str, still: set[int]
) -> None:
    """Learning rates of 0 in the first, the last, one or every step of rounds of five steps."""
    rule = SlowMo(steps=5, slow_lr=0.8, slow_momentum=0.6, overlap=overlap, delay=2)

    def rate(step: int) -> float:
        return 0.0 if step in still else 0.1

    def make() -> Inner:
        return Inner(lambda p: torch.optim.SGD(p, lr=0.1), rate)

    cluster = Cluster(
        rule, quadratic, num_workers=WORKERS, inner=make(), lr=rate, steps=60, seed=1
    ).train()
    lasts, last = iter(rate(step) for step in range(4, 60, 5)), [0.0]

    def outer(weights: Vector, slow: Vector, move: Vector) -> tuple[Vector, Vector]:
        if not last[0]:
            return weights - 0.8 * move, 0.6 * slow
        slow = 0.6 * slow + move / last[0]
        return weights - 0.8 * last[0] * slow, slow

    class Ending(Rounds):
        """Rounds whose outer step takes the rate of the last step of each."""

        def end_round(self) -> None:
            last[:] = [next(lasts)]
            super().end_round()

    expected = Ending(overlap, outer, steps=5, delay=2, num_workers=WORKERS)
    assert_follows(cluster, *expected.run(make(), 60))


@pytest.mark.parametrize("row", [[0.5, 2.0, 0.25], [0.0, 2.0, 0.25], [0.5, 2.0, 0.0], [0.0] * 3])
def test_a_step_on_tensors_is_the_same_and_can_be_solved_for_its_move(row: list[float]) -> None:
    bench = Bench(8.0)
    bench.buffer[0] = 4.0
    after = bench.step(3.0, 1.0, row)
    weights, move, buffer, solved = (torch.tensor([value]) for value in (8.0, 3.0, 4.0, 4.0))
    segments = SegmentTable(bounds=np.array([[0, 1]]), groups=np.zeros(1, np.int64))
    counts, ones, hyper = np.zeros(1, np.int64), np.ones(1, np.int64), np.array([row])
    SlowStep().step_device(DeviceStep(weights, move, [buffer], segments, counts, ones, hyper))
    assert (weights.item(), buffer.item()) == (after, bench.buffer[0])
    found = SlowStep().infer(torch.tensor([8.0]), weights, [solved], segments, hyper)
    assert (found.item(), solved.item()) == (3.0 if row[1] else 0.0, buffer.item())


def test_the_warm_up_is_the_mean_and_leaves_the_slow_momentum_alone() -> None:
    rule = SlowMo(steps=4, warmup=2, slow_lr=2.0, slow_momentum=0.25)
    groups = [rule.outer_group(step, {"lr": 0.5}, 1) for step in (1, 2)]
    rows = [SlowStep.hyper_from_torch(group) for group in groups]
    assert rows == [(0.5, 1.0, 0.0), (0.5, 2.0, 0.25)]
    bench = Bench(8.0)
    assert bench.step(3.0, 0.5, list(rows[0])) == 6.5
    assert bench.buffer.tolist() == [0.0]


def lr(step: int) -> float:
    return 0.1 if step < 100 else 0.03


@pytest.mark.parametrize("warmup", [0, 10])
def test_it_follows_the_equation_for_200_steps(warmup: int) -> None:
    """Algorithm 1: u = beta u + (x_old - x_avg) / lr; x = x_old - alpha lr u."""
    rule = SlowMo(steps=5, warmup=warmup, slow_lr=0.8, slow_momentum=0.6)

    def make() -> Inner:
        return Inner(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True), lr)

    cluster = Cluster(
        rule, quadratic, num_workers=WORKERS, inner=make(), lr=lr, seed=1,
        speeds=(1.0, 1.0, 0.6, 0.2),
    ).train()  # fmt: skip
    slow = np.zeros(NUMEL)

    def outer(step: int, start: Vector, mean: Vector) -> Vector:
        nonlocal slow
        if step < warmup:
            return mean.copy()
        slow = 0.6 * slow + (start - mean) / lr(step)
        return start - 0.8 * lr(step) * slow

    def is_round(step: int) -> bool:
        return step < warmup or (step - warmup + 1) % 5 == 0

    assert_follows(cluster, *model(make(), is_round, outer, 200))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"slowmo.slow_momentum is 1.0"):
        SlowMo(slow_momentum=1.0)
    with pytest.raises(ConfigError, match=r"slowmo.slow_lr is -1.0"):
        SlowMo(slow_lr=-1.0)
    with pytest.raises(ConfigError, match=r"slowmo.steps is 0"):
        SlowMo(steps=0)
