"""The metrics of a shard's jobs and of their workers; metrics.py serves them.

A worker opens no port: its pace and reported values come with its heartbeats to the first shard, so
only that one shows them. There are series for live workers alone, so their number is bounded by the
jobs of the shard. A sum begins at zero again when its worker or the shard's process does, which
`rate` and `increase` of Prometheus know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from psserver.decisions.membership import Presence
from psserver.decisions.worker_reports import StageReport
from psserver.engine.views import JobView, RoundView, ShardView, WorkerView

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LIVE = Presence.LIVE.value


def job_metrics(shard: ShardView) -> Iterator[Metric]:
    """Yields the metrics of jobs and workers."""
    yield from _of_jobs(shard)
    yield _held(shard)
    yield from _of_rounds([(job.name, round_) for job in shard.jobs for round_ in job.rounds])
    workers = [(job.name, worker) for job in shard.jobs for worker in job.workers]
    live = [(name, worker) for name, worker in workers if worker.state == LIVE]
    yield from _of_workers(live)
    yield from _of_pace([(name, worker) for name, worker in live if worker.pace.num_steps])
    yield from _of_peers([(name, worker) for name, worker in live if worker.peers])
    yield from _of_stages(
        [(name, worker.rank, worker.stage) for name, worker in live if worker.stage is not None]
    )


def _of_jobs(shard: ShardView) -> Iterator[Metric]:
    """Yields the bytes, open steps, losses and checkpoints of each job."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    sent = CounterMetricFamily(
        "paceline_job_bytes",
        "Payload bytes of pushes (received) and pulls (sent); shared memory counts as sent.",
        labels=["job", "direction"],
    )
    raw = CounterMetricFamily(
        "paceline_job_uncompressed_bytes",
        "The bytes of paceline_job_bytes, if none had been compressed.",
        labels=["job", "direction"],
    )
    ratio = GaugeMetricFamily(
        "paceline_compression_ratio",
        "Uncompressed bytes over payload bytes since the job began on this shard; 1: none saved.",
        labels=["job", "direction"],
    )
    for job in shard.jobs:
        for direction, nbytes, raw_nbytes in (
            ("received", job.pushed_nbytes, job.raw_pushed_nbytes),
            ("sent", job.pulled_nbytes, job.raw_pulled_nbytes),
        ):
            sent.add_metric([job.name, direction], nbytes)
            raw.add_metric([job.name, direction], raw_nbytes)
            ratio.add_metric([job.name, direction], raw_nbytes / nbytes if nbytes else 1.0)
    yield from (sent, raw, ratio)

    def gauge(name: str, text: str, value: Callable[[JobView], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["job"])
        for job in shard.jobs:
            family.add_metric([job.name], value(job))
        return family

    yield gauge("paceline_job_step", "Newest step of the job on this shard.", lambda job: job.step)
    yield gauge(
        "paceline_open_steps",
        "Steps with pushes and without an update, in the slice that has most of them.",
        lambda job: job.open_steps,
    )
    yield gauge(
        "paceline_checkpoint_age_seconds",
        "Seconds since this shard sent its part of a complete checkpoint; without one, since its "
        "process has had the job.",
        lambda job: job.checkpoint_age_s,
    )
    yield gauge(
        "paceline_workers_away",
        "Lost workers that the live ones miss; in an elastic job those below its least number.",
        lambda job: job.num_away,
    )
    yield gauge(
        "paceline_exposed_slices",
        "Slices that would be lost with this process: its journal has no space for them.",
        lambda job: sum(table.num_exposed for table in job.tables),
    )
    lost = CounterMetricFamily(
        "paceline_workers_lost", "Workers declared lost, or ended with an error.", labels=["job"]
    )
    for job in shard.jobs:
        lost.add_metric([job.name], job.num_lost)
    yield lost


def _held(shard: ShardView) -> Metric:
    """Returns counts of the things that tables hold beside weights."""
    from prometheus_client.core import GaugeMetricFamily

    held = GaugeMetricFamily(
        "paceline_table_held",
        "What a table holds beside weights on this shard, by name: `rows`, `rows_max`, ...",
        labels=["job", "table", "what"],
    )
    for job in shard.jobs:
        for table in job.tables:
            for what, count in table.held.items():
                held.add_metric([job.name, table.name, what], count)
    return held


def _of_rounds(rounds: list[tuple[str, RoundView]]) -> Iterator[Metric]:
    """Yields workers in, window and late moves of each table whose rounds have a quorum."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job", "table"]
    inside = GaugeMetricFamily(
        "paceline_round_workers_in", "Workers whose move is in the open round.", labels=labels
    )
    window = GaugeMetricFamily(
        "paceline_round_window_seconds",
        "Seconds that a round with its quorum waits for the other workers.",
        labels=labels,
    )
    late = CounterMetricFamily(
        "paceline_round_late_moves",
        "Moves that entered a later round than their own.",
        labels=labels,
    )
    for job, round_ in rounds:
        inside.add_metric([job, round_.table], round_.num_in)
        window.add_metric([job, round_.table], round_.window_s)
        late.add_metric([job, round_.table], round_.num_late)
    yield from (inside, window, late)


def _of_workers(live: list[tuple[str, WorkerView]]) -> Iterator[Metric]:
    """Yields place, staleness, waits and reported values of live workers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job", "worker"]
    step = GaugeMetricFamily(
        "paceline_worker_step", "Steps that a worker has pushed.", labels=labels
    )
    staleness = GaugeMetricFamily(
        "paceline_worker_staleness_steps",
        "Staleness of a worker's newest push, in updates; the largest of any slice.",
        labels=labels,
    )
    waited = CounterMetricFamily(
        "paceline_waited_for_seconds",
        "Seconds in which the other workers waited for this one, at a step or a barrier, a mean "
        "over them; sampled once a second.",
        labels=labels,
    )
    reported = GaugeMetricFamily(
        "paceline_reported",
        "Newest value that a live worker's script has reported, on the first shard.",
        labels=[*labels, "name"],
    )
    for name, worker in live:
        key = [name, str(worker.rank)]
        step.add_metric(key, worker.step)
        staleness.add_metric(key, worker.staleness)
        waited.add_metric(key, worker.waited_for_s)
        for what, value in worker.reported.items():
            reported.add_metric([*key, what], value)
    yield from (step, staleness, waited, reported)


def _of_pace(live: list[tuple[str, WorkerView]]) -> Iterator[Metric]:
    """Yields the steps and waits of live workers, as their heartbeats report them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    labels = ["job", "worker"]
    steps = SummaryMetricFamily(
        "paceline_worker_step_seconds",
        "Seconds of a worker's steps, each from the end of the one before, on the first shard.",
        labels=labels,
    )
    waits = CounterMetricFamily(
        "paceline_worker_pull_wait_seconds",
        "Seconds in which a worker waited for shards or other workers, on the first shard.",
        labels=labels,
    )
    requests = CounterMetricFamily(
        "paceline_worker_request_seconds",
        "Seconds in which pushes or pulls of a worker were under way, on the first shard.",
        labels=labels,
    )
    hidden = GaugeMetricFamily(
        "paceline_worker_hidden_ratio",
        "Share of paceline_worker_request_seconds in which the worker did not wait for answers.",
        labels=labels,
    )
    round_steps = GaugeMetricFamily(
        "paceline_worker_round_steps",
        "Steps of the round under way, in a mode with rounds by speed.",
        labels=labels,
    )
    for name, worker in live:
        key, pace = [name, str(worker.rank)], worker.pace
        steps.add_metric(key, count_value=pace.num_steps, sum_value=pace.steps_s)
        waits.add_metric(key, pace.waits_s)
        requests.add_metric(key, pace.requests_s)
        hidden.add_metric(key, pace.hidden_ratio)
        if pace.round_steps:
            round_steps.add_metric(key, pace.round_steps)
    yield from (steps, waits, requests, hidden, round_steps)


def _of_peers(live: list[tuple[str, WorkerView]]) -> Iterator[Metric]:
    """Yields the last exchanges of live workers with each other, in modes without a server."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job", "worker", "table"]
    exchanges = CounterMetricFamily(
        "paceline_peer_exchanges",
        "Models, sums or answers that a worker has taken from others, on the first shard.",
        labels=labels,
    )
    partner = GaugeMetricFamily(
        "paceline_peer_partner", "Rank of a worker's last partner; -1: none yet.", labels=labels
    )
    age = GaugeMetricFamily(
        "paceline_peer_answer_age_seconds",
        "Seconds since a worker's last answer or model of another.",
        labels=labels,
    )
    staleness = GaugeMetricFamily(
        "paceline_peer_staleness_mixes",
        "Mixes of a worker's model between the last read and write of it.",
        labels=labels,
    )
    distance = GaugeMetricFamily(
        "paceline_consensus_distance",
        "Distance of a worker's model to the last average that it has seen, over the norm of that.",
        labels=labels,
    )
    for name, worker in live:
        for report in worker.peers:
            key = [name, str(worker.rank), str(report.table)]
            exchanges.add_metric(key, report.num_exchanges)
            partner.add_metric(key, report.partner)
            age.add_metric(key, report.age_s)
            staleness.add_metric(key, report.staleness)
            distance.add_metric(key, report.distance)
    yield from (exchanges, partner, age, staleness, distance)


