"""Delayed Nesterov: the step by hand, and 200 steps in the order of arrival of a random run."""

import numpy as np
import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.errors import ConfigError
from pscore.optimizers.base import SliceStep
from pscore.optimizers.delayed_nesterov import DelayedNesterov as Delayed
from pscore.rules import DelayedNesterov, parse_mode
from pscore.types import SegmentTable
from tests.harness import NUMEL, SLICES, Cluster, Vector, assert_follows, quadratic
from tests.paper.inner import Inner, Maker, adamw

WORKERS = 4


class Bench:
    """Two segments of one element, of which the second may have no gradient."""

    def __init__(self, weight: float) -> None:
        self.weights = np.array([weight, 1.0], np.float32)
        self.state = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
        self.counts = np.zeros(2, np.int64)

    def step(self, moved: float, row: list[float], *, scale: float = 1.0) -> float:
        """Makes a step of the first segment into new memory."""
        segments = SegmentTable(bounds=np.array([[0, 1], [1, 2]]), groups=np.zeros(2, np.int64))
        out, after = np.empty_like(self.weights), [np.empty(2, np.float32) for _ in self.state]
        grad = np.array([moved, 9.0], np.float32)
        Delayed().step(SliceStep(
            self.weights, out, grad, scale, self.state, segments, self.counts,
            np.array([1, 0]), np.array([row]), state_out=after,
        ))  # fmt: skip
        self.weights, self.state = out, after
        return float(out[0])


def test_the_step_by_hand() -> None:
    """lr 1/2, m 1/2, N 2, c 0: moves of 4 and 8 in pairs, and then of 2 and 2.

    W = 16 - 1/2 * 2; V = 6, W = 15 - 1/2 * (4 + 3); then 1/2 * 1; V = 3 + 2, 1/2 * (1 + 5/2).
    """
    bench, row = Bench(16.0), [0.5, 0.5, 2.0, 0.0]
    assert [bench.step(moved, row) for moved in (4.0, 8.0, 2.0, 2.0)] == [15.0, 11.5, 11.0, 9.25]
    assert [array.tolist() for array in bench.state] == [[5.0, 0.0], [0.0, 0.0]]
    assert bench.weights[1] == 1.0
    assert bench.counts.tolist() == [4, 0]


def test_n_arrivals_are_one_nesterov_step_with_their_mean() -> None:
    """As above: V = 6, W = 16 - 1/2 * (6 + 3) = 11.5; V = 5, W = 11.5 - 1/2 * (2 + 5/2) = 9.25."""
    weight = torch.nn.Parameter(torch.tensor([16.0]))
    outer = torch.optim.SGD([weight], lr=0.5, momentum=0.5, nesterov=True)
    for moves, expected in (((4.0, 8.0), 11.5), ((2.0, 2.0), 9.25)):
        weight.grad = torch.tensor([sum(moves) / 2])
        outer.step()
        assert weight.item() == expected


def test_a_spread_momentum_moves_the_weights_as_far_in_equal_parts() -> None:
    """c = 1/N: with V = 6 behind a pair, each of the next two moves 1/2 * 1/4 * V more.

    W = 16 - 1/2 * 2; V = 6, W = 15 - 1/2 * (4 + 1/4 * 6) = 12.25; then 1/2 * (1 + 1/4 * 6) = 1.25;
    V = 5, 1/2 * (1 + 1/4 * 5).
    """
    bench, row = Bench(16.0), [0.5, 0.5, 2.0, 0.5]
    expected = [15.0, 12.25, 11.0, 9.875]
    assert [bench.step(moved, row) for moved in (4.0, 8.0, 2.0, 2.0)] == expected


def test_without_momentum_the_state_is_left_alone() -> None:
    bench = Bench(16.0)
    assert bench.step(8.0, [0.5, 0.0, 4.0, 0.0], scale=0.5) == 15.5
    assert not any(array.any() for array in bench.state)
    assert Delayed().keeps_state(np.array([[0.5, 0.0, 4.0, 0.0]]))
    assert not Delayed().keeps_state(np.array([[0.5, 0.9, 4.0, 0.0]]))


def test_a_number_of_arrivals_that_no_mode_sends_counts_as_one() -> None:
    """It comes from a peer: W = 16 - 1/2 * (4 + 1/2 * 4)."""
    assert Bench(16.0).step(4.0, [0.5, 0.5, 0.0, 0.0]) == 13.0


