"""Accuracy of every mode at equal steps and at equal simulated seconds, in one process.

    python -m benchmarks.convergence --quick --json
    python -m benchmarks.convergence --sweep k --data ../shared/data/fashion-mnist --seeds 1 2 3
    python -m benchmarks.convergence --sweep resnet --data ../shared/data/cifar-10/cifar10_jpeg.npz

Four workers on the real replicas, clocks and stores; gradients are real, computing and network are
simulated (`pssim/training.py`). `--results FILE` keeps every run as a line of JSON and skips those
that are there already, so that a long sweep can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import tasks
from benchmarks.learning import plots
from benchmarks.learning.runs import Run, as_json, collect, keep, load, show
from benchmarks.learning.sweeps import NUM_WORKERS, SWEEPS, Setting
from pscore import partition
from pscore.compressors import parse_compressor
from pscore.estimate import parse_pull_compressor
from pscore.rules import parse_mode
from pssim.network import NetworkLink
from pssim.training import Compute, TrainingCluster, TrainingJob

NUM_TEST_ON_THE_WAY = 1000  # Test images of the points of a curve; the last point takes all.
POINTS = (0.2, 0.4, 0.6, 0.8)
QUICK_STEPS = 180
CHANCE = 2.29  # A loss that has not left ln 10 after half of the run never will.
# The learning rate falls as a cosine, to this share of itself.
LR_LEFT = 0.0


class Watch:
    """Follows one run."""

    def __init__(self, task: tasks.Task, steps: int) -> None:
        self.task, self.steps = task, steps
        self.model = task.make_model()
        self.points: list[tuple[int, float, float]] = []
        self.losses: list[tuple[float, float]] = []
        self.failure = ""
        self._recent: list[float] = []
        self._at = {int(share * steps) for share in POINTS}

    def __call__(self, cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        """Records each step of each worker."""
        self._recent.append(loss)
        if not math.isfinite(loss):
            self.failure = f"NaN at step {step}"
        if len(self._recent) == plots.LOSS_STEPS * len(cluster.workers):
            self.losses.append((cluster.now_s, statistics.fmean(self._recent)))
            self._recent = []
            late = len(self.losses) * plots.LOSS_STEPS > self.steps / 2
            if late and min(value for _, value in self.losses[-3:]) > CHANCE:
                self.failure = f"no better than chance at step {step}"
        if self.failure:
            cluster.stop()
        elif rank == 0 and step in self._at:
            accuracy, _ = self.task.evaluate(cluster.show(self.model), NUM_TEST_ON_THE_WAY)
            self.points.append((step, cluster.now_s, accuracy))


def run_one(setting: Setting, task: tasks.Task, steps: int, args: argparse.Namespace) -> Run:
    """Trains once."""
    rule = parse_mode(setting.mode)
    steps = round(steps * setting.longer)
    watch = Watch(task, steps)

    def lr(step: int) -> float:
        share = (1 + math.cos(math.pi * step / steps)) / 2
        return setting.lr * (LR_LEFT + (1 - LR_LEFT) * share)

    make = _optimizer(setting)
    started_s = time.process_time()
    job = TrainingJob(
        rule=rule,
        make_model=task.make_model,
        gradient=task.gradient,
        group=make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0],
        optimizer=setting.optimizer,
        lr=lr,
        make_inner=make if rule.outer_optimizer else None,
        num_workers=setting.num_workers,
        steps=steps,
        compressor=parse_compressor(setting.compression),
        pull_compressor=parse_pull_compressor(setting.pull_compression),
        compress_min_nbytes=setting.min_nbytes,
        link=NetworkLink(bandwidth=args.gbit * 125e6),
        compute=Compute(mean_s=args.compute_ms / 1e3),
        seed=task.seed,
        on_step=watch,
    )
    cluster = TrainingCluster(job).run()
    accuracy, loss = math.nan, math.nan
    if not watch.failure:
        accuracy, loss = task.evaluate(cluster.show(watch.model))
        watch.points.append((steps, cluster.now_s, accuracy))
    return Run(
        name=setting.name,
        setting=asdict(setting),
        task=task.name,
        seed=task.seed,
        steps=steps,
        batch=task.batch,
        accuracy=accuracy,
        loss=loss,
        train_loss=watch.losses[-1][1] if watch.losses else math.nan,
        sim_s=cluster.now_s,
        cpu_s=time.process_time() - started_s,
        pushed_mb=sum(worker.pushed_nbytes for worker in cluster.workers) / 1e6,
        pulled_mb=sum(worker.pulled_nbytes for worker in cluster.workers) / 1e6,
        failure=watch.failure,
        points=watch.points,
        losses=watch.losses,
    )


def _optimizer(setting: Setting) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if setting.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=setting.lr)
        return torch.optim.SGD(parameters, lr=setting.lr, momentum=setting.momentum)

    return make


def run_all(args: argparse.Namespace) -> list[Run]:
    """Makes the runs that are not in the results file yet, and returns all of this sweep."""
    settings = SWEEPS[args.sweep]()
    if args.only:
        settings = [setting for setting in settings if setting.name in args.only]
    known = {run.key: run for run in load(args.results)}
    chosen = []
    for seed in args.seeds:
        task = _task(args, seed)
        steps = args.steps or round(args.epochs * task.steps_per_epoch)
        for setting in settings:
            key = (task.name, setting.name, seed, round(steps * setting.longer), task.batch)
            if key not in known and not args.show:
                run = known[key] = run_one(setting, task, steps, args)
                print(
                    f"{run.name}, seed {seed}: {run.failure or f'{run.accuracy:.4f}'}, "
                    f"{run.cpu_s:.0f} s of CPU",
                    flush=True,
                )
                if args.results:
                    keep(run, args.results)
            if key in known:
                chosen.append(known[key])
    return chosen


def _task(args: argparse.Namespace, seed: int) -> tasks.Task:
    if args.sweep == "resnet":
        task = tasks.cifar(args.data, seed, NUM_WORKERS, args.test_images)
    else:
        task = tasks.fashion(args.data, seed, NUM_WORKERS)
    return replace(task, batch=args.batch)


def main() -> None:
    """Runs a sweep."""
    args = parse_args()
    torch.set_num_threads(1)
    runs = run_all(args)
    rows = collect(runs)
    steps = runs[0].steps if runs else 0
    title = (
        f"{runs[0].task if runs else ''}: {NUM_WORKERS} workers x {args.batch} images, {steps} "
        f"steps, learning rate falls to 0 as a cosine; simulated: {args.compute_ms:g} ms a step, "
        f"{args.gbit:g} Gbit/s"
    )
    show(rows, title, markdown=args.markdown)
    if args.out:
        for path in plots.draw(args.sweep, rows, args.out):
            print(f"plot: {path}")
    if args.json:
        print(as_json(rows))


def parse_args() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 seed, few steps, k 1, 5, 16")
    parser.add_argument("--sweep", choices=list(SWEEPS), default="k")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST, or CIFAR-10's npz")
    parser.add_argument("--batch", type=int, default=tasks.BATCH, help="images of each worker")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, help="in place of --epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", help="these runs of the sweep only")
    parser.add_argument("--show", action="store_true", help="run nothing, show the kept results")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument(
        "--results", type=Path, help="JSON lines; runs that are in it are not repeated"
    )
    parser.add_argument(
        "--test-images", type=int, help="of CIFAR-10, at the end; a multiple of 500"
    )
    parser.add_argument("--compute-ms", type=float, default=8.0, help="of a step, simulated")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, per second")
    parser.add_argument("--slice-numel", type=int, help="most elements of a slice, 4096 or more")
    parser.add_argument("--out", type=Path, help="folder of the plots")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if args.slice_numel:
        partition.SLICE_NUMEL_MAX = args.slice_numel
    if args.quick:
        args.sweep, args.seeds, args.steps = "quick", args.seeds[:1], args.steps or QUICK_STEPS
    return args


if __name__ == "__main__":
    main()
