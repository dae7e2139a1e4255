"""Several-steps-delay SGD: the schedule, by hand, over 200 steps, and how far ahead one may run."""

from collections.abc import Callable

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rules import CD, OD, SSD
from pscore.rules.base import Rule
from pscore.types import Push, Verdict
from psserver.decisions.orders import Acknowledge
from psserver.decisions.slice_clock import SliceClock
from tests.harness import NUMEL, SLICES, Cluster, Vector, assert_follows, quadratic
from tests.participants import Listed

LR, MOMENTUM, DECAY, WORKERS = 0.04, 0.8, 0.01, 4
GROUP = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}


def test_the_schedule_by_hand() -> None:
    """k = 2, plain, lr 1: worker 1 pushes -4 at step 0 only; worker 0 sees half of it after W^2.

    The pull is issued after step 1, becomes the base of the local update of step 2, and so is
    first computed with at step 3.
    """
    cluster = Cluster(
        SSD(steps=2, warmup=0, local="sgd"),
        lambda worker, step, weights: np.full(NUMEL, -4.0 * (worker == 1 and step == 0)),
        num_workers=2,
        steps=5,
        group={"lr": 1.0},
    ).train()
    assert cluster.seen()[:, :, 0].tolist() == [[0, 0, 0, 2, 2], [0, 4, 4, 2, 2]]


def test_pulls_are_at_each_kth_step_after_the_warm_up() -> None:
    rule = SSD(steps=3, warmup=4, spread=1)
    plans = [rule.plan(step) for step in range(11)]
    assert [plan.pull for plan in plans] == [True] * 4 + [False, False, True] * 2 + [False]
    assert [plan.block for plan in plans] == [True] * 4 + [False] * 7
    assert [plan.local for plan in plans] == [False] * 4 + [True] * 7


@pytest.mark.parametrize(
    ("spread", "pulled"),
    [
        (1, [[], [], [], [0, 1, 2, 3, 4, 5]]),
        (2, [[], [], [1, 3, 5], [0, 2, 4]]),
        (3, [[], [2, 5], [1, 4], [0, 3]]),
        (4, [[3], [2], [1, 5], [0, 4]]),
    ],
)
def test_spread_each_slice_is_pulled_once_in_the_last_of_the_k_steps(
    spread: int, pulled: list[list[int]]
) -> None:
    rule = SSD(steps=4, warmup=2, spread=spread)
    plans = [rule.plan(step) for step in range(10)]
    places = [[place for place in range(6) if plan.pulls(place)] for plan in plans]
    assert places == [[*range(6)]] * 2 + pulled * 2
    assert [plan.block for plan in plans] == [True] * 2 + [False] * 8


def test_by_itself_it_spreads_only_what_brings_the_optimizers_state() -> None:
    assert SSD().turns == SSD(steps=2).turns == 2
    assert SSD(steps=1).turns == SSD(mirror="kept").turns == SSD(local="glu").turns == 1
    assert SSD(spread=1).turns == 1
    assert SSD(spread=5).turns == 5
    with pytest.raises(ConfigError, match=r"ssd.spread is 4, must be in 0..3"):
        SSD(steps=3, spread=4)


def plain(state: dict[str, Vector], weights: Vector, grad: Vector) -> Vector:
    return weights - LR * (grad + DECAY * weights)


def glu(state: dict[str, Vector], weights: Vector, grad: Vector) -> Vector:
    """As released, with D = k * lr."""
    before, state["before"] = state.get("before", weights), weights
    sync = ((1 - LR * DECAY) * before - weights) / (state["k"] * LR)
    return weights - LR * (2.0 * grad + 0.5 * sync + DECAY * weights)


def secant(state: dict[str, Vector], weights: Vector, grad: Vector) -> Vector:
    return weights - LR * (2.0 * grad + 0.5 * state["sync"] + DECAY * weights)


def mirror(state: dict[str, Vector], weights: Vector, grad: Vector) -> Vector:
    state["velocity"] = MOMENTUM * state["velocity"] + grad + DECAY * weights
    return weights - LR * state["velocity"]


