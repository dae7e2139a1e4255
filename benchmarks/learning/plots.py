"""The plots of `benchmarks.convergence`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import curves

LOSS_STEPS = 25  # A training loss is the mean of so many steps of all workers.

if TYPE_CHECKING:
    from benchmarks.learning.runs import Row

LOCAL_COLORS = {
    "mirror": "#0072b2",
    "mirror kept": "#56b4e9",
    "glu": "#e69f00",
    "secant": "#d55e00",
    "sgd": "#009e73",
}
# The same line as `asgd`, as `mirror` with k=1, or none.
HIDDEN = ("ssp s=3", "od mirror", "od none")
LOST = -12.0  # Points from ssgd below which a run is not drawn to scale.
STYLES = {5: "-", 16: "--"}  # By k.


def draw(sweep: str, rows: dict[str, Row], folder: Path) -> list[Path]:
    """Draws the plots of a sweep; returns the files."""
    if not rows:
        return []
    if sweep == "full":
        delayed = {
            name: row
            for name, row in rows.items()
            if name == "ssgd" or (row.setting["k"] and ", " not in name)
        }
        others = {name: row for name, row in rows.items() if not row.setting["k"]}
        return [
            over_k(delayed, folder / "convergence-k.png"),
            over_time(delayed, folder / "convergence-k-loss.png"),
            over_time(others, folder / "convergence-modes-loss.png"),
        ]
    paths = []
    if sweep in ("k", "adam", "quick"):
        paths.append(over_k(rows, folder / f"convergence-{sweep}.png"))
    if sweep in ("k", "modes", "resnet"):
        paths.append(over_time(rows, folder / f"convergence-{sweep}-loss.png"))
    return paths


def over_k(rows: dict[str, Row], path: Path) -> Path:
    """Draws accuracy over k, one line for each local update; a lost run is a cross below."""
    figure = curves.new_figure(7, 4.2)
    axes = figure.subplots()
    base = next(row for name, row in rows.items() if name.endswith("ssgd"))
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows.values():
        if k := row.setting["k"]:
            local = _local(row)
            gaps = row.gaps(base)
            spread = 50 * (max(gaps) - min(gaps))
            lines.setdefault(local, []).append((k, 100 * row.gap(base), spread))
    good = [value for line in lines.values() for _, value, _ in line if value > LOST]
    bottom = math.floor(min(good, default=0)) - 2
    for rank, (local, line) in enumerate(lines.items()):
        line.sort()
        held = [point for point in line if point[1] >= bottom]
        lost = [k for k, value, _ in line if not value >= bottom]
        axes.errorbar(
            [k for k, _, _ in held],
            [value for _, value, _ in held],
            yerr=[spread for _, _, spread in held],
            color=LOCAL_COLORS[local],
            marker="o",
            markersize=4,
            capsize=2,
            label=local,
        )
        axes.plot(lost, [bottom + 0.4 * (1 + rank)] * len(lost), "x", color=LOCAL_COLORS[local])
    axes.axhline(0, color="black", lw=1, ls="--", label="ssgd")
    axes.set_xscale("log", base=2)
    ticks = sorted({k for line in lines.values() for k, _, _ in line})
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=bottom)
    curves.dress(axes, "k, steps from one pull to the next", "test accuracy, points from ssgd")
    axes.legend(frameon=False, title="x: lost, or further below", fontsize=9)
    axes.set_title(next(iter(rows.values())).runs[0].task)
    return curves.save(figure, path)


def _local(row: Row) -> str:
    """Returns the local update of a row, by its name in `LOCAL_COLORS`."""
    mode = row.setting["mode"]
    if "'kept'" in mode:
        return "mirror kept"
    return next(name for name in LOCAL_COLORS if f"'{name}'" in mode)


def over_time(rows: dict[str, Row], path: Path) -> Path:
    """Draws the training loss over steps and over simulated seconds, of the first seed."""
    figure = curves.new_figure(11, 4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    chosen = {
        name: row
        for name, row in rows.items()
        if name not in HIDDEN and row.setting["k"] in (0, *STYLES)
    }
    others = 0
    for name, row in chosen.items():
        run, k = row.runs[0], row.setting["k"]
        color, style = "black", STYLES.get(k, "-")
        if k:
            color = LOCAL_COLORS[_local(row)]
        elif name != "ssgd":
            color, style = curves.COLORS[others % 6], ("-", "--", ":")[others // 6 % 3]
            others += 1
        losses = [loss for _, loss in run.losses]
        steps = [(index + 1) * LOSS_STEPS for index in range(len(losses))]
        left.plot(steps, losses, style, color=color)
        label = f"{name}{' (lost)' if run.failure else ''}"
        right.plot([second for second, _ in run.losses], losses, style, color=color, label=label)
    top = 1.3 if "LeNet" in next(iter(rows.values())).runs[0].task else 2.5
    for axes in (left, right):
        axes.set_ylim(0.26 if top < 2 else 1.65, top)
        axes.set_xlim(left=0)
    curves.dress(left, "step", f"training loss, mean of {LOSS_STEPS} steps")
    curves.dress(right, "simulated seconds")
    left.set_title("equal steps", fontsize=11)
    right.set_title("equal simulated seconds", fontsize=11)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8
    )
    figure.suptitle(next(iter(rows.values())).runs[0].task)
    return curves.save(figure, path)
