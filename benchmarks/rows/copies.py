"""Checkpoints of many rows: bytes of the changes since the last, pause of training, other shards.

A job on two shards is copied whole while the worker goes on with steps: `whole_pause_ms` is the
longest of them less the median one without a copy. Then, some times, a hundredth of its rows change
and only the changes are copied, while the worker goes on with steps on these. `changes_pause_ms` is
the longest step during a copy less the median one without, the median over the copies, and
`quiet_pause_ms` is that of as many steps without a copy. One more copy of changes is restored on
one, three and four shards: `restore_s` is the longest time until a worker may join, and `is_equal`
whether all rows have the same bits there.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import many
from pscore.net.credentials import ANYONE
from psserver.remote import checkpoint, checkpoint_files

NUM_SHARDS, OTHERS = 2, (1, 3, 4)
CHANGED = 100  # One of so many rows.
# Steps while changes or all rows are copied, and rows of each step, of those that change.
STEPS, WHOLE_STEPS, TOUCHED = 300, 3000, 1000
COPIES = 5
AFTER_S = 0.05  # The copy is asked for when the steps have begun.


def _nbytes(path: Path, names: str = "*.safetensors") -> int:
    return sum(file.stat().st_size for file in path.glob(names))


def _copied(
    job: many.Job, num_changed: int, steps: int, folder: Path, base: checkpoint.Checkpoint | None
) -> tuple[checkpoint.Checkpoint, Path, float, list[float]]:
    """Writes a checkpoint; returns it as the next one's base, and the times of copy and steps."""
    job.ask("draw", num_changed, TOUCHED, steps)
    job.tell("steps")
    time.sleep(AFTER_S)
    start_s = time.monotonic()
    taken = checkpoint.capture(
        job.shards.addresses, ANYONE, many.JOB, weights_only=False, base=base
    )
    took_s, steps_s = time.monotonic() - start_s, job.hear()
    path = checkpoint_files.write(folder, taken, keep=3)
    return checkpoint_files.in_files(path, taken), path, took_s, steps_s


def measure(quick: bool) -> dict[str, Any]:
    """Returns the figures.

    Args:
        quick: Whether there are few rows.
    """
    num_rows = many.QUICK if quick else many.FULL
    table = many.table_of(num_rows)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        with (
            many.shards_of(folder / "before", NUM_SHARDS) as shards,
            many.running(shards, table) as job,
        ):
            job.ask("fill", num_rows)
            changed = num_rows // CHANGED
            copies = folder / "copies"
            base, whole, whole_s, during_whole = _copied(job, changed, WHOLE_STEPS, copies, None)
            base_nbytes = _nbytes(whole)
            quiet, during, took_s, nbytes = [], [], [], []
            for _ in range(COPIES):
                job.ask("fill", changed)
                job.ask("draw", changed, TOUCHED, STEPS)
                quiet.append(job.ask("steps"))
                base, path, each_s, steps_s = _copied(job, changed, STEPS, copies, base)
                took_s.append(each_s)
                during.append(steps_s)
                nbytes.append(_nbytes(path, "changes*"))  # Those of all copies so far.
            wanted = job.ask("look", num_rows)
            taken = checkpoint.capture(
                shards.addresses, ANYONE, many.JOB, weights_only=False, base=base
            )
            last = checkpoint_files.write(copies, taken, keep=3)
        step_s = statistics.median(itertools.chain(*quiet))
        found: dict[str, Any] = {
            "whole_s": whole_s,
            "whole_pause_ms": 1e3 * (max(during_whole) - step_s),
            "changes_s": statistics.median(took_s),
            "changes_pause_ms": 1e3 * (statistics.median(map(max, during)) - step_s),
            "quiet_pause_ms": 1e3 * (statistics.median(map(max, quiet)) - step_s),
            "share_of_base": nbytes[0] / base_nbytes,
        }
        taken = checkpoint_files.read(last, many.JOB, lambda _: None)[1]
        times_s, are_equal = [], []
        for count in OTHERS:
            with many.shards_of(folder / f"on-{count}", count) as shards:
                start_s = time.monotonic()
                checkpoint.restore(shards.addresses, ANYONE, taken, many.JOB)
                times_s.append(time.monotonic() - start_s)
                with many.running(shards, table) as job:
                    are_equal.append(job.ask("look", num_rows) == wanted)
    return {**found, "restore_s": max(times_s), "is_equal": all(are_equal), "rows": num_rows}
