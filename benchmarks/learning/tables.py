"""The tables of docs/convergence.md, from the result files that its commands write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import markdown
from benchmarks.learning import sweeps
from benchmarks.learning.runs import COLUMNS, Row, cells, collect, load

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
LONG = "convergence.jsonl"  # The runs of `--sweep full`.
BRIEF = ("run", "test accuracy, %", "from ssgd")
SHORT = (*BRIEF, "simulated s")
SEEDS = ("run", "seeds", *SHORT[1:])
UPDATES = ("mirror", "mirror kept", "glu", "secant", "sgd")  # Local updates, best first.
SECANT = (
    "ssgd",
    "mirror k=5",
    "glu k=5",
    "secant k=5",
    "secant k=5, lr_scale=0.5",
    "secant k=5, lr_scale=1.4",
    "secant k=5, alpha=1, beta=0.5",
    "secant k=5, alpha=2, beta=0.8",
    "secant k=5, alpha=4, beta=0.5",
    "secant k=5, local_warmup=100",
    "mirror k=16",
    "secant k=16",
    "secant k=16, warmup=200",
)  # The other runs of the file differ from these by no more than the text says.
MODES = (*SHORT, "MB pushed")


def table(file: str, columns: Iterable[str], names: Iterable[str] = ()) -> str:
    """Returns one Markdown table.

    Args:
        file: Result file of `benchmarks.convergence`.
        columns: Some of `COLUMNS`.
        names: The runs to show, in their order; all of the file if empty.

    Raises:
        KeyError: The file lacks one of the runs.
    """
    rows = collect(load(RESULTS / file))
    places = [COLUMNS.index(column) for column in columns]
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)]]
    lines += [cells(name, rows[name], rows) for name in names or rows]
    return "\n".join(f"| {' | '.join(line[place] for place in places)} |" for line in lines)


def local_updates() -> str:
    """Returns the difference of every local update to `ssgd`, by k."""
    rows = collect(load(RESULTS / LONG))
    lengths = sorted({setting.k for setting in sweeps.full() if setting.k})
    lines = [
        [str(k), *(_apart(rows.get(f"{update} k={k}"), rows["ssgd"]) for update in UPDATES)]
        for k in lengths
    ]
    return markdown.table(["k", *(f"`{update}`" for update in UPDATES)], lines, "rrrrrr")


def _apart(row: Row | None, base: Row) -> str:
    """Returns the mean difference to `ssgd` in points, or how many runs of a row are lost."""
    if row is None:
        return ""
    num_lost = sum(bool(run.failure) for run in row.runs)
    return f"{num_lost} of {len(row.runs)} lost" if num_lost else f"{100 * row.gap(base):+.1f}"


def modes() -> str:
    """Returns the table of the modes that have no k."""
    return table(LONG, MODES, [setting.name for setting in sweeps.modes()])


def stragglers() -> str:
    """Returns the table of one slow worker of eight, of `benchmarks.straggler`."""
    found = json.loads((RESULTS / "straggler.json").read_text(encoding="utf-8"))
    rows = [
        f"{mode} | {item['none']:.1f} | {item['10x']:.1f} | {item['100x']:.1f} | "
        f"{item['pace']:.2f} | {item['pace, hiccups']:.2f}"
        for mode, item in found.items()
    ]
    head = "mode | none | 10x | 100x | pace at 100x | pace, steps slow now and then"
    return "\n".join(f"| {row} |" for row in (head, "---" + " | --:" * 5, *rows))


def daemons() -> str:
    """Returns the table of the runs through real daemons, of `benchmarks.accuracy`."""
    found = json.loads((RESULTS / "accuracy.json").read_text(encoding="utf-8"))
    best = found["ssgd"]["accuracy"]
    rows = [
        f"{name} | {item['accuracy']:.4f} | {100 * (item['accuracy'] - best):+.2f} | "
        f"{item['loss']:.3f} | {item['pulled_mb']:,.0f}"
        for name, item in found.items()
    ]
    head = "mode | test accuracy | points from ssgd | training loss | MB pulled"
    return "\n".join(f"| {row} |" for row in (head, "---" + " | --:" * 4, *rows))


TABLES: dict[str, Callable[[], str]] = {
    "daemons": daemons,
    "local updates": local_updates,
    "modes": modes,
    "spread": lambda: table("spread.jsonl", SEEDS),
    "secant": lambda: table("secant.jsonl", BRIEF, SECANT),
    "adam": lambda: table("adam.jsonl", SHORT),
    "gap": lambda: table("gap.jsonl", SHORT),
    "stragglers": stragglers,
    "resnet": lambda: table("resnet.jsonl", SEEDS),
}
