"""Workers that exchange models and are killed without end: `benchmarks.decentralised --kills`.

Real processes train LeNet on the images of the repository. Every few seconds one of them is killed,
and another one takes its rank. Each worker reports every step: its loss, the seconds since the step
before, and the exchanges applied. An exchange of `adpsgd` counts as applied where a model moved by
it; a round of `allreduce` counts every worker's weight in its sum, so that a gradient added twice
shows as a sum above the number of members, and its models must be alike to the bit. A worker may
get the result of a round from others that had ended it before one of its members died, so the
number is the largest of those under which the worker has been in that round.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import psworker
from benchmarks import forked, kit, tasks
from benchmarks.forked import Forked
from psserver.process.embedded import start_embedded
from psworker.gossip import GOSSIPS
from psworker.gossip.pairs import Pairs
from psworker.gossip.ring import Ring

MODES = ("adpsgd", "allreduce", "allreduce(backend=gloo)")
NUM_WORKERS, LIVING_MIN = 6, 3
LEASE_S = 5.0
SLACK_S = 1.0  # That two cores may need to get around to all workers.
GAP_S = (5.0, 10.0)  # From one kill to the next.
AWAY_S = (0.2, 3.0)  # Until another one takes the rank.
THINK_S = 0.02  # Of each step, so that processes do not only compete for cores.
FALLS_TO = 0.8  # Share of the first loss that the last may be.
LR = 0.02
POLL_S = 0.02


class Step(NamedTuple):
    """The report of a worker after each step."""

    number: int  # Number of the step or round, counted alike by all.
    loss: float  # Loss function of its images.
    waited_s: float  # Seconds since its step before; of the first since it met the others.
    num_exchanges: int  # Exchanges or rounds that it has applied.
    num_twice: int  # Those that it has applied more than once.
    check: int  # Check of the bits of the model; 0 where models differ.


class CountedPairs(Pairs):
    """AD-PSGD's worker, which counts how often each exchange has moved the model."""

    applied: Counter[tuple[Any, ...]]

    def on_offer(self, source: int, incarnation: int, number: int, part: int, values: Any) -> Any:
        """Notes the exchange under which `_note` counts."""
        self._about.key = ("half", incarnation, number, part)
        return super().on_offer(source, incarnation, number, part, values)

    def on_answer(self, number: int, part: int, values: Any) -> None:
        """Notes the exchange under which `_note` counts."""
        self._about.key = ("answer", 0, number, part)
        super().on_answer(number, part, values)

    def start(self) -> Any:
        """Begins with nothing counted."""
        self.applied, self._about = Counter(), threading.local()
        yield from super().start()

    def _note(self, part: int) -> None:
        super()._note(part)
        self.applied[self._about.key] += 1


def work(line: Connection, rank: int, task: tasks.Task, mode: str, env: Mapping[str, str]) -> None:
    """Trains until it is told to end, and reports every step."""
    os.environ.update(env)
    GOSSIPS["pairs"] = CountedPairs
    model = task.make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), mode=mode
    )
    gossip = optimizer._table.local_step._peers.gossip
    count = _counter(gossip)
    draw, before_s = random.Random(os.getpid()), time.monotonic()
    while not line.poll(THINK_S):
        optimizer.zero_grad()
        loss = task.gradient(model, rank, draw.randrange(1 << 20))
        optimizer.step()
        now_s = time.monotonic()
        check = zlib.crc32(gossip.model.weights.numpy()) if isinstance(gossip, Ring) else 0
        line.send(Step(gossip.number, loss, now_s - before_s, *count(), check))
        before_s = now_s
    psworker.shutdown()
    line.send(None)


