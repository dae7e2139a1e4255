"""Overlaps of rounds: each form by hand, over 200 steps, and at its limits."""

from typing import Any

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.overlaps import OVERLAPS
from pscore.rules import DiLoCo, LocalSGD, SlowMo
from pscore.types import Role
from tests.harness import NUMEL, Cluster, assert_follows, quadratic
from tests.paper.inner import Inner, adamw, sgd
from tests.paper.overlapped import SPEEDS, Rounds, nesterov, one_and_three, with_a_late_worker


@pytest.mark.parametrize("form", sorted(OVERLAPS))
@pytest.mark.parametrize(("delay", "warmup"), [(1, 0), (3, 16), (8, 0)])
def test_it_follows_the_equation_for_200_steps(form: str, delay: int, warmup: int) -> None:
    rule = DiLoCo(
        steps=8, warmup=warmup, outer_lr=0.3, outer_momentum=0.6, overlap=form, delay=delay
    )
    cluster = Cluster(
        rule, quadratic, num_workers=4, inner=Inner(adamw), seed=delay, speeds=SPEEDS
    ).train()
    model = Rounds(form, nesterov(0.3, 0.6), 8, delay, warmup=warmup)
    assert_follows(cluster, *model.run(Inner(adamw), 200))


def by_hand(form: str, steps: int = 5, **arguments: Any) -> Cluster:
    """Worker 0 moves by 1 in a step, worker 1 by 3; H = 2, outer lr 1/4, m = 1/2, Nesterov."""
    rule = DiLoCo(steps=2, outer_lr=0.25, outer_momentum=0.5, overlap=form, delay=1, **arguments)
    return Cluster(rule, one_and_three, num_workers=2, steps=steps, inner=Inner(sgd(1.0))).train()


def test_mirror_by_hand() -> None:
    """Round 1: D = -4, V = -4, W = 3/2; guesses 1/4 (2 + 1) and 1/4 (6 + 3), translated by 3/4.

    Round 2: D = -4 again, V = -6, W = 3/2 + 1/4 (4 + 3); guesses 3/2 + 1/4 (2 + 2), (6 + 4).
    """
    cluster = by_hand("mirror")
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 0.75, 2.5, 2.5], [0, 3, 2.25, 4.5, 4.0]]
    assert by_hand("mirror", 4).flat_weights().tolist() == [3.25] * NUMEL


def test_mirror_with_its_control_by_hand() -> None:
    """D_i - D is 2 and -2 in every round: in the second both guess with D, and start at W."""
    cluster = by_hand("mirror", control=1.0)
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 0.75, 2.5, 3.25], [0, 3, 2.25, 4.5, 3.25]]


def test_blend_by_hand() -> None:
    """They continue at 2 and 6, and 3 and 9 become 1/2 (3 + 3/2), 1/2 (9 + 3/2) when W lands.

    Round 2: D_i is 3/2 - 13/4 and 3/2 - 33/4; V = -25/4, W = 3/2 + 1/4 (17/4 + 25/8).
    """
    cluster = by_hand("blend")
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 2, 2.25, 3.25], [0, 3, 6, 5.25, 8.25]]
    assert by_hand("blend", 4).flat_weights().tolist() == [3.34375] * NUMEL


def test_blend_keeps_the_part_that_mix_names() -> None:
    assert by_hand("blend", mix=0.25).seen()[:, 3, 0].tolist() == [1.875, 3.375]


def test_late_by_hand() -> None:
    """The second round starts from 0 too, the third from the first round's W."""
    cluster = by_hand("late")
    assert cluster.seen()[:, :, 0].tolist() == [[0, 1, 0, 1, 1.5], [0, 3, 0, 3, 1.5]]
    assert by_hand("late", 4).flat_weights().tolist() == [3.25] * NUMEL


def test_eager_by_hand() -> None:
    """Round 1: G_i = -1, -3: 1/4 (1 + 1/2), 1/4 (3 + 3/2). Round 2: G_i = -1 - 3 for both."""
    cluster = by_hand("eager")
    first, second = cluster.seen()[:, :, 0].tolist()
    assert first == [0, 1, 0.375, 1.375, 0.375 + 0.25 * (4 + 0.5 * 4.5)]
    assert second == [0, 3, 1.125, 4.125, 1.125 + 0.25 * (4 + 0.5 * 5.5)]


@pytest.mark.parametrize("control", [0.5, 1.0])
def test_the_control_follows_the_equation_for_200_steps(control: float) -> None:
    rule = DiLoCo(
        steps=8, outer_lr=0.3, outer_momentum=0.6, overlap="mirror", delay=3, control=control
    )
    cluster = Cluster(rule, quadratic, num_workers=4, inner=Inner(adamw), speeds=SPEEDS).train()
    model = Rounds("mirror", nesterov(0.3, 0.6), 8, 3, control=control)
    assert_follows(cluster, *model.run(Inner(adamw), 200))


