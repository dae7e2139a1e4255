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
SHORT = ("run", "test accuracy, %", "from ssgd", "simulated s")
UPDATES = ("mirror", "mirror kept", "glu", "secant", "sgd")  # Local updates, best first.


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
    return table(LONG, SHORT, [setting.name for setting in sweeps.modes()])


def stragglers() -> str:
    """Returns the table of one slow worker of eight, of `benchmarks.straggler`."""
    found = json.loads((RESULTS / "straggler.json").read_text(encoding="utf-8"))
    alike: dict[str, list[str]] = {}  # Modes by their figures.
    for mode, item in found.items():
        paces = (item["10x"] / item["none"], item["pace"], item["pace, hiccups"])
        alike.setdefault(" | ".join(f"{pace:.2f}" for pace in paces), []).append(mode)
    rows = [f"{'; '.join(modes)} | {paces}" for paces, modes in alike.items()]
    head = "mode | pace at 10x | at 100x | steps slow now and then"
    return "\n".join(f"| {row} |" for row in (head, "---" + " | --:" * 3, *rows))


TABLES: dict[str, Callable[[], str]] = {
    "local updates": local_updates,
    "modes": modes,
    "adam": lambda: table("adam.jsonl", SHORT),
    "stragglers": stragglers,
}
