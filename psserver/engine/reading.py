"""Reads a shard for its status and its metrics: copies of one moment, made under the lock."""

from __future__ import annotations

from psserver.engine.engine import Engine
from psserver.engine.views import Figures, JobView, ShardView, figures_of, view_of


def status(engine: Engine) -> ShardView:
    """Returns the shard and its jobs as they are at this moment."""
    with engine.lock:
        return _view(engine)


def figures(engine: Engine) -> Figures:
    """Returns the numbers of the metrics page, all of one moment."""
    with engine.lock:
        engine.counters.settle()
        return figures_of(engine.shard, engine.counters, _view(engine))


def _view(engine: Engine) -> ShardView:
    return ShardView(
        jobs=_jobs(engine),
        lost=tuple(engine.shard.lifetimes.lost.values()),
        under_way_nbytes=engine.budget.nbytes - engine.budget.left,
        num_recoveries=engine.recovery.num_recoveries,
        num_mended=engine.num_mended,
        copies=engine.copies,
    )


def _jobs(engine: Engine) -> tuple[JobView, ...]:
    now_s = engine.now()
    return tuple(
        view_of(job.job, job.waits, now_s, job.saves, job.exposed, job.held)
        for job in engine.jobs.values()
    )
