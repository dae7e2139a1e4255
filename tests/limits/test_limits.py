"""Every rule in the setting in which it must be another one, to the last bit.

Both are run with the same seed: a rule that decides as the other does sends the same messages, so
that the same order of arrival is drawn for both. All that the workers saw and where the shard ended
is compared, and for most the order of events too.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pscore.rules import ASGD, CD, DCASGD, OD, SSD, SSGD, SSP, DiLoCo, LocalSGD, SlowMo, Staleness
from pscore.rules.base import Plan, Rule
from tests.harness import NUMEL, Cluster, Vector, quadratic
from tests.paper.inner import Inner

GROUP = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
SPEEDS = (1.0, 1.0, 0.5, 0.2)
STEPS = 40
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]  # Of the order of arrival.


def run(rule: Rule, seed: int = 1, **arguments: Any) -> Cluster:
    settings: dict[str, Any] = {
        "num_workers": 4, "steps": STEPS, "group": GROUP, "speeds": SPEEDS, **arguments,
    }  # fmt: skip
    gradient = settings.pop("gradient", quadratic)
    return Cluster(rule, gradient, seed=seed, **settings).train()


def bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Returns the bits, with the two zeros as one: `x + 0` turns -0 into 0."""
    return (array + np.float32(0.0)).view(np.int32)


def assert_same(one: Cluster, other: Cluster, *, same_events: bool = True) -> None:
    np.testing.assert_array_equal(bits(one.seen()), bits(other.seen()))
    np.testing.assert_array_equal(bits(one.flat_weights()), bits(other.flat_weights()))
    assert np.isfinite(one.flat_weights()).all()
    assert np.abs(one.flat_weights()).max() > 0.01
    if same_events:
        assert one.log == other.log


