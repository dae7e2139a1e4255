"""Residuals of error feedback: collected for a checkpoint, and kept for workers after a restore.

Residuals live in the workers, and are not pushed. A checkpoint of version v needs them as they are
after the push of step v - 1. The acknowledgement of that push asks its worker for the residual of
the slice, and the worker sends it before it pushes that slice again. A worker that has stopped
after that step is asked with the answer to a heartbeat. In a rule that may leave a worker's step
out (backup workers), each acknowledgement up to that step asks, and the last push counts. Where the
workers have no step in common, the residual after any later push will do.

After a restore the shard keeps each residual until its worker has pushed the slice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pscore.compressors.base import Compressor
from pscore.errors import RemoteProtocolError
from pscore.types import ANY_STEP, FloatArray, SliceSpec
from psserver.decisions.membership import Presence
from psserver.decisions.progress import Progress
from psserver.decisions.shard import Address, Job
from psserver.decisions.table import Table

PREFIX = "worker"  # Begin of a residual's name in checkpoints and journals: `worker.RANK.ARRAY`.
NAME = re.compile(PREFIX + r"\.(0|[1-9][0-9]{0,3})\.([a-z_]+)")  # With rank and array.
Arrays = dict[str, FloatArray]  # A compressor's state of one slice, each `(numel,) float32`.


@dataclass(slots=True, kw_only=True, eq=False)
class ResidualCollection:
    """The residuals of a table, on their way from its workers into one checkpoint."""

    job: Job
    table: Table
    step: int  # Wanted after the last push up to this one; `ANY_STEP`: after any push.
    arrays: dict[tuple[int, int], Arrays] = field(default_factory=dict)  # By slice and rank.
    steps: dict[tuple[int, int], int] = field(default_factory=dict)  # The last push before each.
    kept: dict[tuple[int, int], Arrays] = field(default_factory=dict)  # A former checkpoint's.

    def missing(self) -> list[tuple[int, int]]:
        """Returns slices and ranks of live workers whose residuals have not come."""
        live = [m.rank for m in self.job.membership.members.values() if m.presence is Presence.LIVE]
        return [
            (index, rank)
            for index, clock in self.table.clocks.items()
            for rank in live
            if (index, rank) not in self.kept  # Not pushed since: still the worker's residual.
            and self._is_missing(index, rank, clock.counted.get(rank))
        ]

    def to_request(self, rank: int) -> list[int]:
        """Returns the slices to request from a worker that has come as far as the step."""
        missing = [index for index, other in self.missing() if other == rank]
        clocks = self.table.clocks
        return [
            index
            for index in missing
            if self.step in clocks[index].counted[rank] or clocks[index].version > self.step
        ]

    @property
    def may_skip(self) -> bool:
        """Whether a step closes without some workers, who may push another one next."""
        num = self.job.membership.num_workers
        return self.table.spec.rule.fan_in(num, num) < num

    def is_for(self, address: Address, rank: int, step: int) -> bool:
        """Whether the acknowledgement of a push requests the residual after it."""
        if not self.table.specs[address.slice].compress:
            return False
        held = self.steps.get((address.slice, rank))
        if self.step == ANY_STEP or (held is not None and held >= step):
            return held is None
        return step == self.step or (self.may_skip and step < self.step)

    def take(self, index: int, rank: int, step: int, arrays: Arrays) -> None:
        """Keeps the residual of a slice after `step`, if it is closer to the wanted step."""
        key = (index, rank)
        is_closer = self.steps.get(key, -1) < step <= self.step
        if is_closer or (self.step == ANY_STEP and key not in self.arrays):
            self.arrays[key], self.steps[key] = arrays, step

    def has_passed(self, missing: list[tuple[int, int]]) -> bool:
        """Whether a worker of `missing` has pushed a later step: the wanted residual is gone."""
        counted = [self.table.clocks[index].counted[rank] for index, rank in missing]
        return self.step != ANY_STEP and any(steps.num_counted - 1 > self.step for steps in counted)

    def named(self, index: int) -> Arrays:
        """Returns the residuals of a slice by their names in a checkpoint: `worker.3.residual`."""
        return {
            f"{PREFIX}.{rank}.{name}": array
            for rank in range(self.job.membership.num_workers)
            for name, array in self._newer(index, rank).items()
        }

    def _newer(self, index: int, rank: int) -> Arrays:
        return self.arrays.get((index, rank)) or self.kept.get((index, rank), {})

    def _is_missing(self, index: int, rank: int, counted: Progress | None) -> bool:
        if counted is None or not self.table.specs[index].compress or not counted.num_counted:
            return False
        if self.step == ANY_STEP:
            return (index, rank) not in self.arrays
        return self.steps.get((index, rank), -1) < _last(counted, self.step)


class JobResiduals:
    """The residuals of one job's workers; but for `is_collecting`, under the engine's lock."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._collections: tuple[ResidualCollection, ...] = ()  # Replaced, never changed.
        self._kept: dict[tuple[int, int, int], Arrays] = {}  # By table, slice and rank.
        self._first: dict[int, int] = {}  # Step of each table's first push after the restore.

    # ----- for a checkpoint

    def collect(self, table: Table, step: int) -> ResidualCollection:
        """Starts to collect the residuals of a table's workers after `step`."""
        collection = ResidualCollection(job=self._job, table=table, step=step)
        for (number, index, rank), arrays in self._kept.items():
            if number == table.index:
                collection.kept[index, rank] = arrays
        self._collections = (*self._collections, collection)
        return collection

    def stop(self, collection: ResidualCollection) -> None:
        """Ends a collection."""
        self._collections = tuple(other for other in self._collections if other is not collection)

    @property
    def is_collecting(self) -> bool:
        """Whether there is a collection; may be read from any thread, without the lock."""
        return bool(self._collections)

    def is_requested(self, address: Address, rank: int, step: int) -> bool:
        """Whether a worker is to send the residual of a slice after `step`."""
        return any(
            collection.table.index == address.table and collection.is_for(address, rank, step)
            for collection in self._collections
        )

    def requests(self, rank: int) -> Iterator[tuple[int, int, list[int]]]:
        """Returns the residuals that a worker has still to send: table, step, and the slices."""
        for collection in self._collections:
            if slices := collection.to_request(rank):
                yield collection.table.index, collection.step, slices

    def take(
        self, table: Table, index: int, rank: int, step: int, arrays: Mapping[str, bytes]
    ) -> None:
        """Hands a worker's residual of a slice after `step` to the collections that want it.

        Raises:
            RemoteProtocolError: It is not the state that the table's compressor keeps.
        """
        table.clock(index)
        numel, names = table.specs[index].numel, table.spec.compressor.state_names
        for name, data in arrays.items():
            if name not in names or len(data) != 4 * numel:
                raise RemoteProtocolError(
                    f"worker {rank} sent {len(data)} bytes of {name[:64]!r} of slice {index}, "
                    f"{4 * numel} of {', '.join(names) or 'nothing'} wanted"
                )
        for collection in self._collections:
            if collection.table is table:
                floats = {name: np.frombuffer(data, "<f4") for name, data in arrays.items()}
                collection.take(index, rank, step, floats)

    # ----- after a restore

    def keep(self, table: Table, index: int, name: str, array: FloatArray, first: int) -> None:
        """Keeps an array of a checkpoint until its worker has pushed step `first` or a later one.

        Args:
            name: As in `ResidualCollection.named`.
            array: `(numel,) float32`.
            first: The first step that is pushed after the restore.
        """
        _, rank, kind = name.split(".", 2)
        self._first[table.index] = first
        self._kept.setdefault((table.index, index, int(rank)), {})[kind] = array

    @property
    def has_kept(self) -> bool:
        """Whether any array is kept for a worker."""
        return bool(self._kept)

    def kept(self, table: int, rank: int) -> dict[int, Arrays]:
        """Returns the arrays that are kept for a worker, by slice."""
        return {
            index: arrays
            for (number, index, other), arrays in self._kept.items()
            if (number, other) == (table, rank)
        }

    def to_record(self) -> dict[str, FloatArray]:
        """Returns all kept arrays by their names in a journal.

        `0/3/5/worker.1.residual` is of table 0, slice 3 and worker 1, which has not pushed step 5.
        """
        return {
            f"{number}/{index}/{self._first[number]}/{PREFIX}.{rank}.{name}": array
            for (number, index, rank), arrays in self._kept.items()
            for name, array in arrays.items()
        }

    def recover(self, arrays: Mapping[str, FloatArray]) -> None:
        """Keeps the arrays of `to_record` of a former process, but for workers that have pushed.

        Raises:
            ValueError, UnknownJobError: A name or an array is not one of this job.
        """
        for path, array in arrays.items():
            number, index, first, name = path.split("/")
            table, found = self._job.table(int(number)), NAME.fullmatch(name)
            part = table.specs.get(int(index))
            if found is None or part is None or not _is_of(array, part):
                raise ValueError(f"{path!r} is not the residual of a slice of this job")
            counted = table.clocks[part.index].counted.get(int(found[1]), Progress())
            if counted.num_counted <= int(first):
                self.keep(table, part.index, name, array, int(first))

    def pushed(self, address: Address, rank: int) -> None:
        """Drops the kept residual of a slice: its worker has fetched and used it."""
        if self._kept:
            self._kept.pop((address.table, address.slice, rank), None)


def is_residual(name: str, compressor: Compressor | None = None) -> bool:
    """Whether a checkpoint's array is a residual: of any compressor, or of this one."""
    found = NAME.fullmatch(name)
    return found is not None and (compressor is None or found[2] in compressor.state_names)


def _last(counted: Progress, step: int) -> int:
    """Returns the last counted push up to `step`; -1: none."""
    known = [other for other in counted.ahead if other <= step]
    return max([*known, min(counted.clock - counted.skipped - 1, step)])


def _is_of(array: FloatArray, part: SliceSpec) -> bool:
    """Returns whether an array of a file is as long as a slice, and float32."""
    return (array.dtype.str, array.shape) == ("<f4", (part.numel,))
