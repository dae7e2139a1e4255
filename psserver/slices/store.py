"""The numbers of one slice in memory, and how a clock's orders change them. No decisions, no I/O.

weights.py decides where the next weights are written. Orders of one slice are executed one after
the other; those of different slices in parallel, without the GIL.

With a journal no array that counts is written in place: optimizer state and sums go from one array
to another too, and each order ends with the record that names the new ones (journal.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from pscore.compressors.base import Compressor
from pscore.net.wire import floats
from pscore.optimizers.base import Optimizer
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.types import FloatArray, IntArray, Push, Role, SliceSpec
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Skip, Update
from psserver.slices.base import (
    NO_CLOCKS,
    NO_OBSERVER,
    Asked,
    Mark,
    Observer,
    Payload,
    Reading,
    WeightedGrad,
    nothing,
)
from psserver.slices.journal import SliceJournal
from psserver.slices.journaled_progress import JournaledProgress
from psserver.slices.optimizer_state import OptimizerState
from psserver.slices.pool import Buffer, Cell, Pool, give
from psserver.slices.pull_estimate import Estimate
from psserver.slices.rule_memory import RuleMemory
from psserver.slices.sums import Sums
from psserver.slices.weights import Weights


class SliceStore:
    """Weights, optimizer state and open sums of one slice; all arrays `(numel,) float32`.

    Attributes:
        counts: `(num_segments,) int64`, optimizer steps of each segment.
        copies: The copies of the weights; readers lease the newest.
        progress: The pushes counted, as the journal has them; None: there is no journal.
    """

    def __init__(
        self,
        spec: SliceSpec,
        rule: Rule,
        optimizer: Optimizer,
        buffers: Sequence[FloatArray] | None = None,
        versions: IntArray | None = None,
        journal: SliceJournal | None = None,
        stamps: IntArray | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Starts with zeros, or with the contents of the journal.

        Args:
            buffers: Two arrays for the weights, in shared memory; None: private ones are made.
            versions: `(2,) int64`, where the versions of these buffers are published.
            journal: Where every change is recorded; needs `buffers`, which outlive the process too.
            stamps: `(2,) int64`, `versions` again, at the end of the file that the buffers lie in.
            observer: Sees additions, steps and publications, for a timeline.
        """
        self.numel = spec.numel
        self._rule = rule
        self.journal = journal  # None: nothing outlives the process.
        self._observer = observer
        self._pool = Pool(spec.numel, 0) if journal is None else journal
        self.progress = None if journal is None else JournaledProgress(journal)
        self._memory = RuleMemory(self._pool)
        self._estimate: Estimate | None = None
        self.copies = Weights(self._pool, buffers, versions, stamps)
        self._state = OptimizerState(spec, optimizer, self._pool)
        self.counts = self._state.counts
        self._sums = Sums(
            spec.numel,
            rule,
            self._pool,
            self._memory,
            self.copies,
            observer,
            self.progress,
            adds=optimizer.adds,
        )
        if journal is not None and not journal.is_new:
            self._recover(journal)

    @property
    def weights(self) -> FloatArray:
        """The newest weights."""
        return self.copies.newest

    @property
    def state(self) -> list[FloatArray]:
        """The optimizer's state."""
        return self._state.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        estimate_nbytes = 0 if self._estimate is None else self._estimate.nbytes
        on_heap = self._memory.arrays.values() if self.journal is None else ()
        memory_nbytes = sum(array.nbytes for array in on_heap)
        return self.copies.shared_nbytes + self._pool.nbytes + memory_nbytes + estimate_nbytes

    def check_invariants(
        self, *, sums_max: int, cells_max: int, buffers_max: int, is_idle: bool = False
    ) -> None:
        """Asserts bounds on memory, for tests and the simulator.

        Args:
            is_idle: Whether nothing is under way, so that no copy of the weights is leased.
        """
        assert len(self._sums) <= sums_max, f"{len(self._sums)} sums are open"
        assert self._pool.nbytes <= 4 * self.numel * cells_max, f"{self._pool.nbytes} bytes"
        self._state.check_invariants()
        self.copies.check_invariants(buffers_max, is_idle=is_idle)

    # ----- checkpoints

    def export(self, mark: Mark | None = None) -> Iterator[dict[str, np.ndarray] | None]:
        """Yields copies of all that outlives the process, by name, in one portion; no open sums."""
        arrays: dict[str, np.ndarray] = {
            "weights": self.weights.copy(),
            "counts": self.counts.copy(),
        }
        arrays |= {f"state.{i}": array.copy() for i, array in enumerate(self.state)}
        arrays |= {f"memory.{name}": array.copy() for name, array in self._memory.arrays.items()}
        yield arrays

    def restore(
        self, arrays: Mapping[str, np.ndarray], version: int, clocks: Mapping[int, int] = NO_CLOCKS
    ) -> None:
        """Sets all that `export` returned, before anything else happens to the slice.

        Args:
            version: Version of the weights, in updates.
            clocks: Steps of each worker that are in them, by rank.
        """
        spare = self._spare()
        np.copyto(spare.array, arrays["weights"])
        self.counts[:] = arrays["counts"]
        for index, array in enumerate(self.state):
            np.copyto(array, arrays[f"state.{index}"])
        prefix = "memory."
        for name in [name for name in arrays if name.startswith(prefix)]:
            memory = self._memory.at(self.weights)
            memory.state[name.removeprefix(prefix)] = arrays[name]
        self._memory.write()
        if self.progress is not None:
            for rank, clock in clocks.items():
                self.progress.advance(rank, clock)
        self._publish(spare, version, self._state.cells)

    # ----- reading

    def answer(self, answer: Answer, asked: Asked, reply: data_pb2.PullReply) -> Reading:
        """Returns the answer: by reference, from a leased buffer, or with a copy of the state."""
        if asked.compressor is not None and asked.held is not None:
            estimate = self._follow(answer, asked.compressor)
            parts = estimate.answer(asked.held, reply)
            return Reading(
                arrays=parts,
                release=None if reply.whole else nothing,
                nbytes=sum(part.nbytes for part in parts),
                raw_nbytes=4 * self.numel,
            )
        arrays = self.read(answer)
        nbytes, release = sum(array.nbytes for array in arrays), None
        if answer.with_state:
            reply.counts.extend(self.counts.tolist())
        elif asked.is_shared and (number := self.copies.newest_mapped()):
            reply.buffer, arrays = number, []
        else:
            buffer = self.copies.lease()
            arrays, release = [buffer.array], partial(self.copies.release, buffer)
        return Reading(arrays=arrays, release=release, nbytes=nbytes, raw_nbytes=nbytes)

    def read(self, answer: Answer) -> list[FloatArray]:
        """Returns the newest weights and, if asked, the state: views until the next order."""
        if not answer.is_look:
            self._note_answer(answer, self.weights)
        return [self.weights, *self.state] if answer.with_state else [self.weights]

    def _follow(self, answer: Answer, compressor: Compressor) -> Estimate:
        """Returns the estimate of the newest weights where pulls are compressed."""
        if self._estimate is None:
            self._estimate = Estimate(compressor, self.weights, answer.version)
        self._estimate.follow(self.weights, answer.version)
        # The worker computes its gradient from the estimate:
        self._note_answer(answer, self._estimate.values)
        return self._estimate

    # ----- orders

    def check(self, payload: Payload, push: Push) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length, or is not what its compressor writes.
        """
        if push.role in (Role.WEIGHTS, Role.STATE, Role.REFILL):
            num_arrays = 1 if push.role is Role.WEIGHTS else 1 + len(self._state)
            floats(memoryview(payload.data), num_arrays, self.numel)
        elif payload.data.nbytes:
            payload.compressor.check(payload.data, self.numel)

    def load(self, action: Load, payload: Payload) -> None:
        """Sets the weights, and with `Role.STATE` or `REFILL` the optimizer's state."""
        num_arrays = 1 if action.role is Role.WEIGHTS else 1 + len(self._state)
        weights, *values = floats(memoryview(payload.data), num_arrays, self.numel)
        spare = self._spare()
        np.copyto(spare.array, weights)
        state = self._state.next_cells() if values else self._state.cells
        for cell, value in zip(state, values, strict=False):
            np.copyto(cell.array, value)
        if payload.counts:
            self.counts[:] = payload.counts
        if self.progress is not None:
            for rank, clock in action.clocks.items():
                self.progress.advance(rank, clock)
        self._estimate = None  # The loaded weights may be far from it: they are sent whole.
        self._publish(spare, action.version, state)

    def hold(self, action: Hold, payload: Payload) -> Payload:
        """Returns a payload that stays valid when the push has been acknowledged."""
        if self.journal is None and not payload.is_borrowed:
            return payload
        cell = self._pool.take()
        data = cell.data[: payload.data.nbytes]
        np.copyto(data, payload.data)
        kept = payload._replace(data=data, cell=cell, is_borrowed=False)
        if self.journal is not None and self.progress is not None:
            self.progress.add(action.push)
            is_compressed = not payload.compressor.is_raw
            self.journal.hold(action.push, cell, data.nbytes, is_compressed=is_compressed)
            self.journal.commit()
        return kept

    def add(self, action: Add, payload: Payload) -> None:
        """Adds a gradient to an open step's sum; an empty payload is a gradient of zeros."""
        self._sums.add(action, payload)

    def update(self, action: Update) -> None:
        """Makes one optimizer step with an open step's mean, and frees its sum."""
        sum_ = self._sums.take(action.open_step)
        self._step([sum_.array], [1.0], action)
        give(self._pool, sum_)

    def add_and_update(self, grads: Sequence[WeightedGrad], update: Update) -> None:
        """Makes the last additions of an update and its optimizer step: their sum is not kept."""
        self._sums.total(
            update.open_step, grads, lambda arrays, shares: self._step(arrays, shares, update)
        )

    def skip(self, action: Skip) -> None:
        """Gives the weights another version; with a journal a copy of them, as an update does."""
        spare = self._spare()
        if spare.array is not self.weights:
            np.copyto(spare.array, self.weights)
        self._publish(spare, action.version, self._state.cells)

    def note_late(self, action: Acknowledge) -> None:
        """Records in the journal a push that is counted without being added."""
        if self.journal is not None and self.progress is not None and action.push is not None:
            self.progress.add_late(action.push)
            self.journal.commit()

    def seal(self) -> None:
        """Records in the journal a hash of weights and state, if it has none of them yet."""
        if self.journal is not None:
            self.journal.seal([self.weights, *self.state])

    def journal_again(self) -> None:
        """Journals the slice again if its journal had ended on a full disk and there is room."""
        journal = self.journal
        if journal is None or journal.is_on or not journal.look_for_room():
            return
        self._state.move(journal)
        self._sums.move(journal)
        self._memory.move(journal)
        if journal.record.version >= 0 and not journal.record.weights:
            self.skip(Skip(version=journal.record.version, former=journal.record.version))
        else:
            journal.commit()

    def change(self, rule: Rule, epoch: int, clocks: Mapping[int, int]) -> None:
        """Continues under another rule; the memory of the former one is dropped.

        Args:
            epoch: Changes of the mode so far, with this one.
            clocks: Clock of each worker from now on, by rank.
        """
        self._rule = rule
        self._sums.change(rule)
        self._memory.clear()
        if self.journal is not None and self.progress is not None:
            self.progress.begin(epoch, clocks)
            self.journal.commit()

    # ----- optimizer steps

    def _step(self, grads: Sequence[FloatArray], shares: Sequence[float], update: Update) -> None:
        with self._observer.stepping(update):
            spare = self._spare()
            state = self._state.step(self.weights, spare.array, grads, shares, update)
            if self._rule.remembers_updates:
                self._rule.on_update(spare.array, self._memory.at(self.weights))
                self._memory.write()
            if self.journal is not None:
                self.journal.remove(update.open_step)
            self._publish(spare, update.version, state)

    def _spare(self) -> Buffer:
        """Returns where the next weights are written."""
        # In a mode by step a worker has copied the weights it pulled before it pushes.
        in_place = self.journal is None and not self._rule.remembers_updates
        return self.copies.spare(in_place=in_place, readers_wait=self._rule.by_step)

    def _publish(self, buffer: Buffer, version: int, state: list[Cell]) -> None:
        """Makes new weights and state the ones that count, in the journal first."""
        with self._observer.publishing(version):
            self.copies.stamp(buffer, version)  # A record names no weights that are not stamped.
            if self.journal is not None:
                record = self.journal.record
                record.version, record.weights = version, buffer.place
                record.state[:] = [cell.place for cell in state]
                record.counts[:] = self.counts.tolist()
                record.ClearField("digest")
                self.journal.commit()
            self._state.replace(state)
            self.copies.publish(buffer)

    # ----- answers, and the start after a crash

    def _note_answer(self, answer: Answer, weights: FloatArray) -> None:
        """Records what an answer changes: the rule's memory, and where a worker begins.

        Args:
            weights: The weights that the worker will train on: those sent, or its estimate.
        """
        remembers = self._rule.remembers_pulls
        if remembers:
            memory = self._memory.at(self.weights)
            memory.weights = weights
            self._rule.on_pull(answer.worker, memory)
            self._memory.write()
        if self.journal is not None and self.progress is not None:
            # In a mode by step the clock of an answer counts nothing.
            begins = not self._rule.by_step and self.progress.advance(answer.worker, answer.clock)
            if begins or remembers:
                self.journal.commit()

    def _recover(self, journal: SliceJournal) -> None:
        """Restores the slice from the journal of a killed process."""
        record = journal.record
        self._sums.recover(journal)
        self._memory.recover(self.weights)
        self.copies.recover(record.weights, record.version, journal.pool.at)
