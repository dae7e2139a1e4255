"""The loop in which the means of rounds with a quorum are compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks import round_quorum
from benchmarks.chars import PART, Text
from pscore.rules import parse_mode
from pssim.training import Compute, TrainingCluster, TrainingJob


def test_the_loop_with_our_mean_is_the_product() -> None:
    torch.set_num_threads(1)
    rounds, rate = 4, 0.7
    tasks = [Text(path=PART, rows=rows) for rows in round_quorum.ROWS]
    learners = len(tasks)
    mode = (
        f"diloco(steps={round_quorum.LENGTH}, outer_lr={rate}, quorum={learners - 1}, window=0.5)"
    )
    job = TrainingJob(
        rule=parse_mode(mode),
        make_model=tasks[0].make_model,
        gradient=lambda model, rank, step: tasks[rank].gradient(model, rank, step),
        group={"lr": round_quorum.LR},
        make_inner=lambda parameters: torch.optim.AdamW(
            parameters, lr=round_quorum.LR, weight_decay=0.1
        ),
        num_workers=learners,
        steps=rounds * round_quorum.LENGTH,
        samples=lambda rank, step: float(round_quorum.ROWS[rank]),
        compute=Compute(mean_s=1.0, deviation=0.0, slow={learners - 1: 2.0}),
    )
    # Rounds close after 20.5, 40.5, 61 and 81 s; the slow learner is in the second and the fourth.
    cluster = TrainingCluster(job).run(until_s=81.25)
    theirs = round_quorum.trained("ours", rate, 0, 1, rounds)
    ours = torch.cat([weight.detach().flatten() for weight in theirs.parameters()])
    product = cluster.show(tasks[0].make_model())
    weights = torch.cat([weight.detach().flatten() for weight in product.parameters()])
    torch.testing.assert_close(weights, ours, rtol=1e-4, atol=1e-5)


def test_the_mean_of_directions_has_the_mean_norm() -> None:
    moves = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])]
    plain = round_quorum.combined(moves, [1.0, 3.0], rda=False)
    turned = round_quorum.combined(moves, [1.0, 3.0], rda=True)
    assert plain.tolist() == [0.75, 0.75]
    assert float(turned.norm()) == pytest.approx(1.5)  # (3 + 3 * 1) / 4.
    assert float(turned[1] / turned[0]) == pytest.approx(3.0)


def test_the_window_of_the_slack_is_half_of_it() -> None:
    window = round_quorum.SlackWindow(ahead=30)
    assert window.length_s == 0.0
    for step, (quorum_s, closed_s) in enumerate([(9.0, 10.0), (20.0, 22.0)]):
        window.tick(quorum_s)
        window.is_over(step)
        window.tick(closed_s)
        window.close(step)
    assert window.length_s == 0.5 * (30.0 - 10.0)  # Ten seconds from close to quorum.
