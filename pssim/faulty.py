"""A job on a faulty network, with workers that die and return and shards that crash.

The workers' gradients are made so that the ledger can tell them apart, and each decision of a shard
is checked when it is made.
"""

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pscore.compressors.none import NoCompression
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, TensorSpec
from psserver.decisions.orders import Update
from psserver.slices.base import Store
from psserver.slices.store import SliceStore
from pssim.booked import WatchedJob, start_weights
from pssim.captures import Captures
from pssim.case import NUMEL, Case
from pssim.cluster import Cluster, quiet, small_slices
from pssim.events import Event, Recorder
from pssim.faulty_worker import LEASE_S, FaultyWorker
from pssim.ledger import Ledger, SliceBook
from pssim.network import FaultyNetwork, Loop, StuckError
from pssim.shard import Decision, SimulatedShard

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LIMIT_S = 600.0  # Seconds of virtual time; a job takes a few seconds, and a dead worker a lease.
TICK_S = 0.5
WINDOW_TICK_S = 0.05
LOOK_S = 0.05


def poison_unreferenced(store: Store) -> None:
    """Fills memory that the journal does not name with NaN, as if it had been half written."""
    assert isinstance(store, SliceStore)
    assert store.journal is not None
    store.journal.pool.poison_free()
    store.copies.poison_others()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The end of a simulation."""

    weights: FloatArray  # `(numel,) float32`: on the shards, at the end.
    ledger: Ledger
    workers: list[FaultyWorker]
    num_events: int
    seconds: float  # Virtual seconds.
    trace: list[str]  # Lines of the transcript.
    events: list[Event]  # Events of steps, pushes, updates and pulls.
    captures: Captures  # Checkpoints during training.

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


def simulate(case: Case, *, trace: bool = False) -> Outcome:
    """Runs a case to its end; raises AssertionError if an invariant is broken."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return FaultyCluster(case, Path(folder), trace=trace).run()


