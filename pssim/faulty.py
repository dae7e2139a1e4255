"""A job on a faulty network, with workers that die and return and shards that crash.

The workers' gradients are made so that the ledger can tell them apart, and each decision of a shard
is checked when it is made.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ReplacedError
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Role, TensorSpec
from psserver.decisions.orders import Update
from psserver.slices.base import Store
from psserver.slices.store import SliceStore
from pssim.booked import start_weights
from pssim.captures import Captures
from pssim.case import NUMEL, Case
from pssim.cluster import Cluster, quiet, small_slices
from pssim.connected import LEASE_S, ConnectedWorker
from pssim.events import Event, Recorder, What
from pssim.ledger import Ledger, SliceBook
from pssim.network import FaultyNetwork, Loop, Network, StuckError
from pssim.shard import Decision, SimulatedShard
from pssim.worker import Program
from psworker.replica.slice_ends import OF_ROUNDS

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


class FaultyWorker(ConnectedWorker):
    """A worker that may die, return, and be cut off.

    Attributes:
        is_dead: Whether its process has been killed.
        num_returns: How often it has returned after the shards had declared it lost.
        has_come: Whether any incarnation has had its first weights.
        others: The other workers of the job.
    """

    def __init__(
        self,
        rank: int,
        case: Case,
        spec: TableSpec,
        layout: Layout,
        optimizer: Optimizer,
        shards: Sequence[SimulatedShard],
        ledger: Ledger,
        loop: Loop,
        network: Network,
        recorder: Recorder,
    ) -> None:
        """Makes the worker and its first process; `start` starts it."""
        super().__init__(
            rank, case, spec, layout, optimizer, shards, ledger, loop, network, recorder
        )
        self.is_dead = False
        self.num_returns = 0
        self.has_come = False
        self.others: Sequence[FaultyWorker] = ()
        self._start_process()

    def _start_process(self) -> None:
        self.segment = np.zeros(self.layout.numel, np.float32)
        self.start_process(
            self._train(),
            self._spec,
            self.layout,
            self.optimizer,
            torch.zeros(self.layout.numel),
            self.case.num_workers,
        )
        share = 1.0 / (1 + self.rank)
        self.replica.speed = lambda: share

    # ----- life and death

    def start(self) -> None:
        """Schedules the begin of the program."""
        comes_s = self.case.comes_s[self.rank] if self.case.comes_s else 0.0
        if comes_s:  # Its clocks begin where the others are.
            self.ledger.came_back.add(self.rank)
        self.loop.after(comes_s, self.resume)

    def die(self) -> None:
        """Kills the process; it may be started again later."""
        if self.is_over:
            return
        self.network.note(f"{self.name} is killed")
        self.is_dead = True
        self._begin_incarnation()
        back_s = self.case.back_s[self.rank]
        if back_s is None:
            self.is_over = True
        else:
            self.loop.after(back_s, self._revive)

    def advance(self) -> None:
        """Runs the program until it has to wait, while its process lives."""
        if not self.is_dead:
            super().advance()

    def _revive(self) -> None:
        self.network.note(f"{self.name} is started again")
        self.is_dead = False
        self._restart += 1
        self._former.clear()
        self.step_now += 1
        self._start_process()
        self.replica.step = self.step_now
        self.resume()

    def _begin_incarnation(self) -> None:
        """Leaves all requests under way to the incarnation that ends."""
        self._former.append(self.incarnation)
        self.incarnation += 1000
        self.ledger.came_back.add(self.rank)
        self._problem = None
        self.has_begun = False
        self.clear(range(len(self.elements)))
        self.pushes.clear()

    # ----- the program

    def _train(self) -> Program:
        yield from self._join(returns=self._restart > 0)
        yield from self._define()
        if self.rank == 0 and not self._restart:
            yield from self._upload()
        self.set_hyper()
        yield from self.wait_for_pulls(self.replica.begin(self.exchange))
        self.has_begun = self.has_come = True
        if self.loop.now_s < self.case.begins_s:
            yield self.case.begins_s - self.loop.now_s
        dies_s = self.case.dies_s[self.rank]
        if dies_s is not None and not self._restart:
            self.loop.after(dies_s, self.die)
        while self.step_now < self.case.steps[self.rank]:
            try:
                yield from self._compute()
                yield from self._step()
            except ReplacedError as problem:
                yield from self._come_back(problem)
            self.step_now += 1
        stays = self.case.min_workers and self.rank == 0
        while stays and not all(other.has_come for other in self.others):
            self.waits_for = "all to join"
            yield 0.1
        try:
            yield from self._finish()
        except ReplacedError as problem:
            if self.case.min_workers:  # The others may wait for it.
                yield from self._come_back(problem)
                yield from self._finish()
            else:
                self.network.note(f"{self.name} was lost at its end: {problem}")
                self.is_dead = True
                self._begin_incarnation()

    def _compute(self) -> Program:
        note, step = self.recorder.note, self.step_now
        note(self.name, What.COMPUTE_STARTED, worker=self.rank, step=step)
        pace = 1.0 if self.case.is_steady else self.rng.uniform(0.5, 1.5)
        yield self.case.compute_s[self.rank] * pace
        note(self.name, What.COMPUTE_ENDED, worker=self.rank, step=step)

    def _finish(self) -> Program:
        yield from self.wait_for_pushes()
        is_open = [index for index, touched in enumerate(self.elements) if touched]
        self.replica.end_round(self.grads, self.exchange)
        yield from self.wait_for_pushes()
        if self.case.rule.outer_optimizer and is_open:
            self._ended_step(is_open)
        yield from self.wait_for_pulls(self.replica.settle())
        self.recorder.leave_out(self.rank)
        yield from self.wait_for_pulls(self.replica.fetch(None, self.exchange))
        self.network.note(f"{self.name} leaves")
        yield from self._leave()

    def _come_back(self, problem: ReplacedError) -> Program:
        """Joins again after having been declared lost, as `DistributedOptimizer` does."""
        self.network.note(f"{self.name} returns: {problem}")
        self.num_returns += 1
        self._begin_incarnation()
        yield from self._join(returns=True)
        yield from self._define()
        self.exchange.restart()
        self.replica.restart()
        yield from self.wait_for_pulls(self.replica.begin(self.exchange))
        self.has_begun = True
        if self.replica.clocks.num_fragments == 1:  # Else their rounds have set it.
            self.replica.step += 1

    def _step(self) -> Program:
        """Makes one step, as `DistributedOptimizer.step` does."""
        self.set_hyper()
        plan, pushed = self.replica.plan(), self.replica.clocks.slices_pushed(self.replica.step)
        self.make_grads(self.step_now)
        weights = self.replica.weights[self.layout.slices[0].stop :].clone()
        samples = self.case.samples[self.rank]
        if plan.push is Role.GRADIENT:
            for index in self.replica.front_first():
                yield from self.wait_for_pulls(self.replica.land(index))
                yield from self.wait_for_push(index)
                present, grad, early = self.present(index), self.grads[index], index > 0
                self.replica.push(index, grad, present, samples, self.exchange, in_backward=early)
                yield 0.0
        # The first slice leaves when backward is over; until then it reads those of the others.
        assert torch.equal(self.replica.weights[self.layout.slices[0].stop :], weights)
        if plan.push is Role.GRADIENT:
            for index in self.replica.front_first()[::2]:  # `finish` ends the others.
                self.replica.end_slice(index, self.grads[index], self.exchange)
        if plan.inner:
            for spec in self.layout.slices:
                self.replica.weights[spec.start : spec.stop] -= self.grads[spec.index]
        if plan.push in OF_ROUNDS:
            yield from self.wait_for_pushes()
        yield from self.wait_for_pulls(self.replica.finish(self.grads, self.exchange, samples))
        if plan.push is not None:
            self.clear(pushed)
            self._ended_step(pushed)

    def _ended_step(self, pushed: Iterable[int]) -> None:
        self.ledger.stepped[self.rank, self.incarnation, self.step_now] = set(pushed)

    def _upload(self) -> Program:
        start = start_weights(self.layout)
        for spec in self.layout.slices:
            self.exchange.load(spec.index, Role.WEIGHTS, [start[spec.start : spec.stop]], [])
        yield from self.wait_for_pushes()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The end of a simulation.

    Attributes:
        weights: `(numel,) float32`: on the shards, at the end.
        ledger: The books.
        workers: The workers.
        num_events: Events of the loop.
        seconds: Virtual seconds.
        trace: Lines of the transcript.
        events: Events of steps, pushes, updates and pulls.
        captures: Checkpoints during training.
    """

    weights: FloatArray
    ledger: Ledger
    workers: list[FaultyWorker]
    num_events: int
    seconds: float
    trace: list[str]
    events: list[Event]
    captures: Captures

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
    """Runs a case to its end.

    Raises:
        AssertionError: An invariant is broken.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return FaultyCluster(case, Path(folder), trace=trace).run()


class FaultyCluster(Cluster):
    """Shards, workers, faults, and the ledger."""

    def __init__(self, case: Case, folder: Path, *, trace: bool) -> None:
        """Makes them.

        Args:
            case: The simulated job.
            folder: Empty; the journals lie in it.
            trace: Whether a transcript is written.
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
        with small_slices(NUMEL):
            self.workers = self._make_workers(case)
        for worker in self.workers:
            worker.others = [other for other in self.workers if other is not worker]
            worker.check = self.check
            worker.residuals = self.captures.book

    def _make_workers(self, case: Case) -> list[FaultyWorker]:
        return [
            FaultyWorker(
                rank,
                case,
                self.spec,
                self.layout,
                self.optimizer,
                self.shards,
                self.ledger,
                self.loop,
                self.network,
                self.recorder,
            )
            for rank in range(case.num_workers)
        ]

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
