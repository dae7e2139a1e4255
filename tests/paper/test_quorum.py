"""Rounds with a quorum in float64, over random arrivals, and their limits."""

from collections import deque

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import DiLoCo, LocalSGD, SlowMo, parse_mode
from pscore.rules.base import require_sizes
from tests.harness import NUMEL, SLICES, Cluster, Vector, quadratic
from tests.paper.inner import Inner

LR, H, WORKERS, STEPS = 0.1, 4, 4, 80


def inner() -> Inner:
    return Inner(lambda parameters: torch.optim.SGD(parameters, lr=LR))


def weight(worker: int, step: int) -> float:
    return 1.0 + worker


class Model:
    """D = sum n_i D_i / sum n_i over the moves that are in; outer Nesterov; slice by slice.

    With two fragments the rounds of the first slice end H / 2 steps before those of the second.
    """

    def __init__(self, quorum: int, outer_lr: float, momentum: float, fragments: int = 1) -> None:
        self.quorum, self.outer_lr, self.momentum = quorum, outer_lr, momentum
        self.ends = (H, H) if fragments == 1 else (H // 2, H)
        self.first = [0] * WORKERS  # Steps of the others when each began: behind the newest round.
        self.has_begun = [False] * WORKERS
        self.weights = [[np.zeros(NUMEL)[part]] for part in SLICES]  # Of each version.
        self.velocity = [np.zeros(NUMEL)[part] for part in SLICES]
        self.local = np.zeros((WORKERS, NUMEL))
        self.start = np.zeros((WORKERS, NUMEL))
        self.sent: dict[tuple[int, int], deque[Vector]] = {}
        self.open: list[list[tuple[int, Vector]]] = [[] for _ in SLICES]
        self.live = set(range(WORKERS))
        self.num_late = 0

    def compute(self, worker: int, step: int) -> None:
        self.has_begun[worker] = True
        self.local[worker] -= LR * quadratic(worker, step, self.local[worker])
        for index, part in enumerate(SLICES):
            place = self.first[worker] + step + 1 - self.ends[index]
            if place % H == 0 or step + 1 == STEPS:
                move = self.start[worker][part] - self.local[worker][part]
                self.sent.setdefault((worker, index), deque()).append(move)

    def push(self, worker: int, index: int, step: int) -> None:
        self.num_late += step < len(self.weights[index]) - 1
        self.open[index].append((worker, self.sent[worker, index].popleft()))
        self.close(index)

    def leave(self, worker: int) -> None:
        self.live.discard(worker)
        for index in range(len(SLICES)):
            self.close(index)

    def close(self, index: int) -> None:
        workers = {worker for worker, _ in self.open[index]}
        if not workers or len(workers) < min(self.quorum, len(workers | self.live)):
            return
        total = sum(weight(worker, 0) for worker, _ in self.open[index])
        mean = sum(weight(worker, 0) * move for worker, move in self.open[index]) / total
        self.velocity[index] = self.momentum * self.velocity[index] + mean
        ahead = mean + self.momentum * self.velocity[index]
        self.weights[index].append(self.weights[index][-1] - self.outer_lr * ahead)
        self.open[index].clear()

    def answer(self, worker: int, index: int, version: int) -> None:
        if not self.has_begun[worker] and version:
            ended = self.ends[index] + (version - 1) * H
            self.first[worker] = max(self.first[worker], ended)
        self.local[worker][SLICES[index]] = self.weights[index][version]
        self.start[worker][SLICES[index]] = self.weights[index][version]


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("fragments", "outer_lr", "momentum"), [(1, 1.0, 0.0), (1, 0.5, 0.6), (2, 0.5, 0.6)]
)
def test_it_follows_the_equation_over_random_arrivals(
    quorum: int, fragments: int, outer_lr: float, momentum: float
) -> None:
    rule = DiLoCo(
        steps=H,
        quorum=quorum,
        window=0.0,
        fragments=fragments,
        outer_lr=outer_lr,
        outer_momentum=momentum,
    )
    cluster = Cluster(
        rule,
        quadratic,
        num_workers=WORKERS,
        inner=inner(),
        samples=weight,
        seed=quorum,
        speeds=(1.0, 1.0, 0.6, 0.2),
        steps=STEPS,
    ).train()
    model = Model(quorum, outer_lr, momentum, fragments)
    for event in cluster.log:
        match event.kind:
            case "compute":
                model.compute(event.worker, event.number)
            case "push":
                model.push(event.worker, event.slice, event.number)
            case "answer":
                model.answer(event.worker, event.slice, event.number)
            case "leave":
                model.leave(event.worker)
            case kind:
                raise AssertionError(kind)  # No move is ever too late.
    assert (model.num_late > 0) == (quorum < WORKERS)
    found = np.concatenate([weights[-1] for weights in model.weights])
    np.testing.assert_allclose(cluster.flat_weights(), found, rtol=2e-4, atol=2e-5)
    assert not any(model.sent.values())


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo, SlowMo])
@pytest.mark.parametrize(("overlap", "fragments"), [("none", 1), ("mirror", 1), ("mirror", 2)])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_quorum_of_all_is_the_mode_without_to_the_bit(
    rule: type[LocalSGD], overlap: str, fragments: int, workers: int
) -> None:
    def train(**quorum: float) -> Cluster:
        return Cluster(
            rule(steps=H, overlap=overlap, fragments=fragments, **quorum),  # type: ignore[arg-type]
            quadratic,
            num_workers=workers,
            inner=inner(),
            samples=weight,
            seed=5,
            steps=24,
        ).train()

    plain, quorum = train(), train(quorum=workers, window=0.0)
    assert np.array_equal(plain.flat_weights(), quorum.flat_weights())
    assert np.array_equal(plain.seen(), quorum.seen())


@pytest.mark.parametrize("fragments", [1, 2])
def test_overlapped_rounds_with_a_quorum_end_near_the_minimum(fragments: int) -> None:
    """Moves come late and answers land late: nothing diverges, and every move is in."""
    cluster = Cluster(
        DiLoCo(steps=H, quorum=2, window=0.0, overlap="mirror", delay=1, fragments=fragments),
        quadratic,
        num_workers=WORKERS,
        inner=inner(),
        seed=3,
        speeds=(1.0, 1.0, 0.6, 0.2),
        steps=200,
    ).train()
    minimum = np.mean([np.cos(np.arange(NUMEL) * (1.0 + w)) for w in range(WORKERS)], axis=0)
    assert np.abs(cluster.flat_weights() - minimum).max() < 2.0
    assert all(clock.window.num_late > 0 for clock in cluster.shard.clocks)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("diloco(quorum=-1)", "diloco.quorum is -1, must be in 0"),
        ("local(quorum=2, window=-2.0)", "local.window is -2.0, must be in 0"),
        ("slowmo(window=3.0)", "slowmo.window is 3 without a quorum"),
        ("diloco(quorum=2, backup=1)", "diloco.quorum is 2 and diloco.backup is 1"),
        ("diloco(quorum=2, overlap=eager)", "diloco.quorum must be 0, is 2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(mode: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_mode(mode)
    assert message in str(problem.value)


def test_a_quorum_of_more_than_the_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"diloco.quorum is 3, must be at most the 2 workers"):
        require_sizes(DiLoCo(quorum=3), 2, 0)
    with pytest.raises(ConfigError, match=r"at most the 2 workers: the job may have 2 to 4"):
        require_sizes(DiLoCo(quorum=3), 4, 2)
