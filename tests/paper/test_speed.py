"""Rounds by speed: steps and weights by hand, 25 rounds against float64, and a simulated job."""

from functools import partial

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import DelayedNesterov, DiLoCo, LocalSGD, SlowMo, make_rule, parse_mode
from pssim.training import Compute, TrainingCluster, TrainingJob
from tests.harness import NUMEL, Cluster, Vector, quadratic
from tests.integration.models import backward, batch, make_model
from tests.paper.inner import Inner, adamw, sgd

SHARES = (1.0, 0.5, 0.25, 1.0)
LENGTHS = (8, 4, 2, 8)  # Of rounds of 8 steps.


def with_speeds(cluster: Cluster, shares: tuple[float, ...]) -> Cluster:
    for worker, share in zip(cluster.workers, shares, strict=True):
        worker.replica.speed = partial(float, share)
    return cluster


def test_a_round_has_as_many_steps_as_the_speed_allows_between_its_bounds() -> None:
    rule = LocalSGD(steps=10, steps_min=3)
    assert [rule.schedule.round_steps(share) for share in (1.0, 0.5, 0.26, 0.24, 0.01)] == [
        10,
        5,
        3,
        3,
        3,
    ]
    assert LocalSGD(steps=10).schedule.round_steps(0.5) is None
    assert [rule.schedule.weight(2.0, num) for num in (10, 5, 1)] == [2.0, 1.0, 0.2]
    assert LocalSGD(steps=10).schedule.weight(2.0, 5) == 2.0


def test_a_round_ends_behind_the_landing_of_an_overlap() -> None:
    rule = DiLoCo(steps=10, steps_min=1, overlap="mirror", delay=4)
    assert [rule.schedule.round_steps(share) for share in (1.0, 0.6, 0.5, 0.1)] == [10, 6, 5, 5]
    assert DiLoCo(steps=10, steps_min=1, overlap="late", delay=10).schedule.round_steps(0.1) == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local(steps=speed)", LocalSGD(steps=8, steps_min=1)),
        ("diloco(steps='speed', steps_min=50)", DiLoCo(steps=500, steps_min=50)),
        ("slowmo(steps=speed)", SlowMo(steps=48, steps_min=1)),
        ("delayed_nesterov(steps=speed)", DelayedNesterov(steps=50, steps_min=1)),
    ],
)
def test_speed_is_a_length_of_rounds(text: str, expected: LocalSGD) -> None:
    rule = parse_mode(text)
    assert rule == expected
    assert parse_mode(str(rule)) == rule
    assert make_rule(rule.name, {"steps": "speed"}).arguments()["steps_min"] == 1