def _counter(gossip: Pairs | Ring) -> Callable[[], tuple[int, int]]:
    """Returns what counts the exchanges that a worker has applied, and those applied twice."""
    if isinstance(gossip, CountedPairs):
        counted = gossip

        def pairs() -> tuple[int, int]:
            with counted.model.lock:
                counts = list(counted.applied.values())
            return len(counts), sum(count - 1 for count in counts)

        return pairs
    assert isinstance(gossip, Ring)
    rounds, scatter, numel = Counter[str](), gossip.model.scatter, len(gossip.model.weights)
    meet, most = gossip._meet, len(gossip._members)

    def met(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        found = yield from meet(*arguments, **options)
        most = max(most, len(gossip._members))
        return found

    def weighed(total: Any) -> None:
        nonlocal most
        weight = float(total[numel])
        rounds["twice"] += weight > most or weight % 1 != 0
        rounds["all"] += 1
        most = len(gossip._members)  # Of the next round.
        scatter(total)

    gossip._meet, gossip.model.scatter = met, weighed  # type: ignore[method-assign]
    return lambda: (rounds["all"], rounds["twice"])


@dataclass(slots=True)
class Found:
    """All reports of a run."""

    # Loss of each step, in the order of the reports.
    losses: list[float] = field(default_factory=list)
    longest_s: float = 0.0  # Longest time between two steps of a worker.
    num_kills: int = 0  # Workers killed.
    num_exchanges: int = 0  # Exchanges or rounds applied, over all workers.
    num_twice: int = 0  # Those applied more than once.
    seconds: float = 0.0  # Length of the run.
    _checks: dict[int, dict[int, int]] = field(default_factory=dict)  # By round, by rank.

    def add(self, rank: int, step: Step) -> None:
        """Counts one report."""
        self.losses.append(step.loss)
        self.longest_s = max(self.longest_s, step.waited_s)
        if step.check:
            self._checks.setdefault(step.number, {})[rank] = step.check

    def drop(self, rank: int, step: Step) -> None:
        """Drops a killed worker's bits of its last round, which the others may make anew."""
        self._checks.get(step.number, {}).pop(rank, None)

    @property
    def num_unlike(self) -> int:
        """Rounds of all-reduce after which two workers had different bits."""
        return sum(len(set(checks.values())) > 1 for checks in self._checks.values())

    def loss(self, from_share: float, to_share: float) -> float:
        """Returns the mean loss of a part of all reports, in their order."""
        num = len(self.losses)
        return statistics.fmean(self.losses[int(from_share * num) : math.ceil(to_share * num)])

    def summary(self) -> dict[str, float]:
        """Returns the figures."""
        return {
            "kills": self.num_kills,
            "steps": len(self.losses),
            "exchanges": self.num_exchanges,
            "applied_twice": self.num_twice,
            "unlike_rounds": self.num_unlike,
            "seconds": round(self.seconds, 1),
            "longest_wait_s": round(self.longest_s, 2),
            "lease_s": LEASE_S,
            "first_loss": round(self.loss(0.0, 0.1), 3),
            "last_loss": round(self.loss(0.9, 1.0), 3),
        }

    @property
    def is_good(self) -> bool:
        """Whether nobody waited longer than a lease, the loss fell, and nothing counted twice."""
        is_once = not (self.num_twice or self.num_unlike)
        falls = self.loss(0.9, 1.0) <= FALLS_TO * self.loss(0.0, 0.1)
        return is_once and falls and self.longest_s <= LEASE_S + SLACK_S


class Loop:
    """Workers of one mode, of which one after the other is killed."""

    def __init__(self, mode: str, servers: Sequence[str], seed: int) -> None:
        """Starts the workers."""
        self._mode, self._servers = mode, servers
        self._task = tasks.fashion(None, seed, NUM_WORKERS)
        self._draw = random.Random(seed)
        self._start_s = time.monotonic()
        self._last: dict[int, Step] = {}  # Report of each rank's present worker.
        self._away: dict[int, float] = {}  # When a rank gets another worker.
        self.found = Found()
        self.workers = {rank: self._start(rank) for rank in range(NUM_WORKERS)}

    def run(self, seconds: float) -> Found:
        """Kills workers for so long, then lets all end.

        Raises:
            RuntimeError: A worker raises, or does not come to its end.
        """
        kill_s = self._now_s() + self._draw.uniform(*GAP_S)
        while self._now_s() < seconds:
            self._hear()
            for rank in [rank for rank, when_s in self._away.items() if when_s <= self._now_s()]:
                del self._away[rank]
                self.workers[rank] = self._start(rank)
            if self._now_s() >= kill_s:
                self._kill()
                kill_s = self._now_s() + self._draw.uniform(*GAP_S)
            time.sleep(POLL_S)
        self.found.seconds = self._now_s()
        for worker in self.workers.values():
            worker.tell()
        for rank in list(self.workers):
            while (step := self.workers[rank].hear()) is not None:
                self._take(rank, step)
            self._forget(rank)
        return self.found

    def end(self) -> None:
        """Ends all workers in any case."""
        for worker in self.workers.values():
            worker.end()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _start(self, rank: int) -> Forked:
        job = f"kills-{os.getpid()}-{self._mode}"
        env = kit.worker_environment(self._servers, rank, NUM_WORKERS, "auto", job)
        return Forked(work, rank, self._task, self._mode, env)

    def _hear(self) -> None:
        for rank, worker in self.workers.items():
            while worker.has_told():
                self._take(rank, worker.hear())

    def _take(self, rank: int, step: Step) -> None:
        self._last[rank] = step
        self.found.add(rank, step)

    def _kill(self) -> None:
        """Kills one of those that have trained, if enough of them live."""
        trained = [rank for rank in self.workers if rank in self._last]
        if len(trained) <= LIVING_MIN:
            return
        rank = self._draw.choice(trained)
        self.workers.pop(rank).end()
        self.found.drop(rank, self._last[rank])
        self._forget(rank)
        self.found.num_kills += 1
        self._away[rank] = self._now_s() + self._draw.uniform(*AWAY_S)

    def _forget(self, rank: int) -> None:
        """Adds up what a worker that is gone has applied, as of its last report."""
        last = self._last.pop(rank, None)
        if last is not None:
            self.found.num_exchanges += last.num_exchanges
            self.found.num_twice += last.num_twice


def measure(modes: Sequence[str], seconds: float, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Runs the loop for each mode; returns the figures, and whether all is as it must be."""
    forked.prepare()
    runs: list[dict[str, Any]] = []
    is_good = True
    for mode in modes:
        with start_embedded(1, lease_s=LEASE_S) as servers:
            loop = Loop(mode, servers.addresses, seed)
            try:
                found = loop.run(seconds)
            finally:
                loop.end()
        runs.append({"mode": mode, "seed": seed} | found.summary())
        is_good = is_good and found.is_good
        print(f"{runs[-1]}", flush=True)
    rows = [list(run.values()) for run in runs]
    kit.show(f"{NUM_WORKERS} workers, {seconds:g} s a mode", [*runs[0]], rows)
    return runs, is_good


def joined(former: Sequence[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all runs; a new one replaces that of the same mode and seed."""
    new = {(run["mode"], run["seed"]) for run in found}
    kept = [run for run in former if (run["mode"], run["seed"]) not in new]
    return sorted(kept + found, key=lambda run: (MODES.index(run["mode"]), run["seed"]))
