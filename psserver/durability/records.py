"""Records: the workers of a job as JSON in journals, and writing files through to the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscore.json_text import count_of
from psserver.decisions.membership import Member, Presence
from psserver.decisions.shard import Job

# The largest values of fields `int32`, `uint32` and `fixed64` of messages; incarnations and
# instances are drawn up to the last.
INT32_MAX = (1 << 31) - 1
UINT32_MAX = (1 << 32) - 1
RANDOM_MAX = (1 << 64) - 1


def members_to_json(job: Job) -> list[dict[str, Any]]:
    """Returns the workers of a job as JSON can hold them, in the order in which they joined."""
    members = sorted(job.membership.members.values(), key=lambda member: member.joined_s)
    return [
        {
            "rank": member.rank,
            "incarnation": member.incarnation,
            "spent": list(member.spent),
            "restart": member.restart,
            "host": member.host,
            "pid": member.pid,
            "presence": member.presence.value,
            "run_id": member.run_id,
            "came_late": member.came_late,
        }
        for member in members
    ]


def members_of(meta: dict[str, Any], now_s: float) -> list[Member]:
    """Returns the workers in a record; those that were live have a new lease.

    Raises:
        ConfigError: A number is not a count.
        LookupError, TypeError, ValueError: The record has another form.
    """
    return [
        Member(
            rank=count_of(entry["rank"], "a rank", most=meta["num_workers"] - 1),
            incarnation=count_of(entry["incarnation"], "an incarnation", most=RANDOM_MAX),
            spent=incarnations_of(entry.get("spent", ())),
            restart=count_of(entry["restart"], "a number of restarts", most=UINT32_MAX),
            host=str(entry["host"]),
            pid=count_of(entry["pid"], "a process number", most=UINT32_MAX),
            heard_s=now_s,
            presence=Presence(entry["presence"]),
            run_id=str(entry.get("run_id", "")),
            came_late=bool(entry.get("came_late")),
            joined_s=float(place - len(meta["members"])),  # Before all that join now.
        )
        for place, entry in enumerate(meta["members"])
    ]


def incarnations_of(spent: Sequence[object]) -> tuple[int, ...]:
    """Returns the incarnations in a record; raises ConfigError if one of them is not one."""
    return tuple(count_of(one, "an incarnation", most=RANDOM_MAX) for one in spent)


def sha256_of(path: Path) -> str:
    """Returns the hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Writes a file or folder to the disk, with the changes that were made through its memory.

    Raises:
        OSError: The disk is full or fails.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
