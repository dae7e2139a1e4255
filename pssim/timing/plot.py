"""The plot of a scan: step times and shards over the bandwidth, a column for each job size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pscore.errors import ConfigError
from pscore.timing.closed import COMPUTING, LATENCY, SHARD_CPU, WORKER_CPU
from pscore.timing.shown import three_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {COMPUTING: "o", "links": "s", SHARD_CPU: "^", WORKER_CPU: "v", LATENCY: "D"}
OTHER = "X"  # Mark of any other limit.
RING = "all-reduce"
WIDTH_MAX = 40.0  # Inches.


def draw(points: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws the points of a scan; a mark is a limit, a dotted line where all-reduce is as fast.

    Raises:
        ConfigError: The file cannot be written, or its name has no ending of a kind of picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({point["workers"] for point in points})
    figure, grid = plt.subplots(
        2,
        len(sizes),
        figsize=(min(WIDTH_MAX, 1.5 + 4.2 * len(sizes)), 6.4),
        height_ratios=(3, 1),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, workers in enumerate(sizes):
        times, shards = grid[0][column], grid[1][column]
        _draw_size([point for point in points if point["workers"] == workers], times, shards)
        times.set_title(f"{workers:,} workers")
        shards.set_xlabel("Gbit/s of each host")
    grid[0][0].set_ylabel("seconds of a step")
    grid[1][0].set_ylabel("shards")
    for axes in grid.flat:
        _show_numbers(axes)
    figure.suptitle(title)
    handles, labels = grid[0][0].get_legend_handles_labels()
    columns = min(5, 2 * len(sizes))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, format=path.suffix[1:])
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot draw {path}: {problem}") from problem
    finally:
        plt.close(figure)


def _draw_size(points: Sequence[dict[str, Any]], times: Axes, shards: Axes) -> None:
    """Draws the points of one number of workers."""
    ring = sorted({(point["gbit"], point["all_reduce_ms"] / 1e3) for point in points})
    times.plot(*zip(*ring, strict=True), "k--", marker="x", label=RING)
    for number, mode in enumerate(dict.fromkeys(point["mode"] for point in points)):
        colour = f"C{number}"
        found = sorted(
            {
                (point["gbit"], point["step_ms"] / 1e3, point["limit"])
                for point in points
                if point["mode"] == mode
            }
        )
        times.plot([one[0] for one in found], [one[1] for one in found], colour, label=mode)
        for gbit, step_s, limit in found:
            mark = MARKS.get(limit, OTHER)
            times.plot(gbit, step_s, color=colour, marker=mark, linestyle="")
        even = next(point["break_even_gbit"] for point in points if point["mode"] == mode)
        if even is not None and found[0][0] <= even <= found[-1][0]:
            times.axvline(even, color=colour, linestyle=":")
    for limit, mark in MARKS.items():
        times.plot([], [], "k", marker=mark, linestyle="", label=f"limit: {limit}")
    times.plot([], [], "k:", label=f"{RING} is as fast from here on")
    numbers = sorted({(point["gbit"], point["shards"]) for point in points})
    shards.plot(*zip(*numbers, strict=True), "k", marker="o", drawstyle="steps-mid")
    for axes in (times, shards):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)


def _show_numbers(axes: Axes) -> None:
    """Shows plain numbers beside the axes, and where there are few decades those between too."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain = FuncFormatter(lambda value, _: three_figures(value))
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(plain if high < 5 * low else NullFormatter())
