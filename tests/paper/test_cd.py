"""CD-SGD: which pushes are compressed, and the fate of the rest; by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.compressors.two_bit import TwoBit
from pscore.errors import ConfigError
from pscore.rules import CD
from tests.harness import NUMEL, Cluster, Vector, assert_follows, quadratic

LR, MOMENTUM, DECAY, WORKERS, THRESHOLD = 0.04, 0.5, 0.01, 4, 0.5
GROUP = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}


def test_k_minus_one_of_k_pushes_are_compressed_and_the_warm_up_is_not() -> None:
    plans = [CD(warmup=2, steps=3).plan(step) for step in range(8)]
    assert [plan.compress for plan in plans] == [False] * 2 + [True, True, False] * 2
    assert [plan.block for plan in plans] == [True] * 2 + [False] * 6
    assert not any(plan.flush for plan in plans)
    plans = [CD(warmup=2, steps=3, correction="flush").plan(step) for step in range(8)]
    assert [plan.flush for plan in plans] == [False] * 4 + [True] + [False] * 2 + [True]


@pytest.mark.parametrize(
    ("correction", "weights", "residual"),
    [
        # g = 3/4 at every step, lr 1, threshold 1/2: r = 1/4; then 1, of which 1/2 goes: r = 1/2.
        ("raw", [0.0, -0.5, -1.0, -1.75, -2.25], 0.75),  # Then g alone, and r = 3/4 after step 3.
        ("flush", [0.0, -0.5, -1.0, -2.25, -2.75], 0.25),  # Then g + r, and r starts over.
    ],
)
def test_by_hand(correction: str, weights: list[float], residual: float) -> None:
    cluster = Cluster(
        CD(warmup=0, steps=3, correction=correction, local="none"),
        lambda *_: np.full(NUMEL, 0.75),
        num_workers=1,
        steps=4,
        group={"lr": 1.0},
        compressor=TwoBit(threshold=0.5),
    ).train()
    # Without a local update a worker sees W one step late: w^{t+1} = W^t.
    assert cluster.seen()[0, :, 0].tolist() == [0.0, *weights[:3]]
    assert cluster.flat_weights().tolist() == [weights[4]] * NUMEL
    assert cluster.workers[0].kept[0]["residual"].tolist() == [residual] * (NUMEL // 2)


def test_the_local_update_takes_the_uncompressed_gradient() -> None:
    """Below the threshold nothing is sent, and the worker's own weights move all the same."""
    cluster = Cluster(
        CD(warmup=0, steps=5),
        lambda *_: np.full(NUMEL, 0.25),
        num_workers=1,
        steps=2,
        group={"lr": 1.0},
        compressor=TwoBit(threshold=8.0),
    ).train()
    assert cluster.seen()[0, :, 0].tolist() == [0.0, -0.25]
    assert cluster.flat_weights().tolist() == [0.0] * NUMEL


def model(rule: CD) -> tuple[Vector, Vector]:
    """Section 3.1: w_i from W^t and g_i; r_i = r_i + g_i, q = Q(r_i), r_i = r_i - q."""
    weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
    local, residual = np.zeros((WORKERS, NUMEL)), np.zeros((WORKERS, NUMEL))
    seen = np.zeros((WORKERS, 200, NUMEL))
    for step in range(200):
        seen[:, step] = local
        grads = np.array([quadratic(i, step, local[i]) for i in range(WORKERS)])
        sent = grads
        after = step - rule.warmup
        if after >= 0 and after % rule.steps != rule.steps - 1:
            total = residual + grads
            sent = THRESHOLD * (total >= THRESHOLD) - THRESHOLD * (total <= -THRESHOLD)
            residual = total - sent
        elif after >= 0 and rule.correction == "flush":
            sent, residual = grads + residual, np.zeros_like(residual)
        local = np.tile(weights, (WORKERS, 1)) - LR * (grads + DECAY * weights)
        velocity = MOMENTUM * velocity + sent.mean(axis=0) + DECAY * weights
        weights = weights - LR * velocity
        if after < 0:
            local[:] = weights
    return seen, weights


@pytest.mark.parametrize("correction", ["raw", "flush"])
@pytest.mark.parametrize("seed", range(2))
def test_it_follows_the_equation_for_200_steps(correction: str, seed: int) -> None:
    rule = CD(warmup=10, steps=4, correction=correction)
    cluster = Cluster(
        rule,
        quadratic,
        num_workers=WORKERS,
        group=GROUP,
        seed=seed,
        speeds=(1.0, 1.0, 0.6, 0.2),
        compressor=TwoBit(threshold=THRESHOLD),
    ).train()
    assert_follows(cluster, *model(rule))


@pytest.mark.parametrize("correction", ["raw", "flush"])
def test_sent_and_residual_add_up_to_the_gradients(correction: str) -> None:
    """Error feedback's invariant, with lr 1 and plain SGD: -W + r = sum of the gradients."""
    grads = np.random.default_rng(0).integers(-8, 9, (37, NUMEL)) / 16.0
    cluster = Cluster(
        CD(warmup=3, steps=5, correction=correction),
        lambda worker, step, weights: grads[step],
        num_workers=1,
        steps=37,
        group={"lr": 1.0},
        compressor=TwoBit(threshold=0.25),
    ).train()
    residual = np.concatenate([kept["residual"] for kept in cluster.workers[0].kept])
    np.testing.assert_array_equal(residual - cluster.flat_weights(), grads.sum(axis=0))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cd.correction is 'x', must be one of flush, raw"):
        CD(correction="x")
    with pytest.raises(ConfigError, match=r"cd.steps is 0"):
        CD(steps=0)
    with pytest.raises(ConfigError, match=r"cd.local is 'x'"):
        CD(local="x")
