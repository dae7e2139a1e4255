"""Checkpoints of a simulated job, and the residuals that they must have.

A worker books its residual of a slice after each push that is answered. A checkpoint that is
complete must have exactly these arrays: lost, doubled and late messages may delay or spoil a
checkpoint, but never change one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pscore.types import FloatArray
from psserver.engine.capture import PENDING, CaptureState, TableCapture, capture
from psserver.engine.residuals import NAME
from pssim.shard import JOB, SimulatedShard


@dataclass(slots=True)
class ResidualBook:
    """Residuals of one job as its workers had them: by rank and slice, then by step and array."""

    had: dict[tuple[int, int], dict[int, dict[str, FloatArray]]] = field(default_factory=dict)

    def note(self, rank: int, index: int, step: int, arrays: Mapping[str, FloatArray]) -> None:
        """Books the residual of a slice after the push of a step, which is answered."""
        copies = {name: array.copy() for name, array in arrays.items()}
        self.had.setdefault((rank, index), {})[step] = copies

    def newest(self, version: int) -> dict[tuple[int, int], int]:
        """Returns the step of the last answered push before a version, by rank and slice."""
        return {
            key: max(steps)
            for key, had in self.had.items()
            if (steps := [step for step in had if version < 0 or step < version])
        }

    def check(
        self, version: int, index: int, rank: int, arrays: dict[str, FloatArray], newest: int
    ) -> None:
        """Checks a worker's residual of one slice in a complete checkpoint.

        Args:
            version: Version of the checkpoint; -1: it has no step in common.
            rank: The worker, which has not died or returned.
            arrays: Its arrays in the checkpoint, by name.
            newest: Step of its last push that had been answered when the checkpoint was complete.
                A later one may have been counted without an answer.
        """
        had = self.had[rank, index]
        wanted = [had[step] for step in had if newest <= step < version or version < 0]
        is_there = bool(arrays) or {} in wanted  # A compressor may begin without an array.
        assert is_there, f"worker {rank} has no residual of slice {index} in version {version}"
        is_known = any(
            arrays.keys() == own.keys()
            and all(np.array_equal(arrays[name], array) for name, array in own.items())
            for own in wanted
        )
        assert is_known, f"worker {rank} never had this residual of slice {index} at {version}"


@dataclass(slots=True, kw_only=True)
class Done:
    """One shard's part of a complete checkpoint, and the workers that were live."""

    copy: TableCapture
    version: int
    live: list[int]
    newest: dict[tuple[int, int], int]  # By rank and slice, as in `ResidualBook.newest`.


class Captures:
    """The checkpoints of one simulated job."""

    def __init__(self) -> None:
        self.book = ResidualBook()  # The residuals that the workers had.
        self.done: list[Done] = []  # Complete parts, one for each shard and checkpoint.
        self._open: list[tuple[SimulatedShard, TableCapture, int]] = []

    def begin(self, shards: Sequence[SimulatedShard]) -> None:
        """Begins a checkpoint of all shards, of a version to come; before there are weights, none.

        Args:
            shards: The shards; each has the job and its table.
        """
        clocks = [clock for shard in shards for _, _, clock, _ in shard.slices()]
        if not all(JOB in shard.engine.jobs for shard in shards) or not clocks:
            return
        if any(clock.version < 0 for clock in clocks):
            return
        newest = max(clock.version for clock in clocks)
        version = newest + 2 if clocks[0].rule.by_step else -1
        for shard in shards:
            if any(True for _ in shard.slices()):
                copy = capture(shard.engine, JOB, "model", version, weights_only=False)
                self._open.append((shard, copy, version))

    def look(self) -> None:
        """Closes the copies that are complete or spoilt."""
        for entry in list(self._open):
            shard, copy, version = entry
            live = shard.engine.jobs[JOB].job.membership.live()
            state, _ = copy.progress()
            if state is CaptureState.DONE:
                newest = self.book.newest(version)
                self.done.append(Done(copy=copy, version=version, live=live, newest=newest))
            if state not in PENDING:
                self._open.remove(entry)
                copy.close()

    def close(self) -> None:
        """Closes the copies that are still open."""
        for _, copy, _ in self._open:
            copy.close()
        self._open.clear()

    def check(self, steady: Sequence[int]) -> None:
        """Checks the residuals of all complete checkpoints.

        Args:
            steady: Ranks of the workers that have neither died nor returned.
        """
        for done in self.done:
            for index, arrays in done.copy.slices.items():
                found: dict[int, dict[str, FloatArray]] = {}
                for name, array in arrays.items():
                    if match := NAME.fullmatch(name):
                        found.setdefault(int(match[1]), {})[match[2]] = array
                for rank in set(done.live) & set(steady):
                    if (newest := done.newest.get((rank, index))) is not None:
                        self.book.check(done.version, index, rank, found.get(rank, {}), newest)