@pytest.mark.parametrize("seed", SEEDS)
def test_ssp_with_bound_0_is_ssgd(seed: int) -> None:
    assert_same(run(SSP(bound=0), seed), run(SSGD(), seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_ssp_without_bound_is_asgd(seed: int) -> None:
    asgd = run(ASGD(), seed, group={"lr": 0.02})
    assert_same(run(SSP(bound=-1), seed, group={"lr": 0.02}), asgd)
    assert_same(run(SSP(bound=10_000), seed, group={"lr": 0.02}), asgd)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_backup_workers_are_the_mean_of_all_in_the_order_of_ranks(seed: int) -> None:
    """backup=0 is ssgd, and ssgd is this loop in float32."""
    cluster = run(SSGD(backup=0), seed, group={"lr": 0.05})
    assert_same(cluster, run(SSGD(), seed, group={"lr": 0.05}))
    weights = np.zeros(NUMEL, np.float32)
    for step in range(STEPS):
        np.testing.assert_array_equal(cluster.seen()[:, step], np.tile(weights, (4, 1)))
        total = np.zeros(NUMEL, np.float32)
        for worker in range(4):
            total += quadratic(worker, step, weights.astype(np.float64)).astype(np.float32)
        weights = weights - np.float32(0.05) * (total * np.float32(0.25))
    np.testing.assert_array_equal(cluster.flat_weights(), weights)


@pytest.mark.parametrize("seed", SEEDS)
def test_ssd_of_one_plain_step_is_od_without_correction(seed: int) -> None:
    ssd = run(SSD(steps=1, warmup=10, local="sgd"), seed)
    assert_same(ssd, run(OD(warmup=10, local="sgd"), seed))
    assert_same(ssd, run(OD(warmup=10, local="dc", variance_control=0.0), seed))
    assert_same(ssd, run(OD(warmup=10, local="dc_adaptive", adaptive_control=0.0), seed))


@dataclass(frozen=True)
class BlockingOD(OD):
    """As OD-SGD, but every pull is waited for at once."""

    name: ClassVar[str] = "od"

    def plan(self, step: int) -> Plan:
        return replace(super().plan(step), block=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_od_without_local_update_and_with_a_blocking_pull_is_ssgd(seed: int) -> None:
    assert_same(run(BlockingOD(warmup=0, local="none"), seed), run(SSGD(), seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", [OD(warmup=STEPS), SSD(warmup=STEPS), CD(warmup=STEPS)], ids=str)
def test_a_warm_up_that_does_not_end_is_ssgd(rule: Rule, seed: int) -> None:
    """Only the weights: the last pull of the warm-up brings the optimizer's state."""
    assert_same(run(rule, seed), run(SSGD(), seed))


def alternate(rule: Rule) -> Cluster:
    """Two workers in strict turns, so that no gradient is older than one update."""
    cluster = Cluster(rule, quadratic, num_workers=2, steps=STEPS, group={"lr": 0.05})
    for worker in cluster.workers:  # Both have the initial weights.
        while worker.replica.parts[0].version < 0:
            cluster.turn(worker.rank)
    while not all(worker.is_done for worker in cluster.workers):
        for worker in cluster.workers:
            begun = len(worker.seen)
            while not worker.is_done and len(worker.seen) == begun:
                cluster.turn(worker.rank)
    return cluster


def test_staleness_of_one_at_most_is_asgd() -> None:
    asgd, staleness = alternate(ASGD()), alternate(Staleness(splits=2))
    assert max(clock.staleness[1] for clock in staleness.shard.clocks) == 1
    assert_same(staleness, asgd)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rule",
    [DCASGD(variance_control=0.0), DCASGD(adaptive=True, adaptive_control=0.0)],
    ids=["constant", "adaptive"],
)
def test_dcasgd_without_lambda_is_asgd(rule: Rule, seed: int) -> None:
    group = {"lr": 0.02, "momentum": 0.5}
    assert_same(run(rule, seed, group=group), run(ASGD(), seed, group=group))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("local", ["sgd", "dc", "dc_adaptive", "glu", "secant", "mirror", "none"])
def test_cd_without_compression_is_od(local: str, seed: int) -> None:
    od = run(OD(warmup=10, local=local), seed)
    for correction in ("raw", "flush"):
        cd = CD(warmup=10, local=local, correction=correction, steps=3)
        assert_same(run(cd, seed), od)


# ----- rounds: two ways of computing the same real number, so bits agree where it is a dyadic one


def halves(worker: int, step: int, weights: Vector) -> Vector:
    """Gradients in eighths, of weights that stay dyadic and small: float32 holds all of it."""
    rng = np.random.default_rng([worker, step])
    drawn: Vector = rng.integers(-8, 9, NUMEL) / 8.0 - np.sign(weights) / 4.0
    return drawn


def sgd(lr: float) -> Inner:
    return Inner(lambda parameters: torch.optim.SGD(parameters, lr=lr))


ROUNDS: dict[str, Any] = {"gradient": halves, "group": {"lr": 0.5}}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rule",
    [
        DiLoCo(steps=1, outer_lr=1.0, outer_momentum=0.0),
        LocalSGD(steps=1),
        SlowMo(steps=1, slow_lr=1.0, slow_momentum=0.0),
        LocalSGD(steps=10, warmup=STEPS),
        DiLoCo(steps=10, warmup=STEPS),
        SlowMo(steps=10, warmup=STEPS),
    ],
    ids=str,
)
def test_rounds_of_one_step_are_ssgd(rule: Rule, seed: int) -> None:
    """lr 1/2 and four workers: every weight is a multiple of 1/64, in both modes."""
    assert_same(run(rule, seed, inner=sgd(0.5), **ROUNDS), run(SSGD(), seed, **ROUNDS))


@pytest.mark.parametrize("form", ["mirror", "blend", "eager", "late"])
def test_an_overlap_whose_answers_land_at_once_blocks(form: str) -> None:
    rule = DiLoCo(steps=5, warmup=5, outer_lr=0.3, outer_momentum=0.5)
    assert_same(
        run(replace(rule, overlap=form, delay=0), inner=sgd(0.05)), run(rule, inner=sgd(0.05))
    )


@pytest.mark.parametrize(("form", "delay"), [("mirror", 5), ("mirror", 1), ("eager", 5)])
@pytest.mark.parametrize(
    "rule",
    [
        DiLoCo(steps=5, outer_lr=0.3, outer_momentum=0.5),
        DiLoCo(steps=5, outer_lr=0.3, outer_momentum=0.5, nesterov=False),
        SlowMo(steps=5, warmup=5),
        LocalSGD(steps=5),
    ],
    ids=str,
)
def test_one_worker_with_an_overlap_without_bias_blocks(
    rule: LocalSGD, form: str, delay: int
) -> None:
    """It knows every worker's move; the momentum that it follows is rounded differently."""

    def alone(rule: Rule) -> Cluster:
        group = {"lr": 0.05}
        return run(rule, num_workers=1, speeds=(1.0,), inner=sgd(0.05), group=group)

    overlapped, blocking = alone(replace(rule, overlap=form, delay=delay)), alone(rule)
    np.testing.assert_allclose(overlapped.seen(), blocking.seen(), rtol=1e-4, atol=1e-5)
    weights = blocking.flat_weights()
    np.testing.assert_allclose(overlapped.flat_weights(), weights, rtol=1e-4, atol=1e-5)


def test_a_round_is_the_mean_of_the_moves_in_the_order_of_ranks() -> None:
    """To the bit, for any length of the round: its samples are a mean, not a sum."""
    cluster = run(LocalSGD(steps=3), steps=3, inner=sgd(0.05))
    total = np.zeros(NUMEL, np.float32)
    for worker in range(4):
        alone, weights = sgd(0.05), torch.zeros(NUMEL)
        for step in range(3):
            alone(worker, step, weights, quadratic(worker, step, weights.double().numpy()))
        total += np.float32(0.0) - weights.numpy()
    np.testing.assert_array_equal(
        cluster.flat_weights(), np.float32(0.0) - total * np.float32(0.25)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_of_one_step_are_ssgd_up_to_rounding_with_any_momentum(momentum: float) -> None:
    """The mean of the workers' momenta is the momentum of their mean."""
    inner = Inner(lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum, weight_decay=0.01))
    group = {"lr": 0.05, "momentum": momentum, "weight_decay": 0.01}
    local, ssgd = run(LocalSGD(steps=1), inner=inner), run(SSGD(), group=group)
    np.testing.assert_allclose(local.seen(), ssgd.seen(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rule",
    [
        DiLoCo(steps=7, outer_lr=1.0, outer_momentum=0.0),
        SlowMo(steps=7, slow_lr=1.0, slow_momentum=0.0),
    ],
    ids=str,
)
def test_rounds_without_outer_momentum_are_local_sgd(rule: Rule, seed: int) -> None:
    """Any numbers: the same operations in the same order."""
    assert_same(run(rule, seed, inner=sgd(0.05)), run(LocalSGD(steps=7), seed, inner=sgd(0.05)))


@pytest.mark.parametrize("seed", SEEDS)
def test_slowmo_with_a_constant_rate_is_diloco_without_nesterov(seed: int) -> None:
    """lr 1/2 is a power of two, so that u * lr is DiLoCo's V to the bit."""
    slowmo = SlowMo(steps=5, slow_lr=0.75, slow_momentum=0.5)
    diloco = DiLoCo(steps=5, outer_lr=0.75, outer_momentum=0.5, nesterov=False)
    settings: dict[str, Any] = {"group": {"lr": 0.5}}
    one = run(slowmo, seed, inner=sgd(0.5), **settings)
    assert_same(one, run(diloco, seed, inner=sgd(0.5), **settings))
