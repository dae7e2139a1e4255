"""The kill loop of jobs in which every push is counted: real shards, and forked workers.

A killed worker is forked again at once; a killed shard is started again by its supervisor, on its
journal. With `on_machines` the machine of a shard, or that of its standby, is lost instead.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import kit
from benchmarks.forked import Forked, ending
from benchmarks.survival.machines import Machines
from benchmarks.survival.shards import Shards, free_ports


@dataclass
class KilledJob:
    """The shards and workers of one job, of which one after the other is killed."""

    job: str
    folder: Path  # Gets the shards' state and log.
    fork: Callable[[int, int, dict[str, str]], Forked]  # Rank, kills before, variables.
    num_workers: int
    num_shards: int
    lease_s: float
    seed: int
    share_of_shards: float = 0.2  # Of the kills.
    on_machines: bool = False
    begin_s: float = 0.0  # From which the times of kills are counted.
    kills: list[tuple[float, str]] = field(default_factory=list)
    workers: list[Forked] = field(default_factory=list)  # By rank.

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.lives = [0] * self.num_workers  # Kills of each worker.
        self.shards: Shards | Machines
        flags = ["--lease-s", f"{self.lease_s:g}"]
        if self.on_machines:
            self.shards = Machines(self.folder, self.num_shards, flags, self.rng)
            return
        state = self.folder / "state"
        state.mkdir()
        flags += ["--shards", str(self.num_shards)]
        self.shards = Shards(self.folder, state, flags, port=free_ports(self.num_shards))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts the shards and the workers, and ends them in any case."""
        self.shards.start()
        try:
            with ending(self.workers):
                self.workers += [self._start(rank) for rank in range(len(self.lives))]
                yield
        finally:
            self.shards.stop()

    def tend(self, seconds: float, is_done: Callable[[int], bool] = lambda rank: False) -> None:
        """Waits, and raises what a worker has raised that is not done."""
        time.sleep(seconds)
        if isinstance(self.shards, Machines):
            self.shards.tend()
        for rank, worker in enumerate(self.workers):
            if not is_done(rank) and worker.has_told():
                worker.hear()

    def kill(self) -> None:
        """Kills a shard, if it has come back, or a worker."""
        if self.rng.random() < self.share_of_shards:
            index = self.rng.randrange(self.num_shards)
            if not (name := self._kill_shard(index)):
                return
        else:
            name = f"worker {(rank := self.rng.randrange(len(self.workers)))}"
            self.workers[rank].end()
            self.lives[rank] += 1
            self.workers[rank] = self._start(rank)
        self.kills.append((time.monotonic() - self.begin_s, name))

    def _kill_shard(self, index: int) -> str:
        """Kills a shard, or loses a machine; returns which one, or nothing if it is not back."""
        if isinstance(self.shards, Machines):
            return self.shards.lose(index) if self.shards.is_whole(index) else ""
        # Pauses before a start get ever longer: one that is not back yet stays away for long.
        is_there = self.shards.ports(index) and self.shards.signal(index, signal.SIGKILL)
        return f"shard {index}" if is_there else ""

    def _start(self, rank: int) -> Forked:
        servers, plane = self.shards.addresses, "tcp" if self.on_machines else "auto"
        environment = kit.worker_environment(servers, rank, self.num_workers, plane, self.job)
        environment["TORCHELASTIC_RESTART_COUNT"] = str(self.lives[rank])
        environment["PACELINE_TIMEOUT_S"] = "120"  # Without an answer of a shard a worker ends.
        return self.fork(rank, self.lives[rank], environment)
