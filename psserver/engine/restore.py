"""Makes a job of the numbers of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pscore.errors import ConfigError
from pscore.table_spec import TableSpec
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob, RunningTable
from psserver.engine.residuals import is_residual


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTable:
    """This shard's part of a table in a checkpoint."""

    spec: TableSpec
    version: int  # Version of all slices.
    clock: int  # First step of the workers; in an asynchronous mode not the version.
    slices: Mapping[int, dict[str, np.ndarray]]  # Arrays by their names in the checkpoint.


def restore(
    engine: Engine,
    name: str,
    num_workers: int,
    min_workers: int,
    tables: Sequence[RestoredTable],
    *,
    replaces: bool = False,
) -> RunningJob:
    """Makes a job without workers; those that join continue from the checkpoint.

    Args:
        num_workers: Its workers; the maximum of an elastic job.
        min_workers: Minimum of an elastic job; 0: it is not elastic.
        replaces: Whether a job of this name may have live workers, which then have to join again.

    Raises:
        PacelineError: The job cannot be made.
    """
    with engine.lock:
        if replaces:
            engine.forget(name, is_forced=True)
            engine.num_mended += 1
        require_free(engine, name)
        job = engine.begin_restored(name, num_workers, min_workers)
        for table in tables:
            _load(job, job.table(engine.define(job, table.spec).index), table)
        job.recorder.note_residuals(job.residuals.to_record())
        return job


def require_free(engine: Engine, name: str) -> None:
    """Raises ConfigError if the job has live workers."""
    with engine.lock:
        job = engine.shard.jobs.get(name)
        if job is not None and job.membership.live():
            raise ConfigError(
                f"job {name!r} has live workers on shard {engine.shard.index}; restore it under "
                "another name with --job, or when they have left"
            )


def _load(job: RunningJob, running: RunningTable, restored: RestoredTable) -> None:
    """Sets numbers and clocks of a new table; called under the engine's lock."""
    table = running.table
    # Each worker continues at the step of the checkpoint, so that it draws the same numbers.
    clocks = dict.fromkeys(range(job.job.membership.num_workers), restored.clock)
    for index, clock in table.clocks.items():
        arrays = dict(restored.slices[index])
        for name in [name for name in arrays if is_residual(name)]:
            job.residuals.keep(table, index, name, arrays.pop(name), restored.clock)
        running.queues[index].store.restore(arrays, restored.version, clocks)
        clock.restore(restored.version, clocks)
