"""The numbers of one slice, and how a clock's actions change them. No decisions, no I/O.

Where the next weights are written is the affair of weights.py. Actions of one slice are carried out
one after the other; different slices in parallel, without the GIL.

With a journal nothing that counts is ever written in place: optimizer state and sums go from one
array to another too, and each action ends with the record that names the new ones (journal.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.memory import kernels
from pscore.net.wire import floats
from pscore.optimizers.base import Optimizer
from pscore.rules.base import Memory, Rule
from pscore.types import ByteArray, FloatArray, IntArray, Push, Role, SegmentTable, SliceSpec
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Skip, Update
from psserver.decisions.progress import LATE_KEPT, Progress
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import Buffer, Cell, Pool, Scratch
from psserver.slices.pull_estimate import Estimate
from psserver.slices.weights import Weights

RAW = NoCompression()
NOBODY: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The bytes of one push, and how to read them."""

    data: ByteArray  # (nbytes,)
    compressor: Compressor
    counts: tuple[int, ...] = ()  # Role STATE: optimizer steps of each segment.
    is_borrowed: bool = False  # It lies in the worker's memory, until it is acknowledged.
    cell: Cell | None = None  # What `SliceStore.hold` has copied it to.


Term = tuple[Add, Payload]  # Of a sum.
SCRATCH = Scratch()  # Of this process's sums, whatever their slice.


