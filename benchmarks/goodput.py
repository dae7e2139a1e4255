"""Goodput against time between failures, with up to 1,000 learners, in simulated time.

    python -m benchmarks.goodput --quick --json
    python -m benchmarks.goodput --out docs/results/goodput.json

The real replicas, clocks and stores (`benchmarks/failing.py`); computing is simulated. Each learner
fails at random times and is started again two minutes later. Decoupled rounds (`diloco` with a
quorum) lose the failed learner's part of a round and its restart. Data parallelism is `ssgd`: a
step waits for all, so everybody waits for each restart, and the failed learner's step is computed
again. Goodput is the learners' computing that is in the weights, over that of the same mode and
time without failures. The shards do not fail here; `benchmarks.chaos` kills real ones.

Not modelled: a real all-reduce job also goes back to its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import curves, kit
from benchmarks.failing import FailingCluster, Failures
from pscore.rules import parse_mode
from pssim.network import NetworkLink
from pssim.training import Compute, TrainingCluster, TrainingJob

LEARNERS = (100, 1000)
HOURS = (1, 10, 100, 1000)  # Mean time between failures of a learner.
RESTART_S = 120.0
STEP_S, DEVIATION = 30.0, 0.1
LENGTH = 20  # H: steps of a round.
STEPS, ROUNDS = 60, 10  # Of a run, and half of the last one: as likely as not it is in.
ROUNDS_MODE, PARALLEL_MODE = "decoupled rounds", "data parallelism"


def make_model() -> nn.Module:
    """Returns one weight: nothing is learned here."""
    torch.manual_seed(0)
    return nn.Linear(1, 1, bias=False)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Returns an optimizer without state."""
    return torch.optim.SGD(parameters, lr=0.1)


def modes(learners: int) -> dict[str, tuple[str, float, float, int]]:
    """Returns mode, seconds of a step, their deviation, and the steps of a run, by name.

    Half a round is one step of the simulation: the answer to the last one lands in the middle.
    """
    quorum = max(1, learners * 2 // 3)
    rounds = f"diloco(steps=2, quorum={quorum}, overlap=mirror, delay=1)"
    half_s, half_deviation = LENGTH * STEP_S / 2, DEVIATION / math.sqrt(LENGTH / 2)
    return {
        ROUNDS_MODE: (rounds, half_s, half_deviation, 2 * ROUNDS),
        PARALLEL_MODE: ("ssgd", STEP_S, DEVIATION, STEPS),
    }


def counted(name: str, learners: int, hours: float, share: float = 1.0) -> tuple[int, int]:
    """Returns the steps or rounds that are in the weights, and the failures.

    Args:
        name: Name of the mode.
        learners: Learners.
        hours: Mean time between failures of each; infinity: none.
        share: Part of the usual length of a run.
    """
    mode, step_s, deviation, steps = modes(learners)[name]
    rule, count = parse_mode(mode), [0]
    length = 2 if rule.outer_optimizer else 1

    def one_more(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        count[0] += (step + 1) % length == 0

    job = TrainingJob(
        rule=rule,
        make_model=make_model,
        gradient=lambda model, rank, step: 0.0,
        group=make_sgd([nn.Parameter(torch.zeros(1))]).param_groups[0],
        make_inner=make_sgd if rule.outer_optimizer else None,
        num_workers=learners,
        num_shards=1,
        steps=1 << 30,
        link=NetworkLink(latency_s=1e-3, bandwidth=1.25e9),
        compute=Compute(mean_s=step_s, deviation=deviation),
        on_step=one_more,
        tick_s=step_s / 100,
    )
    cluster = FailingCluster(job, Failures(mean_s=3600.0 * hours, restart_s=RESTART_S))
    cluster.run(until_s=(math.floor(share * steps / length) + 0.5) * length * step_s)
    return count[0], cluster.num_failures


def measure(sizes: tuple[int, ...], hours: tuple[int, ...], share: float) -> list[dict[str, Any]]:
    """Returns goodput and failures of each mode, number of learners and time between failures."""
    rows = []
    for learners in sizes:
        for name in modes(learners):
            whole, _ = counted(name, learners, math.inf, share)
            for each in hours:
                found, failures = counted(name, learners, each, share)
                row = {"mode": name, "learners": learners, "hours": each, "failures": failures}
                rows.append({**row, "goodput": round(found / whole, 4)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def plot(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Draws goodput against the time between failures; returns the file."""
    path = folder / "goodput.png"
    figure = curves.new_figure(7.5, 4)
    axis = figure.subplots()
    for name, color in ((ROUNDS_MODE, curves.COLORS[0]), (PARALLEL_MODE, curves.COLORS[1])):
        for learners in sorted({row["learners"] for row in rows}):
            found = [row for row in rows if (row["mode"], row["learners"]) == (name, learners)]
            axis.plot(
                [row["hours"] for row in found],
                [100 * row["goodput"] for row in found],
                marker="o",
                color=color,
                linestyle="-" if learners == max(LEARNERS) else ":",
                label=f"{name}, {learners:,} learners",
            )
    axis.set_xscale("log")
    curves.dress(axis, "mean time between failures of a learner, hours", "goodput, %")
    axis.set_ylim(0, 102)
    axis.legend(frameon=False, fontsize=9)
    return curves.save(figure, path)


def main() -> None:
    """Runs all, prints the rows, and writes the result file and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 learners, three times")
    parser.add_argument("--out", type=Path, help="result file; the figure goes to docs/plots")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    sizes, hours = (LEARNERS[:1], HOURS[:3]) if args.quick else (LEARNERS, HOURS)
    rows = measure(sizes, hours, 0.3 if args.quick else 1.0)
    result = {
        "command": " ".join(["python -m benchmarks.goodput", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": kit.commit(),
        "rows": rows,
    }
    head = ["mode", "learners", "hours", "failures", "goodput"]
    kit.show("goodput", head, [[row[key] for key in head] for row in rows])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        plot(rows, kit.ROOT / "docs" / "plots")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
