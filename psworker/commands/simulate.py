"""`psworker simulate`: step times of many workers, by the simulator in a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError, PacelineError
from pscore.json_text import to_json
from pscore.timing.shown import three_figures
from psworker.advice.situation import COMPUTE_MS_MAX, COMPUTE_MS_MIN, WORKERS_MAX, require_between

USER_ERROR = 2  # Exit code of the simulator.
FAILURE_HOURS_MIN, FAILURE_HOURS_MAX = 1e-3, 1e7
FEW = 4  # Slices of a shard: with fewer of them pulls and pushes hardly overlap.
LEFT = ("mode", "limit")  # Columns whose cells begin at the left.
WINS = "*"
MODULE = "pssim.timing"  # The simulator runs both sides; workers and shards never import it.


def simulate(
    *,
    model: str,
    workers: Sequence[int],
    per_host: int,
    gbits: Sequence[float],
    modes: Sequence[str],
    compute_ms: float,
    every_message: bool,
    failure_hours: float | None,
    plot: Path | None,
) -> list[dict[str, Any]]:
    """Returns the points of a scan; `ScanRequest` in `pssim/timing/scan.py` describes them.

    Raises:
        ConfigError: A number is out of its range, or a name is unknown.
        PacelineError: The simulator has failed.
    """
    require_between("--compute-ms", compute_ms, COMPUTE_MS_MIN, COMPUTE_MS_MAX)
    if failure_hours is not None:
        require_between("--failures", failure_hours, FAILURE_HOURS_MIN, FAILURE_HOURS_MAX)
    request = {
        "model": model,
        "workers": list(workers),
        "per_host": per_host,
        "gbits": list(gbits),
        "modes": list(modes),
        "compute_ms": compute_ms,
        "every_message": every_message,
        "failure_hours": failure_hours,
        "plot": None if plot is None else str(plot),
    }
    command = [sys.executable, "-m", MODULE, to_json(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == USER_ERROR:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise PacelineError(f"the simulator has failed: {done.stderr.strip()[-500:]}")
    points: list[dict[str, Any]] = json.loads(done.stdout)
    return points


def numbers_of(text: str, what: str) -> list[float]:
    """Returns the numbers of an option: `1,10,100`.

    Raises:
        ConfigError: One of them is no number above 0.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{what} is {text!r}, must be numbers above 0 with commas between them")
    return numbers


def workers_of(text: str) -> list[int]:
    """Returns the numbers of workers of an option: `64,256`.

    Raises:
        ConfigError: One of them is no whole number, or too large.
    """
    numbers = numbers_of(text, "--workers")
    for number in numbers:
        require_between("--workers", number, 1, WORKERS_MAX)
        if not number.is_integer():
            raise ConfigError(f"--workers is {number:g}, must be a whole number")
    return [int(number) for number in numbers]


def lines_of(points: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the points as lines for a terminal."""
    columns: dict[str, list[str]] = {
        "workers": [f"{point['workers']}" for point in points],
        "Gbit/s": [f"{point['gbit']:g}" for point in points],
        "mode": [point["mode"] for point in points],
        "ms a step": [three_figures(point["step_ms"]) for point in points],
        "all-reduce": [
            three_figures(point["all_reduce_ms"]) + (WINS if point["all_reduce_wins"] else " ")
            for point in points
        ],
        "shards": [f"{point['shards']}" for point in points],
        "beyond": [
            f"{three_figures(point['distance'])}x" if point["distance"] > 1 else ""
            for point in points
        ],
        "limit": [point["limit"] for point in points],
    }
    if any("simulated_ms" in point and point["simulated_ms"] is not None for point in points):
        columns["simulated"] = [three_figures(point["simulated_ms"]) for point in points]
    if any("lost_share" in point for point in points):
        columns["lost"] = [f"{point['lost_share']:.2%}" for point in points]
    widths = {name: max(len(name), *map(len, column)) for name, column in columns.items()}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    lines = [
        " ".join(
            f" {cell:<{width}}" if name in LEFT else f"{cell:>{width}}"
            for (name, width), cell in zip(widths.items(), row, strict=True)
        ).rstrip()
        for row in rows
    ]
    if any(point["all_reduce_wins"] for point in points):
        lines.append(f"{WINS} all-reduce takes no longer than the mode")
    few = [point.get("simulated_slices_per_shard", FEW) for point in points]
    if min(few) < FEW:
        lines.append(f"simulated: longer than in a job where it is with {min(few)} slices a shard")
    if "lost" in columns:
        lines.append("lost: share of the time, by processes that die")
    if any(columns["beyond"]):
        farthest = max(points, key=lambda point: float(point["distance"]))
        distances = "; ".join(farthest["beyond_measured"])
        text = f"beyond: as far from any run; the farthest: {distances}"
        lines += textwrap.wrap(text, 80, subsequent_indent="  ")
    return lines
