"""Records: the workers of a job as JSON in journals, and writing files through to the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from psserver.decisions.membership import Member, Presence
from psserver.decisions.shard import Job


def members_to_json(job: Job) -> list[dict[str, Any]]:
    """Returns the workers of a job as JSON can hold them."""
    return [
        {
            "rank": member.rank,
            "incarnation": member.incarnation,
            "spent": list(member.spent),
            "restart": member.restart,
            "host": member.host,
            "pid": member.pid,
            "presence": member.presence.value,
        }
        for member in job.membership.members.values()
    ]


def members_of(meta: dict[str, Any], now_s: float) -> list[Member]:
    """Returns the workers in a record; those that were live have a new lease."""
    return [
        Member(
            rank=entry["rank"],
            incarnation=entry["incarnation"],
            spent=tuple(entry.get("spent", ())),
            restart=entry["restart"],
            host=entry["host"],
            pid=entry["pid"],
            heard_s=now_s,
            presence=Presence(entry["presence"]),
        )
        for entry in meta["members"]
    ]


def sync(path: Path) -> None:
    """Writes a file or a folder through to the disk.

    Raises:
        OSError: The disk refuses.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
