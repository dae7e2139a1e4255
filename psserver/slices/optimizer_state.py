"""The state of the optimizer for one slice, and its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pscore.optimizers.base import Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable, SliceSpec
from psserver.decisions.orders import Update
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import Cell, Pool, give


class OptimizerState:
    """The state arrays of one slice, each `(numel,) float32`; with a journal none is overwritten.

    Attributes:
        counts: `(num_segments,) int64`, optimizer steps of each segment.
        cells: The state arrays, in the order of the optimizer's `state_names`.
    """

    def __init__(self, spec: SliceSpec, optimizer: Optimizer, pool: Pool | SliceJournal) -> None:
        """Starts with zeros, or with the contents of the journal.

        Args:
            pool: Provides the arrays; a journal if they outlive the process.
        """
        self._segments = SegmentTable.of(spec)
        self._optimizer = optimizer
        self._pool = pool
        self.counts: IntArray = np.zeros(len(self._segments), dtype=np.int64)
        # The last hyper-parameters, and whether a step with them keeps the state.
        self._kept: tuple[HyperArray | None, bool] = None, False
        self._active: tuple[int, IntArray] = (0, np.zeros(len(self._segments), dtype=np.int64))
        if isinstance(pool, SliceJournal) and not pool.is_new:
            self.cells = [pool.pool.at(place) for place in pool.record.state]
            self.counts[:] = list(pool.record.counts)
        else:
            self.cells = [pool.take() for _ in optimizer.state_names]
            for cell in self.cells:
                cell.data.fill(0)

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def arrays(self) -> list[FloatArray]:
        """The state."""
        return [cell.array for cell in self.cells]

    def check_invariants(self) -> None:
        """Asserts what holds between two orders, for tests and the simulator."""
        assert len(self.cells) == len(self._optimizer.state_names)

    def next_cells(self) -> list[Cell]:
        """Returns where the next state is written: in place, unless the present one must stay."""
        if isinstance(self._pool, SliceJournal):
            return [self._pool.take() for _ in self.cells]
        return self.cells

    def replace(self, cells: list[Cell]) -> None:
        """Makes other arrays the state, and frees the former ones."""
        if cells is not self.cells:
            give(self._pool, *self.cells)
            self.cells = cells

    def move(self, journal: SliceJournal) -> None:
        """Moves the arrays that lie on the heap into the arena, where there is room again."""
        self.cells = [journal.moved(cell) for cell in self.cells]
        journal.record.state[:] = [cell.place for cell in self.cells]

    def step(
        self,
        weights: FloatArray,
        out: FloatArray,
        grads: Sequence[FloatArray],
        shares: Sequence[float],
        update: Update,
    ) -> list[Cell]:
        """Makes one optimizer step; returns the arrays of the state after it, for `replace`.

        Args:
            weights: `(numel,) float32`, the weights before the step; kept unless it is `out`.
            out: `(numel,) float32`, receives the weights after it.
            grads: One or more `(numel,) float32`, contiguous, whose sum is the gradient.
            shares: The factor of each of them in the sum.
            update: The order, with the sum's scale and the hyper-parameters.
        """
        if self._kept[0] is not update.hyper:  # Most steps have the array of the step before.
            self._kept = update.hyper, self._optimizer.keeps_state(update.hyper)
        keeps = self._kept[1]
        cells = self.cells if keeps else self.next_cells()
        self._optimizer.step(
            SliceStep(
                weights=weights,
                out=out,
                grad=grads[0],
                others=grads[1:],
                shares=shares,
                scale=update.scale,
                state=self.arrays,
                segments=self._segments,
                counts=self.counts,
                active=self._active_in(update.present),
                hyper=update.hyper,
                state_out=None if cells is self.cells else [cell.array for cell in cells],
            )
        )
        return cells

    def _active_in(self, present: int) -> IntArray:
        """Returns which segments have a gradient, `(num_segments,)` of 0 and 1."""
        if self._active[0] != present:
            bits = [present >> i & 1 for i in range(len(self._segments))]
            self._active = present, np.array(bits, dtype=np.int64)
        return self._active[1]
