"""One-step-delay SGD: schedule and local updates, by hand and over 200 steps."""

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.local.dc import DC, AdaptiveDC
from pscore.rules import OD
from tests.harness import NUMEL, Cluster, Vector, assert_follows, quadratic
from tests.paper.quadratic import make_part, rebase

MOMENTUM, DECAY = 0.5, 0.01
GROUP = {"momentum": MOMENTUM, "weight_decay": DECAY}


def lr(step: int) -> float:
    """A schedule, which the local update has to follow."""
    return 0.1 if step < 120 else 0.04


# ----- the local update


def test_the_correction_by_hand() -> None:
    """lr 1/2, wd 1/4, lambda 2. First step: nothing to correct for. Then W goes from 1 to 3."""
    local, part = DC(variance_control=2.0), make_part([0.5, 0.0, 0.0, 0.25, 0.0, 0.0], 1)
    rebase(local, part, [1.0], version=0)
    local.update(part, torch.tensor([0.5]))
    part.past = [part.hyper]
    assert part.weights.tolist() == [1.0 - 0.5 * (0.5 + 0.25)]
    rebase(local, part, [3.0], version=1)
    part.past = []
    local.update(part, torch.tensor([0.5]))
    # 1/2 + 1/4 * 3 + 2 * 1/4 * (3 - 1) = 9/4.
    assert part.weights.tolist() == [3.0 - 0.5 * 2.25]


def test_a_pull_of_the_warm_up_is_the_one_before() -> None:
    """No local step between the pulls of 1, 3 and 4: W^t - W^{t-1} is 4 - 3."""
    local, part = DC(variance_control=1.0), make_part([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    for version, weight in enumerate((1.0, 3.0, 4.0)):
        rebase(local, part, [weight], version)
    local.update(part, torch.tensor([2.0]))
    assert part.weights.tolist() == [4.0 - (2.0 + 4.0)]


def test_maximize_turns_the_gradient_and_not_the_correction() -> None:
    local, part = DC(variance_control=1.0), make_part([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 1)
    for version, weight in enumerate((3.0, 4.0)):
        rebase(local, part, [weight], version)
    local.update(part, torch.tensor([2.0]))
    assert part.weights.tolist() == [4.0 - (-2.0 + 4.0)]


def test_the_adaptive_correction_by_hand() -> None:
    """decay 1/2: MS = 1/2 * 8 = 4, lambda = 6 / 2; then MS = 2 + 1/2 * 0, and g = 0 ends it."""
    local = AdaptiveDC(adaptive_control=6.0, decay=0.5)
    part = make_part([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    for version, weight in enumerate((3.0, 4.0)):
        rebase(local, part, [weight], version)
    grad = 8.0**0.5
    local.update(part, torch.tensor([grad]))
    assert part.weights.tolist() == pytest.approx([4.0 - (grad + 3.0 * 8.0)], rel=1e-6)
    local.update(part, torch.tensor([0.0]))
    assert part.state["mean_square"].tolist() == pytest.approx([2.0], rel=1e-6)


def test_a_segment_without_gradient_stays_and_its_pulls_count_all_the_same() -> None:
    """Pulls of 3, 4 and 6, a gradient after the last only: W^t - W^{t-1} is 6 - 4."""
    local, part = DC(variance_control=1.0), make_part([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    for version, weight in enumerate((3.0, 4.0, 6.0)):
        rebase(local, part, [weight], version)
        part.active[:] = version == 2
        part.past = [part.hyper]
        local.update(part, torch.tensor([1.0]))
        assert part.weights.tolist() == [weight if version < 2 else 6.0 - (1.0 + 2.0)]


# ----- the schedule


def test_by_hand() -> None:
    """One worker, plain step, lr 1/2, gradient w, W^0 = 1: it is its own shard, one step late."""
    cluster = Cluster(
        OD(warmup=1, local="sgd"),
        lambda worker, step, weights: weights,
        num_workers=1,
        steps=4,
        start=np.ones(NUMEL),
        group={"lr": 0.5},
    ).train()
    # Warm-up: w^1 = W^1 = 1/2. w^2 = W^1 - 1/2 * w^1 = 1/4 = W^2. w^3 = W^2 - 1/2 * w^2 = 1/8.
    assert cluster.seen()[0, :, 0].tolist() == [1.0, 0.5, 0.25, 0.125]


def test_the_gradients_of_others_are_seen_one_step_late() -> None:
    """Two workers, gradients -2 and -6 at step 0 only, lr 1, plain: W^1 = 4."""
    cluster = Cluster(
        OD(warmup=0, local="sgd"),
        lambda worker, step, weights: np.full(NUMEL, (-2.0, -6.0)[worker] * (step == 0)),
        num_workers=2,
        steps=3,
        group={"lr": 1.0},
    ).train()
    assert cluster.seen()[:, :, 0].tolist() == [[0.0, 2.0, 4.0], [0.0, 6.0, 4.0]]


def test_a_local_rate_of_its_own() -> None:
    cluster = Cluster(
        OD(warmup=0, local="sgd", lr_scale=0.5),
        lambda worker, step, weights: np.full(NUMEL, -1.0),
        num_workers=1,
        steps=3,
        group={"lr": 1.0},
    ).train()
    assert cluster.seen()[0, :, 0].tolist() == [0.0, 0.5, 1.5]


def model(rule: OD, num_workers: int, steps: int) -> tuple[Vector, Vector]:
    """The equations of the paper, by t; the order of arrival has no place in them."""
    history = [np.zeros(NUMEL), np.zeros(NUMEL)]  # W^{-1}, W^0, ...
    velocity = np.zeros(NUMEL)
    local = np.zeros((num_workers, NUMEL))
    square = np.zeros((num_workers, NUMEL))
    seen = np.zeros((num_workers, steps, NUMEL))
    for step in range(steps):
        seen[:, step] = local
        before, now = history[-2:]
        grads = np.array([quadratic(i, step, local[i]) for i in range(num_workers)])
        velocity = MOMENTUM * velocity + grads.mean(axis=0) + DECAY * now
        history.append(now - lr(step) * velocity)
        if step < rule.warmup:
            local[:] = history[-1]
            continue
        control: Vector | float = {"sgd": 0.0, "none": 0.0}.get(rule.local, rule.variance_control)
        if rule.local == "dc_adaptive":
            square = rule.decay * square + (1 - rule.decay) * grads**2 + 1e-7
            control = rule.adaptive_control / np.sqrt(square)
        move = grads + DECAY * now + control * grads**2 * (now - before)
        local = now - rule.lr_scale * lr(step) * move * (rule.local != "none")
    return seen, history[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        OD(warmup=20, local="sgd"),
        OD(warmup=20, local="dc", variance_control=0.5),
        OD(warmup=20, local="dc_adaptive", adaptive_control=0.7),
        OD(warmup=0, local="dc_adaptive", decay=0.9, lr_scale=0.5),
        OD(warmup=7, local="none"),
    ],
    ids=str,
)
def test_it_follows_the_equation_for_200_steps(rule: OD) -> None:
    for seed in range(2):
        cluster = Cluster(
            rule, quadratic, num_workers=4, group=GROUP, lr=lr, seed=seed,
            speeds=(1.0, 1.0, 0.6, 0.2),
        ).train()  # fmt: skip
        assert_follows(cluster, *model(rule, 4, 200))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"od.local is 'x', must be one of dc, dc_adaptive, glu"):
        OD(local="x")
    with pytest.raises(ConfigError, match=r"dc_adaptive.decay is 1.0"):
        OD(local="dc_adaptive", decay=1.0)
