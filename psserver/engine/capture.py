"""Copies of a table for a checkpoint: all slices at one version, with the workers' residuals.

Each slice is copied by its own queue, right behind the update to the wanted version. So all slices
of all shards are of one step, and training waits for no more than the copy.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pscore.errors import ConfigError, LimitError, RemoteProtocolError
from pscore.types import ANY_STEP, IntArray, Origin
from psserver.decisions.table import Table
from psserver.engine.engine import Engine
from psserver.engine.host_memory import available_nbytes
from psserver.engine.job import AtVersion, RunningJob, RunningTable
from psserver.engine.residuals import ResidualCollection
from psserver.engine.slice_queue import CopyOut
from psserver.slices.base import Mark

Arrays = dict[str, np.ndarray]


class CaptureState(enum.Enum):
    """The progress of a copy."""

    WAITING = "some slices have not reached the version"
    COLLECTING = "residuals of some workers are missing"
    PASSED = "a slice or a worker is past the version"
    DONE = "all arrays are here"


NO_BASE: Mapping[str, Mark] = {}
NO_MARK: IntArray = np.zeros(0, np.int64)
PENDING = (CaptureState.WAITING, CaptureState.COLLECTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureView:
    """A copy at one moment."""

    state: CaptureState  # Its progress.
    missing: tuple[int, ...]  # Ranks whose residuals are missing.
    version_min: int  # Smallest version of the table's slices now.
    version_max: int  # Likewise.
    waiting_for: str  # The table's longest wait.
    by_step: bool  # Whether the table's slices have steps in common.
    about: dict[str, Any] | None  # The copy's entry in a manifest, once it is done.


class TableCapture:
    """A copy of one table."""

    def __init__(
        self,
        job: RunningJob,
        table: RunningTable,
        version: int,
        lock: threading.RLock,
        base: Mapping[str, Mark] = NO_BASE,
    ) -> None:
        """Schedules the copies; called under the lock.

        Args:
            version: Wanted of all slices; -1: that of each slice now.
            base: By slice: the mark of an earlier copy, since which the changes will do.
        """
        self.job = job.name
        self.slices: dict[int, Arrays] = {}  # The arrays that are copied already, by slice.
        self._job = job
        self._running = table
        self._table = table.table
        self._version = version
        self._base = base
        self._engine_lock = lock
        self._lock = threading.Lock()  # Lock of `slices` and `_state`.
        self._state = CaptureState.WAITING
        self._step = 0  # Step of training, at the copied version.
        self._about: dict[int, dict[str, Any]] = {}  # By slice.
        self._scheduled: dict[int, AtVersion] = {}  # By slice.
        self._residuals: ResidualCollection | None = None
        self._schedule()

    def _schedule(self) -> None:
        """Schedules a copy of each slice, now or at the version."""
        clocks, wanted = self._table.clocks, self._version
        if any(clock.version > wanted >= 0 for clock in clocks.values()):
            self._state = CaptureState.PASSED
            return
        at = [wanted] if wanted >= 0 else [clock.progress() for clock in clocks.values()]
        self._step = self._table.spec.step_at(min(at, default=0))
        if not clocks:
            self._state = CaptureState.DONE
        for index, clock in clocks.items():
            copy = CopyOut(take=partial(self._take, index), mark=self._base.get(str(index)))
            self._about[index] = {"version": wanted, "clocks": {}}
            if wanted == -1:  # No step in common: the numbers belong to the workers' own steps.
                own = {str(rank): steps.clock for rank, steps in clock.counted.items()}
                self._about[index] = {"version": clock.version, "clocks": own}
            if wanted in (-1, clock.version):
                self._running.queues[index].submit([copy])
            else:
                self._scheduled[index] = AtVersion(version=wanted, work=copy)
                self._running.do_at_version(index, self._scheduled[index])

    def collect_residuals(self) -> None:
        """Collects the workers' residuals too, if the table has any; called under the lock."""
        if self._table.spec.compressor.state_names:
            step = self._version - 1 if self._version >= 0 else ANY_STEP
            self._residuals = self._job.residuals.collect(self._table, step)

    def _take(self, index: int, arrays: Arrays) -> None:
        """Receives the copy of one slice; called by its queue."""
        with self._lock:
            self.slices[index] = arrays
            is_whole = len(self.slices) == len(self._table.clocks)
            if is_whole and self._state is CaptureState.WAITING:
                self._state = CaptureState.DONE

    def progress(self) -> tuple[CaptureState, tuple[int, ...]]:
        """Returns the state, and the ranks whose residuals are missing."""
        if self._state is not CaptureState.DONE or self._residuals is None:
            return self._state, ()
        with self._engine_lock:
            if self._residuals is None:
                return self._state, ()
            missing = self._residuals.missing()
            if missing:
                has_passed = self._residuals.has_passed(missing)
                state = CaptureState.PASSED if has_passed else CaptureState.COLLECTING
                return state, tuple(sorted({rank for _, rank in missing}))
            for index, arrays in self.slices.items():
                arrays |= self._residuals.named(index)
            self._stop_collecting()
        return self._state, ()

    def view(self) -> CaptureView:
        """Returns the copy as it is at this moment."""
        with self._engine_lock:
            state, missing = self.progress()
            versions = [clock.version for clock in self._table.clocks.values()] or [-1]
            return CaptureView(
                state=state,
                missing=missing,
                version_min=min(versions),
                version_max=max(versions),
                waiting_for=self._job.waits.of_table(self._table),
                by_step=self._table.spec.rule.by_step and not self._may_differ(),
                about=self._describe() if state is CaptureState.DONE else None,
            )

    def _may_differ(self) -> bool:
        """Whether slices keep different versions.

        With a quorum, the last move of a worker may be in time in one slice and late in another,
        which then has one more round, and when all workers have gone none will follow.
        """
        membership = self._job.job.membership
        return self._table.spec.rule.window_s is not None and membership.is_idle

    def _describe(self) -> dict[str, Any]:
        # The count of pushes is set when it is restored: not all modes have one.
        spec = replace(self._table.spec, origin=Origin(0, self._step))
        return {
            "spec": spec.to_json(),
            "num_workers": self._job.job.membership.num_workers,
            "slices": {
                str(index): {
                    **self._about[index],
                    "counts": arrays["counts"].tolist(),
                    "mark": arrays.get("mark", NO_MARK).tolist(),
                    "arrays": sorted(name for name in arrays if name not in ("counts", "mark")),
                    "nbytes": {name: array.nbytes for name, array in arrays.items()},
                }
                for index, arrays in self.slices.items()
            },
        }

    def array(self, index: int, name: str) -> np.ndarray:
        """Returns a copied array; raises RemoteProtocolError if there is none of this name."""
        try:
            return self.slices[index][name]
        except KeyError:
            raise RemoteProtocolError(f"no array {name!r} of slice {index} was copied") from None

    def close(self) -> None:
        """Cancels the copies that are not made yet."""
        with self._engine_lock:
            self._stop_collecting()
            for index, entry in self._scheduled.items():
                self._running.cancel(index, entry)
            self._scheduled.clear()

    def _stop_collecting(self) -> None:
        if self._residuals is not None:
            self._job.residuals.stop(self._residuals)
            self._residuals = None


