"""The metrics of a shard's jobs and of their workers; metrics.py serves them.

A worker opens no port: its pace and reported values come with its heartbeats to the first shard, so
only that one shows them. There are series for live workers alone, so their number is bounded by the
jobs of the shard. A sum begins at zero again when its worker or the shard's process does, which
`rate` and `increase` of Prometheus know of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from psserver.decisions.directory import PeerReport
from psserver.decisions.membership import Presence
from psserver.decisions.worker_reports import ReportedPace, StageReport
from psserver.engine.views import JobView, RoundView, ShardView, WorkerView
from psserver.service.families import Columns, families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LIVE = Presence.LIVE.value
BYTES: Columns[tuple[int, int]] = {  # Those of payloads, and those if none had been compressed.
    "counter paceline_job_bytes": (
        "Payload bytes of pushes (received) and pulls (sent); shared memory counts as sent.",
        lambda it: it[0],
    ),
    "counter paceline_job_uncompressed_bytes": (
        "The bytes of paceline_job_bytes, if none had been compressed.",
        lambda it: it[1],
    ),
    "gauge paceline_compression_ratio": (
        "Uncompressed bytes over payload bytes since the job began on this shard; 1: none saved.",
        lambda it: it[1] / it[0] if it[0] else 1.0,
    ),
}
JOB: Columns[JobView] = {
    "gauge paceline_job_step": ("Newest step of the job on this shard.", lambda job: job.step),
    "gauge paceline_open_steps": (
        "Steps with pushes and without an update, in the slice that has most of them.",
        lambda job: job.open_steps,
    ),
    "gauge paceline_checkpoint_age_seconds": (
        "Seconds since this shard sent its part of a complete checkpoint; without one, since its "
        "process has had the job.",
        lambda job: job.checkpoint_age_s,
    ),
    "gauge paceline_workers_away": (
        "Lost workers that the live ones miss; in an elastic job those below its least number.",
        lambda job: job.num_away,
    ),
    "gauge paceline_exposed_slices": (
        "Slices that would be lost with this process: its journal has no space for them.",
        lambda job: sum(table.num_exposed for table in job.tables),
    ),
    "counter paceline_workers_lost": (
        "Workers declared lost, or ended with an error.",
        lambda job: job.num_lost,
    ),
}
HELD: Columns[int] = {
    "gauge paceline_table_held": (
        "What a table holds beside weights on this shard, by name: `rows`, `rows_max`, ...",
        float,
    )
}
ROUND: Columns[RoundView] = {
    "gauge paceline_round_workers_in": (
        "Workers whose move is in the open round.",
        lambda it: it.num_in,
    ),
    "gauge paceline_round_window_seconds": (
        "Seconds that a round with its quorum waits for the other workers.",
        lambda it: it.window_s,
    ),
    "counter paceline_round_late_moves": (
        "Moves that entered a later round than their own.",
        lambda it: it.num_late,
    ),
}
WORKER: Columns[WorkerView] = {
    "gauge paceline_worker_step": ("Steps that a worker has pushed.", lambda it: it.step),
    "gauge paceline_worker_staleness_steps": (
        "Staleness of a worker's newest push, in updates; the largest of any slice.",
        lambda it: it.staleness,
    ),
    "counter paceline_waited_for_seconds": (
        "Seconds in which the other workers waited for this one, at a step or a barrier, a mean "
        "over them; sampled once a second.",
        lambda it: it.waited_for_s,
    ),
}
REPORTED: Columns[float] = {
    "gauge paceline_reported": (
        "Newest value that a live worker's script has reported, on the first shard.",
        float,
    )
}
PACE: Columns[ReportedPace] = {
    "counter paceline_worker_pull_wait_seconds": (
        "Seconds in which a worker waited for shards or other workers, on the first shard.",
        lambda pace: pace.waits_s,
    ),
    "counter paceline_worker_request_seconds": (
        "Seconds in which pushes or pulls of a worker were under way, on the first shard.",
        lambda pace: pace.requests_s,
    ),
    "gauge paceline_worker_hidden_ratio": (
        "Share of paceline_worker_request_seconds in which the worker did not wait for answers.",
        lambda pace: pace.hidden_ratio,
    ),
    "gauge paceline_worker_round_steps": (
        "Steps of the round under way, in a mode with rounds by speed.",
        lambda pace: pace.round_steps or None,
    ),
}
PEERS: Columns[PeerReport] = {
    "counter paceline_peer_exchanges": (
        "Models, sums or answers that a worker has taken from others, on the first shard.",
        lambda it: it.num_exchanges,
    ),
    "gauge paceline_peer_partner": (
        "Rank of a worker's last partner; -1: none yet.",
        lambda it: it.partner,
    ),
    "gauge paceline_peer_answer_age_seconds": (
        "Seconds since a worker's last answer or model of another.",
        lambda it: it.age_s,
    ),
    "gauge paceline_peer_staleness_mixes": (
        "Mixes of a worker's model between the last read and write of it.",
        lambda it: it.staleness,
    ),
    "gauge paceline_consensus_distance": (
        "Distance of a worker's model to the last average that it has seen, over the norm of that.",
        lambda it: it.distance,
    ),
}
STAGE: Columns[StageReport] = {
    "counter paceline_stage_wait_seconds": (
        "Seconds in which a worker of a pipeline waited for the stages beside its own.",
        lambda it: it.waits_s,
    ),
    "gauge paceline_stage_version": (
        "Updates of a stage's weights since its worker began.",
        lambda it: it.version,
    ),
    "gauge paceline_stage_minibatch": (
        "Minibatches of the training before the next one of a stage.",
        lambda it: it.minibatch,
    ),
    "gauge paceline_stage_in_flight": (
        "Minibatches of a worker between their forward and their backward pass.",
        lambda it: it.in_flight,
    ),
    "gauge paceline_stage_activation_bytes": (
        "Bytes of activations that a worker keeps for the backward passes in flight.",
        lambda it: it.activation_nbytes,
    ),
}


def job_metrics(shard: ShardView) -> Iterator[Metric]:
    """Yields the metrics of jobs and workers."""
    from prometheus_client.core import SummaryMetricFamily

    jobs = shard.jobs
    nbytes = [
        pair
        for job in jobs
        for pair in (
            ([job.name, "received"], (job.pushed_nbytes, job.raw_pushed_nbytes)),
            ([job.name, "sent"], (job.pulled_nbytes, job.raw_pulled_nbytes)),
        )
    ]
    yield from families(["job", "direction"], nbytes, BYTES)
    yield from families(["job"], [([job.name], job) for job in jobs], JOB)
    tables = [(job.name, table) for job in jobs for table in job.tables]
    held = [([job, it.name, what], count) for job, it in tables for what, count in it.held.items()]
    yield from families(["job", "table", "what"], held, HELD)
    rounds = [([job.name, it.table], it) for job in jobs for it in job.rounds]
    yield from families(["job", "table"], rounds, ROUND)
    labels = ["job", "worker"]
    live = [
        ([job.name, str(worker.rank)], worker)
        for job in jobs
        for worker in job.workers
        if worker.state == LIVE
    ]
    yield from families(labels, live, WORKER)
    reported = [([*key, name], value) for key, it in live for name, value in it.reported.items()]
    yield from families([*labels, "name"], reported, REPORTED)
    paces = [(key, it.pace) for key, it in live if it.pace.num_steps]
    steps = SummaryMetricFamily(
        "paceline_worker_step_seconds",
        "Seconds of a worker's steps, each from the end of the one before, on the first shard.",
        labels=labels,
    )
    for key, pace in paces:
        steps.add_metric(key, count_value=pace.num_steps, sum_value=pace.steps_s)
    yield steps
    yield from families(labels, paces, PACE)
    peers = [([*key, str(one.table)], one) for key, it in live for one in it.peers]
    yield from families([*labels, "table"], peers, PEERS)
    stages = [([*key, str(it.stage.stage)], it.stage) for key, it in live if it.stage is not None]
    yield from families([*labels, "stage"], stages, STAGE)
