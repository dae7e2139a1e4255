"""A training job whose workers fail: each dies at random times, and is started again.

The time from the start of a worker's process to its failure is exponential, so that a job of N
workers has N times as many failures as one worker. A process that dies takes its computing since
its last push with it; another one joins after a restart, pulls, and continues. The shards do not
fail here (`faulty.py` has them crash at every event), and no worker is declared lost: a mode that
waits for all waits for the restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from pssim.training import TrainingCluster, TrainingJob, TrainingWorker

INCARNATIONS = 10_000  # Distance between the incarnations of a rank: no two are alike.


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of each worker."""

    mean_s: float  # Mean time from the start of a process to its failure, in virtual seconds.
    restart_s: float  # Time from a failure to the next process, which then joins.
    seed: int = 0  # Seed of the times.


class FailingWorker(TrainingWorker):
    """A worker that fails and is started again."""

    cluster: FailingCluster  # Its job.

    def __init__(self, cluster: FailingCluster, rank: int, model: nn.Module) -> None:
        super().__init__(cluster, rank, model)
        self.num_failures = 0  # Failures so far.
        self._is_dead = False
        self._draw = np.random.default_rng([cluster.failures.seed, rank, 1])

    def advance(self) -> None:
        """Runs the program until it has to wait, while its process lives."""
        if not self._is_dead:
            super().advance()

    def await_failure(self) -> None:
        """Schedules the failure of the present process."""
        self.loop.after(self.cluster.failures.mean_s * self._draw.exponential(), self.fail)

    def fail(self) -> None:
        """Ends the process, with all that it has not pushed."""
        if self.is_over:
            return
        self.num_failures += 1
        self._is_dead = True
        self.incarnation += INCARNATIONS
        self._problem = None
        self.loop.after(self.cluster.failures.restart_s, self._start_again)

    def _start_again(self) -> None:
        self._is_dead = False
        self.restart = self.num_failures
        cluster = self.cluster
        self.start_process(
            self.train(),
            cluster.spec,
            cluster.layout,
            cluster.optimizer,
            self.flat_model.weights,
            cluster.job.num_workers,
        )
        self.join()
        self.resume()
        self.await_failure()


class FailingCluster(TrainingCluster):
    """The workers and shards of a job with failures; `run` trains."""

    def __init__(self, job: TrainingJob, failures: Failures) -> None:
        """Makes them, with rank 0's weights on the shards.

        Args:
            failures: The failures; a mean of infinity: none.
        """
        self.failures = failures  # Its failures.
        self._failing: list[FailingWorker] = []
        super().__init__(job)
        for worker in self._failing:
            worker.await_failure()

    def make_worker(self, rank: int, model: nn.Module) -> FailingWorker:
        """Returns a new worker."""
        self._failing.append(FailingWorker(self, rank, model))
        return self._failing[-1]

    @property
    def num_failures(self) -> int:
        """Failures of all workers so far."""
        return sum(worker.num_failures for worker in self._failing)