class Shard:
    """The equation in float64, of one slice."""

    def __init__(self, numel: int, rule: DelayedNesterov) -> None:
        self.rule, self.every = rule, rule.every or WORKERS
        self.weights, self.velocity = np.zeros(numel), np.zeros(numel)
        self.moves: list[Vector] = []

    def arrive(self, move: Vector) -> None:
        rule, every = self.rule, self.every
        self.moves.append(move)
        part = rule.activation
        if len(self.moves) == every:
            mean = np.mean(self.moves, axis=0)
            self.velocity = rule.outer_momentum * self.velocity + mean
            self.moves, part = [], 1 - (every - 1) * rule.activation
        along = part * rule.outer_momentum * self.velocity
        self.weights = self.weights - rule.outer_lr * (move / every + along)


def follow(cluster: Cluster, rule: DelayedNesterov, make: Maker = adamw) -> tuple[Vector, Vector]:
    """Returns what each worker saw at each step, and the last weights."""
    inner, shards = Inner(make), [Shard(NUMEL // 2, rule) for _ in SLICES]
    local = torch.zeros((WORKERS, NUMEL), dtype=torch.float64)
    starts, seen = np.zeros((WORKERS, NUMEL)), np.zeros((WORKERS, cluster.steps, NUMEL))
    for event in cluster.log:
        who, part = event.worker, SLICES[event.slice]
        if event.kind == "compute":
            seen[who, event.number] = local[who].numpy()
            grad = quadratic(who, event.number, local[who].numpy())
            inner(who, event.number, local[who], grad)
        elif event.kind == "push":
            shards[event.slice].arrive(starts[who, part] - local[who, part].numpy())
        elif event.kind == "answer":
            starts[who, part] = shards[event.slice].weights
            local[who, part] = torch.from_numpy(starts[who, part])
    return seen, np.concatenate([shard.weights for shard in shards])


@pytest.mark.parametrize(
    "mode", ["delayed_nesterov(steps=5)", "delayed_nesterov(steps=4, every=3, activation=0.2)"]
)
def test_it_follows_the_equation_for_200_steps(mode: str) -> None:
    """Workers of unequal speed, none of which waits for another."""
    rule = parse_mode(mode)
    assert isinstance(rule, DelayedNesterov)
    cluster = Cluster(
        rule, quadratic, num_workers=WORKERS, inner=Inner(adamw), seed=3,
        speeds=(1.0, 1.0, 0.6, 0.2),
    ).train()  # fmt: skip
    assert_follows(cluster, *follow(cluster, rule))
    last = [event.worker for event in cluster.log if event.kind == "push"][-40:]
    assert set(last) == {3}  # The others have ended long before.


def test_a_step_follows_from_the_rounds_behind_it() -> None:
    rule = DelayedNesterov(steps=3)
    pushes = [step for step in range(12) if rule.plan(step).push is not None]
    assert pushes == [2, 5, 8, 11]
    assert [rule.step_after(0, num) for num in range(4)] == [0, 3, 6, 9]
    assert not rule.by_step
    assert rule.fan_in(4, 4) == 1


def test_the_momentum_waits_for_as_many_arrivals_as_there_are_workers() -> None:
    assert DelayedNesterov().outer_group(0, {}, 6)["every"] == 6
    assert DelayedNesterov(every=3).outer_group(0, {}, 6)["every"] == 3


def test_arguments_out_of_range_are_refused() -> None:
    for text, message in (
        ("outer_momentum=1.0", "delayed_nesterov.outer_momentum is 1.0"),
        ("outer_lr=-1.0", "delayed_nesterov.outer_lr is -1.0"),
        ("steps=0", "delayed_nesterov.steps is 0"),
        ("every=-1", "delayed_nesterov.every is -1"),
        ("every=4, activation=0.5", "delayed_nesterov.activation is 0.5, must be at most 1/4"),
        ("quorum=3", "mode 'delayed_nesterov' has no argument 'quorum'; it has steps, every"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_mode(f"delayed_nesterov({text})")
    DelayedNesterov(activation=0.25).require_workers(4)
    with pytest.raises(ConfigError, match=r"activation is 0.25, must be at most 1/5"):
        DelayedNesterov(activation=0.25).require_workers(5)


def test_few_bits_with_error_feedback_are_cautioned() -> None:
    compressor = parse_compressor("topk")
    assert "momentum counts it again" in DelayedNesterov().caution(compressor)
    assert not DelayedNesterov(outer_momentum=0.0).caution(compressor)