def _of_stages(live: list[tuple[str, int, StageReport]]) -> Iterator[Metric]:
    """Yields the work of a pipeline's stages, by job, worker and stage."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job", "worker", "stage"]
    waits = CounterMetricFamily(
        "paceline_stage_wait_seconds",
        "Seconds in which a worker of a pipeline waited for the stages beside its own.",
        labels=labels,
    )
    version = GaugeMetricFamily(
        "paceline_stage_version",
        "Updates of a stage's weights since its worker began.",
        labels=labels,
    )
    minibatch = GaugeMetricFamily(
        "paceline_stage_minibatch",
        "Minibatches of the training before the next one of a stage.",
        labels=labels,
    )
    in_flight = GaugeMetricFamily(
        "paceline_stage_in_flight",
        "Minibatches of a worker between their forward and their backward pass.",
        labels=labels,
    )
    activations = GaugeMetricFamily(
        "paceline_stage_activation_bytes",
        "Bytes of activations that a worker keeps for the backward passes in flight.",
        labels=labels,
    )
    for name, rank, report in live:
        key = [name, str(rank), str(report.stage)]
        waits.add_metric(key, report.waits_s)
        version.add_metric(key, report.version)
        minibatch.add_metric(key, report.minibatch)
        in_flight.add_metric(key, report.in_flight)
        activations.add_metric(key, report.activation_nbytes)
    yield from (waits, version, minibatch, in_flight, activations)
