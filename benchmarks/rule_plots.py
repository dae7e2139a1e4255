"""One small plot for each update rule's page, from the results that are in the repository.

    python -m benchmarks.rule_plots

Left and middle: training loss of the rule beside `ssgd`, at equal steps and at equal simulated
seconds, mean over the seeds (`benchmarks.convergence --sweep full`). Right: its pace beside one
slow worker of eight (`benchmarks.straggler`). Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import curves
from benchmarks.learning.plots import LOSS_STEPS
from benchmarks.learning.runs import Row, collect, load

RESULTS = Path("docs/results")
FACTORS = ("2x", "10x", "100x")
LOSS_TOP, LOSS_BOTTOM = 1.0, 0.28
# For each rule its runs in the one file, and in the other.
PAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ssgd": (("ssgd backup=1",), ("ssgd backup=1",)),
    "asgd": (("asgd", "asgd m=0.6"), ("asgd",)),
    "staleness": (("staleness n=1 m=0.6", "staleness n=4"), ("staleness n=1", "staleness n=8")),
    "dcasgd": (("dcasgd", "dcasgd adaptive", "asgd"), ("dcasgd",)),
    "ssp": (("ssp s=3",), ("ssp s=3", "ssp s=16", "ssp, no bound")),
    "od": (("od dc", "od mirror", "od none"), ("od",)),
    "ssd": (("mirror k=5", "mirror k=16", "secant k=5"), ("ssd k=5", "ssd k=16")),
    "cd": (("cd k=5, 2-bit", "cd mirror, 2-bit"), ("cd k=5",)),
    "local": (("local H=8",), ("local H=8", "local H=8, backup=1")),
    "slowmo": (("slowmo H=8", "local H=8"), ("slowmo H=48", "slowmo H=48, backup=1")),
    "diloco": (("diloco H=16", "local H=8"), ("diloco H=64", "diloco H=64, backup=1")),
    "delayed_nesterov": (
        ("delayed_nesterov H=16 m=0.5", "delayed_nesterov H=16", "diloco H=16"),
        ("delayed_nesterov H=64", "diloco H=64"),
    ),
}


def draw(rule: str, rows: dict[str, Row], paces: dict[str, dict[str, float]], folder: Path) -> Path:
    """Draws one page's plot; returns the file."""
    trained, slowed = PAGES[rule]
    figure = curves.new_figure(9.6, 2.9)
    steps, seconds, pace = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 0.9))
    for index, name in enumerate(("ssgd", *trained)):
        color = "black" if not index else curves.COLORS[index - 1]
        losses, when_s = _means(rows[name])
        steps.plot([LOSS_STEPS * (i + 1) for i in range(len(losses))], losses, color=color, lw=1.2)
        seconds.plot(when_s, losses, color=color, lw=1.2, label=name)
    for axes in (steps, seconds):
        axes.set_ylim(LOSS_BOTTOM, LOSS_TOP)
        axes.set_xlim(left=0)
    curves.dress(steps, "step", "training loss")
    curves.dress(seconds, "simulated seconds")
    seconds.legend(frameon=False, fontsize=8)
    _bars(pace, ("ssgd", *slowed), paces)
    return curves.save(figure, folder / f"rule-{rule}.png")


def _means(row: Row) -> tuple[list[float], list[float]]:
    """Returns the training losses and their seconds, as the mean over the seeds."""
    runs = [run.losses for run in row.runs if not run.failure]
    length = min(len(losses) for losses in runs)
    return (
        [statistics.fmean(losses[i][1] for losses in runs) for i in range(length)],
        [statistics.fmean(losses[i][0] for losses in runs) for i in range(length)],
    )


def _bars(axes: Any, names: Sequence[str], paces: dict[str, dict[str, float]]) -> None:
    """Draws how much of its pace each keeps beside a worker that is slowed."""
    for place, name in enumerate(names):
        color = "black" if not place else curves.COLORS[place - 1]
        for index, factor in enumerate(FACTORS):
            spot = place + 0.27 * (index - 1)
            value = paces[name][factor] / paces[name]["none"]
            axes.barh(spot, value, 0.24, color=color, alpha=1.0 - 0.25 * index)
            axes.text(value + 0.02, spot, factor, va="center", fontsize=7)
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xticks((0.0, 0.5, 1.0))
    curves.dress(axes, "pace, one of eight slowed")


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=Path("docs/plots"), help="folder of the plots")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    rows = collect(load(args.results / "convergence.jsonl"))
    paces = json.loads((args.results / "straggler.json").read_text())
    paths = [draw(rule, rows, paces, args.out) for rule in PAGES]
    for path in paths:
        print(f"plot: {path}, {path.stat().st_size} bytes")
    if args.json:
        print(json.dumps({path.name: path.stat().st_size for path in paths}))


if __name__ == "__main__":
    main()