def model(
    rule: SSD, update: Callable[[dict[str, Vector], Vector, Vector], Vector]
) -> tuple[Vector, Vector]:
    """Section 1.3's schedule: b_i is advanced before the push, and re-based on W after a pull.

    Spread over p steps, the elements of slice s are pulled s mod p steps before those of slice 0.
    """
    weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
    old, sync = weights, weights
    base = np.zeros((WORKERS, NUMEL))
    view = base.copy()
    k = np.array(rule.steps)
    states = [{"sync": weights, "velocity": velocity, "k": k} for _ in range(WORKERS)]
    seen = np.zeros((WORKERS, 200, NUMEL))
    since, turn = np.zeros(NUMEL), np.zeros(NUMEL)
    for number, part in enumerate(SLICES):
        turn[part] = number % rule.turns
    for step in range(200):
        seen[:, step] = view
        grads = [quadratic(i, step, view[i]) for i in range(WORKERS)]
        velocity = MOMENTUM * velocity + np.mean(grads, axis=0) + DECAY * weights
        weights = weights - LR * velocity
        since += 1
        is_warm = step >= rule.warmup
        if is_warm:
            base = np.array([update(states[i], base[i], grads[i]) for i in range(WORKERS)])
            view = base.copy()
        is_pulled = ((step - rule.warmup + 1 + turn) % rule.steps == 0) | (not is_warm)
        sync = np.where(is_pulled, ((1 - LR * DECAY) ** since * old - weights) / (since * LR), sync)
        for state in states:
            state["sync"] = sync
            # kept: from the shard at the end of the warm-up only.
            if rule.mirror == "exact" or step == rule.warmup - 1:
                state["velocity"] = np.where(is_pulled, velocity, state["velocity"])
        old, since = np.where(is_pulled, weights, old), np.where(is_pulled, 0, since)
        base = np.where(is_pulled, weights, base)
        if not is_warm:
            view = base.copy()
    return seen, weights


@pytest.mark.parametrize(
    ("name", "form", "update", "steps", "spread"),
    [
        *(("mirror", "exact", mirror, *at) for at in [(1, 0), (4, 1), (4, 0), (4, 4), (2, 2)]),
        *(
            (*local, *at)
            for local in [
                ("sgd", "exact", plain),
                ("glu", "exact", glu),
                ("secant", "exact", secant),
                ("mirror", "kept", mirror),
            ]
            for at in [(1, 0), (4, 4)]
        ),
    ],
)
def test_it_follows_the_equation_for_200_steps(
    name: str,
    form: str,
    update: Callable[[dict[str, Vector], Vector, Vector], Vector],
    steps: int,
    spread: int,
) -> None:
    rule = SSD(steps=steps, warmup=10, local=name, mirror=form, spread=spread)
    cluster = Cluster(
        rule, quadratic, num_workers=WORKERS, group=GROUP, seed=steps, speeds=(1.0, 1.0, 0.6, 0.2)
    ).train()
    assert_follows(cluster, *model(rule, update))


# ----- acknowledgement on receipt


@pytest.mark.parametrize(
    ("rule", "ahead"),
    [
        (SSD(steps=5, warmup=0, local="sgd"), 5),
        (SSD(steps=2, warmup=0, local="glu"), 2),
        (SSD(steps=32, warmup=0, spread=1), 32),
        (SSD(steps=32, warmup=0), 31),
        (SSD(steps=3, warmup=0, spread=2), 2),
        (OD(warmup=0), 1),
        (CD(warmup=0), 1),
    ],
    ids=str,
)
def test_a_fast_worker_runs_ahead_of_a_slow_one_and_then_waits(rule: Rule, ahead: int) -> None:
    """k steps are finished, and their gradients in, while the other has pushed none."""
    cluster = Cluster(rule, quadratic, num_workers=2, steps=40, speeds=(1.0, 0.0))
    cluster.train(events=2_000)
    fast, slow = cluster.workers
    assert (fast.replica.step, slow.replica.step) == (ahead, 0)
    assert fast.replica.clocks.counts == [ahead] * 2
    assert not fast.num_unacknowledged
    assert [clock.clock(0) for clock in cluster.shard.clocks] == [ahead] * 2
    assert cluster.shard.clocks[0].version == 0
    cluster.speeds = (1.0, 1.0)
    cluster.train()
    assert cluster.shard.clocks[0].version == 40
    assert cluster.shard.most_open <= ahead


