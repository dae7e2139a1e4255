"""Kills a worker or a shard of a job in time, and returns the time that the others lose."""

from __future__ import annotations

from dataclasses import dataclass

from pscore.rules.base import Rule
from pscore.timing.deployment import Deployment
from pscore.timing.plans import without_warmup
from pssim.cluster import quiet
from pssim.timing.run import RAW, TimedJob, make_job


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKill:
    """The death of a process."""

    is_shard: bool  # Whether it is a shard; else it is a worker.
    index: int  # Its index or rank.
    at_s: float  # Its moment, in virtual seconds.
    noticed_s: float = 0.0  # Seconds after which the shards no longer wait for a worker.
    back_s: float  # Seconds until another process is in its place.


def lost_s(deployment: Deployment, rule: Rule, kill: TimedKill, *, steps: int) -> float:
    """Returns the seconds by which the other workers end later because of a kill.

    Args:
        steps: Steps of each worker; the kill must be long before their end.
    """
    ends = []
    for has_kill in (False, True):
        with quiet():
            job = make_job(deployment, without_warmup(rule), RAW, steps=steps)
            survivors = list(job.workers)
            if not kill.is_shard:
                del survivors[kill.index]
            if has_kill:
                plan = _kill_shard if kill.is_shard else _kill_worker
                plan(job, kill)
            for worker in job.workers:
                job.loop.after(0.0, worker.start)
            job.loop.run()
        assert all(worker.is_over for worker in survivors), f"{rule}: others wait for ever"
        ends.append(max(worker.ended_s[-1] for worker in survivors))
    return ends[1] - ends[0]


def _kill_shard(job: TimedJob, kill: TimedKill) -> None:
    """Plans that a shard answers nothing for a while, and continues from its journal."""
    shard = job.shards[kill.index]
    job.loop.at(kill.at_s, shard.stop)
    job.loop.at(kill.at_s + kill.back_s, shard.resume)


def _kill_worker(job: TimedJob, kill: TimedKill) -> None:
    """Plans that a worker dies, is declared lost, and that another one takes its rank."""
    loop, rank = job.loop, kill.index
    loop.at(kill.at_s, job.workers[rank].kill)

    def lose() -> None:
        for shard in job.shards:
            shard.lose(rank)

    def come() -> None:
        for shard in job.shards:
            shard.welcome(rank)
        job.make_worker(rank).start()

    loop.at(kill.at_s + kill.noticed_s, lose)

    loop.at(kill.at_s + max(kill.back_s, kill.noticed_s), come)
