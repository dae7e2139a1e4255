"""Rounds whose answers land in the next round, in float64, written from the equations."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.harness import NUMEL, Vector, quadratic
from tests.paper.inner import Inner

Outer = Callable[[Vector, Vector, Vector], tuple[Vector, Vector]]  # W, V, D: W', V'.


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
    gradient: Callable[[int, int, Vector], Vector] = quadratic
    landed: list[Vector] = field(default_factory=list)  # W^0, W^1, ...

    def run(self, inner: Inner, total: int) -> tuple[Vector, Vector]:
        """Returns what each worker saw at each step, and the global weights at the end."""
        count = self.num_workers
        weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
        local = torch.zeros((count, NUMEL), dtype=torch.float64)
        x = local.numpy()  # The same memory.
        origin = np.zeros((count, NUMEL))
        seen = np.zeros((count, total, NUMEL))
        self.landed = [weights]
        is_flying = False
        moves = mean = np.zeros((count, NUMEL))  # Of the last round that has landed.
        flying = mean, mean
        own, own_velocity = np.zeros((count, NUMEL)), np.zeros((count, NUMEL))  # Of eager.
        is_first = True
        for step in range(total):
            seen[:, step] = x
            for worker in range(count):
                inner(worker, step, local[worker], self.gradient(worker, step, x[worker]))
            if step < self.warmup:
                weights = x.mean(axis=0)
                x[:], origin[:] = weights, weights
                self.landed[-1] = weights
                continue
            place = (step - self.warmup) % self.steps
            if place + 1 == self.delay and is_flying:
                if self.form == "mirror":
                    x += weights - origin
                    origin[:] = weights
                elif self.form == "blend":
                    x[:] = self.mix * x + (1 - self.mix) * weights
                    origin[:] = weights
                moves, mean = flying
                is_flying = False
            if place + 1 < self.steps:
                continue
            made = origin - x
            average = made.mean(axis=0)
            before, momentum = weights, velocity
            weights, velocity = self.outer(before, momentum, average)
            for worker in range(count):
                if self.form == "late":
                    start = before
                elif self.form == "blend":
                    start = x[worker]
                elif self.form == "eager":
                    if is_first:
                        own[worker], own_velocity[worker] = before, momentum
                    rest = mean - moves[worker] / count
                    guess = made[worker] / count + (0 if is_first else rest)
                    start, own_velocity[worker] = self.outer(
                        own[worker], own_velocity[worker], guess
                    )
                    own[worker] = start
                else:
                    last = 0 if is_first else moves[worker] - mean
                    start, _ = self.outer(before, momentum, made[worker] - self.control * last)
                origin[worker] = start
            x[:] = origin
            flying, is_flying, is_first = (made, average), True, False
            self.landed.append(weights)
        return seen, weights
