"""Lists the publications of the shards with their readers, for `psserver readers`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pscore.pb.ps.v1 import publish_pb2 as pb
from psserver.remote.status import in_bytes


def listed(replies: Sequence[pb.ListReply]) -> list[dict[str, Any]]:
    """Returns each publication once, with the newest version that all shards have.

    Args:
        replies: The shards' answers.
    """
    found: dict[tuple[str, str], list[pb.PublicationStatus]] = {}
    for reply in replies:
        for one in reply.publications:
            found.setdefault((one.job, one.table), []).append(one)
    return [_combined(parts) for _, parts in sorted(found.items())]


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
    for one in publications:
        sent = ", ".join(f"{form} {in_bytes(n)}" for form, n in sorted(one["sent"].items()))
        sys.stdout.write(
            f"{one['job']}/{one['table']}: version {one['version']} (step {one['step']}), "
            f"{len(one['readers'])} readers; sent: {sent or 'nothing'}\n"
        )
        for reader in one["readers"]:
            sys.stdout.write(
                f"  {reader['host']} pid {reader['pid']}: version {reader['version']}, "
                f"{reader['lag']} behind ({reader['lag_steps']} steps, {reader['lag_s']:g} s), "
                f"{reader['resyncs']} resyncs\n"
            )
    if not publications:
        sys.stdout.write("nothing is published; psserver start --publish JOB:every=K\n")
