"""Common parts of the plots."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DOTS_PER_INCH = 110
NUM_COLORS = 96


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and those before it, `window` at most."""
    means = []
    for index in range(len(values)):
        part = values[max(0, index + 1 - window) : index + 1]
        means.append(sum(part) / len(part))
    return means


def dress(axes: Axes, x_label: str, y_label: str = "") -> None:
    """Gives one plot its labels and a light grid."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure, in few colors, which is a third of the bytes; returns where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, dpi=DOTS_PER_INCH)
    with Image.open(content) as image:
        image.convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    return path


def finite(value: Any) -> Any:
    """Returns the value as JSON can hold it: None for NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
