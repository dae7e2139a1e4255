"""`psserver jobs` and `psserver forget`: list the jobs of shards, and free one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscore.errors import UnknownJobError
from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.job_state import State
from psserver.exits import CommandError, Exit
from psserver.remote import ask
from psserver.remote.status import Value, in_bytes, in_time, table_of

LOST = "lost"
ORDER = (State.LIVE.value, LOST, State.INTERRUPTED.value, State.RESTORED.value, State.ENDED.value)


def listed(replies: Sequence[pb.StatusReply]) -> list[dict[str, Any]]:
    """Returns the jobs of all shards as JSON values, those with live workers first.

    Memory is that of all shards together; the state is the first of `ORDER` that any shard names.
    """
    names = {job.job for reply in replies for job in reply.jobs}
    names |= {lost.job for reply in replies for lost in reply.lost}
    found = [_job(name, replies) for name in sorted(names)]
    return sorted(found, key=lambda job: ORDER.index(job["state"]))


def _job(name: str, replies: Sequence[pb.StatusReply]) -> dict[str, Any]:
    parts = [job for reply in replies for job in reply.jobs if job.job == name]
    reasons = [lost.reason for reply in replies for lost in reply.lost if lost.job == name]
    states = {part.state for part in parts} | ({LOST} if reasons else set())
    live = {w.rank for part in parts for w in part.workers if w.state == State.LIVE.value}
    return {
        "name": name,
        "state": min(states, key=ORDER.index),
        "step": max((part.step for part in parts), default=0),
        "num_live": len(live),
        "num_workers": max((part.num_workers for part in parts), default=0),
        "memory_nbytes": sum(part.memory_nbytes for part in parts),
        "silent_s": round(max((part.silent_s for part in parts), default=0.0), 1),
        "reasons": list(dict.fromkeys(reasons)),
    }


def show(jobs: Sequence[dict[str, Any]]) -> None:
    """Prints the jobs as a table, and why those are lost that are."""
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    if not jobs:
        console.print("no jobs")
        return
    columns: dict[str, Value] = {
        "job": lambda job: job["name"],
        "state": lambda job: job["state"],
        "step": lambda job: job["step"],
        "workers": lambda job: f"{job['num_live']} of {job['num_workers']}",
        "memory": lambda job: in_bytes(job["memory_nbytes"]),
        "heard": lambda job: f"{in_time(job['silent_s'])} ago" if job["num_workers"] else "",
    }
    console.print(table_of(None, columns, jobs))
    for job in jobs:
        for reason in job["reasons"]:
            console.print(f"{job['name']} is lost: {reason}", markup=False, soft_wrap=True)


def forget(
    addresses: Sequence[str], credentials: Credentials, name: str, *, is_forced: bool
) -> tuple[int, list[str]]:
    """Makes every shard forget a job.

    Returns:
        The bytes that its tables took, and where its checkpoints are now.

    Raises:
        CommandError: No shard has it, workers take part in it, or one does not answer.
    """
    jobs = listed(ask.statuses(addresses, credentials))
    live = next((job["num_live"] for job in jobs if job["name"] == name), 0)
    if live and not is_forced:  # Before any shard is asked: none shall be left without the others.
        raise CommandError(
            Exit.USAGE,
            f"job {name!r} has live workers ({live}); end them first, or give --force: then they "
            "end with an error",
        )
    replies = ask.forget(addresses, name, credentials, is_forced=is_forced)
    folders = [reply.checkpoints for reply in replies if reply.checkpoints]
    if not (folders or any(reply.found for reply in replies)):
        known = ", ".join(job["name"] for job in jobs) or "none"
        raise CommandError(
            Exit.USAGE, str(UnknownJobError(f"no job {name!r} on these shards; jobs: {known}"))
        )
    return sum(reply.memory_nbytes for reply in replies), folders
