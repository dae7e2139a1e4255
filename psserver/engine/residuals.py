"""What error feedback owes at the workers: asked for when a checkpoint is taken, and given back.

Residuals live in the workers, and are not pushed. A checkpoint of version v needs them as they are
after the push of step v - 1. A worker that pushes that step while the checkpoint is being taken is
told so with the acknowledgement, and sends what it owes before it pushes that slice again; one that
has stopped after that step is told with the answer to a heartbeat. One that may leave that step out
(backup workers) is told with each acknowledgement up to it, and its last push counts. Where there
is no step in common, what is owed after any later push will do. After a restore it waits here for
its worker, until that has pushed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pscore.compressors.base import Compressor
from pscore.errors import RemoteProtocolError
from pscore.types import ANY_STEP, FloatArray
from psserver.decisions.membership import Presence
from psserver.decisions.progress import Progress
from psserver.decisions.shard import Address, Job
from psserver.decisions.table import Table

PREFIX = "owed"
NAME = re.compile(PREFIX + r"\.(0|[1-9][0-9]{0,3})\.([a-z_]+)")  # With rank and array.
Arrays = dict[str, FloatArray]  # What a compressor keeps of a slice, each `(numel,) float32`.


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """What one checkpoint asks the workers of a table for."""

    job: Job
    table: Table
    step: int  # After the last push up to this one; `ANY_STEP`: no matter which.
    arrays: dict[tuple[int, int], Arrays] = field(default_factory=dict)  # By slice and rank.
    steps: dict[tuple[int, int], int] = field(default_factory=dict)  # After which they are.
    kept: dict[tuple[int, int], Arrays] = field(default_factory=dict)  # Of a former checkpoint.

    def missing(self) -> list[tuple[int, int]]:
        """Returns slices and ranks of live workers that have not sent what they owe."""
        live = [m.rank for m in self.job.membership.members.values() if m.presence is Presence.LIVE]
        return [
            (index, rank)
            for index, clock in self.table.clocks.items()
            for rank in live
            if (index, rank) not in self.kept  # It has not pushed since: that is what it owes.
            and self._is_missing(index, rank, clock.counted.get(rank))
        ]

    def to_ask(self, rank: int) -> list[int]:
        """Returns the slices that a worker is to be asked for: not before it has come so far."""
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
        """Whether the acknowledgement of a push asks for what is owed after it."""
        if not self.table.specs[address.slice].compress:
            return False
        held = self.steps.get((address.slice, rank))
        if self.step == ANY_STEP or (held is not None and held >= step):
            return held is None
        return step == self.step or (self.may_skip and step < self.step)

    def take(self, index: int, rank: int, step: int, arrays: Arrays) -> None:
        """Takes what is owed of a slice after `step`, if it is closer to what is asked for."""
        key = (index, rank)
        is_closer = self.steps.get(key, -1) < step <= self.step
        if is_closer or (self.step == ANY_STEP and key not in self.arrays):
            self.arrays[key], self.steps[key] = arrays, step

    def has_passed(self, missing: list[tuple[int, int]]) -> bool:
        """Whether somebody of `missing` has pushed a later step: what it owed then is gone."""
        counted = [self.table.clocks[index].counted[rank] for index, rank in missing]
        return self.step != ANY_STEP and any(_newest(steps) > self.step for steps in counted)

    def named(self, index: int) -> Arrays:
        """Returns what has come of a slice, by its names in a checkpoint: `owed.3.residual`."""
        return {
            f"{PREFIX}.{rank}.{name}": array
            for rank in range(self.job.membership.num_workers)
            for name, array in self._newer(index, rank).items()
        }

    def _newer(self, index: int, rank: int) -> Arrays:
        return self.arrays.get((index, rank)) or self.kept.get((index, rank), {})

    def _is_missing(self, index: int, rank: int, counted: Progress | None) -> bool:
        if counted is None or not self.table.specs[index].compress or _newest(counted) < 0:
            return False
        if self.step == ANY_STEP:
            return (index, rank) not in self.arrays
        return self.steps.get((index, rank), -1) < _last(counted, self.step)


class Debts:
    """What the workers of one shard owe; but for `is_asking`, called under the engine's lock."""

    def __init__(self) -> None:
        """Asks for nothing."""
        self._asks: tuple[Ask, ...] = ()  # Replaced, never changed.
        self._kept: dict[tuple[int, int, int, int], Arrays] = {}  # Job id, table, slice, rank.
        self._first: dict[tuple[int, int], int] = {}  # Step of each table's first push since.

    # ----- for a checkpoint

    def ask(self, job: Job, table: Table, step: int) -> Ask:
        """Begins to ask the workers of a table for what they owe after `step`."""
        ask = Ask(job=job, table=table, step=step)
        for (key, number, index, rank), arrays in self._kept.items():
            if (key, number) == (id(job), table.index):
                ask.kept[index, rank] = arrays
        self._asks = (*self._asks, ask)
        return ask

    def drop(self, ask: Ask) -> None:
        """Asks no more."""
        self._asks = tuple(other for other in self._asks if other is not ask)

    @property
    def is_asking(self) -> bool:
        """Whether anything is asked for; may be read from any thread, without the lock."""
        return bool(self._asks)

    def is_asked(self, job: Job, address: Address, rank: int, step: int) -> bool:
        """Whether a worker is to send what it owes of a slice after `step`."""
        return any(
            ask.job is job and ask.table.index == address.table and ask.is_for(address, rank, step)
            for ask in self._asks
        )

    def asked_of(self, job: Job, rank: int) -> Iterator[tuple[int, int, list[int]]]:
        """Returns what a worker has not sent yet: table, step, and the slices."""
        for ask in self._asks:
            if ask.job is job and (slices := ask.to_ask(rank)):
                yield ask.table.index, ask.step, slices

    def take(
        self, job: Job, table: Table, index: int, rank: int, step: int, arrays: Mapping[str, bytes]
    ) -> None:
        """Takes what a worker owes of a slice after `step`; what nobody asks for is dropped.

        Raises:
            RemoteProtocolError: It is not what the table's compressor keeps.
        """
        table.clock(index)
        numel, names = table.specs[index].numel, table.spec.compressor.state_names
        for name, data in arrays.items():
            if name not in names or len(data) != 4 * numel:
                raise RemoteProtocolError(
                    f"worker {rank} owes {len(data)} bytes of {name[:64]!r} of slice {index}, "
                    f"{4 * numel} of {', '.join(names) or 'nothing'} wanted"
                )
        for ask in self._asks:
            if ask.job is job and ask.table is table:
                floats = {name: np.frombuffer(data, "<f4") for name, data in arrays.items()}
                ask.take(index, rank, step, floats)

    # ----- after a restore

    def keep(
        self, job: Job, table: Table, index: int, name: str, array: FloatArray, first: int
    ) -> None:
        """Keeps an array of a checkpoint, named as in `Ask.named`, until step `first` is pushed."""
        _, rank, kind = name.split(".", 2)
        self._first[id(job), table.index] = first
        self._kept.setdefault((id(job), table.index, index, int(rank)), {})[kind] = array

    def kept(self, job: Job, table: Table, rank: int) -> dict[int, Arrays]:
        """Returns what is kept for a worker, by slice."""
        return {
            index: arrays
            for (key, number, index, other), arrays in self._kept.items()
            if (key, number, other) == (id(job), table.index, rank)
        }

    def kept_of(self, key: int) -> dict[str, FloatArray]:
        """Returns all that is kept for a job, by its id: `0/3/5/owed.1.residual` is of table 0.

        It is of slice 3 there, and for a worker 1 that has not pushed step 5.
        """
        return {
            f"{number}/{index}/{self._first[key, number]}/{PREFIX}.{rank}.{name}": array
            for (other, number, index, rank), arrays in self._kept.items()
            for name, array in arrays.items()
            if other == key
        }

    def take_up(self, job: Job, arrays: Mapping[str, FloatArray]) -> None:
        """Goes on with what a former process has kept; who has pushed has had it."""
        for path, array in arrays.items():
            number, index, first, name = path.split("/")
            table = job.table(int(number))
            counted = table.clocks[int(index)].counted.get(int(name.split(".")[1]), Progress())
            if _newest(counted) < int(first):
                self.keep(job, table, int(index), name, array, int(first))

    def pushed(self, job: Job, address: Address, rank: int) -> None:
        """Forgets what was kept of a slice for a worker: it has it, and has used it."""
        if self._kept:
            self._kept.pop((id(job), address.table, address.slice, rank), None)

    def forget_job(self, key: int) -> None:
        """Forgets what belongs to the job with this id."""
        self._kept = {entry: arrays for entry, arrays in self._kept.items() if entry[0] != key}
        self._first = {entry: first for entry, first in self._first.items() if entry[0] != key}


def is_owed(name: str, compressor: Compressor | None = None) -> bool:
    """Whether `name` is one of `Ask.named`: of any compressor, or one that this one keeps."""
    found = NAME.fullmatch(name)
    return found is not None and (compressor is None or found[2] in compressor.state_names)


def _newest(counted: Progress) -> int:
    return max(counted.ahead, default=counted.clock - 1)


def _last(counted: Progress, step: int) -> int:
    """Returns the last push that is in up to `step`; -1: none."""
    known = [other for other in counted.ahead if other <= step]
    return max([*known, min(counted.clock - 1, step)])
