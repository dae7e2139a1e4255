"""The processes that are one worker; one process alone is a group of one, which sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pscore.errors import PacelineError
from psworker.group.watch import Watch


class WorkerGroup:
    """A group of one process; a subclass connects several (local_group.py).

    Every collective is called by all processes of the group, in the same order. Its leader is the
    process with local rank 0, which alone is a member of the job for the shards.

    Attributes:
        rank: 0-based rank of this process in the group.
        size: Number of processes.
        watch: Notices the end of another process of the group.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Starts no thread and sends nothing; the arguments are the attributes."""
        self.rank, self.size = rank, size
        self.watch = Watch(rank, size)

    @property
    def is_alone(self) -> bool:
        """Whether this process has nobody to agree with."""
        return self.size == 1

    @property
    def is_leader(self) -> bool:
        """Whether this process is the one that the shards know as the worker."""
        return self.rank == 0

    def require_alone(self, problem: PacelineError) -> None:
        """Refuses to go on where several processes that are still joining were declared lost.

        Args:
            problem: The error by which this process has learnt that; another one of the group may
                be elsewhere in its start, so they cannot rejoin together.

        Raises:
            PacelineError: There are several; of the class of `problem`.
        """
        if not self.is_alone:
            raise type(problem)(
                f"{problem}; that was before the {self.size} processes of this worker had begun, "
                "and they cannot rejoin from there: start all of them again"
            ) from problem

    # ----- numbers and text

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of all processes' values, one by one."""
        return list(values)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns each process's values, by local rank; all give equally many."""
        return [list(values)]

    def largest(self, value: float) -> float:
        """Returns the largest of all processes' values."""
        return max(given for (given,) in self.gather([value]))

    def barrier(self) -> None:
        """Waits for the other processes."""

    def led(self, call: Callable[[], Any]) -> Any:
        """Returns the result of the leader's call in all processes, or raises its error in all.

        Args:
            call: Called by the leader; returns something that JSON can hold.

        Raises:
            PacelineError: The leader's call has raised it.
        """
        return call()

    # ----- tensors

    def share(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Copies each tensor of the process that owns it, by local rank, to the others."""

    def sum_on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all processes' tensors, on the host if there are several processes.

        Args:
            values: This process's tensor; may be overwritten.
        """
        return values
