"""Accuracy of a LeNet with every compressor, one way and both ways, and the bytes of a step.

    python -m benchmarks.feedback --data ../shared/data/fashion-mnist --results lenet.jsonl --json
    python -m benchmarks.feedback --data ../shared/data/fashion-mnist --modes cd --only none 2bit

Two workers and two shards in one process (`pssim/training.py`); the learning rate falls as a cosine
to 0. Tensors below 64 KiB, and those of one dimension, stay as they are, as by default;
`--min-nbytes` changes that. `--results FILE` keeps every run and skips those that are there, so
that a long series can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import convergence, kit, tasks
from benchmarks.learning import runs
from benchmarks.learning.sweeps import Setting

NUM_WORKERS = 2
MODES = {"ssgd": "ssgd", "cd": "cd(warmup=100)"}
# Of pushes, and of pulls.
PAIRS = {
    "none": ("none", "none"),
    "fp16": ("fp16", "none"),
    "bf16": ("bf16", "none"),
    "int8": ("int8", "none"),
    "2bit": ("2bit", "none"),
    "1bit": ("1bit", "none"),
    "qsgd": ("qsgd", "none"),
    "terngrad": ("terngrad", "none"),
    "natural": ("natural", "none"),
    "topk": ("topk(ratio=0.01)", "none"),
    "topk sampled": ("topk(ratio=0.001, select=sampled)", "none"),
    "randomk": ("randomk(ratio=0.01)", "none"),
    "dgc": ("dgc(ratio=0.001)", "none"),
    "bf16 both ways": ("bf16", "bf16"),
    "int8 both ways": ("int8", "int8"),
    "2bit both ways": ("2bit", "2bit"),
    "1bit both ways": ("1bit", "1bit"),
    "2bit up, int8 down": ("2bit", "int8"),
}
COLUMNS = [
    "compressor", "mode", "accuracy %", "from none", "bytes pushed/step", "bytes pulled/step",
]  # fmt: skip


def settings(args: argparse.Namespace) -> list[Setting]:
    """Returns the runs of one seed."""
    return [
        Setting(
            name=f"{mode}, {name}",
            mode=MODES[mode],
            # DGC has the momentum on the worker, and its source has none on the server.
            momentum=0.0 if name == "dgc" else 0.9,
            compression=PAIRS[name][0],
            pull_compression=PAIRS[name][1],
            min_nbytes=args.min_nbytes,
            num_workers=NUM_WORKERS,
        )
        for mode in args.modes
        for name in args.only
    ]


def run_all(args: argparse.Namespace) -> list[runs.Run]:
    """Makes the runs that are not in the results file yet; returns all that were asked for."""
    known = {(*run.key, run.setting["min_nbytes"]): run for run in runs.load(args.results)}
    found = []
    for seed in args.seeds:
        task = replace(tasks.fashion(args.data, seed, NUM_WORKERS), batch=args.batch)
        steps = args.steps or round(args.epochs * task.steps_per_epoch)
        for setting in settings(args):
            key = (task.name, setting.name, seed, steps, task.batch, args.min_nbytes)
            if key not in known:
                run = known[key] = convergence.run_one(setting, task, steps, args)
                shown = run.failure or f"{run.accuracy:.4f}"
                print(f"{run.name}, seed {seed}: {shown}, {run.cpu_s:.0f} s of CPU", flush=True)
                if args.results:
                    runs.keep(run, args.results)
            found.append(known[key])
    return found


def collect(found: list[runs.Run], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the figures of each mode and compressor, over the seeds."""
    figures: dict[str, dict[str, Any]] = {mode: {} for mode in args.modes}
    for mode in args.modes:
        for name in args.only:
            same = [run for run in found if run.name == f"{mode}, {name}"]
            num_pushes = NUM_WORKERS * same[0].steps
            figures[mode][name] = {
                "accuracy": [run.accuracy for run in same],
                "pushed_nbytes": round(1e6 * same[0].pushed_mb / num_pushes),
                "pulled_nbytes": round(1e6 * same[0].pulled_mb / num_pushes),
                "failure": next((run.failure for run in same if run.failure), ""),
            }
    return figures


def rows(figures: dict[str, dict[str, Any]]) -> list[list[Any]]:
    """Returns the lines of the table."""
    lines: list[list[Any]] = []
    for mode, by_name in figures.items():
        base = by_name.get("none", {}).get("accuracy")
        for name, item in by_name.items():
            values = item["accuracy"]
            if item["failure"]:
                lines.append([name, mode, item["failure"], "", "", ""])
                continue
            mean = statistics.fmean(values)
            points = f"{100 * (mean - statistics.fmean(base)):+.2f}" if base else ""
            shown = f"{100 * mean:.2f}"
            if len(values) > 1:
                shown += f" ±{50 * (max(values) - min(values)):.2f}"
            nbytes = (f"{item['pushed_nbytes']:,}", f"{item['pulled_nbytes']:,}")
            lines.append([name, mode, shown, points, *nbytes])
    return lines


def main() -> None:
    """Runs the missing settings, and shows all."""
    args = parse_args()
    torch.set_num_threads(1)
    found = run_all(args)
    figures = collect(found, args)
    first = found[0]
    title = (
        f"{first.task}: {NUM_WORKERS} workers x {first.batch} images, {first.steps} steps, "
        f"tensors from {args.min_nbytes} bytes on compressed, {len(args.seeds)} seeds; bytes of "
        "one worker, with 64 for each message"
    )
    kit.show(title, COLUMNS, rows(figures))
    if args.json:
        print(json.dumps({"lenet": figures, "steps": first.steps, "seeds": args.seeds}))


def parse_args() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--batch", type=int, default=tasks.BATCH, help="images of each worker")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--steps", type=int, help="in place of --epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--min-nbytes", type=int, default=1 << 16, help="smaller tensors stay")
    parser.add_argument(
        "--results", type=Path, help="JSON lines; runs that are in it are not repeated"
    )
    parser.add_argument("--compute-ms", type=float, default=8.0, help="of a step, simulated")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, per second")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
