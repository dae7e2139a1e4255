"""Accuracy of asynchronous pipelines at equal samples, beside one process.

    python -m benchmarks.pipeline_learning --quick --json
    python -m benchmarks.pipeline_learning --data fashion-mnist --seeds 1 2 3 --epochs 3 \\
        --results docs/results/pipeline_learning.json

A small net like VGG (four convolutions, four linear layers) on Fashion-MNIST. The replicas are the
real ones, in one thread (`pssim/pipelines.py`). Every run has the same images in the same order,
and every update holds 64 of them: with R replicas a minibatch has 64/R images, where an update
holds M minibatches (`2bw`, `flush`) it has 64/M. So runs differ only in the weights at which
gradients are taken. The learning rate falls to 0 as a cosine. `flush` ends all minibatches of an
update before the next one begins, so the number of stages changes nothing, and it is run with one.
`no stashing` takes the backward pass at the newest weights, which is not the gradient of any
function. Each stage has the same number of the layers with parameters, as far as that is possible.

`--quick` takes one seed and the 10,000 images of the repository. `--results` keeps the figures for
the table of docs/pipelines.md; those of other seeds after as many updates stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import kit, tasks
from benchmarks.markdown import machine, table
from pssim.pipelines import PipelineWorld
from psworker.pipeline.run.schedule import Place, Stash, TwoVersions, Vertical

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "pipeline_learning.json"
BATCH = 64  # Images of an update.
WIDTH = 8  # Channels of the first convolutions.
DECAY = 0.01  # Of NAdamW.


class Unstashed(Stash):
    """The newest version at the forward, and another one at the backward."""

    in_place = True


class Flush(TwoVersions):
    """The minibatches of an update share the weights that the last update made."""

    def version(self, minibatch: int) -> int:
        """Returns the number of updates before this minibatch's."""
        return minibatch // self.whole


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer and its learning rate.

    Attributes:
        lr: The largest learning rate; it falls to 0 as a cosine.
        make: Makes the optimizer of some parameters.
    """

    lr: float
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]


NADAMW = "NAdamW 0.99"
OPTIMIZERS = {
    "SGD 0.9": Optimizer(0.01, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    NADAMW: Optimizer(
        0.001,
        lambda p: torch.optim.NAdam(
            p, betas=(0.99, 0.999), weight_decay=DECAY, decoupled_weight_decay=True
        ),
    ),
}
FORMS: dict[str, Callable[[Place, int], Stash]] = {
    "stashing": lambda place, _: Stash(place),
    "vertical": lambda place, _: Vertical(place),
    "2bw": TwoVersions,
    "flush": Flush,
    "no stashing": lambda place, _: Unstashed(place),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of run."""

    form: str  # Versions of the weights.
    replicas: tuple[int, ...]  # Number of replicas of each stage.
    optimizer: str = "SGD 0.9"  # Name of the optimizer.

    @property
    def parts(self) -> int:
        """Minibatches of an update."""
        if self.form not in ("2bw", "flush"):
            return self.replicas[0]
        deepest = Place(0, 0, self.replicas).depth() * self.replicas[0]
        return max(4, 1 << (deepest - 1).bit_length())

    @property
    def name(self) -> str:
        """Its name in results."""
        plan = "-".join(str(number) for number in self.replicas)
        return f"{self.form}, {plan}, {self.optimizer}"


ONE = (1,)
SHAPES = ((1, 1), (2, 2), (1, 1, 1), (2, 2, 2))
DEEP = ((1,) * 4, (1,) * 8)
SETTINGS = (
    Setting("stashing", ONE),
    Setting("flush", ONE),
    *(Setting(f, s) for s in SHAPES for f in ("stashing", "vertical", "2bw", "no stashing")),
    *(Setting(f, s) for s in DEEP for f in ("stashing", "2bw", "no stashing")),
    *(Setting(f, ONE, NADAMW) for f in ("stashing", "flush")),
    *(Setting(f, s, NADAMW) for s in SHAPES for f in ("stashing", "vertical", "2bw")),
    *(Setting("stashing", s, NADAMW) for s in DEEP),
)


