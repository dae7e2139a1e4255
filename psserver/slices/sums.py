"""The sums of gradients of one slice: one for each open step, until its optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pscore.compressors.none import NoCompression
from pscore.memory import kernels
from pscore.rules.base import Rule
from pscore.types import FloatArray
from psserver.decisions.orders import Add
from psserver.slices.base import Observer, Payload, WeightedGrad
from psserver.slices.journal import SliceJournal
from psserver.slices.journaled_progress import JournaledProgress
from psserver.slices.pool import Cell, Pool, Scratch, give
from psserver.slices.rule_memory import RuleMemory
from psserver.slices.weights import Weights

RAW = NoCompression()
SCRATCH = Scratch()  # For sums of all slices of this process.


class Sums:
    """Open sums, each array `(numel,) float32`; with a journal none is changed in place."""

    def __init__(
        self,
        numel: int,
        rule: Rule,
        pool: Pool | SliceJournal,
        memory: RuleMemory,
        copies: Weights,
        observer: Observer,
        progress: JournaledProgress | None,
        *,
        adds: bool,
    ) -> None:
        """Starts without an open step.

        Args:
            rule: The table's mode: it may correct each gradient.
            pool: Provides the arrays; a journal if they outlive the process.
            copies: The slice's weights, which a correction reads.
            progress: Each worker's progress in the journal; None: there is no journal.
            adds: Whether the optimizer's step takes several gradients.
        """
        self._numel = numel
        self._rule = rule
        self._pool = pool
        self._memory = memory
        self._copies = copies
        self._observer = observer
        self._progress = progress
        self._adds = adds
        self._cells: dict[int, Cell] = {}  # By open step. Invariant: none without an `Add` to it.

    def __len__(self) -> int:
        """Returns the number of open sums."""
        return len(self._cells)

    def change(self, rule: Rule) -> None:
        """Continues under another rule; no step is open."""
        self._rule = rule

    def recover(self, journal: SliceJournal) -> None:
        """Restores the open sums from the journal of a killed process."""
        steps = journal.record.open_steps
        self._cells = {step.key: journal.pool.at(step.place) for step in steps}

    def move(self, journal: SliceJournal) -> None:
        """Moves the sums that lie on the heap into the arena, where there is room again."""
        for key, cell in self._cells.items():
            self._cells[key] = journal.moved(cell)
            journal.move(key, self._cells[key])

    def add(self, action: Add, payload: Payload) -> None:
        """Adds a gradient to an open step's sum; an empty payload is a gradient of zeros."""
        former = self._cells.get(action.open_step)
        assert (former is None) == action.is_first
        is_in_place = former is not None and self._progress is None
        target = former if former is not None and is_in_place else self._pool.take()
        grads = [(action, payload)]
        with self._observer.adding(grads):
            self._write(former, grads, target.array)
        self._cells[action.open_step] = target
        if isinstance(self._pool, SliceJournal):
            self._count(action)
            self._pool.add(action.open_step, action.push, action.weight, target)
            self._pool.commit()
        give(self._pool, None if is_in_place else former, payload.cell)

    def take(self, open_step: int) -> Cell:
        """Removes and returns an open step's sum; the caller gives the cell back."""
        return self._cells.pop(open_step)

    def total(
        self,
        open_step: int,
        grads: Sequence[WeightedGrad],
        use: Callable[[list[FloatArray], list[float]], None],
    ) -> None:
        """Removes an open step's sum and has it used with its last gradients: it is not kept.

        Raw gradients are used where they lie: the optimizer's step adds them in its own pass.

        Args:
            grads: The gradients that are not added yet, at least one.
            use: Called with arrays `(numel,) float32`, valid during the call, and the factor of
                each in the sum.
        """
        for action, _ in grads:
            self._count(action)
        former = self._cells.pop(open_step, None)
        assert (former is None) == grads[0][0].is_first
        is_raw = self._is_raw(grads)
        arrays, shares = _sources(former, grads) if is_raw else ([], [])
        if not (is_raw and (self._adds or shares == [1.0])):
            with SCRATCH.borrow(self._numel) as sum_:
                with self._observer.adding(grads):
                    self._write(former, grads, sum_)
                use([sum_], [1.0])
        elif len(arrays) == 1:
            use(arrays, shares)
        else:
            with self._observer.adding(grads):
                use(arrays, shares)
        give(self._pool, former, *[payload.cell for _, payload in grads])

    def _count(self, action: Add) -> None:
        """Counts a push in the journal, if there is one; the caller commits."""
        if isinstance(self._pool, SliceJournal) and self._progress is not None:
            self._progress.add(action.push)
            self._pool.drop(action.push)

    def _write(self, former: Cell | None, grads: Sequence[WeightedGrad], out: FloatArray) -> None:
        """Sets `out` to a former sum, if there is one, plus gradients; `out` may be that sum's."""
        if self._is_raw(grads):
            kernels.sum_all(*_sources(former, grads), out)
            return
        if former is not None and former.array is not out:
            np.copyto(out, former.array)
        for index, (add, payload) in enumerate(grads):
            assign = former is None and index == 0
            data, compressor = payload.data, payload.compressor
            if data.nbytes and self._rule.compensates:
                with SCRATCH.borrow(self._numel) as grad:
                    compressor.decode_add(data, grad, 1.0, assign=True)
                    memory = self._memory.at(self._copies.newest)
                    self._rule.compensate(grad, add.push.worker, memory)
                    self._memory.write()
                    RAW.decode_add(grad.view(np.uint8), out, add.weight, assign=assign)
            elif data.nbytes:
                compressor.decode_add(data, out, add.weight, assign=assign)
            elif assign:
                out.fill(0.0)

    def _is_raw(self, grads: Sequence[WeightedGrad]) -> bool:
        """Returns whether each gradient is added in place, without decoding."""
        is_raw = all(payload.compressor.is_raw and payload.data.nbytes for _, payload in grads)
        return is_raw and not self._rule.compensates


def _sources(
    former: Cell | None, grads: Sequence[WeightedGrad]
) -> tuple[list[FloatArray], list[float]]:
    """Returns the arrays of a sum, a former one first, and the factor of each."""
    arrays = [payload.data.view("<f4") for _, payload in grads]
    shares = [add.weight for add, _ in grads]
    return (arrays, shares) if former is None else ([former.array, *arrays], [1.0, *shares])
