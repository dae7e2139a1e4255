"""A whole cluster in one thread: makes it, runs it to its end, and says what came of it."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pscore import partition
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout, make_layout
from pscore.types import FloatArray, TensorSpec
from psserver.decisions.table import TableSpec
from pssim.case import NUMEL, Case
from pssim.events import Event, Recorder
from pssim.ledger import Ledger, SliceBook
from pssim.network import Loop, Network
from pssim.shard import JOB, TICK_S, Server
from pssim.worker import Worker, start_weights

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LIMIT_S = 600.0  # Of simulated time; a job takes a few seconds, and a dead worker a lease.


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a simulation."""

    weights: FloatArray  # (numel,): at the end, on the shards.
    ledger: Ledger
    workers: list[Worker]
    num_events: int
    seconds: float  # Simulated.
    trace: list[str]
    events: list[Event]

    @property
    def num_updates(self) -> int:
        """Updates of all slices."""
        return sum(book.version for book in self.ledger.books.values())

    @property
    def lead_max(self) -> int:
        """Steps that an accepted push was beyond the newest update."""
        return max(book.lead_max for book in self.ledger.books.values())

    @property
    def ahead_max(self) -> int:
        """Steps that a worker was ahead of the slowest."""
        return max(book.ahead_max for book in self.ledger.books.values())


@contextmanager
def small_slices() -> Iterator[None]:
    """Cuts slices of a few elements, so that a tiny model has several of them on each shard."""
    kept = partition.SLICE_NUMEL_MIN, partition.SLICE_NUMEL_MAX
    partition.SLICE_NUMEL_MIN = partition.SLICE_NUMEL_MAX = NUMEL
    try:
        yield
    finally:
        partition.SLICE_NUMEL_MIN, partition.SLICE_NUMEL_MAX = kept


def simulate(case: Case, *, trace: bool = False) -> Outcome:
    """Runs a case to its end.

    Raises:
        AssertionError: An invariant is broken.
    """
    with small_slices(), tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return Cluster(case, Path(folder), trace=trace).run()


class Cluster:
    """Shards, workers, and the network between them."""

    def __init__(self, case: Case, folder: Path, *, trace: bool) -> None:
        self.case = case
        self.loop = Loop()
        self.rng = random.Random(case.seed)
        self.network = Network(self.loop, case.faults, case.cuts, self.rng)
        self.network.trace = [] if trace else None
        self.recorder = Recorder(self._now)
        tensors = tuple(
            TensorSpec(
                name=f"w{index}",
                shape=shape,
                dtype="float32",
                compress=(case.compressor.name, case.pull_compressor.name) != ("none", "none"),
            )
            for index, shape in enumerate(case.shapes)
        )
        layout = make_layout(tensors, case.num_shards)
        optimizer = OPTIMIZERS[case.rule.outer_optimizer or "sgd"]()
        self.layout = layout
        self.ledger = Ledger(min_workers=case.min_workers)
        start = start_weights(layout)
        for spec in layout.slices:
            self.ledger.books[spec.index] = SliceBook(
                case, spec, optimizer, start[spec.start : spec.stop].copy()
            )
        self.servers = [
            Server(
                index,
                case,
                self.ledger,
                self.network,
                self._now,
                self._send_later,
                self.recorder,
                folder / str(index) if case.crashes else None,
            )
            for index in range(case.num_shards)
        ]
        table = TableSpec(
            name="model",
            tensors=tensors,
            num_shards=case.num_shards,
            rule=case.rule,
            compressor=case.compressor,
            pull_compressor=case.pull_compressor,
            optimizer=optimizer.name,
            num_groups=1,
        )
        self.workers = [
            Worker(
                rank,
                case,
                layout,
                optimizer,
                table,
                self.servers,
                self.ledger,
                self.loop,
                self.network,
                self.recorder,
            )
            for rank in range(case.num_workers)
        ]
        for worker in self.workers:
            worker.others = [other for other in self.workers if other is not worker]

    def run(self) -> Outcome:
        """Runs until nothing is left to happen, and checks what the job has come to."""
        for worker in self.workers:
            worker.start()
        for server in self.servers:
            self.loop.after(TICK_S, partial(self._tick, server))
        for index, at_s in self.case.crashes:
            self.loop.after(at_s, self.servers[index].crash)
        try:
            self.loop.run(LIMIT_S, self._explain)
            self._check_the_end()
        finally:
            for server in self.servers:
                server.close()
        return Outcome(
            weights=self._weights(),
            ledger=self.ledger,
            workers=self.workers,
            num_events=self.loop.num_events,
            seconds=self.loop.now_s,
            trace=self.network.trace or [],
            events=self.recorder.events,
        )

    def _check_the_end(self) -> None:
        for server in self.servers:
            assert server.is_over
            server.check()
            server.settled()
        self.ledger.whole(may_be_late=getattr(self.case.rule, "backup", 0) > 0)
        for worker in self.workers:
            assert worker.is_over, f"{worker.name} still waits for {worker.waits_for}"
            if not worker.is_dead:
                self._check_final(worker)
                if not worker.num_returns:
                    late = self.ledger.late(worker.rank, worker.incarnation)
                    told = worker.exchange.missed.num_steps
                    assert told == late, f"{late} steps were late, {worker.name} knows of {told}"

    def _check_final(self, worker: Worker) -> None:
        """A worker that finished has the shards' weights, with its own last push in them."""
        for spec in self.layout.slices:
            book = self.ledger.books[spec.index]
            version = worker.replica.parts[spec.index].version
            assert torch.equal(
                worker.replica.weights[spec.start : spec.stop],
                torch.from_numpy(book.weights[version]),
            )

    def _weights(self) -> FloatArray:
        weights = np.zeros(self.layout.numel, dtype=np.float32)
        for server in self.servers:
            for index, store in server.stores().items():
                spec = self.layout.slices[index]
                weights[spec.start : spec.stop] = store.weights
        return weights

    def _tick(self, server: Server) -> None:
        server.tick()
        server.check()
        if not server.is_over or server.intake.waiting:
            self.loop.after(TICK_S, partial(self._tick, server))

    def _now(self) -> float:
        return self.loop.now_s

    def _send_later(self, send: Callable[[], None], release: Callable[[], None]) -> None:
        """Holds an answer's weights on lease for a while, then sends and gives them back."""

        def leave() -> None:
            send()
            release()
            for server in self.servers:
                server.num_leased -= 1

        for server in self.servers:
            server.num_leased += 1
            server.num_leased_max = max(server.num_leased_max, server.num_leased)
        self.loop.after(self.rng.random() * self.case.faults.delay_s_max, leave)

    def _explain(self) -> str:
        waiting = [
            f"{worker.name} waits for {worker.waits_for}"
            for worker in self.workers
            if not worker.is_over
        ]
        for server in self.servers:
            for job in server.shard.jobs.values():
                waiting += [
                    f"{server.name}: slice {index} at version {clock.version} misses "
                    f"{clock.missing()}"
                    for table in job.tables.values()
                    for index, clock in table.clocks.items()
                ]
        return "; ".join(waiting)


__all__ = ["JOB", "Cluster", "Layout", "Outcome", "simulate", "small_slices"]