def test_overlapped_slowmo_follows_the_equation_for_200_steps() -> None:
    """The momentum is in units of gradients: u <- m u + D / lr, W <- W - lr u."""

    def slow(weights: Any, velocity: Any, move: Any) -> Any:
        velocity = 0.5 * velocity + move / 0.05
        return weights - 0.05 * velocity, velocity

    rule = SlowMo(steps=8, slow_momentum=0.5, overlap="mirror", delay=3)
    cluster = Cluster(rule, quadratic, num_workers=4, inner=Inner(sgd(0.05)), speeds=SPEEDS).train()
    assert_follows(cluster, *Rounds("mirror", slow, 8, 3).run(Inner(sgd(0.05)), 200))


def test_overlapped_local_sgd_continues_where_it_is_until_the_mean_lands() -> None:
    plain = nesterov(1.0, 0.0)
    rule = LocalSGD(steps=8, overlap="mirror", delay=3)
    cluster = Cluster(rule, quadratic, num_workers=4, inner=Inner(adamw), speeds=SPEEDS).train()
    assert_follows(cluster, *Rounds("mirror", plain, 8, 3).run(Inner(adamw), 200))


def test_starts_are_the_global_weights_in_the_mean() -> None:
    """Claims about mirror: no bias at any momentum; late and eager have one."""

    def bias(form: str) -> float:
        model = Rounds(form, nesterov(0.3, 0.9), 8, 8)
        seen, _ = model.run(Inner(adamw), 160)
        starts = seen[:, 8::8].mean(axis=0)
        return float(np.abs(starts - np.array(model.landed[1:-1])).max())

    assert bias("mirror") < 1e-12
    assert min(bias("late"), bias("eager")) > 0.01


def test_a_worker_with_weight_counts_for_as_much_in_the_mean() -> None:
    """Samples 1 and 3: D = -5; the workers' guesses do not depend on their weights."""
    cluster = Cluster(
        DiLoCo(steps=2, outer_lr=0.25, outer_momentum=0.5, overlap="mirror", delay=1),
        one_and_three,
        num_workers=2,
        steps=4,
        samples=lambda worker, step: (1.0, 3.0)[worker],
        inner=Inner(sgd(1.0)),
    ).train()
    assert cluster.seen()[:, 3, 0].tolist() == [1.75 + 1.125, 5.25 - 0.375]


def test_rounds_that_a_worker_has_missed_bring_the_momentum_along() -> None:
    """With a backup worker versions are missed; then the shards' own momentum is pulled."""
    rule = DiLoCo(steps=2, backup=1, outer_lr=0.2, outer_momentum=0.5, overlap="mirror", delay=1)
    cluster = with_a_late_worker(rule)
    cluster.train(events=6_000)
    slow, num_known = cluster.workers[2], 0
    assert slow.exchange.traffic.num_too_late > 5
    shard = cluster.shard
    for part, clock, store in zip(slow.replica.parts, shard.clocks, shard.stores, strict=True):
        if part.version == clock.version and "landed" in part.state:
            num_known += 1
            velocity = part.state["momentum_buffer"].numpy()
            np.testing.assert_allclose(velocity, store.state[0], rtol=1e-3, atol=1e-4)
    assert num_known
    assert np.isfinite(cluster.flat_weights()).all()
    assert np.abs(cluster.flat_weights()).max() < 3


@pytest.mark.parametrize("make", [DiLoCo, SlowMo, LocalSGD])
def test_arguments_that_do_not_fit_are_refused(make: type[LocalSGD]) -> None:
    name = make.name
    with pytest.raises(
        ConfigError, match=rf"{name}.overlap is 'early', must be one of blend, eager"
    ):
        make(overlap="early")
    with pytest.raises(ConfigError, match=rf"{name}.delay is 5, must be in -1..4"):
        make(steps=4, overlap="mirror", delay=5)
    with pytest.raises(ConfigError, match=rf"{name}.mix is 2.0, must be in"):
        make(mix=2.0)
    with pytest.raises(ConfigError, match=rf"{name}.control is -1.0, must be in"):
        make(control=-1.0)
    with pytest.raises(ConfigError, match=r"'eager', which needs every worker's move .* is 1"):
        make(overlap="eager", backup=1)


def test_an_automatic_delay_is_a_fifth_of_a_round() -> None:
    landings = [DiLoCo(steps=steps, overlap="mirror").landing for steps in (1, 4, 20, 500)]
    assert landings == [1, 1, 4, 100]
    assert DiLoCo(steps=20).landing == DiLoCo(steps=20, overlap="mirror", delay=0).landing == 0


def test_the_actions_of_a_worker_at_each_step() -> None:
    plans = [LocalSGD(steps=3, warmup=1, overlap="mirror", delay=2).plan(step) for step in range(7)]
    assert [plan.push is Role.DELTA for plan in plans] == [True, *[False, False, True] * 2]
    assert [plan.block for plan in plans] == [True, *[False] * 6]
    assert [plan.local for plan in plans] == [False, *[False, False, True] * 2]
    assert [plan.lands for plan in plans] == [True, *[False, True, False] * 2]
