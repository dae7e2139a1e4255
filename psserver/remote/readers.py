"""Lists the publications of the shards with their readers, for `psserver readers`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pscore.pb.ps.v1 import publish_pb2 as pb
from psserver.exits import CommandError, Exit
from psserver.remote.status import published_lines


def listed(answers: Sequence[pb.ListReply | CommandError]) -> list[dict[str, Any]]:
    """Returns each publication once, with the newest version that all shards have.

    Args:
        answers: The shards' answers; those that are errors are left out.
    """
    found: dict[tuple[str, str], list[pb.PublicationStatus]] = {}
    for answer in answers:
        for one in () if isinstance(answer, CommandError) else answer.publications:
            found.setdefault((one.job, one.table), []).append(one)
    return [_combined(parts) for _, parts in sorted(found.items())]


def add(status: dict[str, Any], answers: Sequence[pb.ListReply | CommandError]) -> None:
    """Adds to each job of a status (`status.combine`) what is published of it."""
    found = listed(answers)
    for job in status["jobs"]:
        job["published"] = [one for one in found if one["job"] == job["name"]]


def require_all(answers: Sequence[object]) -> None:
    """Raises an error that names all shards that have not answered.

    Raises:
        CommandError: One of them is an error.
    """
    silent = [answer.message for answer in answers if isinstance(answer, CommandError)]
    if silent:
        raise CommandError(Exit.NO_ANSWER, "; ".join(dict.fromkeys(silent)))


def _combined(parts: Sequence[pb.PublicationStatus]) -> dict[str, Any]:
    slowest = min(parts, key=lambda part: part.newest)
    nbytes: Counter[str] = Counter()
    for part in parts:
        nbytes += Counter(part.nbytes)
    readers: dict[int, dict[str, Any]] = {}
    for part in parts:
        for one in part.readers:
            held = readers.setdefault(one.reader.id, _reader(one))
            held["lag_s"] = max(held["lag_s"], round(one.lag_s, 1))
    return {
        "job": slowest.job,
        "table": slowest.table,
        "lineage": max(part.lineage for part in parts),
        "version": slowest.newest,
        "step": slowest.step,
        "every": slowest.every,
        "exact": slowest.exact,
        "sent": dict(nbytes),
        "memory_nbytes": sum(part.memory_nbytes for part in parts),
        "readers": list(readers.values()),
    }


def _reader(one: pb.ReaderStatus) -> dict[str, Any]:
    return {
        "host": one.reader.host,
        "pid": one.reader.pid,
        "version": one.reader.number,
        "lag": one.lag,
        "lag_steps": one.lag_steps,
        "lag_s": round(one.lag_s, 1),
        "resyncs": one.reader.resyncs,
        "silent_s": round(one.silent_s, 1),
    }


def show(publications: Sequence[dict[str, Any]]) -> None:
    """Prints publications and their readers as text."""
    for line in published_lines(publications, sys.maxsize):
        sys.stdout.write(f"{line}\n")
    if not publications:
        sys.stdout.write(
            "nothing is published: no job has joined, or none that `psserver start --publish "
            "JOB:every=K` or publish_every= in its script names\n"
        )
