"""Rows under kills: every push of rows counts exactly once, in its own rows.

Two workers train one table without a bound of ids on two shards with journals, in `asgd`; a second
run does so in `ssgd`, with rows that come late and go (going.py). Every few seconds a shard or a
worker is killed (SIGKILL). A shard is started again by its supervisor; a worker is forked again at
once, and draws other ids.

The gradient of a row is a number that belongs to its id, in all columns, and the learning rate is
1. So in the end a row divided by this number is the times that it was pushed. Each worker writes
down a step before it begins: a lookup returns when all pushes before it are counted, so of a killed
worker only the last two pushes may be counted or not. Nor need the last two of a worker that has to
join again, because a shard was lost and then asked first by a worker that was killed too: it says
so, and writes down that it does.

    lost      rows that were counted less often than they were pushed
    double    rows that were counted more often
    torn      rows whose columns differ
    shifted   rows with a part of another row's gradient: not a multiple of their own number
    removed   rows that have gone, in the second run
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.forked import Forked, prepare
from benchmarks.rows import going
from benchmarks.rows.going import OPEN, STEP, end, judge, missed_of, push, wrap
from benchmarks.survival.loop import KilledJob

JOB = "row-kills"
NUM_SHARDS, NUM_WORKERS, DIM = 2, 2, 4
NUM_IDS, TOUCHED = 1 << 18, 10_000
MORE_STEPS = 5  # Of each worker after the last kill.
SHARE_OF_WORKERS = 0.25  # Of the kills.
WRONG = ("lost", "double", "torn", "shifted")
SECONDS, QUICK_SECONDS, EVERY_S = 600.0, 40.0, 3.0


def _drawn(rank: int, life: int, step: int) -> np.ndarray:
    """Returns the ids of a step, `(TOUCHED,) int64`, all different, below `NUM_IDS`."""
    start, half = np.random.default_rng([rank, life, step]).integers(NUM_IDS // 2, size=2)
    return (start + np.arange(TOUCHED) * (2 * half + 1)) % NUM_IDS  # An odd stride of 2^18.


def work(line: Connection, rank: int, life: int, environment: dict[str, str], folder: Path) -> None:
    """Trains as one worker until it is told to end; then it looks up all rows if it is asked.

    Args:
        line: To the measuring process.
        rank: Rank.
        life: How often it was killed before.
        environment: Variables of the job.
        folder: Gets the steps that were begun, and the rows.
    """
    os.environ.update(environment)
    import psworker

    table = psworker.Embedding(None, DIM, name="rows", init="zeros")
    model, optimizer = wrap({"rows": table}, 1.0, "asgd")
    steps = (folder / f"{rank}-{life}.steps").open("ab", buffering=0)
    late = (folder / f"{rank}-{life}.late").open("ab", buffering=0)
    missed = missed_of(table)
    step = told = 0
    while not line.poll():
        steps.write(STEP.pack(step))
        push(model, optimizer, _drawn(rank, life, step))
        if missed.num_steps > told:
            told = missed.num_steps
            late.write(STEP.pack(step))
        step += 1
    line.recv()
    end(line, folder, model, {"rows": np.arange(NUM_IDS)})


class Run:
    """The workers and shards of one run."""

    def __init__(self, folder: Path, work: Callable[..., None] = work, seed: int = 0) -> None:
        """Prepares them, with `work` as that of a worker; starts nothing yet."""
        self._folder = folder
        self._job = KilledJob(
            JOB,
            folder,
            lambda *about: Forked(work, *about, folder),
            num_workers=NUM_WORKERS,
            num_shards=NUM_SHARDS,
            lease_s=60.0,
            share_of_shards=1.0 - SHARE_OF_WORKERS,
            seed=seed,
        )

    def train(self, seconds: float, every_s: float) -> int:
        """Trains under kills; returns how many there were.

        Args:
            seconds: Time of the kills, from the first step on.
            every_s: Time from kill to kill, between half and one and a half of it.
        """
        job = self._job
        with job.running():
            while not all(len(lives[-1]) for lives in self.steps):
                job.tend(0.05)
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                job.tend(every_s * job.rng.uniform(0.5, 1.5))
                job.kill()
            while not all(len(lives[-1]) for lives in self.steps):
                job.tend(0.05)
            newest = max(self.steps[rank][last][-1] for rank, last in enumerate(job.lives))
            for worker in job.workers:
                worker.tell(int(newest) + MORE_STEPS)
            for worker in job.workers:
                worker.hear()
            for rank, worker in enumerate(job.workers):
                worker.tell("look" if rank == 0 else "end")
            for worker in job.workers:
                worker.hear()
        return len(job.kills)

    @property
    def steps(self) -> list[list[np.ndarray]]:
        """The steps that each worker has begun in each life."""
        found = []
        for rank, last in enumerate(self._job.lives):
            paths = [self._folder / f"{rank}-{life}.steps" for life in range(last + 1)]
            read = [path.read_bytes() if path.exists() else b"" for path in paths]
            whole = [data[: len(data) // STEP.size * STEP.size] for data in read]
            found.append([np.frombuffer(data, "<i8") for data in whole])
        return found


def account(folder: Path, steps: list[list[np.ndarray]]) -> dict[str, float]:
    """Returns how many rows are wrong, by kind, and how many pushes there were."""
    least, most = np.zeros(NUM_IDS, np.int64), np.zeros(NUM_IDS, np.int64)
    for rank, lives in enumerate(steps):
        for life, begun in enumerate(lives):
            known = len(begun) if life == len(lives) - 1 else len(begun) - OPEN
            path = folder / f"{rank}-{life}.late"
            late = np.fromfile(path, "<i8").tolist() if path.exists() else []
            may_miss = {step - back for step in late for back in range(OPEN)}
            for step in range(len(begun)):
                ids = _drawn(rank, life, step)
                most[ids] += 1
                least[ids] += step < known and step not in may_miss
    return {
        **judge(-np.load(folder / "rows.npy"), least, most),
        "pushes": sum(len(begun) for lives in steps for begun in lives),
    }


def measure(_: bool) -> dict[str, float]:
    """Returns the account of both runs under kills together; the second lasts `SECONDS`."""
    prepare()
    cases = (work, account, QUICK_SECONDS), (going.work, going.account, SECONDS)
    sums: dict[str, float] = dict.fromkeys(("faults", *WRONG, "pushes", "removed", "seconds"), 0)
    for train, count, seconds in cases:
        with tempfile.TemporaryDirectory(prefix="paceline-row-kills-") as folder:
            run = Run(Path(folder), train)
            counted = {"faults": run.train(seconds, EVERY_S), "seconds": seconds}
            for name, value in {**counted, **count(Path(folder), run.steps)}.items():
                sums[name] += value
    return sums