def test_spread_over_all_steps_nobody_finishes_more_than_one_step_before_the_slowest() -> None:
    rule = SSD(steps=2, warmup=0, local="glu", spread=2)  # One of the two slices at each step.
    cluster = Cluster(rule, quadratic, num_workers=2, steps=40, speeds=(1.0, 0.0))
    cluster.train(events=2_000)
    assert [worker.replica.step for worker in cluster.workers] == [1, 0]


def test_beyond_that_a_push_is_parked_without_acknowledgement() -> None:
    """Back-pressure, not memory: it is let in when the slow worker's gradient has come."""
    clock = SliceClock(SSD(steps=2, warmup=0), Listed(lambda: [0, 1], 2))
    clock.version = 0
    hyper = np.zeros((1, 6))

    def acknowledged(worker: int, step: int) -> list[object]:
        message = Push(worker=worker, step=step, base_version=0, hyper=hyper)
        actions = clock.push(message, (worker, step))
        assert all(a.verdict is Verdict.ACCEPTED for a in actions if isinstance(a, Acknowledge))
        return [action.token for action in actions if isinstance(action, Acknowledge)]

    assert [acknowledged(0, step) for step in range(3)] == [[(0, 0)], [(0, 1)], []]
    assert acknowledged(1, 0) == [(1, 0), (0, 2)]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_bound_is_what_a_worker_reaches_and_never_more(steps: int) -> None:
    """`steps_open` lets every push in that the schedule can make: none waits for room."""
    cluster = Cluster(
        SSD(steps=steps, warmup=3, local="sgd"), quadratic, steps=60, speeds=(1.0, 0.3, 0.02)
    )
    most = 0
    for _ in range(400):
        cluster.train(events=10)
        most = max(most, *(len(clock.open_steps) for clock in cluster.shard.clocks))
        parked = [push for clock in cluster.shard.clocks for push in clock.parking]
        assert all(push.may_wait for push in parked)  # For each other, in the warm-up.
    assert most == steps


# ----- changes at run time


def replace_rule(cluster: Cluster, rule: SSD) -> None:
    """Gives every replica and clock another rule, which a job cannot do while it runs."""
    for clock in cluster.shard.clocks:
        due = clock.resume(clock.version, dict(clock.counted), dict(clock.open_steps), rule=rule)
        assert not due
    for worker in cluster.workers:
        worker.replica.rule = rule
    cluster.rule = rule


def test_from_warm_up_to_delay_and_to_another_k_every_gradient_counts_once() -> None:
    """Gradients 1, lr 1, no momentum: W = -t whatever the mode was, for every t."""
    cluster = Cluster(
        SSD(steps=3, warmup=5, local="sgd"),
        lambda *_: np.ones(NUMEL),
        num_workers=4,
        steps=40,
        group={"lr": 1.0},
        speeds=(1.0, 1.0, 0.4, 0.1),
    )
    for steps in (3, 7, 1, 5):
        cluster.train(events=400)
        replace_rule(cluster, SSD(steps=steps, warmup=5, local="sgd"))
    cluster.train()
    assert cluster.flat_weights().tolist() == [-40.0] * NUMEL
    counted = [(e.worker, e.slice, e.number) for e in cluster.log if e.kind == "push"]
    assert sorted(counted) == [(w, s, t) for w in range(4) for s in range(2) for t in range(40)]


def test_arguments_out_of_range_are_refused() -> None:
    for arguments in ({"steps": 0}, {"warmup": -1}, {"lr_scale": -1.0}, {"alpha": -1.0}):
        with pytest.raises(ConfigError):
            SSD(local="glu", **arguments)
    with pytest.raises(ConfigError, match=r"mirror.mirror is 'x'"):
        SSD(mirror="x")
