"""The changes from one status to the next in words: faults, recoveries, joins, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

Status = dict[str, Any]
GOOD, BAD, INFO = "good", "bad", "info"


class HistoryEvent(NamedTuple):
    """One change."""

    kind: str  # good, bad, info
    text: str


def changes(former: Status, status: Status) -> Iterator[HistoryEvent]:
    """Yields what has changed between two values of `psserver.remote.status.combine`."""
    yield from _of_shards(former, status)
    jobs = {job["name"]: job for job in former["jobs"]}
    if status["silent"] and not status["jobs"]:
        return
    for job in status["jobs"]:
        if job["name"] in jobs:
            yield from _of_job(jobs[job["name"]], job)
        else:
            yield HistoryEvent(INFO, f"job {job['name']} is there")


def _of_shards(former: Status, status: Status) -> Iterator[HistoryEvent]:
    known = {shard["index"]: shard for shard in former["shards"]}
    silent = {shard["index"] for shard in former["silent"]}
    for shard in status["silent"]:
        if shard["index"] not in silent:
            yield HistoryEvent(BAD, f"shard {shard['index']} at {shard['address']} does not answer")
    for shard in status["shards"]:
        index, pid = shard["index"], shard["pid"]
        before = known.get(index)
        if index in silent:
            yield HistoryEvent(GOOD, f"shard {index} answers again (process {pid})")
        elif before is not None and before["pid"] != pid:
            yield HistoryEvent(
                BAD,
                f"shard {index} died and was started again (process {before['pid']}, now {pid})",
            )
        if before is not None and shard["num_recoveries"] > before["num_recoveries"]:
            yield HistoryEvent(GOOD, f"shard {index} has continued its jobs from its journal")


def _of_job(former: dict[str, Any], job: dict[str, Any]) -> Iterator[HistoryEvent]:
    name = job["name"]
    workers = {worker["rank"]: worker for worker in former["workers"]}
    for worker in job["workers"]:
        where = f"worker {worker['rank']} of job {name}"
        before = workers.get(worker["rank"])
        if before is None or (before["state"] != "live" and worker["state"] == "live"):
            yield HistoryEvent(INFO if before is None else GOOD, f"{where} has joined")
        elif before["state"] != worker["state"]:
            is_lost = worker["state"] == "lost"
            end = "was lost or ended with an error" if is_lost else "has left"
            yield HistoryEvent(BAD if is_lost else INFO, f"{where} {end} at step {worker['step']}")
        elif before["pid"] != worker["pid"]:
            yield HistoryEvent(GOOD, f"{where} has come back (process {worker['pid']})")
    modes = {table["name"]: table["mode"] for table in former["tables"]}
    for table in job["tables"]:
        if modes.get(table["name"], table["mode"]) != table["mode"]:
            yield HistoryEvent(
                INFO, f"job {name} is in mode {table['mode']} from step {job['step']}"
            )
    age_s, old_s = job["checkpoint_age_s"], former["checkpoint_age_s"]
    if age_s is not None and (old_s is None or age_s < old_s):
        yield HistoryEvent(GOOD, f"checkpoint of job {name}, about step {job['step']}")