class Small(nn.Sequential):
    """A net like VGG, smaller: eight layers with parameters."""

    def __init__(self) -> None:
        """Makes the layers, which `cut` joins to stages."""
        w = WIDTH
        super().__init__(
            nn.Sequential(nn.Conv2d(1, w, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(w, 2 * w, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(2 * w, 4 * w, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(4 * w * 49, 128), nn.ReLU()),
            nn.Sequential(nn.Linear(128, 64), nn.ReLU()),
            nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
            nn.Sequential(nn.Linear(64, 10)),
        )
        for name, values in self.named_parameters():
            if name.endswith("weight"):  # The default shrinks what a ReLU passes on.
                nn.init.kaiming_normal_(values, nonlinearity="relu")
            else:
                nn.init.zeros_(values)


def cut(model: nn.Sequential, number: int) -> list[nn.Module]:
    """Returns the stages of a model, with as many of its children each as possible."""
    bounds = [round(len(model) * stage / number) for stage in range(number + 1)]
    layers = list(model)
    return [nn.Sequential(*layers[first:end]) for first, end in itertools.pairwise(bounds)]


def learn(setting: Setting, task: tasks.Task, updates: int) -> float:
    """Trains once; returns the accuracy on all test images, or that of a guess if it diverges."""
    optimizer = OPTIMIZERS[setting.optimizer]
    world = PipelineWorld(
        cut(task.make_model(), len(setting.replicas)),  # type: ignore[arg-type]
        lambda place: FORMS[setting.form](place, setting.parts),
        setting.replicas,
        lambda place, parameters: optimizer.make(parameters),
        functional.cross_entropy,
    )

    def anneal(stage: int, number: int) -> None:
        lr = optimizer.lr * (1 + math.cos(math.pi * min(number, updates) / updates)) / 2
        for rank in world.group(stage):
            for group in world.optimizers[rank].param_groups:
                group["lr"] = lr

    world.before_update = anneal
    world.run(minibatches(task, updates, setting.parts))
    stages = [world.modules[world.group(stage)[0]] for stage in range(len(setting.replicas))]
    return task.evaluate(nn.Sequential(*stages))[0]


def minibatches(
    task: tasks.Task, updates: int, parts: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the images of each update in equal parts."""
    for step in range(updates):
        images, labels = task.minibatch(0, step)
        yield from zip(images.chunk(parts), labels.chunk(parts), strict=True)


@dataclass(slots=True, kw_only=True)
class Learned:
    """The result of one run."""

    name: str  # Form, replicas of the stages and optimizer.
    seed: int  # Seed of the weights and the order of the images.
    updates: int  # Updates of each stage.
    accuracy: float  # Accuracy on all test images.
    cpu_s: float  # CPU seconds.


def run(work: tuple[Setting, int, Path | None, float]) -> Learned:
    """Makes one run, in a process of its own."""
    setting, seed, folder, epochs = work
    torch.set_num_threads(1)
    started_s = time.process_time()
    fashion = tasks.fashion(folder, seed, 1)
    task = replace(fashion, name="a net like VGG, Fashion-MNIST", model=Small, batch=BATCH)
    updates = round(epochs * task.steps_per_epoch)
    accuracy = learn(setting, task, updates)
    return Learned(
        name=setting.name,
        seed=seed,
        updates=updates,
        accuracy=round(accuracy, 5),
        cpu_s=round(time.process_time() - started_s, 1),
    )


# ----- results


def base_of(name: str) -> str:
    """Returns the name of the run in one process that a run is compared with."""
    return Setting("stashing", ONE, name.split(", ")[-1]).name


def gaps(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Returns the differences of one kind of run to one process, in points, by seed."""
    base = {one["seed"]: one["accuracy"] for one in runs if one["name"] == base_of(name)}
    own = [one for one in runs if one["name"] == name and one["seed"] in base]
    return [100 * (one["accuracy"] - base[one["seed"]]) for one in own]


def keep(path: Path, found: Sequence[Learned]) -> None:
    """Writes the runs to the result file, beside those of other seeds."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
    new = {(one.name, one.seed): asdict(one) for one in found}
    former = {
        (one["name"], one["seed"]): one
        for one in known["runs"]
        if one["updates"] == found[0].updates
    }
    order = {setting.name: index for index, setting in enumerate(SETTINGS)}
    runs = sorted((former | new).values(), key=lambda one: (order[one["name"]], one["seed"]))
    about: dict[str, Any] = kit.describe_run("benchmarks.pipeline_learning")
    if len(runs) > len(found):  # Others of the table are by former commands.
        before = [known[key] for key in ("command", "date", "commit")]
        about["former"] = [*known.get("former", []), before]
    path.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n", encoding="utf-8")


def results() -> str:
    """Returns the tables of docs/pipelines.md: a table for each optimizer, a row for each plan."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs = found["runs"]
    last = [found[key] for key in ("command", "date", "commit")]
    made = [f"{one[1]}, commit {one[2]}" for one in (*found.get("former", []), last)]
    seeds = len({one["seed"] for one in runs})
    about = (
        f"`python -m benchmarks.pipeline_learning`, {seeds} seeds, {runs[0]['updates']} updates of "
        f"{BATCH} images, {'; '.join(made)}, "
        f"{machine(found['machine'])}."
    )
    names = dict.fromkeys(one["name"] for one in runs)
    optimizers = dict.fromkeys(name.split(", ")[-1] for name in names)
    return "\n\n".join([about, *(_compared(runs, optimizer) for optimizer in optimizers)])


def _compared(runs: Sequence[dict[str, Any]], optimizer: str) -> str:
    """Returns the differences of all runs with an optimizer to one process, by plan and form."""
    names = [one["name"] for one in runs if one["name"].endswith(f", {optimizer}")]
    base = base_of(names[0])
    cells: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(names):
        form, plan, _ = name.split(", ")
        apart = gaps(runs, name)
        if name != base:
            row = cells.setdefault("any" if form == "flush" else plan, {})
            row[form] = f"{statistics.fmean(apart):+.2f}"
    forms = list(dict.fromkeys(form for row in cells.values() for form in row))
    rows = [[plan, *(row.get(form, "") for form in forms)] for plan, row in cells.items()]
    alone = statistics.fmean(one["accuracy"] for one in runs if one["name"] == base)
    return (
        f"{optimizer}: one process has {100 * alone:.2f}%. Differences in points:\n\n"
        f"{table(['replicas', *forms], rows, 'l' + 'r' * len(forms))}"
    )


def main() -> None:
    """Runs all settings with all seeds."""
    args = parse_args()
    names = {one.name for one in SETTINGS if re.search(args.only, one.name)}
    names |= {base_of(name) for name in names}
    chosen = [one for one in SETTINGS if one.name in names]
    work = [(one, seed, args.data, args.epochs) for seed in args.seeds for one in chosen]
    found = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for one in pool.imap_unordered(run, work):
            print(f"{one.name}, seed {one.seed}: {100 * one.accuracy:.2f}%", flush=True)
            found.append(one)
    runs = [asdict(one) for one in found]
    means = {
        setting.name: statistics.fmean(one.accuracy for one in found if one.name == setting.name)
        for setting in chosen
    }
    kit.show(
        f"{found[0].updates} updates of {BATCH} images",
        ["run", "test accuracy, %", "from one process, points"],
        [
            [name, f"{100 * mean:.2f}", f"{statistics.fmean(gaps(runs, name)):+.2f}"]
            for name, mean in means.items()
        ],
    )
    if args.results:
        keep(args.results, found)
    if args.json:
        print(json.dumps({"accuracy": {name: round(mean, 5) for name, mean in means.items()}}))


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few images")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=float, default=1.0, help="of all images")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", metavar="PATTERN", default="", help="settings of such names")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="keep the figures here")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if args.quick:
        args.data, args.seeds, args.epochs = None, [1], 1.0
    return args


if __name__ == "__main__":
    main()
