"""Steps a second on many rows with a journal, beside the same without one, by turns in one run.

The journal is in memory (/dev/shm), as is recommended: a killed process loses nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.rows import many

TOUCHED, ROUNDS, TURNS = 100_000, 10, 5
WAYS: dict[str, tuple[str, ...]] = {"with": (), "without": ("--durability", "memory")}


def measure(quick: bool) -> dict[str, float]:
    """Returns the median milliseconds of a step with and without, and the share that is lost.

    Args:
        quick: Whether there are few rows.
    """
    num_rows = many.QUICK if quick else many.FULL // 5
    times_s: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as stack:
        jobs: dict[str, many.Job] = {}
        for name, flags in WAYS.items():
            shards = stack.enter_context(many.shards_of(Path(folder) / name, 1, *flags))
            jobs[name] = stack.enter_context(many.running(shards, many.table_of(num_rows)))
            jobs[name].ask("fill", num_rows)
        for _ in range(TURNS):
            for name, job in jobs.items():
                job.ask("draw", num_rows, TOUCHED, ROUNDS)
                times_s[name] += job.ask("steps")
    took = {name: statistics.median(each) for name, each in times_s.items()}
    return {
        "with_ms": 1e3 * took["with"],
        "without_ms": 1e3 * took["without"],
        "share_lost": 1.0 - took["without"] / took["with"],
    }
