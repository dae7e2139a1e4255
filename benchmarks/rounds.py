"""Loss of rounds that block and of rounds that overlap, at equal tokens.

    python -m benchmarks.rounds --quick --json
    python -m benchmarks.rounds --seeds 3 --out docs/results/rounds.json
    python -m benchmarks.rounds --task lenet --unlike --forms blocking mirror control \
        --data ../shared/data/fashion-mnist --out docs/results/rounds-lenet-unlike.json
    python -m benchmarks.rounds --links --out docs/results/round_links.json   # round_links.py
    python -m benchmarks.rounds --times --out docs/results/round_times.json   # round_times.py
    python -m benchmarks.rounds --moves --json                                # round_moves.py
    python -m benchmarks.rounds --quorum --json                               # round_quorum.py

A small transformer predicts the characters of a part of Shakespeare's plays; LeNet and ResNet-20
tell images apart (`--task`). Four workers run AdamW between the rounds of `diloco`; the real
replicas, clocks and stores (`pssim/training.py`) exchange the rounds in simulated time, with the
bits of a job of processes (`test_a_simulated_job_has_the_bits_of_one_of_processes`). The loss is
that of the shards' weights on the text's end, or on the test images. The answer to a round lands a
fifth of the next one later; in `late` and `eager` it is used a whole round later.

Each form has an outer rate of its own: the full run walks on a grid, from the better of two rates,
to the smallest loss of the first seed, and trains the other seeds with that rate. It writes the
result file after each form; started again with the same task, it continues with the forms that are
missing, or that were trained with another number of steps or fewer seeds. `--quick` trains one seed
with the rates of the result file, or with `--rates`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import round_links, round_moves, round_quorum, round_times
from benchmarks.chars import PART, Text
from benchmarks.images import Images
from pscore.compressors.none import NoCompression
from pscore.compressors.sparseloco import SparseLoCo
from pscore.rules import DiLoCo
from pssim.training import TrainingCluster, TrainingJob

RESULT = Path(__file__).parent.parent / "docs" / "results" / "rounds.json"
NUM_WORKERS = 4
LR, LEAST, RISE = 3e-3, 0.1, 50  # Of AdamW: its peak, the end over the peak, steps of its rise.
OUTER_MOMENTUM = 0.9
FORMS = ("blocking", "late", "blend", "eager", "mirror")
SPARSE = "sparse"  # Rounds that block, with `sparseloco` both ways and no outer momentum.
CONTROL = "control"  # `mirror` whose guess has the mean's part of the round before in it.
FURTHER = (CONTROL, SPARSE)
TASKS = ("text", "lenet", "resnet")
LENGTHS = (20, 100)  # H.
STEPS_MIN, ROUNDS_MIN = 800, 16
GRID = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4)  # Outer rates.
LOW_RATE = 0.05
FIRST_RATES = {
    "blocking": 0.7,
    "late": 0.2,
    "blend": 0.7,
    "eager": 0.2,
    "mirror": 0.7,
    "control": 0.7,
    "sparse": 1.0,
}
SPARSELY = SparseLoCo(k=512), SparseLoCo(k=512, decay=1.0)  # Of pushes and of pulls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A form of a round, and the task."""

    form: str  # One of `FORMS`, or of `FURTHER`.
    length: int  # H, steps.
    delay: int = -1  # Steps after which an answer lands; -1: a fifth of H.
    steps: int = STEPS_MIN  # Steps of each worker.
    # Whether each worker draws from its own part of the text, or of the classes.
    unlike: bool = False
    task: str = "text"  # One of `TASKS`.
    data: Path | None = None  # The text, or the images; None: those of the repository.
    momentum: float = OUTER_MOMENTUM  # Outer momentum, of all forms but `SPARSE`.
    num_workers: int = NUM_WORKERS  # Workers.

    def rule(self, outer_lr: float) -> DiLoCo:
        """Returns the mode."""
        momentum = 0.0 if self.form == SPARSE else self.momentum
        rule = DiLoCo(steps=self.length, outer_lr=outer_lr, outer_momentum=momentum)
        if self.form in ("blocking", SPARSE):
            return rule
        if self.form == CONTROL:
            return replace(rule, overlap="mirror", delay=self.delay, control=1.0)
        return replace(rule, overlap=self.form, delay=self.delay)

    def rate(self, step: int) -> float:
        """Returns AdamW's learning rate: a linear rise, then half a cosine."""
        wave = (1 + math.cos(math.pi * min(1.0, step / self.steps))) / 2
        return LR * min(1.0, (step + 1) / RISE) * (LEAST + (1 - LEAST) * wave)

    def examples(self, seed: int) -> Text | Images:
        """Returns the model and its data."""
        num_parts = self.num_workers if self.unlike else 1
        if self.task == "text":
            return Text(path=self.data or PART, seed=seed, num_parts=num_parts)
        return Images(name=self.task, path=self.data, seed=seed, num_parts=num_parts)

    def train(self, outer_lr: float, seed: int) -> float:
        """Trains; returns the held-out loss of the shards' weights, in nats an example."""
        begin_s = time.perf_counter()
        task = self.examples(seed)
        pushes, pulls = SPARSELY if self.form == SPARSE else (NoCompression(), NoCompression())
        job = TrainingJob(
            compressor=pushes,
            pull_compressor=pulls,
            rule=self.rule(outer_lr),
            make_model=task.make_model,
            gradient=task.gradient,
            group={"lr": LR},
            lr=self.rate,
            make_inner=make_inner,
            num_workers=self.num_workers,
            steps=self.steps,
            seed=seed,
        )
        cluster = TrainingCluster(job).run()
        loss = task.held_out_loss(cluster.show(task.make_model()))
        print(
            f"H = {self.length}, {self.form}, outer rate {outer_lr:g}, seed {seed}: "
            f"{loss:.4f} ({time.perf_counter() - begin_s:.0f} s)",
            flush=True,
        )
        return loss


