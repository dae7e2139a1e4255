"""Loss of rounds that block and of rounds that overlap, at equal tokens.

    python -m benchmarks.rounds --quick --json
    python -m benchmarks.rounds --seeds 3 --steps 2000 --data tiny-shakespeare.txt
    python -m benchmarks.rounds --tune

A small transformer predicts the characters of a part of Shakespeare's plays. Four workers run AdamW
between the rounds of `diloco`; the real replicas, clocks and stores (`pssim/training.py`) exchange
the rounds in simulated time. Each form of the overlap has its own best outer rate, which `--tune`
looks for. The answer to a round lands a fifth of the next one later; in `late` and `eager` it is
used a whole round later. The loss is that of the shards' weights on the text's end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.chars import PART, Text
from pscore.rules import DiLoCo
from pssim.training import TrainingCluster, TrainingJob

NUM_WORKERS = 4
LR, LEAST, RISE = 3e-3, 0.1, 50  # Of AdamW: its peak, the end over the peak, steps of its rise.
OUTER_MOMENTUM = 0.9
FORMS = ("blocking", "late", "blend", "eager", "mirror")
LENGTHS = (20, 100)  # H.
STEPS = 2000
QUICK_STEPS, QUICK_ROUNDS = 400, 10
RATES_TRIED = (0.1, 0.2, 0.4, 0.7)
# Outer rates by the length of a round, before any tuning: `--tune` is still to be run.
RATES: dict[int, dict[str, float]] = {
    20: {"blocking": 0.4, "late": 0.1, "blend": 0.4, "eager": 0.2, "mirror": 0.4},
    100: {"blocking": 0.4, "late": 0.1, "blend": 0.4, "eager": 0.2, "mirror": 0.4},
}


def make_rule(form: str, steps: int, outer_lr: float, delay: int = -1) -> DiLoCo:
    """Returns the mode of a form.

    Args:
        form: One of `FORMS`.
        steps: H.
        outer_lr: The outer rate.
        delay: Steps after which an answer lands; -1: a fifth of H.
    """
    overlap = "none" if form == "blocking" else form
    rule = DiLoCo(steps=steps, outer_lr=outer_lr, outer_momentum=OUTER_MOMENTUM, overlap=overlap)
    return replace(rule, delay=delay)


def rate(step: int, steps: int) -> float:
    """Returns AdamW's learning rate: a linear rise, then half a cosine."""
    wave = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return LR * min(1.0, (step + 1) / RISE) * (LEAST + (1 - LEAST) * wave)


def train(rule: DiLoCo, text: Text, steps: int) -> float:
    """Trains, and returns the held-out loss of the shards' weights."""

    def make_inner(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, fused=True)

    job = TrainingJob(
        rule=rule,
        make_model=text.make_model,
        gradient=text.gradient,
        group={"lr": LR},
        lr=lambda step: rate(step, steps),
        make_inner=make_inner,
        num_workers=NUM_WORKERS,
        steps=steps,
        seed=text.seed,
    )
    cluster = TrainingCluster(job).run()
    return text.held_out_loss(cluster.show(text.make_model()))


def measure(args: argparse.Namespace, rates: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Returns the mean loss over the seeds by length of a round and form."""
    found: dict[str, Any] = {}
    for length in args.lengths:
        for form in args.forms:
            outer_lr = rates[min(rates, key=lambda known: abs(known - length))][form]
            rule = make_rule(form, length, outer_lr, args.delay)
            losses = []
            for seed in range(args.seeds):
                begin_s = time.perf_counter()
                losses.append(train(rule, make_text(args, seed), num_steps(args, length)))
                took_s = time.perf_counter() - begin_s
                print(
                    f"H = {length}, {form}, outer rate {outer_lr:g}, seed {seed}: "
                    f"{losses[-1]:.4f} ({took_s:.0f} s)",
                    flush=True,
                )
            row = found.setdefault(f"H{length}", {})
            row[form] = round(sum(losses) / len(losses), 4)
    return found


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the losses of every outer rate that is tried."""
    found: dict[str, Any] = {}
    for outer_lr in args.rates:
        tried = {length: dict.fromkeys(FORMS, outer_lr) for length in args.lengths}
        found[f"{outer_lr:g}"] = measure(args, tried)
    return found


def num_steps(args: argparse.Namespace, length: int) -> int:
    """Returns the steps of each worker; with `--quick` enough for a few rounds."""
    return max(QUICK_STEPS, QUICK_ROUNDS * length) if args.quick else args.steps


def make_text(args: argparse.Namespace, seed: int) -> Text:
    """Returns the task."""
    return Text(path=args.data, seed=seed, num_parts=NUM_WORKERS if args.unlike else 1)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed and fewer steps")
    parser.add_argument("--tune", action="store_true", help="try outer rates for each form")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_TRIED, help="for --tune")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="H")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--delay", type=int, default=-1, help="steps; -1: a fifth of H")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each worker")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--unlike", action="store_true", help="each worker has its own part")
    parser.add_argument("--data", type=Path, default=PART, help="a text; else a part of one")
    parser.add_argument("--out", type=Path, help="writes the result to a file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = tune(args) if args.tune else measure(args, RATES)
    if args.out:
        about = {
            "steps": {f"H{length}": num_steps(args, length) for length in args.lengths},
            "seeds": args.seeds,
            "delay": args.delay,
            "unlike": args.unlike,
            "data": args.data.name,
            "outer_momentum": OUTER_MOMENTUM,
            "rates": {f"H{length}": row for length, row in RATES.items()},
        }
        args.out.write_text(json.dumps({"about": about, "loss": found}, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
