"""`psworker simulate`: step times of many workers, by the simulator in a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError, PacelineError
from pscore.json_text import to_json
from psworker.advice.situation import WORKERS_MAX, require_between

USER_ERROR = 2  # Exit code of the simulator.
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


def _lost(point: dict[str, Any]) -> str:
    """Returns the share of time that a point loses by failures, as text."""
    return f"  ({point['lost_share']:.2%} lost by failures)" if "lost_share" in point else ""


def lines_of(points: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the points as lines for a terminal."""
    lines = [
        f"{'workers':>7} {'Gbit/s':>7}  {'mode':<24} {'ms a step':>11} {'all-reduce':>11}  "
        f"{'shards':>6}  limit"
    ]
    for point in points:
        wins = "  (all-reduce wins)" if point["all_reduce_wins"] else ""
        lines.append(
            f"{point['workers']:>7} {point['gbit']:>7g}  {point['mode']:<24} "
            f"{point['step_ms']:>11,.0f} {point['all_reduce_ms']:>11,.0f}  {point['shards']:>6}  "
            f"{point['limit']}{wins}{_lost(point)}"
        )
    beyond = sorted({text for point in points for text in point["beyond_measured"]})
    if beyond:
        lines.append(f"not measured: {'; '.join(beyond)}")
    return lines
