"""A worker's announced absence from the steps of its table, and its return.

Meanwhile the steps of the other workers do not wait for it. It returns like a worker that joins a
job under way: it pulls the newest weights, and steps wait for it from its next one on.
"""

from __future__ import annotations

from psworker.job import context
from psworker.training.optimizer import DistributedOptimizer


class Absences:
    """The steps of a `DistributedOptimizer`, from which its worker may be absent."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def step_aside(self) -> None:
        """Asks the shards not to wait for this worker's gradients; it must be between two steps."""
        table = self._optimizer._table

        def leave_steps() -> None:
            table.settle()
            table.exchange.step_aside(table.replica.step)

        self._optimizer._recovery.run_between_steps(leave_steps)

    def come_back(self, minibatch: int) -> None:
        """Returns to the steps, with the global weights."""
        with self._optimizer._recovery.guard():
            table = self._optimizer._table
            table.exchange.come_back(minibatch)
            table.replica.restart()
            table.begin()

    def step(self, minibatch: int, share: float) -> None:
        """Makes a step with the gradient of a minibatch, which each slice counts once."""
        self._optimizer._table.exchange.minibatch = minibatch
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= share
        try:
            self._optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def end(self) -> None:
        """Leaves the table's job, with the global weights in the model."""
        context.shutdown()