def capture(
    engine: Engine,
    name: str,
    table: str,
    version: int,
    *,
    weights_only: bool,
    base: Mapping[str, Mark] = NO_BASE,
) -> TableCapture:
    """Copies a table for a checkpoint, with the residuals of its workers.

    Args:
        version: Wanted of all slices; -1: that of each slice now.
        base: By slice: the mark of an earlier copy, since which the changes will do.

    Raises:
        ConfigError: There is no such table.
        LimitError: The host has no memory for the copy.
    """
    with engine.lock:
        job = engine.jobs.get(name)
        found = None if job is None else job.job.tables.get(table)
        if job is None or found is None:
            raise ConfigError(f"no table {table!r} of a job {name!r} on shard {engine.shard.index}")
        running = job.tables[found.index]
        _require_memory(job, found, engine.shard.index, weights_only=weights_only)
        copy = TableCapture(job, running, version, engine.lock, base)
        if not weights_only:
            copy.collect_residuals()
        return copy


def _require_memory(job: RunningJob, table: Table, shard: int, *, weights_only: bool) -> None:
    """Raises LimitError for a copy that the host has no memory for."""
    num_residuals = 0 if weights_only else len(table.spec.compressor.state_names)
    num_workers = job.job.membership.num_workers
    num_arrays = 1 + len(table.optimizer.state_names) + num_residuals * num_workers
    available = available_nbytes()
    if num_arrays * table.nbytes > available:
        raise LimitError(
            f"a copy of table {table.spec.name!r} of job {job.name!r} on shard {shard} is of "
            f"{num_arrays * table.nbytes} bytes, {available} are left on its host"
        )
