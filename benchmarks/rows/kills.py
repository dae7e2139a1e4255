"""Rows under kills: every push of rows counts exactly once, in its own rows.

Two workers train one table without a bound of ids on two shards with journals, in `asgd`; a second
run does so in `ssgd`, with rows that come late and go (going.py). Every few seconds a shard or a
worker is killed (SIGKILL). A shard is started again by its supervisor; a worker is forked again at
once, and draws other ids.

The gradient of a row is a number that belongs to its id, in all columns, and the learning rate is
1. So in the end a row divided by this number is the times that it was pushed. Each worker writes
down a step before it begins: a lookup returns when all pushes before it are counted, so of a killed
worker only the last two pushes may be counted or not.

    lost      rows that were counted less often than they were pushed
    double    rows that were counted more often
    torn      rows whose columns differ
    shifted   rows with a part of another row's gradient: not a multiple of their own number
    removed   rows that have gone, in the second run
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks import kit
from benchmarks.forked import Forked, ending, prepare
from benchmarks.rows import going
from benchmarks.rows.going import OPEN, STEP, end, judge, push, wrap
from benchmarks.survival.shards import Shards, free_ports

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
    step = 0
    while not line.poll():
        steps.write(STEP.pack(step))
        push(model, optimizer, _drawn(rank, life, step))
        step += 1
    line.recv()
    end(line, folder, model, {"rows": np.arange(NUM_IDS)})


class Run:
    """The workers and shards of one run."""

    def __init__(self, folder: Path, work: Callable[..., None] = work, seed: int = 0) -> None:
        """Prepares them, with `work` as that of a worker; starts nothing yet."""
        self._folder, self._work, self._rng = folder, work, random.Random(seed)
        (folder / "state").mkdir()
        flags = ["--shards", str(NUM_SHARDS), "--lease-s", "60"]
        self._shards = Shards(folder, folder / "state", flags, port=free_ports(NUM_SHARDS))
        self._lives = [0] * NUM_WORKERS
        self._workers: list[Forked] = []

    def train(self, seconds: float, every_s: float) -> int:
        """Trains under kills; returns how many there were.

        Args:
            seconds: Time of the kills, from the first step on.
            every_s: Time from kill to kill, between half and one and a half of it.
        """
        self._shards.start()
        self._workers = [self._worker(rank) for rank in range(NUM_WORKERS)]
        with ending(self._workers):
            try:
                while not all(len(lives[-1]) for lives in self.steps):
                    self._tend(0.05)
                faults, end_s = 0, time.monotonic() + seconds
                while time.monotonic() < end_s:
                    self._tend(every_s * self._rng.uniform(0.5, 1.5))
                    faults += self._kill()
                while not all(len(lives[-1]) for lives in self.steps):
                    self._tend(0.05)
                newest = max(self.steps[rank][last][-1] for rank, last in enumerate(self._lives))
                for worker in self._workers:
                    worker.tell(int(newest) + MORE_STEPS)
                for worker in self._workers:
                    worker.hear()
                for rank, worker in enumerate(self._workers):
                    worker.tell("look" if rank == 0 else "end")
                for worker in self._workers:
                    worker.hear()
            finally:
                self._shards.stop()
        return faults

    def _worker(self, rank: int) -> Forked:
        addresses = self._shards.addresses
        environment = kit.worker_environment(addresses, rank, NUM_WORKERS, "auto", JOB)
        environment["TORCHELASTIC_RESTART_COUNT"] = str(self._lives[rank])
        return Forked(self._work, rank, self._lives[rank], environment, self._folder)

    def _tend(self, seconds: float) -> None:
        """Waits, and raises what a worker has raised."""
        time.sleep(seconds)
        for worker in self._workers:
            if worker.has_told():
                worker.hear()

    def _kill(self) -> bool:
        """Kills a worker, which is started again, or a shard; returns whether it was there."""
        if self._rng.random() >= SHARE_OF_WORKERS:
            return self._shards.signal(self._rng.randrange(NUM_SHARDS), signal.SIGKILL)
        rank = self._rng.randrange(NUM_WORKERS)
        self._workers[rank].end()
        self._lives[rank] += 1
        self._workers[rank] = self._worker(rank)
        return True

    @property
    def steps(self) -> list[list[np.ndarray]]:
        """The steps that each worker has begun in each life."""
        found = []
        for rank, last in enumerate(self._lives):
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
            for step in range(len(begun)):
                ids = _drawn(rank, life, step)
                most[ids] += 1
                least[ids] += step < known
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
