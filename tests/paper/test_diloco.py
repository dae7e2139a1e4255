"""DiLoCo: the outer step, by hand and over 200 steps."""

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import DiLoCo
from tests.harness import NUMEL, Cluster, Vector, assert_follows, quadratic
from tests.paper.inner import Inner
from tests.paper.rounds import WORKERS, model


def test_by_hand() -> None:
    """H = 2, inner steps of 1 and of 3: D = -4. m = 1/2, outer lr 1/4, Nesterov.

    Round 1: V = -4, W = 1/4 * (4 + 1/2 * 4) = 3/2. Round 2: V = -6, W = 3/2 + 1/4 * (4 + 3).
    """
    cluster = Cluster(
        DiLoCo(steps=2, outer_lr=0.25, outer_momentum=0.5),
        lambda worker, step, weights: np.full(NUMEL, (-1.0, -3.0)[worker]),
        num_workers=2,
        steps=4,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 1.5, 2.5], [0, 3, 1.5, 4.5]]
    assert cluster.flat_weights().tolist() == [3.25] * NUMEL


def test_without_nesterov_by_hand() -> None:
    """As above: round 1 W = 1/4 * 4, round 2 W = 1 + 1/4 * 6."""
    cluster = Cluster(
        DiLoCo(steps=2, outer_lr=0.25, outer_momentum=0.5, nesterov=False),
        lambda worker, step, weights: np.full(NUMEL, (-1.0, -3.0)[worker]),
        num_workers=2,
        steps=4,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.flat_weights().tolist() == [2.5] * NUMEL


def test_the_warm_up_is_the_mean_and_leaves_the_outer_momentum_alone() -> None:
    """One warm-up step of 1, then a round of 2 whose momentum starts over: 1 + 1/2 * (2 + 1)."""
    cluster = Cluster(
        DiLoCo(steps=2, warmup=1, outer_lr=0.5, outer_momentum=0.5),
        lambda *_: np.full(NUMEL, -1.0),
        num_workers=2,
        steps=3,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    ).train()
    assert cluster.flat_weights().tolist() == [2.5] * NUMEL


@pytest.mark.parametrize("warmup", [0, 16])
def test_it_follows_the_equation_for_200_steps(warmup: int) -> None:
    """Delta = mean(theta_ref - theta_i); theta_ref = Nesterov(theta_ref, Delta), inner AdamW."""

    def make() -> Inner:
        return Inner(lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1))

    cluster = Cluster(
        DiLoCo(steps=8, warmup=warmup),
        quadratic,
        num_workers=WORKERS,
        inner=make(),
        seed=2,
        speeds=(1.0, 1.0, 0.6, 0.2),
    ).train()
    velocity = np.zeros(NUMEL)

    def outer(step: int, start: Vector, mean: Vector) -> Vector:
        nonlocal velocity
        if step < warmup:
            return mean.copy()
        delta = start - mean
        velocity = 0.9 * velocity + delta
        return start - 0.7 * (delta + 0.9 * velocity)

    def is_round(step: int) -> bool:
        return step < warmup or (step - warmup + 1) % 8 == 0

    assert_follows(cluster, *model(make(), is_round, outer, 200))


def test_the_inner_learning_rate_does_not_enter_the_outer_step() -> None:
    rows = [DiLoCo().outer_group(0, {"lr": lr}, 1) for lr in (0.1, 0.5)]
    assert rows[0] == rows[1]
    assert (rows[0]["lr"], rows[0]["momentum"], rows[0]["nesterov"]) == (0.7, 0.9, True)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"diloco.outer_momentum is 1.0"):
        DiLoCo(outer_momentum=1.0)
    with pytest.raises(ConfigError, match=r"diloco.outer_lr is -1.0"):
        DiLoCo(outer_lr=-1.0)
