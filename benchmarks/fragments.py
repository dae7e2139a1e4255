"""Bytes of each step of rounds in fragments, as a worker counts them.

    python -m benchmarks.fragments --json
    python -m benchmarks.fragments --out docs/results/fragments.json

Two workers train a model of 6 million weights on two shards, in `local` with the overlap `mirror`:
the real replicas, clocks and stores in simulated time (`pssim/training.py`). After each step a
worker reads its own counters of bytes pushed and pulled. The bytes of a cycle do not depend on the
number of fragments; those of the step with the most do.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.markdown import table
from pscore.rules import LocalSGD
from pssim.training import TrainingCluster, TrainingJob

LENGTH, CYCLES = 24, 3  # H; the first cycle is left out, in which fragments begin.
NUMEL = 6 << 20
FRAGMENTS = (1, 2, 4, 6, 12)
MIB = 1 << 20


class Flat(nn.Module):
    """One matrix of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL // 1024, 1024))


def make_inner(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of one worker."""
    return torch.optim.SGD(parameters, lr=1.0)


def measure(fragments: int) -> dict[str, float]:
    """Returns the bytes of a worker's steps: their mean, and the most, pushed and pulled."""
    counted: list[tuple[int, int]] = []

    def note(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        traffic = cluster.workers[0].exchange.traffic
        if rank == 0:
            counted.append((traffic.pushed_nbytes, traffic.pulled_nbytes))

    job = TrainingJob(
        rule=LocalSGD(steps=LENGTH, overlap="mirror", delay=1, fragments=fragments),
        make_model=Flat,
        gradient=lambda model, rank, step: 0.0,
        group={"lr": 1.0},
        make_inner=make_inner,
        num_workers=2,
        num_shards=2,
        steps=LENGTH * CYCLES,
        on_step=note,
    )
    TrainingCluster(job).run()
    found: dict[str, float] = {"fragments": fragments}
    for name, counts in zip(("pushed", "pulled"), zip(*counted, strict=True), strict=True):
        pairs = zip(counts[LENGTH - 1 :], counts[LENGTH:], strict=False)
        steps = [after - before for before, after in pairs]
        found[f"{name}_mean_nbytes"] = sum(steps) / len(steps)
        found[f"{name}_peak_nbytes"] = max(steps)
    return found


def rows_of(found: list[dict[str, float]]) -> str:
    """Returns the table of a run."""
    head = ["fragments", "MiB pushed a step, mean", "most", "MiB pulled a step, mean", "most"]
    names = [
        f"{what}_{which}_nbytes" for what in ("pushed", "pulled") for which in ("mean", "peak")
    ]
    rows = [
        [f"{row['fragments']:g}", *(f"{row[name] / MIB:.2f}" for name in names)] for row in found
    ]
    return table(head, rows, "rrrrr")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    found = [measure(fragments) for fragments in FRAGMENTS]
    run = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "length": LENGTH, "rows": found}
    print(rows_of(found))
    if args.out:
        args.out.write_text(json.dumps(run, indent=1) + "\n")
    if args.json:
        print(json.dumps(run))


if __name__ == "__main__":
    main()
