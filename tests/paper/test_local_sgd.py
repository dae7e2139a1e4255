"""Local SGD: rounds, their mean, and the warm-up; by hand and over 200 steps."""

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError, GradientError
from pscore.rules import DiLoCo, LocalSGD
from pscore.types import Role
from tests.harness import NUMEL, SLICES, Cluster, Vector, assert_follows, quadratic
from tests.paper.inner import Inner, Maker
from tests.paper.rounds import WORKERS, model


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def rmsprop(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The shards have no counterpart of it, and need none."""
    return torch.optim.RMSprop(parameters, lr=0.01)


def test_nothing_is_sent_between_rounds() -> None:
    rule = LocalSGD(steps=3, warmup=2)
    plans = [rule.plan(step) for step in range(9)]
    ends = [True, True, False, False, True, False, False, True, False]
    assert [plan.push is Role.DELTA for plan in plans] == ends
    assert [plan.push is None for plan in plans] == [not end for end in ends]
    assert [plan.pull for plan in plans] == ends
    assert [plan.block for plan in plans] == ends
    assert all(plan.inner and not plan.local for plan in plans)


def test_by_hand() -> None:
    """lr 1, H = 2: worker 0 moves by 1 + 2, worker 1 by 5 + 0, and they meet at 4."""
    moves = [[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 1.0, 0.0]]
    cluster = Cluster(
        LocalSGD(steps=2),
        lambda worker, step, weights: np.full(NUMEL, -moves[worker][step]),
        num_workers=2,
        steps=4,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 4, 7], [0, 5, 4, 5]]
    assert cluster.flat_weights().tolist() == [8.0] * NUMEL  # 4 + (7 + 1) / 2.
    assert [clock.version for clock in cluster.shard.clocks] == [2, 2]


def test_a_round_is_weighed_by_the_mean_samples_of_its_steps() -> None:
    """Moves 1 and 9, samples 1 + 5 and 1 + 1 over two steps: (3 * 1 + 1 * 9) / 4."""
    cluster = Cluster(
        LocalSGD(steps=2),
        lambda worker, step, weights: np.full(NUMEL, (-0.5, -4.5)[worker]),
        num_workers=2,
        steps=2,
        samples=lambda worker, step: (1.0, 5.0)[step] if worker == 0 else 1.0,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.flat_weights().tolist() == [3.0] * NUMEL


def test_the_last_round_is_pushed_although_it_is_not_over() -> None:
    cluster = Cluster(
        LocalSGD(steps=4),
        lambda *_: np.full(NUMEL, -1.0),
        num_workers=2,
        steps=6,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.flat_weights().tolist() == [6.0] * NUMEL


def test_weights_that_are_not_finite_are_not_pushed() -> None:
    cluster = Cluster(
        LocalSGD(steps=2),
        lambda *_: np.full(NUMEL, np.inf),
        num_workers=1,
        steps=2,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    )
    with pytest.raises(GradientError, match="weights of slice 0 hold NaN or Inf at step 1"):
        cluster.train()
    assert cluster.flat_weights().tolist() == [0.0] * NUMEL


def average(step: int, start: Vector, mean: Vector) -> Vector:
    return mean.copy()


@pytest.mark.parametrize("make", [sgd, rmsprop])
@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (8, 16)])
def test_it_follows_the_equation_for_200_steps(make: Maker, steps: int, warmup: int) -> None:
    cluster = Cluster(
        LocalSGD(steps=steps, warmup=warmup),
        quadratic,
        num_workers=WORKERS,
        inner=Inner(make),
        seed=steps,
        speeds=(1.0, 1.0, 0.6, 0.2),
    ).train()

    def is_round(step: int) -> bool:
        return step < warmup or (step - warmup + 1) % steps == 0

    assert_follows(cluster, *model(Inner(make), is_round, average, 200))


# ----- rounds that need not wait for everybody


def test_a_round_closes_without_the_slowest_and_what_that_brings_later_is_dropped() -> None:
    """Worker 2 alone moves, by 3 in a round; its move, in time, is half of a mean of two."""
    cluster = Cluster(
        LocalSGD(steps=3, backup=1),
        lambda worker, step, weights: np.full(NUMEL, float(worker == 2)),
        num_workers=3,
        steps=2_000,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
        speeds=(1.0, 1.0, 0.2),
    )
    cluster.train(events=8_000)
    assert cluster.workers[2].exchange.traffic.num_too_late > 10
    pushed = [event for event in cluster.log if event.kind == "push" and event.worker == 2]
    for index, part in enumerate(SLICES):
        in_time = sum(event.slice == index for event in pushed)
        np.testing.assert_array_equal(cluster.flat_weights()[part], -1.5 * in_time)


def backup_model(cluster: Cluster, steps: int, num_needed: int) -> tuple[Vector, Vector]:
    """Rounds of the first `num_needed` workers of each slice, by the order of events."""
    count = cluster.num_workers
    weights, views = np.zeros(NUMEL), np.zeros((count, NUMEL))
    reference, local, speed = (np.zeros((count, NUMEL)) for _ in range(3))
    seen = np.zeros((count, cluster.steps, NUMEL))
    moves = [dict[int, Vector]() for _ in SLICES]
    live = set(range(count))
    for event in cluster.log:
        who = event.worker
        if event.kind == "compute":
            if event.number % steps == 0:
                reference[who] = local[who] = views[who]
            seen[who, event.number] = local[who]
            grad = quadratic(who, event.number, local[who]) + 0.01 * local[who]
            speed[who] = grad if event.number == 0 else 0.9 * speed[who] + grad
            local[who] = local[who] - 0.1 * speed[who]
        elif event.kind == "push":
            part = SLICES[event.slice]
            moves[event.slice][who] = reference[who, part] - local[who, part]
        elif event.kind == "answer":
            views[who, SLICES[event.slice]] = weights[SLICES[event.slice]]
        elif event.kind == "leave":
            live.discard(who)
        for part, moved in zip(SLICES, moves, strict=True):
            if moved and len(moved) >= min(num_needed, len(moved.keys() | live)):
                weights[part] -= sum(moved.values()) / len(moved)
                moved.clear()
    return seen, weights


@pytest.mark.parametrize("seed", range(3))
def test_rounds_with_backup_workers_follow_the_equation_for_200_steps(seed: int) -> None:
    cluster = Cluster(
        LocalSGD(steps=5, backup=2),
        quadratic,
        num_workers=5,
        inner=Inner(sgd),
        seed=seed,
        speeds=(1.0, 1.0, 1.0, 0.5, 0.1),
    ).train()
    assert sum(worker.exchange.traffic.num_too_late for worker in cluster.workers) > 20
    assert_follows(cluster, *backup_model(cluster, 5, 3))


def test_more_backup_workers_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local.backup is 2, must be less than the 2 workers"):
        Cluster(LocalSGD(backup=2), quadratic, num_workers=2)
    with pytest.raises(ConfigError, match=r"diloco.backup is -1, must be in 0"):
        DiLoCo(backup=-1)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local.steps is 0, must be in 1"):
        LocalSGD(steps=0)
    with pytest.raises(ConfigError, match=r"local.warmup is -1"):
        LocalSGD(warmup=-1)