class SliceStore:
    """Weights, optimizer state and open sums of one slice; all arrays `(numel,) float32`."""

    def __init__(
        self,
        spec: SliceSpec,
        rule: Rule,
        optimizer: Optimizer,
        buffers: Sequence[FloatArray] | None = None,
        versions: IntArray | None = None,
        journal: SliceJournal | None = None,
        stamps: IntArray | None = None,
    ) -> None:
        """Starts with zeros, or with what the journal has.

        Args:
            spec: The slice.
            rule: The job's mode.
            optimizer: The server's.
            buffers: Two arrays for the weights, in shared memory; else private ones are made.
            versions: `(2,) int64`, where the versions of these buffers are published.
            journal: Where every change is written down; needs `buffers`, which outlive it too.
            stamps: `(2,) int64`, `versions` again, at the end of the file that the buffers lie in.
        """
        self.numel = spec.numel
        self.segments = SegmentTable.of(spec)
        self.counts: IntArray = np.zeros(len(self.segments), dtype=np.int64)
        self._rule = rule
        self._optimizer = optimizer
        self._journal = journal
        self._pool = Pool(spec.numel, 0) if journal is None else journal
        self._bins: dict[int, Cell] = {}
        self._counted: dict[int, Progress] = {}  # As it is in the journal.
        self._memory: Memory | None = None
        self._estimate: Estimate | None = None
        self._scratch: Cell | None = None
        self._weights = Weights(self._pool, buffers, versions, stamps)
        self._active: tuple[int, IntArray] = (0, np.zeros(len(self.segments), dtype=np.int64))
        self._state: list[Cell] = []
        if journal is None or journal.is_new:
            self._state = [self._zeros() for _ in optimizer.state_names]
        else:
            self._take_up(journal)

    @property
    def journal(self) -> SliceJournal | None:
        """Where changes are written down."""
        return self._journal

    @property
    def counted(self) -> dict[int, Progress]:
        """A copy of which steps of each worker are in, by rank, as the journal has it."""
        return deepcopy(self._counted)

    @property
    def weights(self) -> FloatArray:
        """The newest weights."""
        return self._weights.newest

    @property
    def state(self) -> list[FloatArray]:
        """The optimizer's state."""
        return [cell.array for cell in self._state]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        kept = 0 if self._memory is None else sum(a.nbytes for a in self._memory.state.values())
        estimate_nbytes = 0 if self._estimate is None else self._estimate.nbytes
        kept = kept if self._journal is None else 0
        return self._weights.shared_nbytes + self._pool.nbytes + kept + estimate_nbytes

    # ----- outliving the process

    def export(self) -> dict[str, np.ndarray]:
        """Returns copies of all that has to outlive the process; open sums are not part of it."""
        arrays: dict[str, np.ndarray] = {
            "weights": self.weights.copy(),
            "counts": self.counts.copy(),
        }
        arrays |= {f"state.{i}": array.copy() for i, array in enumerate(self.state)}
        if self._memory is not None:
            kept = self._memory.state.items()
            arrays |= {f"memory.{name}": array.copy() for name, array in kept}
        return arrays

    def restore(
        self, arrays: Mapping[str, np.ndarray], version: int, clocks: Mapping[int, int] = NOBODY
    ) -> None:
        """Takes what `export` returned, before anything else happens to the slice.

        Args:
            arrays: What it returned.
            version: Of the weights.
            clocks: Steps of each worker that are in them, by rank.
        """
        spare = self._spare()
        np.copyto(spare.array, arrays["weights"])
        self.counts[:] = arrays["counts"]
        for index, cell in enumerate(self._state):
            np.copyto(cell.array, arrays[f"state.{index}"])
        prefix = "memory."
        for name in [name for name in arrays if name.startswith(prefix)]:
            self._remember().state[name.removeprefix(prefix)] = arrays[name]
        if self._memory is not None:
            self._write_memory(self._memory)
        for rank, clock in clocks.items():
            self._count(rank, clock)
        self._publish(spare, version, self._state)

    # ----- reading

    def lease(self) -> Buffer:
        """Returns the newest weights' buffer; it stays as it is until `release`."""
        return self._weights.lease()

    def release(self, buffer: Buffer) -> None:
        """Ends a lease; may be called from any thread."""
        self._weights.release(buffer)

    def mapped(self) -> int:
        """Returns the number of the newest weights' buffer in shared memory, 0 if not there."""
        return self._weights.mapped()

    def read(self, answer: Answer) -> list[FloatArray]:
        """Returns the newest weights and, if asked, the state: views until the next action."""
        if not answer.is_look:
            self._answer(answer.worker, answer.clock, self.weights)
        return [self.weights, *self.state] if answer.with_state else [self.weights]

    # ----- changing

    def check(self, payload: Payload, role: Role) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length.
        """
        if role in (Role.WEIGHTS, Role.STATE):
            num_arrays = 1 if role is Role.WEIGHTS else 1 + len(self._state)
            floats(memoryview(payload.data), num_arrays, self.numel)
        elif payload.data.nbytes:
            payload.compressor.check(payload.data, self.numel)

    def load(self, action: Load, payload: Payload) -> None:
        """Takes weights, and with `Role.STATE` the optimizer's state, as they are."""
        num_arrays = 1 if action.role is Role.WEIGHTS else 1 + len(self._state)
        weights, *values = floats(memoryview(payload.data), num_arrays, self.numel)
        spare = self._spare()
        np.copyto(spare.array, weights)
        state = self._next_state() if values else self._state
        for cell, value in zip(state, values, strict=False):
            np.copyto(cell.array, value)
        if payload.counts:
            self.counts[:] = payload.counts
        self._estimate = None  # What was loaded may be far away: it is sent whole.
        self._publish(spare, action.version, state)

    def hold(self, action: Hold, payload: Payload) -> Payload:
        """Returns a payload that stays when the push has been acknowledged."""
        if self._journal is None and not payload.is_borrowed:
            return payload
        cell = self._pool.take()
        data = cell.data[: payload.data.nbytes]
        np.copyto(data, payload.data)
        kept = replace(payload, data=data, cell=cell, is_borrowed=False)
        if self._journal is not None:
            self._count_step(action.push)
            is_compressed = not payload.compressor.is_raw
            self._journal.hold(action.push, cell, data.nbytes, is_compressed=is_compressed)
            self._journal.commit()
        return kept

    def add(self, action: Add, payload: Payload) -> None:
        """Adds a gradient to a bin; an empty payload is a gradient of zeros."""
        bin_ = self._bins.get(action.open_step)
        assert (bin_ is None) == action.is_first
        target = self._pool.take() if bin_ is None or self._journal is not None else bin_
        self._sum(bin_, [(action, payload)], target.array)
        self._bins[action.open_step] = target
        if self._journal is not None:
            self._count_step(action.push)
            self._journal.drop(action.push)
            self._journal.add(action.open_step, action.push, action.weight, target)
            self._journal.commit()
        self._give(bin_ if bin_ is not target else None, payload.cell)

    def update(self, action: Update) -> None:
        """Makes one optimizer step with a bin's mean, and frees the bin."""
        bin_ = self._bins.pop(action.open_step)
        self._step(bin_.array, action)
        self._give(bin_)

    def add_and_update(self, terms: Sequence[Term], update: Update) -> None:
        """Makes the last additions of an update and its step: their sum needs no bin.

        A raw gradient that is alone in its update is no sum, and is read where it lies.
        """
        if self._journal is not None:
            for add, _ in terms:
                self._count_step(add.push)
                self._journal.drop(add.push)
        bin_ = self._bins.pop(update.open_step, None)
        assert (bin_ is None) == terms[0][0].is_first
        if bin_ is None and len(terms) == 1 and terms[0][0].weight == 1.0 and self._is_raw(terms):
            self._step(terms[0][1].data.view("<f4"), update)
        else:
            with SCRATCH.borrow(self.numel) as sum_:
                self._sum(bin_, terms, sum_)
                self._step(sum_, update)
        self._give(bin_, *(payload.cell for _, payload in terms))

    def skip(self, action: Skip) -> None:
        """Gives the weights another version; with a journal a copy of them, as an update does."""
        spare = self._spare()
        if spare.array is not self.weights:
            np.copyto(spare.array, self.weights)
        self._publish(spare, action.version, self._state)

    def refuse(self, action: Acknowledge) -> None:
        """Notes a push that is counted without being added."""
        if self._journal is not None and action.push is not None:
            self._count_step(action.push)
            late = self._counted[action.push.worker].late
            late.add(action.push.step)
            late -= {step for step in late if step < action.push.step - LATE_KEPT}
            self._journal.count(action.push.worker, self._counted[action.push.worker])
            self._journal.commit()

    def change(self, rule: Rule, epoch: int, clocks: Mapping[int, int]) -> None:
        """Goes on under another rule; what the former one remembered is of no use to it.

        Args:
            rule: The new one.
            epoch: Changes so far, with this one.
            clocks: Where each worker counts on from, by rank.
        """
        self._rule, self._memory = rule, None
        if self._journal is None:
            return
        self._counted = {rank: Progress(clock=clock) for rank, clock in clocks.items()}
        self._journal.begin(epoch, self._counted)
        self._journal.commit()

    # ----- inside

    def _is_raw(self, terms: Sequence[Term]) -> bool:
        """Whether each of several gradients is added as it lies there."""
        is_raw = all(payload.compressor.is_raw and payload.data.nbytes for _, payload in terms)
        return is_raw and not self._rule.compensates

    def _sum(self, bin_: Cell | None, terms: Sequence[Term], out: FloatArray) -> None:
        """Sets `out` to a bin's sum, if there is one, plus gradients; `out` may be the bin's."""
        before = [] if bin_ is None else [bin_.array]
        if self._is_raw(terms):
            grads = [payload.data.view("<f4") for _, payload in terms]
            scales = [add.weight for add, _ in terms]
            kernels.sum_all([*before, *grads], [1.0] * len(before) + scales, out)
            return
        if bin_ is not None and bin_.array is not out:
            np.copyto(out, bin_.array)
        for index, (add, payload) in enumerate(terms):
            assign = bin_ is None and index == 0
            data, compressor = payload.data, payload.compressor
            if data.nbytes and self._rule.compensates:
                memory = self._remember()
                compressor.decode_add(data, memory.scratch, 1.0, assign=True)
                self._rule.compensate(memory.scratch, add.push.worker, memory)
                self._write_memory(memory)
                data, compressor = memory.scratch.view(np.uint8), RAW
            if data.nbytes:
                compressor.decode_add(data, out, add.weight, assign=assign)
            elif assign:
                out.fill(0.0)

    def estimate(self, answer: Answer, compressor: Compressor) -> Estimate:
        """Returns what stands for the newest weights where pulls are compressed by `compressor`."""
        if self._estimate is None:
            self._estimate = Estimate(compressor, self.weights, answer.version)
        self._estimate.follow(self.weights, answer.version)
        # What the worker computes its gradient from:
        self._answer(answer.worker, answer.clock, self._estimate.values)
        return self._estimate

    def _step(self, grad: FloatArray, update: Update) -> None:
        spare = self._spare()
        state = self._state
        if self._journal is not None and not self._optimizer.keeps_state(update.hyper):
            state = self._next_state()
        self._optimizer.step(
            self.weights,
            spare.array,
            grad,
            update.scale,
            self.state,
            self.segments,
            self.counts,
            self._active_in(update.present),
            update.hyper,
            state_out=None if state is self._state else [cell.array for cell in state],
        )
        if self._journal is not None:
            self._journal.remove(update.open_step)
        self._publish(spare, update.version, state)

    def _next_state(self) -> list[Cell]:
        """Returns where the next state is written: in place, unless the present one must stay."""
        if self._journal is None:
            return self._state
        return [self._journal.take() for _ in self._state]

    def _spare(self) -> Buffer:
        """Returns where the next weights are written."""
        # Whoever pushes in a mode by step has taken what it pulled before (`Replica.push`).
        return self._weights.spare(in_place=self._journal is None, readers_wait=self._rule.by_step)

    def _active_in(self, present: int) -> IntArray:
        """Returns which segments have a gradient, `(num_segments,)` of 0 and 1."""
        if self._active[0] != present:
            bits = [present >> i & 1 for i in range(len(self.segments))]
            self._active = present, np.array(bits, dtype=np.int64)
        return self._active[1]

    def _publish(self, buffer: Buffer, version: int, state: list[Cell]) -> None:
        """Makes new weights and state the ones that count, in the journal first."""
        self._weights.stamp(buffer, version)  # A record names nothing that is not stamped.
        if self._journal is not None:
            record = self._journal.record
            record.version, record.weights = version, buffer.place
            record.state[:] = [cell.place for cell in state]
            record.counts[:] = self.counts.tolist()
            self._journal.commit()
        if state is not self._state:
            self._give(*self._state)
            self._state = state
        self._weights.publish(buffer)

    def _give(self, *cells: Cell | None) -> None:
        for cell in cells:
            if cell is not None:
                self._pool.give(cell)

    def _zeros(self) -> Cell:
        cell = self._pool.take()
        cell.data.fill(0)
        return cell

    # ----- what the journal counts

    def _count_step(self, push: Push) -> None:
        """Notes that a push is in; one that was held is in already."""
        assert self._journal is not None
        counted = self._counted.setdefault(push.worker, Progress())
        if push.step not in counted:
            counted.add(push.step)
            self._journal.count(push.worker, counted)

    def _count(self, worker: int, clock: int) -> None:
        """Notes that a worker counts on from `clock`."""
        if self._journal is None:
            return
        counted = self._counted.setdefault(worker, Progress())
        if counted.clock < clock:
            counted.clock = clock
            counted.ahead.clear()
            self._journal.count(worker, counted)

    def _answer(self, worker: int, clock: int, weights: FloatArray) -> None:
        """Notes what an answer changes: what a rule remembers, and where a worker begins.

        Args:
            worker: The worker that will train on the answer.
            clock: Where it counts on from.
            weights: What it is sent, or its estimate after that.
        """
        remembers = self._rule.remembers_pulls
        if remembers:
            memory = self._remember()
            memory.weights = weights
            self._rule.on_pull(worker, memory)
            self._write_memory(memory)
        if self._journal is not None:
            known = self._counted.get(worker)
            is_behind = clock > (0 if known is None else known.clock)
            begins = is_behind and not self._rule.by_step  # Else nothing is counted by it.
            if begins:
                self._count(worker, clock)
            if begins or remembers:
                self._journal.commit()

    # ----- what a rule remembers

    def _remember(self) -> Memory:
        """Returns the rule's memory; `weights` are the newest at each call."""
        if self._memory is None:
            self._scratch = self._pool.take()
            self._memory = Memory(weights=self.weights, scratch=self._scratch.array)
        self._memory.weights = self.weights
        return self._memory

    def _write_memory(self, memory: Memory) -> None:
        """Moves what a rule has begun to remember to where it outlives the process.

        From then on it is changed in place: a kill in the middle leaves a part of it changed. It is
        a backup of weights that is copied again when the worker asks again, or a running mean.
        """
        if self._journal is None:
            return
        for name, array in memory.state.items():
            if name not in self._journal.record.memory:
                cell = self._journal.take()
                np.copyto(cell.array, array)
                memory.state[name] = cell.array
                self._journal.record.memory[name] = cell.place

    def _take_up(self, journal: SliceJournal) -> None:
        """Goes on with what a former process has written."""
        record = journal.record
        self._state = [journal.pool.at(place) for place in record.state]
        self.counts[:] = list(record.counts)
        for rank, steps in record.counted.items():
            self._counted[rank] = Progress(steps.clock, set(steps.ahead), set(steps.late))
        self._bins = {bin_.bin: journal.pool.at(bin_.place) for bin_ in record.bins}
        if record.memory:
            memory = self._remember()
            for name, place in record.memory.items():
                memory.state[name] = journal.array(place)
        self._weights.take_up(record.weights, record.version, journal.pool.at)
