"""Synchronous SGD and backup workers: the equation, by hand and over 200 steps."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rules import SSGD
from pscore.types import Push, Verdict
from psserver.decisions.orders import Acknowledge, Action, Add, Update
from psserver.decisions.progress import LATE_KEPT
from psserver.decisions.slice_clock import SliceClock
from tests.harness import NUMEL, SLICES, Cluster, Vector, assert_follows, quadratic
from tests.participants import Listed

LR, MOMENTUM, DECAY = 0.05, 0.9, 0.01
GROUP = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
HYPER = np.zeros((1, 6))


def push(clock: SliceClock, worker: int, step: int, base: int = 0) -> list[Action]:
    message = Push(worker=worker, step=step, base_version=base, hyper=HYPER)
    return clock.push(message, f"{worker}.{step}")


def make_clock(rule: SSGD, num_workers: int) -> tuple[SliceClock, list[int]]:
    live = list(range(num_workers))
    clock = SliceClock(rule, Listed(lambda: live, num_workers))
    clock.version = 0
    return clock, live


def verdicts(actions: list[Action]) -> list[Verdict]:
    return [action.verdict for action in actions if isinstance(action, Acknowledge)]


def test_a_step_waits_for_every_gradient_and_takes_their_mean_in_the_order_of_ranks() -> None:
    clock, _ = make_clock(SSGD(), 3)
    assert not [a for a in push(clock, 2, 0) + push(clock, 1, 0) if isinstance(a, Add | Update)]
    actions = push(clock, 0, 0)
    assert [action.worker for action in actions if isinstance(action, Add)] == [0, 1, 2]
    (update,) = [action for action in actions if isinstance(action, Update)]
    assert (update.scale, update.version) == (1 / 3, 1)


def test_by_hand() -> None:
    """Two workers, minimum at 0 and at 2, lr 1/2: W = 1 -> 1 - 1/2 * mean(1, -1) = 1 -> ..."""
    minimum = np.array([0.0, 2.0])
    cluster = Cluster(
        SSGD(),
        lambda worker, step, weights: weights - minimum[worker] - step,
        num_workers=2,
        steps=3,
        start=np.full(NUMEL, 5.0),
        group={"lr": 0.5},
    ).train()
    # Step 0: 5 - (5 + 3) / 4 = 3; step 1: 3 - (2 + 0) / 4 = 2.5; step 2: 2.5 - (0.5 - 1.5) / 4.
    assert cluster.seen()[0, :, 0].tolist() == [5.0, 3.0, 2.5]
    assert cluster.flat_weights().tolist() == [2.75] * NUMEL


def model(num_workers: int, steps: int) -> tuple[Vector, Vector]:
    """W^{t+1} = W^t - lr V^{t+1}, V^{t+1} = m V^t + mean g + wd W^t."""
    weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
    seen = np.zeros((num_workers, steps, NUMEL))
    for step in range(steps):
        seen[:, step] = weights
        grads = [quadratic(worker, step, weights) for worker in range(num_workers)]
        velocity = MOMENTUM * velocity + np.mean(grads, axis=0) + DECAY * weights
        weights = weights - LR * velocity
    return seen, weights


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_the_equation_for_200_steps(seed: int) -> None:
    cluster = Cluster(SSGD(), quadratic, num_workers=4, group=GROUP, seed=seed).train()
    assert_follows(cluster, *model(4, 200))


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    first, second = (
        Cluster(SSGD(), quadratic, num_workers=4, steps=50, group=GROUP, seed=seed).train()
        for seed in (1, 2)
    )
    assert first.log != second.log
    np.testing.assert_array_equal(first.flat_weights(), second.flat_weights())


def test_samples_weigh_the_mean() -> None:
    """lr 1, from 0: gradients -1 and -4 with weights 3 and 1 give (3 * 1 + 4) / 4."""
    cluster = Cluster(
        SSGD(),
        lambda worker, step, weights: np.full(NUMEL, (-1.0, -4.0)[worker]),
        num_workers=2,
        steps=1,
        samples=lambda worker, step: (3.0, 1.0)[worker],
        group={"lr": 1.0},
    ).train()
    assert cluster.flat_weights().tolist() == [1.75] * NUMEL


# ----- backup workers


def test_the_first_n_make_the_step_and_a_later_one_is_answered_late() -> None:
    clock, _ = make_clock(SSGD(backup=1), 3)
    push(clock, 2, 0)
    actions = push(clock, 0, 0)
    (update,) = [action for action in actions if isinstance(action, Update)]
    assert (update.scale, clock.version) == (1 / 2, 1)
    late = push(clock, 1, 0)
    assert verdicts(late) == [Verdict.TOO_LATE]
    assert not [action for action in late if isinstance(action, Add | Update)]
    assert verdicts(push(clock, 1, 0)) == [Verdict.TOO_LATE]  # Again, if it is sent again.


def test_a_late_gradient_never_enters_the_weights() -> None:
    """Worker 2 alone moves them, by 1/2 for each of its gradients that came in time."""
    cluster = Cluster(
        SSGD(backup=1),
        lambda worker, step, weights: np.full(NUMEL, float(worker == 2)),
        steps=1_000,
        speeds=(1.0, 1.0, 0.05),
        group={"lr": 1.0},
    )
    cluster.train(events=4_000)
    assert cluster.workers[2].exchange.traffic.num_too_late > 10
    pushed = [e for e in cluster.log if e.kind == "push" and e.worker == 2]
    for index, part in enumerate(SLICES):
        in_time = sum(event.slice == index for event in pushed)
        np.testing.assert_array_equal(cluster.flat_weights()[part], -0.5 * in_time)


def test_fewer_workers_than_a_step_waits_for_are_enough() -> None:
    clock, live = make_clock(SSGD(backup=1), 4)
    push(clock, 0, 0)
    live.remove(1)
    live.remove(2)
    assert not [action for action in clock.recheck() if isinstance(action, Update)]
    (update,) = [action for action in push(clock, 3, 0) if isinstance(action, Update)]
    assert update.scale == 1 / 2


def test_a_worker_that_was_late_continues_with_the_newest_step() -> None:
    """Else it would be late for ever, and its gradients would never count."""
    cluster = Cluster(SSGD(backup=1), quadratic, steps=100, speeds=(1.0, 1.0, 0.0), group=GROUP)
    cluster.train(events=500)
    behind = cluster.shard.clocks[0].version
    cluster.speeds = (1.0, 1.0, 1.0)
    cluster.train()
    counted = [e.number for e in cluster.log if e.kind == "push" and e.worker == 2]
    in_time = [number for number in counted if number < 100]
    assert min(in_time) >= behind > 10
    assert len(in_time) > 60  # Of two slices; about two thirds of its pushes.
    assert cluster.shard.clocks[0].counted[2].ahead  # The steps it has left out are a gap.


def test_the_steps_that_a_worker_has_left_out_are_not_kept_for_ever() -> None:
    clock, _ = make_clock(SSGD(backup=1), 2)
    for step in range(0, 6 * LATE_KEPT, 2):
        clock.version = step
        push(clock, 1, step)
    assert len(clock.counted[1].ahead) == LATE_KEPT // 2
    assert clock.clock(1) == 5 * LATE_KEPT - 1


def backup_model(cluster: Cluster, num_needed: int) -> tuple[Vector, Vector]:
    """The shard's history with the first `num_needed` pushes of each step of each slice."""
    count, steps = cluster.num_workers, cluster.steps
    weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
    views, grads = np.zeros((count, NUMEL)), np.zeros((count, NUMEL))
    seen = np.zeros((count, steps, NUMEL))
    versions = [0] * len(SLICES)
    sums = np.zeros(NUMEL)
    arrived: list[set[int]] = [set() for _ in SLICES]
    live = set(range(count))

    def close() -> None:
        for index, part in enumerate(SLICES):
            needed = min(num_needed, len(arrived[index] | live))
            if arrived[index] and len(arrived[index]) >= needed:
                mean = sums[part] / len(arrived[index])
                velocity[part] = MOMENTUM * velocity[part] + mean + DECAY * weights[part]
                weights[part] -= LR * velocity[part]
                sums[part] = 0.0
                versions[index] += 1
                arrived[index].clear()

    for event in cluster.log:
        if event.kind == "compute":
            seen[event.worker, event.number] = views[event.worker]
            grads[event.worker] = quadratic(event.worker, event.number, views[event.worker])
        elif event.kind == "push":
            part = SLICES[event.slice]
            assert event.number == versions[event.slice]
            sums[part] += grads[event.worker, part]
            arrived[event.slice].add(event.worker)
        elif event.kind == "late":
            assert event.number < versions[event.slice]
        elif event.kind == "answer":
            assert event.number == versions[event.slice]
            views[event.worker, SLICES[event.slice]] = weights[SLICES[event.slice]]
        else:
            live.discard(event.worker)
        close()
    return seen, weights


@pytest.mark.parametrize("seed", range(3))
def test_backup_workers_follow_the_equation_for_200_steps(seed: int) -> None:
    cluster = Cluster(
        SSGD(backup=2),
        quadratic,
        num_workers=5,
        group=GROUP,
        seed=seed,
        speeds=(1.0, 1.0, 1.0, 0.5, 0.1),
    ).train()
    assert sum(worker.exchange.traffic.num_too_late for worker in cluster.workers) > 50
    assert_follows(cluster, *backup_model(cluster, 3))


def test_more_backup_workers_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssgd.backup is 2, must be less than the 2 workers"):
        make_clock(SSGD(backup=2), 2)
    with pytest.raises(ConfigError, match=r"ssgd.backup is -1, must be in 0"):
        SSGD(backup=-1)
