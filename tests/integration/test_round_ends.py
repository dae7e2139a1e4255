"""Rounds that end before their time, and the answers that are under way then."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station

Array = npt.NDArray[Any]
NUMEL, H, DELAY = 16, 4, 3
LR, OUTER, MOMENTUM, MIX = 0.1, 0.5, 0.6, 0.25
SAMPLES = (1.0, 3.0)  # Of each worker: its weight in the mean.
FORMS = ("none", "late", "mirror", "blend", "eager")
# Steps before the open round ends early, and the steps after that. An answer lands in the third
# step of a round: 5 and 9 are before it, 7 is behind it.
STEPS = ((5, 6), (7, 6), (9, 3))


def mode(form: str) -> str:
    ends = f"outer_lr={OUTER}, outer_momentum={MOMENTUM}, mix={MIX}"
    return f"diloco(steps={H}, overlap={form}, delay={DELAY}, {ends})"


def gradient(rank: int, step: int) -> Array:
    """Returns a gradient that does not depend on the weights, of both parameters."""
    drawn: Array = np.random.default_rng([rank, step]).standard_normal(2 * NUMEL)
    return drawn.astype(np.float32)


class Rounds:
    """Rounds in float64; the second half of the weights may be frozen at first."""

    def __init__(self, form: str, trained: int) -> None:
        self.form, self.trained, self.step = form, trained, 0
        self.global_ = np.zeros(2 * NUMEL)
        self.momentum = np.zeros(2 * NUMEL)
        self.begin()

    def begin(self) -> None:
        """All continue from the global weights, and nothing is under way."""
        self.start, self.x = (np.tile(self.global_, (2, 1)) for _ in "sx")
        self.before = self.global_.copy()  # The newest that has landed.
        self.num, self.lands, self.others = 0, False, np.zeros((2, 2 * NUMEL))
        self.own, self.own_momentum = self.start.copy(), np.tile(self.momentum, (2, 1))

    def train(self, num: int) -> None:
        for _ in range(num):
            for rank, x in enumerate(self.x):
                x[: self.trained] -= LR * gradient(rank, self.step)[: self.trained]
            self.num += 1
            self.step += 1
            place = self.step % H
            if self.lands and place == DELAY:
                self.land()
            if place == 0:
                self.end_round()

    def land(self) -> None:
        self.lands = False
        self.before = self.global_.copy()
        if self.form == "mirror":
            self.x += self.global_ - self.start
            self.start[:] = self.global_
        elif self.form == "blend":
            self.x[:] = MIX * self.x + (1 - MIX) * self.global_
            self.start[:] = self.global_

    def outer(self, weights: Array, momentum: Array, move: Array) -> tuple[Array, Array]:
        momentum = MOMENTUM * momentum + move
        return weights - OUTER * (move + MOMENTUM * momentum), momentum

    def push(self) -> Array:
        """Steps with the weighted mean of the moves; returns them."""
        moves = self.start - self.x
        mean = np.average(moves, axis=0, weights=SAMPLES)
        self.global_, self.momentum = self.outer(self.global_, self.momentum, mean)
        return moves

    def end_round(self) -> None:
        """Ends a round in time; with an overlap the next one starts without the answer."""
        before, momentum = self.global_, self.momentum
        moves = self.push()
        self.num = 0
        if self.form == "none":
            self.begin()
            return
        mean = np.average(moves, axis=0, weights=SAMPLES)
        for rank, move in enumerate(moves):
            if self.form == "late":
                self.x[rank] = before
            elif self.form == "mirror":
                self.x[rank], _ = self.outer(before, momentum, move)
            elif self.form == "eager":
                guess = move / 2 + self.others[rank]
                self.own[rank], self.own_momentum[rank] = self.outer(
                    self.own[rank], self.own_momentum[rank], guess
                )
                self.x[rank] = self.own[rank]
                self.others[rank] = mean - move / 2
        self.start[:] = self.x
        self.lands = True

    def end_early(self) -> None:
        """Ends the open round as it is: its move counts, and no answer lands any more."""
        if self.num:
            self.push()
        self.begin()


def work(me: Station, form: str, cause: str, steps: tuple[int, int]) -> list[Array]:
    """Returns the model behind the early end of a round, where it can be seen, and at the end."""
    first, second = (torch.nn.Parameter(torch.zeros(NUMEL)) for _ in "ab")
    second.requires_grad_(cause != "thaw")
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([first, second], lr=LR),
        [("first", first), ("second", second)],
        mode=mode(form),
        samples=SAMPLES[me.rank],
    )

    def train(begin: int, num: int) -> None:
        for step in range(begin, begin + num):
            optimizer.zero_grad()
            grads = torch.from_numpy(gradient(me.rank, step)).view(2, NUMEL)
            for parameter, grad in zip((first, second), grads, strict=True):
                if parameter.requires_grad:
                    parameter.grad = grad.clone()
            optimizer.step()

    def model() -> Array:
        return torch.cat((first, second)).detach().numpy().copy()

    train(0, steps[0])
    if cause == "set_mode":
        optimizer.set_mode(mode("none").replace(f"mix={MIX}", "mix=0.75"))  # None is as it was.
    elif cause == "thaw":
        second.requires_grad_(True)  # The next step sees it, and ends the round before it.
    elif cause == "close":
        psworker.shutdown()
        return [model()]
    found = [model()] if cause == "set_mode" else []
    train(*steps)
    psworker.shutdown()
    return [*found, model()]


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("cause", ["close", "set_mode", "thaw"])
def test_an_open_round_that_ends_early_counts_and_no_answer_lands(
    shards: Shards, cause: str, steps: tuple[int, int]
) -> None:
    for form in FORMS:
        rounds = Rounds(form, NUMEL if cause == "thaw" else 2 * NUMEL)
        rounds.train(steps[0])
        rounds.end_early()
        expected = [rounds.global_] if cause != "thaw" else []
        if cause == "set_mode":
            rounds.form = "none"
        if cause == "thaw":
            rounds.trained = 2 * NUMEL
        if cause != "close":
            rounds.train(steps[1])
            rounds.end_early()
            expected.append(rounds.global_)
        for found in shards.run(work, form, cause, steps):
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=form)
