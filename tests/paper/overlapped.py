"""Rounds whose answers land in the next round, in float64, written from the equations."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pscore.rules.base import Rule
from tests.harness import NUMEL, Cluster, Vector, quadratic
from tests.paper.inner import Inner, sgd

Outer = Callable[[Vector, Vector, Vector], tuple[Vector, Vector]]  # W, V, D: W', V'.
SPEEDS = (1.0, 1.0, 0.6, 0.2)


def one_and_three(worker: int, step: int, weights: Vector) -> Vector:
    """Returns gradients for work by hand: worker 0 moves by 1 in a step, worker 1 by 3."""
    return np.full(NUMEL, (-1.0, -3.0)[worker])


def with_a_late_worker(rule: Rule) -> Cluster:
    """Returns three workers of which the last has a fifth of the others' speed."""
    return Cluster(
        rule, quadratic, num_workers=3, steps=400, inner=Inner(sgd(0.05)), speeds=(1.0, 1.0, 0.2)
    )


def nesterov(lr: float, momentum: float) -> Outer:
    """Returns torch's SGD with Nesterov momentum."""

    def step(weights: Vector, velocity: Vector, move: Vector) -> tuple[Vector, Vector]:
        velocity = momentum * velocity + move
        return weights - lr * (move + momentum * velocity), velocity

    return step


@dataclass
class Rounds:
    """A training run of workers that overlap their rounds."""

    form: str
    outer: Outer
    steps: int  # H.
    delay: int
    num_workers: int = 4
    warmup: int = 0
    mix: float = 0.5
    control: float = 0.0

    def __post_init__(self) -> None:
        each = (self.num_workers, NUMEL)
        self.landed = [np.zeros(NUMEL)]  # W^0, W^1, ...
        self.velocity = np.zeros(NUMEL)
        self.local = torch.zeros(each, dtype=torch.float64)
        self.x = self.local.numpy()  # The same memory.
        self.origin = np.zeros(each)
        self.moves: list[Vector] = []  # D_i^0, D_i^1, ...
        self.own, self.own_velocity = np.zeros(each), np.zeros(each)  # Of eager.

    def run(self, inner: Inner, total: int) -> tuple[Vector, Vector]:
        """Returns what each worker saw at each step, and the global weights at the end."""
        seen = np.zeros((self.num_workers, total, NUMEL))
        for step in range(total):
            seen[:, step] = self.x
            for worker, weights in enumerate(self.local):
                inner(worker, step, weights, quadratic(worker, step, self.x[worker]))
            self.end_step(step)
        return seen, self.landed[-1]

    def end_step(self, step: int) -> None:
        """Lands an answer, and ends a round, if it is time."""
        place = (step - self.warmup) % self.steps
        if step < self.warmup:
            self.x[:] = self.origin[:] = self.own[:] = self.landed[-1] = self.x.mean(axis=0)
            return
        if place + 1 == self.delay and self.moves:
            self.land(self.landed[-1])
        if place + 1 == self.steps:
            self.end_round()

    def land(self, weights: Vector) -> None:
        """Lands the weights that hold the last round."""
        if self.form == "mirror":
            self.x += weights - self.origin
            self.origin[:] = weights
        elif self.form == "blend":
            self.x[:] = self.mix * self.x + (1 - self.mix) * weights
            self.origin[:] = weights

    def end_round(self) -> None:
        """Steps with the mean of the moves, and starts the next round without it."""
        moves, before, momentum = self.origin - self.x, self.landed[-1], self.velocity
        last = self.moves[-1] if self.moves else np.zeros_like(moves)
        after, self.velocity = self.outer(before, momentum, moves.mean(axis=0))
        count = self.num_workers
        for worker, move in enumerate(moves):
            others = last.mean(axis=0) - last[worker] / count
            apart = last[worker] - last.mean(axis=0)
            if self.form == "none":
                self.x[worker] = after
            elif self.form == "late":
                self.x[worker] = before
            elif self.form == "mirror":
                self.x[worker] = self.outer(before, momentum, move - self.control * apart)[0]
            elif self.form == "eager":
                self.own[worker], self.own_velocity[worker] = self.outer(
                    self.own[worker], self.own_velocity[worker], move / count + others
                )
                self.x[worker] = self.own[worker]
        self.origin[:] = self.x
        self.moves.append(moves)
        self.landed.append(after)
