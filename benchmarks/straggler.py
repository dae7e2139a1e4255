"""Steps per second of every mode with one slow worker of eight, in simulated time.

    python -m benchmarks.straggler --json --out docs/plots

The real replicas, clocks and stores (`pssim/training.py`); computing is simulated and the network
is fast, so that only waiting for others takes time. Two cases: one worker is always slowed by a
factor, as in the straggler table of AD-PSGD (Lian et al., arXiv:1710.06952); and every worker has a
slow step now and then. Pace is steps per second of the seven other workers (in the second case: of
all eight) over the same without a slow one. An allowance of k or s steps hides a slow step, but not
a slow worker.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import curves
from pscore.rules import parse_mode
from pssim.network import NetworkLink
from pssim.training import Compute, TrainingCluster, TrainingJob

NUM_WORKERS, SLOW = 8, 7  # SLOW is the rank of the slow one.
FACTORS = (2, 10, 100)
HICCUP, HICCUP_FACTOR = 0.02, 10.0  # A step in fifty takes ten times as long.
KEEPS = 0.9  # The pace from which on a mode keeps its pace.
MEAN_S = 10e-3
MODES = {
    "ssgd": "ssgd",
    "ssgd backup=1": "ssgd(backup=1)",
    "asgd": "asgd",
    "staleness n=1": "staleness(splits=1)",
    "staleness n=8": "staleness(splits=8)",
    "dcasgd": "dcasgd",
    "ssp s=3": "ssp(bound=3)",
    "ssp s=16": "ssp(bound=16)",
    "ssp, no bound": "ssp(bound=-1)",
    "od": "od(warmup=0)",
    "cd k=5": "cd(warmup=0)",
    "ssd k=5": "ssd(steps=5, warmup=0)",
    "ssd k=16": "ssd(steps=16, warmup=0)",
    "local H=8": "local(steps=8)",
    "local H=64": "local(steps=64)",
    "local H=8, backup=1": "local(steps=8, backup=1)",
    "slowmo H=48": "slowmo",
    "slowmo H=48, backup=1": "slowmo(backup=1)",
    "diloco H=64": "diloco(steps=64)",
    "diloco H=64, backup=1": "diloco(steps=64, backup=1)",
    "delayed_nesterov H=64": "delayed_nesterov(steps=64)",
}


def make_model() -> nn.Module:
    """Returns a few weights: nothing is learned here."""
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def rates(mode: str, compute: Compute, seconds: float) -> tuple[float, float]:
    """Returns steps per second of one of the first seven workers, and of all eight together."""
    rule = parse_mode(mode)
    counts = [0] * NUM_WORKERS

    def count(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        counts[rank] += 1

    def make_sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]

    job = TrainingJob(
        rule=rule,
        make_model=make_model,
        gradient=lambda model, rank, step: 0.0,
        group=make_sgd([torch.nn.Parameter(torch.zeros(1))]).param_groups[0],
        make_inner=make_sgd if rule.outer_optimizer else None,
        num_workers=NUM_WORKERS,
        num_shards=1,
        steps=1 << 30,
        link=NetworkLink(latency_s=50e-6, bandwidth=1.25e9),
        compute=compute,
        on_step=count,
    )
    TrainingCluster(job).run(until_s=seconds)
    return sum(counts[:SLOW]) / SLOW / seconds, sum(counts) / seconds


def measure(num_steps: int) -> dict[str, dict[str, float]]:
    """Returns, for each mode, the steps per second of each case."""
    found: dict[str, dict[str, float]] = {}
    seconds = num_steps * MEAN_S
    for name, mode in MODES.items():
        row: dict[str, float] = {}
        row["none"], row["none, all"] = rates(mode, Compute(mean_s=MEAN_S), seconds)
        for factor in FACTORS:
            compute = Compute(mean_s=MEAN_S, slow={SLOW: float(factor)})
            row[f"{factor}x"], row[f"{factor}x, all"] = rates(mode, compute, seconds)
        # The factor is so chosen that the mean of a step is the same as without.
        share = 1 + HICCUP * (HICCUP_FACTOR - 1)
        compute = Compute(mean_s=MEAN_S / share, hiccup=HICCUP, hiccup_factor=HICCUP_FACTOR)
        _, row["hiccups, all"] = rates(mode, compute, seconds)
        row["pace"] = row[f"{FACTORS[-1]}x"] / row["none"]
        row["pace, hiccups"] = row["hiccups, all"] / row["none, all"]
        found[name] = {key: round(value, 3) for key, value in row.items()}
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    """Prints the table."""
    grid = Table(
        title=f"{NUM_WORKERS} workers, {1e3 * MEAN_S:g} ms of computing a step, worker {SLOW} "
        "slowed; steps/s of each other worker",
        box=box.SIMPLE_HEAD,
    )
    grid.add_column("mode")
    columns = ("none", *(f"{factor}x" for factor in FACTORS))
    for column in (*columns, "pace at 100x", "keeps it", "pace, hiccups"):
        grid.add_column(column, justify="right")
    for name, row in found.items():
        grid.add_row(
            name,
            *(f"{row[column]:.1f}" for column in columns),
            f"{row['pace']:.2f}",
            "yes" if row["pace"] >= KEEPS else "no",
            f"{row['pace, hiccups']:.2f}",
        )
    Console(highlight=False, width=110).print(grid)
    print(
        f"hiccups: {100 * HICCUP:g} % of every worker's steps take {HICCUP_FACTOR:g} times as "
        "long, the mean step as long as without"
    )


def plot(found: dict[str, dict[str, float]], folder: Path) -> Path:
    """Draws the pace of each mode as bars; returns the file."""
    figure = curves.new_figure(10.5, 5)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(found))
    for index, factor in enumerate(FACTORS):
        paces = [row[f"{factor}x"] / row["none"] for row in found.values()]
        spots = [place + 0.26 * (index - 1) for place in places]
        left.barh(spots, paces, 0.26, color=curves.COLORS[index], label=f"{factor}x")
    right.barh(places, [row["pace, hiccups"] for row in found.values()], 0.6, color="#56b4e9")
    left.set_yticks(list(places), list(found))
    left.invert_yaxis()
    handles, labels = left.get_legend_handles_labels()
    labels = [f"slowed {label}" for label in labels]
    figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=3)
    curves.dress(left, "pace of the other seven workers (1: as without)")
    curves.dress(right, "pace of all eight (1: as without)")
    left.set_title("one worker of eight is always slow", fontsize=11)
    right.set_title(
        f"every worker: {100 * HICCUP:g} % of steps take {HICCUP_FACTOR:g}x as long", fontsize=11
    )
    for axes in (left, right):
        axes.set_xlim(0, 1.05)
    return curves.save(figure, folder / "straggler.png")


def main() -> None:
    """Runs every mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="simulated time, in steps' times")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the plot")
    parser.add_argument("--results", type=Path, help="file that the figures are written to")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.steps)
    show(found)
    print(f"plot: {plot(found, args.out)}")
    if args.results:
        lines = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
        args.results.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