class FaultyCluster(Cluster):
    """Shards, workers, faults, and the ledger."""

    def __init__(self, case: Case, folder: Path, *, trace: bool) -> None:
        """Makes them.

        Args:
            folder: Empty; the journals lie in it.
        """
        self.case = case
        self.rng = random.Random(case.seed)
        loop = Loop()
        network = FaultyNetwork(loop, case.faults, case.cuts, self.rng)
        network.trace = [] if trace else None
        self.recorder = Recorder(self.now)
        self.ledger = Ledger(min_workers=case.min_workers)
        self.captures = Captures()
        self._num_leased = self._num_leased_max = 0
        self._lost: list[set[int]] = [set() for _ in range(case.num_shards)]
        with small_slices(NUMEL):
            super().__init__(
                _spec_of(case),
                loop,
                network,
                lease_s=LEASE_S,
                observers=(self.ledger, self.recorder, self),
                send_later=self._send_later,
                folder=folder if case.crashes else None,
            )
        start = start_weights(self.layout)
        for spec in self.layout.slices:
            self.ledger.books[spec.index] = SliceBook(
                case, spec, self.optimizer, start[spec.start : spec.stop].copy()
            )
        job = WatchedJob(
            case=case,
            spec=self.spec,
            layout=self.layout,
            optimizer=self.optimizer,
            shards=self.shards,
            ledger=self.ledger,
            loop=self.loop,
            network=self.network,
            recorder=self.recorder,
        )
        with small_slices(NUMEL):
            self.workers = [FaultyWorker(rank, job) for rank in range(case.num_workers)]
        for worker in self.workers:
            worker.others = [other for other in self.workers if other is not worker]
            worker.check = self.check
            worker.residuals = self.captures.book

    def run(self) -> Outcome:
        """Runs until nothing is left to happen, and checks the end."""
        for worker in self.workers:
            worker.start()
        for shard in self.shards:
            self.loop.after(TICK_S, partial(self._tick, shard))
            if self.case.rule.window_s is not None:
                self.loop.after(WINDOW_TICK_S, partial(self._tick_windows, shard))
        for at_s in self.case.captures_s:
            self.loop.after(at_s, partial(self.captures.begin, self.shards))
        if self.case.captures_s:
            self.loop.after(LOOK_S, self._look)
        for index, at_s in self.case.crashes:
            self.loop.after(at_s, partial(self._crash, self.shards[index]))
        try:
            with quiet(), small_slices(NUMEL):
                if not self.loop.run(LIMIT_S):
                    raise StuckError(f"not over after {LIMIT_S:g} virtual seconds: {self._waits()}")
            self._check_the_end()
        finally:
            self.close()
        return Outcome(
            weights=self.flat_weights(),
            ledger=self.ledger,
            workers=self.workers,
            num_events=self.loop.num_events,
            seconds=self.loop.now_s,
            trace=self.network.trace or [],
            events=self.recorder.events,
            captures=self.captures,
        )

    def decided(self, decision: Decision) -> None:
        """Writes updates into the transcript."""
        if isinstance(decision.action, Update):
            version = decision.action.version
            self.network.note(f"    {decision.shard}: slice {decision.slice} has version {version}")

    # ----- time

    def _tick(self, shard: SimulatedShard) -> None:
        shard.tick()
        for rank in shard.lost() - self._lost[shard.index]:
            self.network.note(f"    {shard.name}: worker {rank} is lost")
        self._lost[shard.index] = shard.lost()
        self.check(shard)
        if not shard.is_over or shard.engine.requests.waiting:
            self.loop.after(TICK_S, partial(self._tick, shard))

    def _tick_windows(self, shard: SimulatedShard) -> None:
        shard.engine.tick_windows()
        self.check(shard)
        if not shard.is_over:
            self.loop.after(WINDOW_TICK_S, partial(self._tick_windows, shard))

    def _look(self) -> None:
        """Looks at the checkpoints while a worker trains."""
        self.captures.look()
        if not all(worker.is_over for worker in self.workers):
            self.loop.after(LOOK_S, self._look)

    def _crash(self, shard: SimulatedShard) -> None:
        self.network.note(f"    {shard.name}: is killed, and starts again")
        shard.crash(poison_unreferenced)
        self.check(shard)

    def _send_later(self, send: Callable[[], None], release: Callable[[], None]) -> None:
        """Keeps an answer's weights on lease for a while, then sends and releases them."""

        def leave() -> None:
            send()
            release()
            self._num_leased -= 1

        self._num_leased += 1
        self._num_leased_max = max(self._num_leased_max, self._num_leased)
        self.loop.after(self.rng.random() * self.case.faults.delay_s_max, leave)

    # ----- invariants

    def check(self, shard: SimulatedShard) -> None:
        """Checks that a shard keeps no more than the rule's open steps need."""
        if shard.problem is not None:
            raise shard.problem
        rule, workers = self.case.rule, self.case.num_workers
        open_max = rule.steps_open() if rule.by_step else 1
        for index, _, clock, store in shard.slices():
            assert clock.version in (self.ledger.books[index].version, -1)
            sums = open_max * (1 + workers) + 1  # With those that are held.
            buffers = 2 + self._num_leased_max
            store.check_invariants(
                sums_max=open_max,
                cells_max=sums + buffers + len(store.state) + 1,
                buffers_max=buffers,
            )
            assert len(clock.parking) <= workers, f"{len(clock.parking)} pushes parked"
            clock.check_invariants()

    def _check_the_end(self) -> None:
        self.captures.look()
        self.captures.close()
        steady = set(range(self.case.num_workers)) - self.ledger.came_back
        self.captures.check(sorted(steady))
        for shard in self.shards:
            assert shard.is_over
            self.check(shard)
            assert not shard.engine.requests.waiting
            jobs = shard.engine.jobs.values()
            assert not any(table.has_scheduled for job in jobs for table in job.tables.values())
            for index, _, clock, store in shard.slices():
                cells = store.nbytes // (4 * store.numel)
                store.check_invariants(sums_max=0, cells_max=cells, buffers_max=cells, is_idle=True)
                assert clock.num_waiting == 0
                self.ledger.books[index].settled(store.weights)
        self.ledger.whole(may_be_late=getattr(self.case.rule, "backup", 0) > 0)
        for worker in self.workers:
            assert worker.is_over, f"{worker.name} still waits for {worker.waits_for}"
            if not worker.is_dead:
                self._check_final(worker)
                if not worker.num_returns:
                    late = self.ledger.late(worker.rank, worker.incarnation)
                    known = worker.exchange.missed.num_steps
                    assert known == late, f"{late} steps were late, {worker.name} knows of {known}"

    def _check_final(self, worker: FaultyWorker) -> None:
        """Checks that a worker that has finished has the shards' weights."""
        for spec in self.layout.slices:
            book = self.ledger.books[spec.index]
            version = worker.replica.parts[spec.index].version
            assert torch.equal(
                worker.replica.weights[spec.start : spec.stop],
                torch.from_numpy(book.weights[version]),
            )

    def _waits(self) -> str:
        waiting = [
            f"{worker.name} waits for {worker.waits_for}"
            for worker in self.workers
            if not worker.is_over
        ]
        for shard in self.shards:
            waiting += [
                f"{shard.name}: slice {index} at version {clock.version} misses {clock.missing()}"
                for index, _, clock, _ in shard.slices()
            ]
        return "; ".join(waiting)


def _spec_of(case: Case) -> TableSpec:
    compressors = (case.compressor, case.pull_compressor)
    is_compressed = not all(isinstance(one, NoCompression) for one in compressors)
    return TableSpec(
        name="model",
        tensors=tuple(
            TensorSpec(name=f"w{index}", shape=shape, dtype="float32", compress=is_compressed)
            for index, shape in enumerate(case.shapes)
        ),
        num_shards=case.num_shards,
        rule=case.rule,
        compressor=case.compressor,
        pull_compressor=case.pull_compressor,
        optimizer=case.rule.outer_optimizer or "sgd",
        num_groups=1,
    )
