"""Figures of a training under way, as properties of `DistributedOptimizer`."""

from __future__ import annotations

from typing import Any

from pscore.rules.base import Rule
from psworker.connection.accounts.missed import Missed
from psworker.connection.accounts.reports import TOKENS
from psworker.connection.accounts.traffic import Traffic, ddp_nbytes
from psworker.training.gradients.gradients import Gradients
from psworker.training.progress import require_weight
from psworker.training.scalars import Scalars, Writer
from psworker.training.table import TrainingTable


class WorkerFigures:
    """This worker's place in the training, its weight in the mean, and its traffic."""

    _table: TrainingTable
    _gradients: Gradients
    _scalars: Scalars | None = None

    def report(self, **values: Any) -> None:
        """Shows values of the training in `psserver status` and in the shards' metrics.

        They travel with the next heartbeat (every second or two), so a call costs microseconds; a
        value that is a tensor on a GPU is waited for. Nothing else depends on them.

        Args:
            values: `loss`, `tokens` (the number since the last report, or of samples; shown as a
                sum, as tokens per second, and as bytes pushed and pulled per token beside those of
                DDP), and others: 16 names of at most 40 characters. A value that is not
                finite is left out, with one warning.

        Raises:
            ConfigError: A name or value cannot be reported.
        """
        reports = self._table.session.heartbeats.reports
        reports.put(values)
        if TOKENS in values:
            reports.put_bytes(self.traffic, self._ddp_nbytes)
        if self._scalars is not None:
            self._scalars.write(values, self.steps, self.traffic)

    def report_to(self, writer: Writer | None) -> None:
        """Also writes what `report` is given as scalars of this worker, by `steps`.

        Each report then adds the pace since the one before: `paceline/step_seconds` and
        `paceline/wait_seconds` (means of a step), `paceline/pushed_bytes` and
        `paceline/pulled_bytes` (payload bytes so far).

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`, or another object with
                `add_scalar(tag, value, step)`; None: no scalars from now on.

        Raises:
            ConfigError: It has no `add_scalar`.
        """
        self._scalars = None if writer is None else Scalars(writer, self._table.session)

    @property
    def _ddp_nbytes(self) -> float:
        """Bytes that a worker of DDP sends in a step of this model, and receives."""
        table = self._table
        numel = sum(
            segment.stop - segment.start
            for spec in table.layout.slices
            for segment in spec.segments
        )
        return ddp_nbytes(numel, table.session.num_workers)

    @property
    def samples(self) -> float:
        """Weight of this worker's gradient in the mean."""
        return self._table.progress.samples

    @samples.setter
    def samples(self, samples: float) -> None:
        if require_weight(samples) != self.samples:
            self._gradients.overlap.changed(f"samples ({self.samples:g}, now {samples:g})")
            self._table.progress.samples = require_weight(samples)

    @property
    def steps(self) -> int:
        """Steps of the job's training behind this worker: seeds its next data (docs/elastic.md)."""
        return self._table.replica.step

    @property
    def samples_seen(self) -> float:
        """Sum of `samples` over these steps: this worker's position in its data."""
        return self._table.progress.seen

    @property
    def clock(self) -> int:
        """Pushes of this worker that the shards have counted: steps, or rounds; 0 in a new job."""
        return self._table.replica.next_push

    @property
    def rule(self) -> Rule:
        """The mode."""
        return self._table.rule

    @property
    def missed(self) -> Missed:
        """Steps of this worker that did not count, or not in every slice."""
        return self._table.exchange.missed

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received, and pushes that came too late."""
        return self._table.exchange.traffic