def make_inner(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of one worker."""
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The losses of one form."""

    steps: int  # Steps of each worker.
    rate: float  # The outer rate.
    losses: list[float]  # Held-out loss of each seed with it.
    # Loss of the first seed by outer rate, as text; None: it diverged.
    tried: dict[str, float | None]


def search(setting: Setting, num_seeds: int, known: Mapping[str, float | None]) -> Found:
    """Trains with the best rate of the grid that a walk finds.

    The walk begins at the better of the form's `FIRST_RATES` and `LOW_RATE`: with short rounds the
    loss has a second minimum at low rates.

    Args:
        setting: The form and the task.
        num_seeds: Seeds.
        known: Losses of the first seed that need no training, as in `Found.tried`.
    """
    tried = {
        GRID.index(float(rate)): math.inf if loss is None else loss for rate, loss in known.items()
    }

    def loss_at(place: int) -> float:
        if not 0 <= place < len(GRID):
            return math.inf
        if place not in tried:
            loss = setting.train(GRID[place], 0)
            tried[place] = math.inf if math.isnan(loss) else loss
        return tried[place]

    best = min((GRID.index(rate) for rate in (FIRST_RATES[setting.form], LOW_RATE)), key=loss_at)
    while (better := min((best, best - 1, best + 1), key=loss_at)) != best:
        best = better
    losses = [tried[best], *(setting.train(GRID[best], seed) for seed in range(1, num_seeds))]
    return Found(
        steps=setting.steps,
        rate=GRID[best],
        losses=[round(loss, 4) for loss in losses],
        tried={
            f"{GRID[place]:g}": round(tried[place], 4) if math.isfinite(tried[place]) else None
            for place in sorted(tried)
        },
    )


def measure(
    setting: Setting, num_seeds: int, outer_lr: float | None, known: Mapping[str, float | None]
) -> Found:
    """Trains with an outer rate, or with the best one.

    Args:
        setting: The form and the task.
        num_seeds: Seeds.
        outer_lr: The outer rate; None: it is looked for.
        known: Losses by outer rate that need no training, as in `Found.tried`.
    """
    torch.set_num_threads(1)
    if outer_lr is None:
        return search(setting, num_seeds, known)
    losses = [round(setting.train(outer_lr, seed), 4) for seed in range(num_seeds)]
    tried: dict[str, float | None] = {f"{outer_lr:g}": losses[0]}
    return Found(steps=setting.steps, rate=outer_lr, losses=losses, tried=tried)


def known_rate(form: str, length: int) -> float:
    """Returns the best outer rate of a form in the result file, at the nearest H that it has.

    A form that is not in it has its rate of `FIRST_RATES`.
    """
    forms: Mapping[str, Any] = {}
    if RESULT.exists():
        forms = json.loads(RESULT.read_text(encoding="utf-8"))["forms"]
    known = [name for name, row in forms.items() if form in row]
    if not known:
        return FIRST_RATES[form]
    nearest = min(known, key=lambda name: abs(int(name[1:]) - length))
    return float(forms[nearest][form]["rate"])


class Result:
    """The losses by length of a round and form, in a file if there is one."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Reads the file, of which forms that other arguments have made are dropped."""
        words = ("quick", "rates", "delay", "task", "unlike")
        data = None if args.data is None else args.data.name
        self.arguments = {word: getattr(args, word) for word in words} | {"data": data}
        self.forms: dict[str, dict[str, Any]] = {}
        self._path: Path | None = args.out
        if self._path is not None and self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["arguments"] == self.arguments:
                self.forms = kept["forms"]

    def has(self, length: int, form: str, steps: int, num_seeds: int) -> bool:
        """Returns whether a form is there, with as many steps, and seeds or more."""
        found = self.forms.get(f"H{length}", {}).get(form)
        return found is not None and found["steps"] == steps and len(found["losses"]) >= num_seeds

    def tried(self, length: int, form: str, steps: int) -> dict[str, float | None]:
        """Returns the losses of the first seed by outer rate, with as many steps."""
        found = self.forms.get(f"H{length}", {}).get(form)
        return dict(found["tried"]) if found is not None and found["steps"] == steps else {}

    def add(self, length: int, form: str, found: Found) -> None:
        """Adds the losses of a form, and writes the file."""
        self.forms.setdefault(f"H{length}", {})[form] = asdict(found)
        if self._path is not None:
            shown = {
                "date": time.strftime("%Y-%m-%d"),
                "arguments": self.arguments,
                "forms": self.in_order(),
            }
            self._path.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")

    def in_order(self) -> dict[str, dict[str, Any]]:
        """Returns the forms by length, both in the order of the table."""
        order = (*FORMS, *FURTHER)
        return {
            name: {form: self.forms[name][form] for form in order if form in self.forms[name]}
            for name in sorted(self.forms, key=lambda name: int(name[1:]))
        }

    def means(self) -> dict[str, dict[str, float]]:
        """Returns the mean losses over the seeds."""
        return {
            name: {form: round(statistics.fmean(it["losses"]), 4) for form, it in row.items()}
            for name, row in self.in_order().items()
        }


def measure_all(args: argparse.Namespace, result: Result) -> None:
    """Measures the forms that the result lacks; several processes train."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        started = {}
        for length in sorted(args.lengths, reverse=True):  # The longest ones first.
            for form in args.forms:
                steps = args.steps or max(STEPS_MIN, ROUNDS_MIN * length)
                if result.has(length, form, steps, args.seeds):
                    continue
                setting = Setting(
                    form=form,
                    length=length,
                    delay=min(args.delay, length),
                    steps=steps,
                    unlike=args.unlike,
                    task=args.task,
                    data=args.data,
                )
                rate = args.rates.get(form)
                if args.quick and rate is None:
                    rate = known_rate(form, length)
                known = result.tried(length, form, steps)
                started[pool.submit(measure, setting, args.seeds, rate, known)] = length, form
        for future in as_completed(started):
            result.add(*started[future], future.result())


def rate_of(text: str) -> tuple[str, float]:
    """Returns a form and its outer rate from `mirror=0.4`."""
    form, _, rate = text.partition("=")
    return form, float(rate)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--links", action="store_true", help="bytes and times at 100 Mbit/s")
    parser.add_argument("--times", action="store_true", help="times of rounds on slow links")
    parser.add_argument("--moves", action="store_true", help="rates of fine-tuning")
    parser.add_argument("--quorum", action="store_true", help="means and windows of a quorum")
    parser.add_argument("--quick", action="store_true", help="one seed, with known outer rates")
    parser.add_argument("--rates", type=rate_of, nargs="+", default=[], help="such as mirror=0.4")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="H")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=(*FORMS, *FURTHER))
    parser.add_argument("--delay", type=int, default=-1, help="steps; -1: a fifth of H")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help=f"of each worker; 0: {STEPS_MIN}, and at least {ROUNDS_MIN} rounds",
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--unlike", action="store_true", help="each worker has its own part")
    parser.add_argument(
        "--data", type=Path, help="a text, a folder of Fashion-MNIST or CIFAR-10's npz"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, help="writes the result to a file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if args.links:
        round_links.run(args.out, as_json=args.json)
        return
    if args.times:
        round_times.run(args.out, as_json=args.json)
        return
    if args.moves:
        round_moves.run(args.out, as_json=args.json)
        return
    if args.quorum:
        round_quorum.run(args.out, as_json=args.json)
        return
    args.rates = dict(args.rates)
    result = Result(args)
    measure_all(args, result)
    if args.json:
        print(json.dumps(result.means()))


if __name__ == "__main__":
    main()
