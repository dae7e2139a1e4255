"""Two means of rounds with a quorum, and two windows: `python -m benchmarks.rounds --quorum`.

Ours (docs/rules/quorum.md) beside those of GradientMail 0.0.2, as its code has them:

    move's weight   tokens / steps             tokens^2 / steps
    mean            sum n_i D_i / sum n_i      per tensor, unless its name has "embed": the mean of
                                               the norms along the mean of the directions ("RDA")
    window after    1.5 spreads of arrivals,   half of the slack of the steps that a learner makes
    the quorum      at most a quarter of a     before its answer lands: min(0.5 max(ahead t_step -
                    round                      (t_quorum + t_sync), 0), t_round); means move by 0.1

Loss: four learners, two with a batch four times as large; one has half the speed, so that its move
enters every second round. Each form walks from outer rate 0.1 to its own best one on the first
seed. Ours has the bits of the product's rounds up to rounding (tests/unit/benchmarks).

Windows: twelve learners, of speeds that lie up to 30 % apart and one of half speed; a quorum of
eight. The real replicas and shards in simulated time (`pssim/training.py`), with either window and
nothing else changed. Nothing is learned there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import kit
from benchmarks.chars import PART, Text
from benchmarks.goodput import make_model, make_sgd
from benchmarks.markdown import table
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from psserver.decisions.window import Window
from pssim.network import NetworkLink
from pssim.training import Compute, TrainingCluster, TrainingJob

LENGTH, ROUNDS, SEEDS = 20, 40, 2
ROWS = (2, 2, 8, 8)  # Of each learner's step; the last learner has half the speed.
LR, OUTER_MOMENTUM = 3e-3, 0.9
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4)
DATA = {"alike": 1, "unlike": len(ROWS)}
FORMS = {  # Power of a learner's tokens a step, and whether the mean keeps the norm.
    "ours": (1, False),
    "tokens^2": (2, False),
    "RDA": (1, True),
    "tokens^2, RDA": (2, True),
}
FLOOR = 1e-12  # Of a norm, as there.

LEARNERS, QUORUM, ROUND_STEPS, STEP_S = 12, 8, 40, 1.0
SPEEDS = {rank: 1.0 + 0.03 * rank for rank in range(LEARNERS - 1)} | {LEARNERS - 1: 2.0}
DEVIATION = 0.3  # Of a step's logarithm.
WINDOW_ROUNDS, DECAY = 60, 0.1
SIDES = ("ours", "theirs")
DELAYS = (0, 10, 20, 30)  # Steps that a learner makes before an answer lands; 0: it blocks.


# ----- losses


def combined(moves: Sequence[torch.Tensor], weights: Sequence[float], *, rda: bool) -> torch.Tensor:
    """Returns the mean of one tensor's moves.

    Args:
        moves: Tensors of one shape, one of each learner.
        weights: Weight of each learner, above 0.
        rda: Whether the mean of the directions gets the mean of the norms.
    """
    shares = [weight / sum(weights) for weight in weights]
    if not rda:
        return torch.stack([share * move for share, move in zip(shares, moves, strict=True)]).sum(0)
    norms = [float(move.norm()) for move in moves]
    units = [move / max(norm, FLOOR) for move, norm in zip(moves, norms, strict=True)]
    direction = combined(units, weights, rda=False)
    norm = sum(share * each for share, each in zip(shares, norms, strict=True))
    return direction * (norm / max(float(direction.norm()), FLOOR))


class Learner:
    """One learner of the loop: its model, its optimizer, and the weights that it began with."""

    def __init__(self, seed: int, rank: int, num_parts: int) -> None:
        """Makes the model that all learners begin with."""
        self.task = Text(path=PART, rows=ROWS[rank], num_parts=num_parts, seed=seed)
        self.rank, self.step = rank, 0
        self.model = self.task.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.1)

    def move(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the move of one round of steps from the given weights, by tensor."""
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        for _ in range(LENGTH):
            self.optimizer.zero_grad()
            self.task.gradient(self.model, self.rank, self.step)
            self.optimizer.step()
            self.step += 1
        pairs = zip(weights, self.model.parameters(), strict=True)
        return [weight - parameter.detach() for weight, parameter in pairs]


