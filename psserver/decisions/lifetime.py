"""One shard's decisions to continue a job, to restart it, or to forget it; no I/O, no clock.

An interrupted job (job.py) keeps its memory until new workers join under its name. They continue
from its newest step, and the job waits for all of them as at its start. It is freed after days
(`Limits.keep_interrupted_s`), earlier if a new job needs its place and no job has ended, or by a
person (`psserver forget`). A job that has ended is kept for a while, so that its weights can still
be exported; it is freed earlier if another job needs the room. Workers that join under its name
start a new job at step 0. The workers and the log are informed of a continued and of a restarted
job. A job whose numbers cannot be used is refused with an error.

Some launchers replace a worker without counting its restarts (a Job of Kubernetes). An identity of
the launch, which its workers send (`Member.run_id`), tells such a worker from one of the next
launch. One without it is judged by the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from pscore.errors import ConfigError, LimitError, NotOverError, StateLostError
from psserver.decisions.job import Job, Life
from psserver.decisions.job_state import State
from psserver.decisions.limits import Limits
from psserver.decisions.membership import SUSPECT_SHARE, Member, Membership, Presence

FORMER_MAX = 1024  # Freed jobs whose ends are remembered.
WORKERS_NAMED = 4  # In a message.
SPEAKS_S = 5.0  # In which a live worker has spoken to a new process of a shard, at the latest.


class Lifetimes:
    """The jobs of one shard, and the ends of the jobs that it has freed.

    Attributes:
        expired: Jobs that could have continued and were freed, for the log, each with the reason.
        lost: Jobs whose numbers cannot be used, by `digest` of the name: the name or, where that
            is not known, the digest; and why.
    """

    def __init__(self, index: int, limits: Limits) -> None:
        """Starts without jobs.

        Args:
            limits: Bounds on memory and on the time that ended jobs are kept.
        """
        self.jobs: dict[str, Job] = {}
        self.lost: dict[str, tuple[str, str]] = {}
        self.expired: list[tuple[Job, str]] = []
        self._ends: dict[str, str] = {}  # Ends of freed jobs in words, by name; the newest last.
        self._index = index
        self._limits = limits

    # ----- when a worker joins

    def is_gone(self, job: Job, num_workers: int, member: Member, life: int) -> bool:
        """Returns whether a job is no longer there for a worker that joins.

        It is not if it has ended, or if the worker takes the rank of a dead one before there was
        any update, here or on the first shard: then nothing is lost. Others may live that had no
        time to speak to a new process of this shard: they have uploaded their weights. If the
        first shard has begun it anew, so does this one, which may have made the first step alone,
        or have noticed the end of the last worker before the loss of another.

        Args:
            life: Number of the life on the first shard; 0: this is the first shard.
        """
        if job.is_over:
            return _has_finished(job, member) or not self._belongs(job, num_workers, member)
        is_deserted = job.membership.is_deserted(member.rank)
        is_back = member.returns or member.continues or is_repeated(job, member)
        live = [job.membership.members[rank] for rank in job.membership.live()]
        is_back |= any(other.is_restored for other in live)
        if is_back or not is_deserted:
            return False
        is_dead = member.rank in job.membership.members
        may_be = job.is_in_first_step if life else not job.has_progress
        return member.anew or (is_dead and may_be)

    def begins_anew(self, name: str, *, refills: bool) -> str:
        """Returns the news for workers that begin a job of this name; empty if it is the first.

        Raises:
            StateLostError: The job was here, and its numbers cannot be used.
        """
        if refills:
            self.lost.pop(digest(name), None)
            return ""
        lost = self.lost.get(digest(name))
        if lost is not None:
            _, reason = lost
            raise StateLostError(
                f"shard {self._index} had job {name!r} and cannot continue it: {reason}; restore "
                f"a checkpoint with `psserver restore DIR --job {name}`, or run `psserver forget "
                f"{name}` to start over"
            )
        former = self.jobs.get(name)
        ending = self._ends.get(name, "")
        if former is not None and former.step > 0:
            ending = former.end_in_words()
        return f"job {name!r} starts over at step 0: the former one {ending}" if ending else ""

    def meet(self, job: Job, member: Member, life: int) -> None:
        """Begins another life of a job if the worker that joins is the first of it.

        The first shard decides whether any worker still takes part. The others follow it, even if
        they have not noticed the deaths: a job begins another life on all shards or on none. A
        worker that its launcher has started again may be the first one: torchrun and Ray start all
        workers again when one has died.

        Args:
            job: It has not ended.
            member: The worker, not yet a member.
            life: Number of the life on the first shard; 0: this is the first shard.

        Raises:
            NotOverError: Others may live that had no time to speak to a new process of this
                shard.
        """
        if member.returns or is_repeated(job, member):
            job.life.number = life or job.life.number
        elif job.is_over and not (member.continues and not job.has_progress):
            job.life.number = life or job.life.number
            if _is_same_run(job, member, job.met) and member.rank in {-1, *job.met}:
                member.news = (
                    f"job {job.name!r} has ended at step {job.step}, and this worker is of the "
                    "same run (PACELINE_RUN_ID): it continues there; to start over instead, run "
                    f"`psserver forget {job.name}`"
                )
        elif life == 0 and job.membership.is_deserted(member.rank):
            unheard = _unheard(job.membership, member)
            if unheard:
                others = ", ".join(job.membership.describe(one) for one in unheard[:WORKERS_NAMED])
                raise NotOverError(f"this shard was just started again, and waits for {others}")
            self._go_on(job, job.life.number + 1, is_changing=job.barriers.holds)
        elif life not in (0, job.life.number):
            self._go_on(job, life, is_changing=True)  # The first shard knows whether they were.

    def require_over(self, job: Job, member: Member) -> None:
        """Refuses a worker while others of the job are live, if it would come too early.

        Its process has finished this run and begins the next one, or its launch is another one; an
        elastic job may have workers of several launches. Or the others change the job just now.

        Raises:
            NotOverError: A worker of the run is live.
        """
        live = job.membership.live()
        if not live or is_repeated(job, member):
            return
        others = ", ".join(job.membership.describe(rank) for rank in live[:WORKERS_NAMED])
        if _has_finished(job, member):
            raise NotOverError(
                f"this process has finished a run of job {job.name!r} and begins the next one, but "
                f"the former continues with {others}"
            )
        if not job.membership.is_elastic and _is_same_run(job, member, live) is False:
            raise NotOverError(
                f"job {job.name!r} trains with {others}, which another launch has started, and "
                f"this worker is of run {member.run_id!r} (PACELINE_RUN_ID): wait for the job's "
                "end, or take another job name"
            )
        if job.barriers.holds and live != [member.rank]:
            raise NotOverError(f"{others} change the mode or the parameters of job {job.name!r}")

    def _go_on(self, job: Job, number: int, *, is_changing: bool) -> None:
        state, step = job.state, job.step
        job.membership.begin_again()
        job.met.clear()
        for table in job.tables.values():
            table.begin_again(is_changing=is_changing)
        job.barriers.begin_again()
        why = "it was restored from a checkpoint"
        if state is not State.RESTORED:
            why = (
                "all of its workers were lost before the last of them had ended; to start over "
                f"instead, end them and run `psserver forget {job.name}`"
            )
        news = f"job {job.name!r} continues at step {step}: {why}"
        restored = job.life.is_restored
        job.life = Life(number=number, first_step=step, is_restored=restored, news=news)

    def _belongs(self, job: Job, num_workers: int, member: Member) -> bool:
        """Returns whether a worker continues a job that is over.

        A worker that returns does, and one that has joined the first shard before the end, that its
        launcher has started again, or that is of the same run. So does one that has never joined:
        in an asynchronous mode the others may have finished before it began. An elastic job that
        has had as many workers as it needs expects no more.
        """
        members = job.membership.members
        came_back = member.returns and member.rank in members
        if member.continues or came_back or is_repeated(job, member):
            return True
        is_same = _is_same_run(job, member, members)
        if is_same is False:
            return False
        is_restarted = member.restart > 0 and member.rank in members
        was_there = job.has_progress and (is_same or is_restarted)
        is_awaited = (
            0 <= member.rank < num_workers == job.membership.num_workers
            and member.rank not in job.met
            and not job.membership.has_begun
        )
        return bool(was_there or is_awaited)

    # ----- how long it is kept

    def tick(self, now_s: float) -> None:
        """Records since when jobs have no workers, and frees those that were kept long enough."""
        for job in self.jobs.values():
            is_idle = job.is_over or job.may_continue
            job.life.idle_s = (job.life.idle_s or now_s) if is_idle else None
        for job in self._ended():
            if now_s - _idle_since(job) >= self._limits.keep_ended_s:
                self._free(job)
        for job in self._interrupted():
            if now_s - _idle_since(job) >= self._limits.keep_interrupted_s:
                days = self._limits.keep_interrupted_s / 86400
                self._expire(job, f"it had no workers for {days:g} days (keep_interrupted_s)")

    def free_one(self) -> bool:
        """Frees the job that ended first; returns whether any has ended."""
        ended = self._ended()
        if ended:
            self._free(ended[0])
        return bool(ended)

    def make_room(self, name: str, most: int) -> None:
        """Frees a job if there are `most` jobs beside this one.

        The job that ended first, or else the one that has waited longest for workers.

        Raises:
            LimitError: All of them have live workers.
        """
        if name in self.jobs or len(self.jobs) < most or self.free_one():
            return
        waiting = self._interrupted()
        if not waiting:
            raise LimitError(
                f"{most} jobs have not ended on shard {self._index}: `psserver jobs` lists them, "
                "`psserver forget JOB` frees one"
            )
        self._expire(waiting[0], f"job {name!r} needs its place, one of {most}")

    def forget(self, name: str, *, is_forced: bool) -> tuple[bool, int]:
        """Deletes a job and its records; returns whether it was here, and its memory in bytes.

        Raises:
            ConfigError: Workers take part in it, and it is not forced.
        """
        job = self.jobs.get(name)
        if job is not None and job.membership.live() and not is_forced:
            who = ", ".join(
                job.membership.describe(rank) for rank in job.membership.live()[:WORKERS_NAMED]
            )
            raise ConfigError(
                f"job {name!r} has live workers on shard {self._index}: {who}; end them first, or "
                "give --force: then they end with an error"
            )
        found = [
            self.jobs.pop(name, None),
            self._ends.pop(name, None),
            self.lost.pop(digest(name), None),
        ]
        nbytes = 0 if job is None else job.memory_nbytes
        return any(entry is not None for entry in found), nbytes

    def _ended(self) -> list[Job]:
        """Returns the jobs that have ended, in the order of their ends."""
        return sorted((job for job in self.jobs.values() if job.is_over), key=_idle_since)

    def _interrupted(self) -> list[Job]:
        """Returns the jobs that wait for workers to continue them, the longest first."""
        return sorted((job for job in self.jobs.values() if job.may_continue), key=_idle_since)

    def _expire(self, job: Job, reason: str) -> None:
        self.expired.append((job, reason))
        self._free(job)

    def _free(self, job: Job) -> None:
        del self.jobs[job.name]
        if job.step > 0:
            self._ends.pop(job.name, None)
            self._ends[job.name] = job.end_in_words()
        while len(self._ends) > FORMER_MAX:
            del self._ends[next(iter(self._ends))]


def _idle_since(job: Job) -> float:
    """Returns since when a job has no workers; infinity if it was not seen without any."""
    return math.inf if job.life.idle_s is None else job.life.idle_s


def is_repeated(job: Job, member: Member) -> bool:
    """Returns whether a join has been sent twice."""
    rank = job.membership.rank_of(member.incarnation) if member.rank < 0 else member.rank
    held = None if rank is None else job.membership.members.get(rank)
    return held is not None and held.incarnation == member.incarnation


def _is_same_run(job: Job, member: Member, ranks: Iterable[int]) -> bool | None:
    """Returns whether the launch of a worker is that of some of `ranks`; None: it is not known."""
    known = {job.membership.members[rank].run_id for rank in ranks} - {""}
    return member.run_id in known if member.run_id and known else None


def _unheard(membership: Membership, member: Member) -> list[int]:
    """Returns other ranks that had no time yet to speak to a new process of the shard."""
    since_s = member.heard_s - min(SUSPECT_SHARE * membership.lease_s, SPEAKS_S)
    found = [membership.members[rank] for rank in membership.live() if rank != member.rank]
    return [one.rank for one in found if one.is_restored and one.heard_s > since_s]


def _has_finished(job: Job, member: Member) -> bool:
    """Returns whether the process that joins was a worker of the job's run, and has left it."""
    members = job.membership
    rank = members.rank_of(member.after) if member.after else None
    return rank is not None and rank in job.met and members.members[rank].presence is Presence.LEFT


def digest(name: str) -> str:
    """Returns a name for files of a job, 16 hex digits: a job's name may hold any character."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
