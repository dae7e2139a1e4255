"""Results of `benchmarks.convergence`, kept in a file and shown as tables."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import curves

COLUMNS = (
    "run",
    "lr",
    "momentum",
    "seeds",
    "test accuracy, %",
    "from ssgd",
    "test loss",
    "train loss",
    "simulated s",
    "% at equal s",
    "MB pushed",
    "MB pulled",
)


@dataclass(slots=True, kw_only=True)
class Run:
    """The result of one setting with one seed."""

    name: str
    setting: dict[str, Any]
    task: str
    seed: int
    steps: int
    batch: int  # Images of one worker in one step.
    accuracy: float  # Of the test images; NaN after a divergence.
    loss: float  # Of the test images.
    train_loss: float
    sim_s: float  # Simulated seconds until the last worker has ended.
    cpu_s: float
    pushed_mb: float  # Of all workers, 10**6 bytes.
    pulled_mb: float
    failure: str = ""
    points: list[tuple[int, float, float]] = field(default_factory=list)  # Step, second, accuracy.
    losses: list[tuple[float, float]] = field(default_factory=list)  # Second, training loss.

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """Returns what tells it from every other run."""
        return (self.task, self.name, self.seed, self.steps, self.batch)


@dataclass(slots=True, kw_only=True)
class Row:
    """One setting over its seeds."""

    setting: dict[str, Any]
    runs: list[Run]

    def mean(self, what: str) -> float:
        """Returns the mean over the seeds; NaN if one of them diverged."""
        return statistics.fmean(getattr(run, what) for run in self.runs)

    @property
    def spread(self) -> float:
        """Half of the range of the accuracy over the seeds."""
        values = [run.accuracy for run in self.runs]
        return (max(values) - min(values)) / 2

    def gap(self, base: Row) -> float:
        """Returns the difference in accuracy to another row, over the seeds that both have."""
        gaps = self.gaps(base)
        return statistics.fmean(gaps) if gaps else math.nan

    def gaps(self, base: Row) -> list[float]:
        """Returns that difference for each of these seeds."""
        theirs = {run.seed: run.accuracy for run in base.runs}
        return [run.accuracy - theirs[run.seed] for run in self.runs if run.seed in theirs]

    def accuracy_at(self, sim_s: float) -> float:
        """Returns the accuracy at a simulated second, between the points of the curves."""
        return statistics.fmean(_between(run.points, sim_s) for run in self.runs)


def _between(points: list[tuple[int, float, float]], sim_s: float) -> float:
    before = (0.0, 0.1)
    for _, second, accuracy in points:
        if second >= sim_s:
            share = (sim_s - before[0]) / (second - before[0])
            return before[1] + share * (accuracy - before[1])
        before = (second, accuracy)
    return before[1]


def collect(runs: list[Run]) -> dict[str, Row]:
    """Returns the rows, by k and in the order of their first runs."""
    rows: dict[str, Row] = {}
    for run in sorted(runs, key=lambda run: run.setting["k"]):
        rows.setdefault(run.name, Row(setting=run.setting, runs=[])).runs.append(run)
    return rows


def base_of(row: Row, rows: dict[str, Row]) -> Row | None:
    """Returns the synchronous run that a row is compared with: as long, and as alike, as can be."""
    same = [
        other
        for other in rows.values()
        if other.setting["mode"] == "ssgd"
        and other.setting["optimizer"] == row.setting["optimizer"]
        and other.setting["longer"] == row.setting["longer"]
    ]
    alike = [other for other in same if other.setting["lr"] == row.setting["lr"]]
    return (alike or same or [None])[0]


def cells(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    """Returns one line of the table."""
    adam = row.setting["optimizer"] == "adam"
    momentum = "Adam" if adam else f"{row.setting['momentum']:g}"
    head = [name, f"{row.setting['lr']:g}", momentum, str(len(row.runs))]
    failed = [run for run in row.runs if run.failure]
    if failed:
        others = [f"{100 * run.accuracy:.1f}" for run in row.runs if not run.failure]
        what = f"{len(failed)} of {len(row.runs)} lost: {failed[0].failure}"
        what += f"; else {', '.join(others)}" if others else ""
        return [*head, what, *[""] * (len(COLUMNS) - len(head) - 1)]
    base = base_of(row, rows)
    spread = f" ±{100 * row.spread:.1f}" if len(row.runs) > 1 else ""
    return [
        *head,
        f"{100 * row.mean('accuracy'):.1f}{spread}",
        f"{100 * row.gap(base):+.1f}" if base else "",
        f"{row.mean('loss'):.3f}",
        f"{row.mean('train_loss'):.3f}",
        f"{row.mean('sim_s'):.1f}",
        f"{100 * row.accuracy_at(base.mean('sim_s') / 2):.1f}" if base else "",
        f"{row.mean('pushed_mb'):,.0f}",
        f"{row.mean('pulled_mb'):,.0f}",
    ]


def show(rows: dict[str, Row], title: str, *, markdown: bool = False) -> None:
    """Prints the table."""
    lines = [cells(name, row, rows) for name, row in rows.items()]
    if markdown:
        rules = ["---", *["---:"] * (len(COLUMNS) - 1)]
        for line in (COLUMNS, rules, *lines):
            print(f"| {' | '.join(line)} |")
    else:
        grid = Table(title=title, box=box.SIMPLE_HEAD)
        for index, column in enumerate(COLUMNS):
            grid.add_column(column, justify="right" if index else "left", no_wrap=not index)
        for line in lines:
            grid.add_row(*line)
        Console(highlight=False, width=140).print(grid)
    print("± half of the range over the seeds; equal s: half of the simulated time of ssgd's run")


def as_json(rows: dict[str, Row]) -> str:
    """Returns the figures as one line."""
    values = {
        name: {
            "accuracy": curves.finite(row.mean("accuracy")),
            "loss": curves.finite(row.mean("loss")),
            "sim_s": round(row.mean("sim_s"), 3),
            "seeds": len(row.runs),
        }
        for name, row in rows.items()
    }
    return json.dumps(values)


def keep(run: Run, path: Path) -> None:
    """Adds a run to a results file."""
    with path.open("a") as file:
        file.write(json.dumps(_short(curves.finite(asdict(run)))) + "\n")


def _short(value: Any) -> Any:
    """Returns the value with five digits of each float: more says nothing, and fills files."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value


def load(path: Path | None) -> list[Run]:
    """Returns the runs of a results file."""
    if path is None or not path.exists():
        return []
    runs = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        for name in ("accuracy", "loss", "train_loss"):
            values[name] = math.nan if values[name] is None else values[name]
        runs.append(Run(**values))
    return runs