def trained(form: str, rate: float, seed: int, num_parts: int, rounds: int = ROUNDS) -> nn.Module:
    """Returns the model after rounds of one form.

    Args:
        form: One of `FORMS`.
        rate: Outer learning rate.
        seed: Seed of the model and of the minibatches.
        num_parts: Parts of the text from which the learners draw; 1: all draw from all of it.
        rounds: Rounds; of an even number the last one has the slow learner's move.
    """
    power, rda = FORMS[form]
    learners = [Learner(seed, rank, num_parts) for rank in range(len(ROWS))]
    model = learners[0].task.make_model()
    names = [name for name, _ in model.named_parameters()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [torch.zeros_like(weight) for weight in weights]
    late: list[torch.Tensor] = []
    for round_ in range(rounds):
        moves = [learner.move(weights) for learner in learners[:-1]]
        if round_ % 2:
            moves.append(late)
        else:
            late = learners[-1].move(weights)
        tokens = [float(rows**power) for rows in ROWS[: len(moves)]]
        for index, name in enumerate(names):
            parts = [each[index] for each in moves]
            move = combined(parts, tokens, rda=rda and "embed" not in name)
            momenta[index] = OUTER_MOMENTUM * momenta[index] + move
            weights[index] = weights[index] - rate * (move + OUTER_MOMENTUM * momenta[index])
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return model


def loss_of(form: str, rate: float, seed: int, num_parts: int) -> float:
    """Returns the loss on the text's end, in nats a character."""
    model = trained(form, rate, seed, num_parts)
    return Text(path=PART, num_parts=num_parts, seed=seed).held_out_loss(model)


def losses_of(form: str, num_parts: int) -> dict[str, Any]:
    """Returns a form's best outer rate and the losses of all seeds with it."""
    found: dict[float, float] = {}
    best = RATES.index(0.1)
    while True:
        for index in (best - 1, best, best + 1):
            if 0 <= index < len(RATES) and RATES[index] not in found:
                found[RATES[index]] = loss_of(form, RATES[index], 0, num_parts)
        better = RATES.index(min(found, key=lambda rate: found[rate]))
        if better == best:
            break
        best = better
    rate = RATES[best]
    rest = [loss_of(form, rate, seed, num_parts) for seed in range(1, SEEDS)]
    return {"rate": rate, "losses": [round(loss, 4) for loss in (found[rate], *rest)]}


# ----- windows


class SlackWindow(Window):
    """Their window: half of the slack that the steps ahead leave after quorum and exchange.

    The seconds of an exchange are 0 here: a simulated shard answers at once.
    """

    def __init__(self, ahead: int) -> None:
        """Knows how many steps a learner makes before its answer lands."""
        super().__init__(-1.0)
        self._ahead = ahead
        self._to_quorum_s: float | None = None

    @property
    def length_s(self) -> float:
        """The length of the open round's window, in seconds; 0 before it has been measured."""
        if self._to_quorum_s is None:
            return 0.0
        slack_s = max(self._ahead * STEP_S - self._to_quorum_s, 0.0)
        return min(0.5 * slack_s, ROUND_STEPS * STEP_S)

    def close(self, step: int) -> None:
        """Notes that a round has closed, and measures the time to its quorum."""
        super().close(step)
        if self.closed is None or self.closed.opened_s is None:
            return
        took_s = self.closed.quorum_s - self.closed.opened_s
        former_s = took_s if self._to_quorum_s is None else self._to_quorum_s
        self._to_quorum_s = former_s + DECAY * (took_s - former_s)


@contextmanager
def windows(ahead: int | None) -> Iterator[list[Window]]:
    """Gives the shards their windows, ours with None; yields those that are made."""
    made: list[Window] = []
    ours = Window.of

    def of(rule: Rule) -> Window:
        made.append(ours(rule) if ahead is None else SlackWindow(ahead))
        return made[-1]

    with mock.patch.object(Window, "of", of):
        yield made


def waits(
    delay: int, *, is_ours: bool, seed: int = 0, rounds: int = WINDOW_ROUNDS
) -> dict[str, Any]:
    """Returns the rounds, the share of the moves that are late, and that of the time waited.

    Args:
        delay: Steps after which an answer lands; 0: rounds that block.
        is_ours: Whether the window is ours.
        seed: Seed of the computing times.
        rounds: Length of the run, in rounds of a learner of usual speed.
    """
    overlap = f", overlap=mirror, delay={delay}" if delay else ""
    steps = [0] * LEARNERS

    def one_more(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        steps[rank] += 1

    job = TrainingJob(
        rule=parse_mode(f"diloco(steps={ROUND_STEPS}, quorum={QUORUM}{overlap})"),
        make_model=make_model,
        gradient=lambda model, rank, step: 0.0,
        group=make_sgd([nn.Parameter(torch.zeros(1))]).param_groups[0],
        make_inner=make_sgd,
        num_workers=LEARNERS,
        num_shards=1,
        steps=1 << 30,
        link=NetworkLink(latency_s=1e-3, bandwidth=1.25e9),
        compute=Compute(mean_s=STEP_S, deviation=DEVIATION, slow=SPEEDS),
        seed=seed,
        on_step=one_more,
        tick_s=STEP_S / 50,
    )
    until_s = rounds * ROUND_STEPS * STEP_S
    with windows(None if is_ours else delay) as made:
        cluster = TrainingCluster(job).run(until_s=until_s)
    (window,) = (window for window in made if window.closed is not None)
    moves = sum(each // ROUND_STEPS for each in steps)
    waited_s = sum(worker.waited_s for worker in cluster.workers)
    return {
        "rounds": sum(
            clock.version for shard in cluster.shards for _, _, clock, _ in shard.slices()
        ),
        "late": round(window.num_late / moves, 4),
        "waited": round(waited_s / LEARNERS / until_s, 4),
    }


# ----- the run


def run(out: Path | None, *, as_json: bool) -> None:
    """Trains all forms, and measures both windows."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"losses": {}, "windows": {}}
    for data, num_parts in DATA.items():
        row = found["losses"][data] = {}
        for form in FORMS:
            row[form] = losses_of(form, num_parts)
            print(f"{data}, {form}: {row[form]}", flush=True)
    for delay in DELAYS:
        row = found["windows"][str(delay)] = {
            "ours": waits(delay, is_ours=True),
            "theirs": waits(delay, is_ours=False),
        }
        print(f"delay {delay}: {row}", flush=True)
    found |= {
        "command": "python -m benchmarks.rounds --quorum",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "commit": kit.commit(),
    }
    kit.publish(found, tables_of(found), out, as_json=as_json)


def tables_of(found: dict[str, Any]) -> str:
    """Returns the tables of a result: losses with their outer rates, then the windows."""
    rows = [
        [data, *(f"{mean(row[form]['losses']):.4f} ({row[form]['rate']:g})" for form in FORMS)]
        for data, row in found["losses"].items()
    ]
    losses = table(["data", *FORMS], rows, "l" + "r" * len(FORMS))
    head = ["delay", *(f"{key}, {side}" for key in ("rounds", "late", "waited") for side in SIDES)]
    rows = [
        [
            delay,
            *(str(row[side]["rounds"]) for side in SIDES),
            *(f"{row[side][key]:.1%}" for key in ("late", "waited") for side in SIDES),
        ]
        for delay, row in found["windows"].items()
    ]
    return f"{losses}\n\n{table(head, rows, 'r' * len(head))}"
