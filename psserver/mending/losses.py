"""Notices shards that have come back without jobs that they had; it asks nobody itself.

A shard's `instance` stays the same while its journals do, so another one means that all is lost
which was not saved elsewhere. A shard that refuses its journal of a job reports that. A job that
was forgotten or has ended is missing nowhere, nor is one whose weights the workers have: they fill
the shard again. Nor is one whose workers reach the shard: then a standby has it, which nobody has
heard of here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.job_state import State
from psserver.decisions.membership import Presence
from psserver.remote.checkpoint import holds_weights


@dataclass(slots=True)
class _HeldJobs:
    """A shard as it was when it last answered."""

    instance: int
    held: set[str]  # Jobs of which it has had weights.
    lost: set[str] = field(default_factory=set)  # Those that it no longer has.
    is_late: bool = False  # Whether a standby may have had its place since then.


class Losses:
    """The jobs that the shards of a cluster have had, and have lost.

    Attributes:
        elsewhere: The shards that workers reach, with a job that the process here lacks.
    """

    def __init__(self) -> None:
        self._shards: dict[int, _HeldJobs] = {}
        self.elsewhere: set[int] = set()

    @property
    def has_any(self) -> bool:
        """Whether some shard lacks a job, as far as is known."""
        return any(shard.lost for shard in self._shards.values())

    def look(
        self, answers: Sequence[pb.StatusReply | None], *, is_late: bool = False
    ) -> dict[str, list[int]]:
        """Returns the jobs that some shards have lost, with those shards; none before all answer.

        Args:
            answers: The status of each shard, in order; None: it does not answer.
            is_late: Whether a shard may have got a standby since the last look, and that its place:
                then what its next answer shows is no loss.
        """
        for known in self._shards.values():
            known.is_late = known.is_late or is_late
        there = [(index, answer) for index, answer in enumerate(answers) if answer is not None]
        for index, answer in there:
            self._note(index, answer)
        if len(there) < len(answers):
            return {}
        jobs = [job for _, answer in there for job in _running(answer)]
        kept = {job.job for job in jobs}
        tables = _tables(jobs)
        on_workers = {job.job for job in jobs if is_held(job)}
        missing: dict[str, list[int]] = {}
        self.elsewhere = set()
        for index, answer in there:
            shard = self._shards[index]
            whole = {job.job for job in answer.jobs if _is_whole(job, tables)}
            shard.lost = (shard.lost & kept) - whole
            others = {job.job for job in jobs if _is_reached(job, index, answer.shard.instance)}
            if shard.lost & others:
                self.elsewhere.add(index)
            for job in sorted(shard.lost - on_workers - others):
                missing.setdefault(job, []).append(index)
        return missing

    def add(self, job: str, answers: Sequence[pb.StatusReply]) -> None:
        """Records that shards have had a job, as a checkpoint of it has found since the last look.

        Args:
            answers: The status of each shard then. One that has come back since, is left out.
        """
        for index, answer in enumerate(answers):
            known = self._shards.setdefault(index, _HeldJobs(answer.shard.instance, set()))
            if known.instance == answer.shard.instance and job in jobs_with_weights(answer):
                known.held.add(job)

    def _note(self, index: int, answer: pb.StatusReply) -> None:
        instance, held = answer.shard.instance, jobs_with_weights(answer)
        known = self._shards.setdefault(index, _HeldJobs(instance, held))
        if known.instance != instance and not known.is_late:
            known.lost |= known.held
        known.lost = (known.lost | {one.job for one in answer.lost}) - held
        known.instance, known.held, known.is_late = instance, held, False


def torn(answers: Sequence[pb.StatusReply]) -> dict[str, list[int]]:
    """Returns the jobs that some shards have updated and of which others, named, lack weights.

    Their workers wait. A job that starts looks like that for a moment, until rank 0 has sent all
    weights: only who knows better may take it for lost.
    """
    bare: dict[str, list[int]] = {}
    updated: set[str] = set()
    for index, answer in enumerate(answers):
        for job in _running(answer):
            versions = [table.version_min for table in job.tables if table.num_slices]
            if versions and min(versions) < 0:
                bare.setdefault(job.job, []).append(index)
            elif versions and min(versions) > 0:
                updated.add(job.job)
    return {job: shards for job, shards in bare.items() if job in updated}


def _running(answer: pb.StatusReply) -> list[pb.JobStatus]:
    """Returns the jobs of a shard that have not ended, and of which a checkpoint can exist."""
    return [job for job in answer.jobs if job.state != State.ENDED.value and holds_weights(job)]


def _tables(jobs: Sequence[pb.JobStatus]) -> dict[str, set[str]]:
    """Returns the names of the tables that some shard has, by job."""
    found: dict[str, set[str]] = {}
    for job in jobs:
        found.setdefault(job.job, set()).update(table.name for table in job.tables)
    return found


def _is_whole(job: pb.JobStatus, tables: Mapping[str, set[str]]) -> bool:
    """Returns whether a shard has all that can be there of a job, be it without a slice."""
    there = {table.name for table in job.tables}
    return there >= tables.get(job.job, there) and not any(
        table.num_slices and table.version_min < 0 for table in job.tables
    )


def _is_reached(job: pb.JobStatus, index: int, instance: int) -> bool:
    """Returns whether a live worker reaches a shard, and not the process with this instance."""
    live = [one.reached for one in job.workers if one.state == Presence.LIVE.value]
    return any(len(found) > index and found[index] not in (0, instance) for found in live)


def is_held(job: pb.JobStatus) -> bool:
    """Returns whether workers take part that have all of a job, and fill the shard."""
    return job.state == State.LIVE.value and any(table.on_workers for table in job.tables)


def jobs_with_weights(answer: pb.StatusReply) -> set[str]:
    """Returns the jobs of which a shard has slices, all of them with weights."""
    return {job.job for job in answer.jobs if _has_weights(job)}


def _has_weights(job: pb.JobStatus) -> bool:
    tables = [table for table in job.tables if table.num_slices]
    return bool(tables) and all(table.version_min >= 0 for table in tables)
