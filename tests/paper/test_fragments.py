"""Fragments of a model: their schedule by hand, rounds in float64, limits, and late workers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.fragments import Schedule
from pscore.overlaps import OVERLAPS
from pscore.rules import DiLoCo, LocalSGD, SlowMo
from pscore.types import Role
from tests.harness import NUMEL, SLICES, Cluster, assert_follows, quadratic
from tests.paper.inner import Inner, adamw, sgd
from tests.paper.overlapped import SPEEDS, Rounds, nesterov, one_and_three, with_a_late_worker

# ----- the schedule


def test_the_ends_of_rounds_by_hand() -> None:
    """H = 5 in 2 fragments: they end at 3 and 5 steps of a cycle; 4 steps of warm-up before."""
    plans = [
        [DiLoCo(steps=5, warmup=4, fragments=2).plan_of(step, q).push for step in range(15)]
        for q in (0, 1)
    ]
    ends = [[step + 1 for step, push in enumerate(each) if push is Role.DELTA] for each in plans]
    assert ends == [[1, 2, 3, 4, 7, 12], [1, 2, 3, 4, 9, 14]]


def test_answers_land_as_many_steps_behind_the_end_of_a_round_in_every_fragment() -> None:
    rule = LocalSGD(steps=6, fragments=3, overlap="mirror", delay=2)
    lands = [[step for step in range(18) if rule.plan_of(step, q).lands] for q in range(3)]
    assert lands == [[3, 9, 15], [5, 11, 17], [1, 7, 13]]


@pytest.mark.parametrize("number", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0, 4])
def test_steps_follow_from_the_rounds_that_have_ended(number: int, warmup: int) -> None:
    """Counted one by one, from any step on."""
    schedule = Schedule(number, 7, warmup)
    rule = LocalSGD(steps=7, warmup=warmup, fragments=number)
    for start in range(20):
        for fragment in range(number):
            ends = [
                step + 1
                for step in range(start, 60)
                if rule.plan_of(step, fragment).push is not None
            ]
            for count, end in enumerate(ends[:4], 1):
                assert schedule.step_after(start, count, fragment) == end
                assert schedule.num_between(start, end, fragment) == count
                assert schedule.num_between(start, end - 1, fragment) == count - 1
            assert schedule.step_after(start, 0, fragment) == start


def test_one_round_ends_at_a_time_and_evenly_over_a_cycle() -> None:
    rule = LocalSGD(steps=100, fragments=8)
    ends = [step + 1 for step in range(100) if rule.plan(step).push is not None]
    assert ends == [13, 25, 38, 50, 63, 75, 88, 100]


def test_slices_are_divided_in_their_order_by_bytes_or_in_turn() -> None:
    assert Schedule(3, 9, 0).assign([4, 4, 4, 4, 4, 1]) == [0, 0, 1, 1, 2, 2]
    assert Schedule(3, 9, 0).assign([100, 1, 1]) == [0, 1, 2]
    assert Schedule(3, 9, 0).assign([1, 1, 100]) == [0, 1, 2]
    assert Schedule(2, 9, 0, "strided").assign([4, 4, 4, 4, 1]) == [0, 1, 0, 1, 0]
    assert Schedule(1, 9, 0).assign([4, 4]) == [0, 0]


# ----- rounds


class Fragments:
    """The model's two slices as two models, whose rounds end in turn."""

    def __init__(self, form: str, steps: int, delay: int, warmup: int, **options: Any) -> None:
        outer = nesterov(0.3, 0.6)
        self.rounds = [Rounds(form, outer, steps, delay, warmup=warmup, **options) for _ in SLICES]
        self.shifts = [steps - (q + 1) * steps // 2 for q in (0, 1)]

    def run(self, inner: Inner, total: int) -> tuple[Any, Any]:
        """Returns what each worker saw at each step, and the global weights at the end."""
        count = self.rounds[0].num_workers
        local = torch.zeros((count, NUMEL), dtype=torch.float64)
        seen = np.zeros((count, total, NUMEL))
        for step in range(total):
            seen[:, step] = local.numpy()
            for worker, weights in enumerate(local):
                inner(worker, step, weights, quadratic(worker, step, weights.numpy().copy()))
            for part, rounds, shift in zip(SLICES, self.rounds, self.shifts, strict=True):
                rounds.x[:, part] = local.numpy()[:, part]
                rounds.end_step(step if step < rounds.warmup else step + shift)
                local[:, part] = torch.from_numpy(rounds.x[:, part])
        self.rounds[0].end_round()  # Half a round, which is pushed when training ends.
        parts = zip(SLICES, self.rounds, strict=True)
        return seen, np.concatenate([rounds.landed[-1][part] for part, rounds in parts])


@pytest.mark.parametrize("form", ["none", *sorted(OVERLAPS)])
@pytest.mark.parametrize(("delay", "warmup"), [(1, 0), (6, 16)])
def test_they_follow_the_equations_for_ten_rounds(form: str, delay: int, warmup: int) -> None:
    """With a delay above H / 2 the answer of one fragment lands behind the end of the other."""
    rule = DiLoCo(
        steps=8,
        warmup=warmup,
        outer_lr=0.3,
        outer_momentum=0.6,
        overlap=form,
        delay=delay,
        fragments=2,
    )
    cluster = Cluster(
        rule, quadratic, num_workers=4, steps=96, inner=Inner(adamw), seed=delay, speeds=SPEEDS
    ).train()
    assert_follows(cluster, *Fragments(form, 8, delay, warmup).run(Inner(adamw), 96))


def by_hand(fragments: int, steps: int, **arguments: Any) -> Cluster:
    """Worker 0 moves by 1 in a step, worker 1 by 3."""
    return Cluster(
        LocalSGD(steps=4, fragments=fragments, **arguments),
        one_and_three,
        num_workers=2,
        steps=steps,
        inner=Inner(sgd(1.0)),
    ).train()


def test_two_fragments_by_hand() -> None:
    """H = 4: the first slice has its mean after 2 steps, 2 (1 + 3) / 2 = 4; the second after 4."""
    seen = by_hand(2, 7).seen()
    assert seen[:, :, 0].tolist() == [[0, 1, 4, 5, 6, 7, 12], [0, 3, 4, 7, 10, 13, 12]]
    assert seen[:, :, -1].tolist() == [[0, 1, 2, 3, 8, 9, 10], [0, 3, 6, 9, 8, 11, 14]]


def test_the_end_of_training_pushes_the_rounds_that_are_open() -> None:
    """After 5 steps: 3 of the first slice's second round, 1 of the second slice's; both count."""
    assert by_hand(2, 5).flat_weights().tolist() == [10.0] * NUMEL
    assert by_hand(2, 6).flat_weights().tolist() == [12.0] * NUMEL


@pytest.mark.parametrize("form", ["none", *sorted(OVERLAPS)])
@pytest.mark.parametrize("make", [DiLoCo, SlowMo, LocalSGD])
def test_one_fragment_is_the_whole_model_to_the_bit(make: type[LocalSGD], form: str) -> None:
    """In either pattern; and a part of the model in one slice knows nothing of the other part."""
    rule = make(steps=6, warmup=3, overlap=form, delay=2)
    clusters = [
        Cluster(each, quadratic, num_workers=2, steps=40, inner=Inner(adamw)).train()
        for each in (rule, replace(rule, fragments=1, pattern="strided"))
    ]
    np.testing.assert_array_equal(clusters[0].seen(), clusters[1].seen())


def test_the_last_fragment_has_the_rounds_of_the_whole_model() -> None:
    """Gradients of one slice do not depend on the other's weights: then it has the same bits."""
    whole, parts = by_hand(1, 11), by_hand(2, 11)
    np.testing.assert_array_equal(whole.seen()[:, :, SLICES[1]], parts.seen()[:, :, SLICES[1]])


@pytest.mark.parametrize("form", ["none", "mirror"])
def test_a_late_worker_leaves_rounds_out_in_their_order(form: str) -> None:
    """Nobody waits for ever, and the late worker's rounds count again when it is as fast."""
    rule = DiLoCo(
        steps=4, backup=1, outer_lr=0.2, outer_momentum=0.5, fragments=2, overlap=form, delay=1
    )
    cluster = with_a_late_worker(rule)
    cluster.train(events=3_000)
    slow = cluster.workers[2]
    before = slow.exchange.traffic.num_too_late
    assert before > 5
    assert slow.replica.step > len(slow.seen)
    cluster.speeds = (0.2, 0.2, 1.0)
    cluster.train(events=3_000)
    assert slow.exchange.traffic.num_too_late < before + 5
    assert np.abs(cluster.flat_weights()).max() < 3


@pytest.mark.parametrize("make", [DiLoCo, SlowMo, LocalSGD])
def test_arguments_that_do_not_fit_are_refused(make: type[LocalSGD]) -> None:
    name = make.name
    with pytest.raises(ConfigError, match=rf"{name}.fragments is 5, must be in 1..4"):
        make(steps=4, fragments=5)
    with pytest.raises(ConfigError, match=rf"{name}.fragments is 0, must be in 1..4"):
        make(steps=4, fragments=0)
    with pytest.raises(ConfigError, match=rf"{name}.pattern is 'odd', must be one of seq"):
        make(pattern="odd")


def test_more_fragments_than_slices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"diloco.fragments is 3, and the model has 2 slices"):
        Cluster(DiLoCo(fragments=3), quadratic)