def test_arguments_that_make_no_sense_are_refused() -> None:
    for text, message in (
        ("local(steps=fast)", "local.steps is 'fast', must be of type int"),
        ("ssd(steps=speed)", "ssd.steps is 'speed', must be of type int"),
        ("local(steps=4, steps_min=5)", "local.steps_min is 5, must be in 0..4"),
        ("local(steps=speed, fragments=2)", "fragments is 2: the rounds of fragments end at the"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_mode(text)


def samples_of(second: float, worker: int, step: int) -> float:
    return second if worker else 1.0


def test_moves_are_weighed_by_the_samples_in_them_by_hand() -> None:
    """Steps of 1. Moves of 4 steps and of 2: (4 * 4 + 2 * 2) / 6; with 2 samples a step of the
    second worker, (4 * 4 + 4 * 2) / 8 = 3.
    """
    for samples, expected in ((1.0, 20 / 6), (2.0, 3.0)):
        cluster = Cluster(
            LocalSGD(steps=4, steps_min=1),
            lambda *_: np.full(NUMEL, -1.0),
            num_workers=2,
            steps=4,
            inner=Inner(sgd(1.0)),
            samples=partial(samples_of, samples),
        )
        with_speeds(cluster, (1.0, 0.5)).train()
        assert [len(worker.seen) for worker in cluster.workers] == [4, 2]
        assert cluster.flat_weights() == pytest.approx([expected] * NUMEL)


def follow(mode: DiLoCo, steps: int) -> tuple[list[list[Vector]], Vector]:
    """Returns what each worker saw at each of its steps, and the last weights."""
    inner, start, velocity = Inner(adamw), np.zeros(NUMEL), np.zeros(NUMEL)
    local = torch.zeros((len(SHARES), NUMEL), dtype=torch.float64)
    seen: list[list[Vector]] = [[] for _ in SHARES]
    for first in range(0, steps, mode.steps):
        moves = np.zeros(NUMEL)
        for worker, length in enumerate(LENGTHS):
            places = [*range(length - 1), mode.steps - 1]
            for step in (first + place for place in places):
                seen[worker].append(local[worker].numpy().copy())
                grad = quadratic(worker, step, local[worker].numpy())
                inner(worker, step, local[worker], grad)
            moves += length * (1 + worker) * (start - local[worker].numpy())
        mean = moves / sum(length * (1 + worker) for worker, length in enumerate(LENGTHS))
        velocity = 0.9 * velocity + mean
        start = start - 0.7 * (mean + 0.9 * velocity)
        local.copy_(torch.from_numpy(np.tile(start, (len(SHARES), 1))))
    return seen, start


def test_it_follows_the_equation_for_25_rounds() -> None:
    """Workers of four speeds, whose steps have 1 to 4 samples."""
    mode = DiLoCo(steps=8, steps_min=2)
    cluster = Cluster(
        mode, quadratic, num_workers=4, inner=Inner(adamw), seed=4,
        samples=lambda worker, step: 1.0 + worker,
    )  # fmt: skip
    with_speeds(cluster, SHARES).train()
    seen, weights = follow(mode, 200)
    for worker, expected in zip(cluster.workers, seen, strict=True):
        np.testing.assert_allclose(worker.seen, expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(cluster.flat_weights(), weights, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("overlap", ["none", "mirror"])
def test_workers_of_equal_speed_train_as_without(overlap: str) -> None:
    """To the bit: a whole round has the weight that it had."""
    ends = [
        Cluster(
            DiLoCo(steps=8, steps_min=steps_min, overlap=overlap), quadratic,
            inner=Inner(adamw), seed=5, steps=40,
        ).train().flat_weights()
        for steps_min in (0, 1)
    ]  # fmt: skip
    assert np.array_equal(ends[0], ends[1])


def run(mode: str) -> tuple[TrainingCluster, list[list[int]]]:
    """Trains 200 steps with a worker at half speed; returns the steps that each has made."""
    made: list[list[int]] = [[] for _ in range(4)]

    def gradient(model: torch.nn.Module, rank: int, step: int) -> float:
        made[rank].append(step)
        backward(model, *batch(rank, step))
        return 0.0

    job = TrainingJob(
        rule=parse_mode(mode),
        make_model=make_model,
        gradient=gradient,
        group={"lr": 1e-3},
        make_inner=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        steps=200,
        compute=Compute(deviation=0.02, slow={2: 2.0}),
    )
    return TrainingCluster(job).run(), made


def test_a_learner_at_half_speed_is_not_waited_for() -> None:
    """Its rounds have half the steps once speeds are known, and all arrive at about one time."""
    equal, by_speed = run("diloco(steps=20)"), run("diloco(steps=20, steps_min=4)")
    assert [len(steps) for steps in equal[1]] == [200] * 4
    made = by_speed[1]
    assert len(made[2]) == pytest.approx(20 + 9 * 10, abs=5)
    assert all(len(made[rank]) == pytest.approx(200, abs=10) for rank in (0, 1, 3))
    assert {steps[-1] for steps in made} == {199}
    # Of ten rounds only the first, before speeds are known, waits for the slow one.
    assert by_speed[0].now_s < 0.6 * equal[0].now_s
    assert by_speed[0].workers[0].waited_s < 0.2 * equal[0].workers[0].waited_s
