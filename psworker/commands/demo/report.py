"""The demo's results as a table, a plot and JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pscore.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT = "loss.png"
SMOOTHED_STEPS = 25
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito.


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Training loss, mean over the workers, step by step."""

    seconds: list[float]  # Since training began.
    losses: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one mode over all workers; megabytes of 10**6 bytes."""

    accuracy: float
    images_per_s: float
    pushed_mb: float
    pulled_mb: float
    curve: Curve

    def as_json(self) -> dict[str, float]:
        """Returns the figures without the curve."""
        return {
            "accuracy": round(self.accuracy, 4),
            "images_per_s": round(self.images_per_s, 1),
            "pushed_mb": round(self.pushed_mb, 3),
            "pulled_mb": round(self.pulled_mb, 3),
        }


def make_folder(folder: Path) -> None:
    """Makes the folder for the plot; raises ConfigError if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"cannot write to --out {folder}: {problem.strerror}") from problem
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to --out {folder}: permission denied")


def show(results: dict[str, Result], plot_path: Path | None) -> None:
    """Prints the table, and the path of the plot."""
    grid = Table("mode", box=box.SIMPLE_HEAD)
    for column in ("accuracy", "images/s", "MB pushed", "MB pulled"):
        grid.add_column(column, justify="right")
    for key, result in results.items():
        grid.add_row(
            escape(key),
            f"{result.accuracy:.3f}",
            f"{result.images_per_s:,.0f}",
            f"{result.pushed_mb:,.1f}",
            f"{result.pulled_mb:,.1f}",
        )
    console = Console(highlight=False)
    console.print(grid)
    if plot_path is None:
        console.print("no plot without matplotlib: pip install 'paceline[demo]'", markup=False)
    else:
        console.print(f"loss curves: {plot_path}", markup=False, soft_wrap=True)


def plot(
    results: dict[str, Result], folder: Path, *, title: str, num_steps: int, epochs: int
) -> Path | None:
    """Draws the loss curves over passes and over seconds; without matplotlib returns None.

    Args:
        results: By the name of the mode.
        epochs: Passes over the images that these are.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    over_steps, over_seconds = figure.subplots(1, 2, sharey=True)
    for color, (key, result) in zip(COLORS * len(results), results.items(), strict=False):
        losses = smoothed(result.curve.losses)
        label = f"{key} (accuracy {result.accuracy:.3f})"
        passes = [(step + 1) * epochs / num_steps for step in range(len(losses))]
        over_steps.plot(passes, losses, color=color, label=label, linewidth=1.5)
        over_seconds.plot(result.curve.seconds, losses, color=color, linewidth=1.5)
    _dress(over_steps, "passes over the training images")
    _dress(over_seconds, "seconds of training")
    over_steps.set_ylabel(f"training loss, mean of {SMOOTHED_STEPS} steps")
    over_steps.legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(folder / PLOT, dpi=120)
    return folder / PLOT


def smoothed(values: list[float]) -> list[float]:
    """Returns the mean of each value and those before it, `SMOOTHED_STEPS` at most."""
    means: list[float] = []
    for index in range(len(values)):
        window = values[max(0, index + 1 - SMOOTHED_STEPS) : index + 1]
        means.append(sum(window) / len(window))
    return means


def _dress(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
