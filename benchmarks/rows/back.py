"""Time until a shard with many rows answers again after it was killed (SIGKILL).

From the kill to the answer to a lookup that was asked right behind it: the supervisor starts a
process, which maps the slabs, makes the index of their headers, and is joined again.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.rows import many

ROUNDS, TOUCHED, REST_S = 3, 1000, 12.0


def measure(quick: bool) -> dict[str, float]:
    """Returns the seconds, and the rows of the shard.

    Args:
        quick: Whether there are few rows.
    """
    num_rows = many.QUICK if quick else many.FULL
    times_s = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        many.shards_of(Path(folder) / "shards", 1) as shards,
        many.running(shards, many.table_of(num_rows)) as job,
    ):
        job.ask("fill", num_rows)
        for _ in range(ROUNDS):
            start_s = time.monotonic()
            shards.signal(0, signal.SIGKILL)
            job.ask("look", TOUCHED)
            times_s.append(time.monotonic() - start_s)
            time.sleep(REST_S)  # Pauses before a start get longer if a shard dies often.
    return {"median_s": statistics.median(times_s), "longest_s": max(times_s), "rows": num_rows}
