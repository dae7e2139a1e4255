"""Pace of real workers beside one that is slowed: part of `benchmarks.decentralised`.

Eight processes, one of them slowed by a factor as in the straggler table of AD-PSGD (Lian et al.,
arXiv:1710.06952). Computing is sleeping, so that two cores carry all of them; the exchanged model
has the size of a LeNet, through shared memory and local sockets. An epoch is 60,000 images in
batches of 128, so 58 steps of each worker; its seconds are those of the seven other workers.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import psworker
from benchmarks import curves, forked, kit
from benchmarks.forked import Forked
from benchmarks.tasks import LeNet
from psserver.process.embedded import start_embedded

NUM_WORKERS, SLOW = 8, 0  # SLOW is the rank of the slow one.
MODES = {
    "allreduce": "allreduce",
    "dpsgd": "dpsgd",
    "adpsgd": "adpsgd",
    "ssgd": "ssgd",
    "ssgd(backup=1)": "ssgd(backup=1)",
    "asgd": "asgd",
}
PEER_MODES = ("allreduce", "dpsgd", "adpsgd")  # Drawn with a full line.
FACTORS = {"1x": 1, "2x": 2, "10x": 10, "100x": 100}
COMPUTE_S = 0.05  # Of a step.
EPOCH_STEPS = 60_000 // (NUM_WORKERS * 128)
NUM_SLOW_STEPS = 4.5  # That a case lasts.
CYCLE = 3  # Steps after which the graph `exp` of 8 workers, and so the pattern of waits, repeats.
SECONDS_MIN = 2.5
WARM_STEPS = 8  # The graph `exp` has gone around.


# ----- a worker


def work(line: Connection) -> None:
    """Trains once for each run that the line brings: a mode, a slow step's seconds, variables."""
    while True:
        mode, slow_s, variables = line.recv()
        os.environ.update(variables)
        line.send(train(line, mode, slow_s))


def train(line: Connection, mode: str, slow_s: float) -> list[float]:
    """Trains in one mode until it is told to end; returns when each step ended, in s.

    It reports when it has made some steps and continues, as others may depend on it, until it is
    told to count. From then on each step computes for `slow_s`.
    """
    model = LeNet()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), mode=mode
    )

    def one_step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()

    for _ in range(WARM_STEPS):
        one_step()
    line.send("warm")
    while not line.poll(COMPUTE_S):  # Computing is sleeping, until a message is there.
        one_step()
    line.recv()
    ends_s: list[float] = []
    while not line.poll(slow_s):
        one_step()
        ends_s.append(time.monotonic())
    line.recv()
    psworker.shutdown()
    return ends_s


# ----- the measuring process


class Crowd:
    """Eight worker processes and a shard, which stay from one case to the next."""

    def __init__(self, servers: Sequence[str], workers: Sequence[Forked]) -> None:
        """Measures with processes that are ready."""
        self._servers, self._workers = servers, workers
        self._num_runs = 0

    def epoch_s(self, mode: str, factor: int) -> float:
        """Returns the seconds of an epoch of the workers that are not slowed."""
        self._num_runs += 1
        for rank, worker in enumerate(self._workers):
            slow_s = COMPUTE_S * (factor if rank == SLOW else 1)
            worker.tell((mode, slow_s, self._environment(rank)))
        for worker in self._workers:
            worker.hear()
        self._tell_all("count")
        seconds = max(SECONDS_MIN, NUM_SLOW_STEPS * factor * COMPUTE_S)
        start_s = time.monotonic()
        time.sleep(seconds)
        self._tell_all("end")
        ends_s = [worker.hear() for worker in self._workers]
        others = [ends for rank, ends in enumerate(ends_s) if rank != SLOW]
        return EPOCH_STEPS * step_s(ends_s[SLOW], others, start_s + seconds)

    def _tell_all(self, text: str) -> None:
        for worker in self._workers:
            worker.tell(text)

    def _environment(self, rank: int) -> Mapping[str, str]:
        job = f"straggler-{os.getpid()}-{self._num_runs}"
        return kit.worker_environment(self._servers, rank, NUM_WORKERS, "auto", job)


def step_s(slow: Sequence[float], others: Sequence[Sequence[float]], until_s: float) -> float:
    """Returns the seconds of a step of the other workers, while the slow one makes its own.

    Whole cycles of the slow worker's steps count, from the end of its first one on: until then the
    others run ahead of it as far as the mode allows, and later some make all steps of a cycle at
    once. The events at its ended a step counts for that step.

    Args:
        slow: When each step of the slow worker ended, in seconds.
        others: The same of each other worker.
        until_s: When the workers were told to end, which they do not do all at once.
    """
    ended = [end for end in slow if end <= until_s]
    num = len(ended) - 1
    if num < 1:
        return math.inf
    num -= num % CYCLE if num > CYCLE else 0
    after_s = (ended[num] - ended[0]) / num / 4
    start_s, end_s = ended[0] + after_s, ended[num] + after_s
    counts = [sum(start_s < end <= end_s for end in ends) for ends in others]
    return (end_s - start_s) / statistics.fmean(counts) if any(counts) else math.inf


@contextmanager
def crowd() -> Iterator[Crowd]:
    """Starts the shard and the workers, and ends them in any case."""
    forked.prepare()
    with (
        forked.ending([Forked(work) for _ in range(NUM_WORKERS)]) as workers,
        start_embedded(1) as servers,
    ):
        yield Crowd(servers.addresses, workers)


def measure(modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the seconds of an epoch by mode and factor."""
    found: dict[str, dict[str, float]] = {}
    with crowd() as workers:
        for mode in modes:
            found[mode] = {
                name: round(workers.epoch_s(MODES[mode], factor), 2)
                for name, factor in FACTORS.items()
            }
            print(f"{mode}: {found[mode]}", flush=True)
    rows = [[mode, *row.values(), row["100x"] / row["1x"]] for mode, row in found.items()]
    title = (
        f"{NUM_WORKERS} workers, {1e3 * COMPUTE_S:g} ms of computing a step, worker {SLOW} slowed: "
        "seconds an epoch of the others"
    )
    kit.show(title, ["mode", *FACTORS, "100x / 1x"], rows)
    return found


def plot(found: Mapping[str, Mapping[str, float]], folder: Path) -> Path:
    """Draws the seconds of an epoch over the factor of the slow worker; returns the file."""
    figure = curves.new_figure(6.4, 3.4)
    axes = figure.subplots()
    for index, (mode, row) in enumerate(found.items()):
        factors = [FACTORS[name] for name in row]
        style = "-o" if mode in PEER_MODES else "--s"
        axes.loglog(factors, row.values(), style, ms=4, color=curves.COLORS[index], label=mode)
    axes.set_xticks(list(FACTORS.values()), list(FACTORS), minor=False)
    curves.dress(axes, f"how much slower one of {NUM_WORKERS} is", "s an epoch of the others")
    axes.legend(frameon=False, fontsize=8)
    return curves.save(figure, folder / "decentralised.png")
