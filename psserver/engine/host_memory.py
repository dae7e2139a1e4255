"""The free memory of the host or container, asked before a large allocation.

Without the question the kernel would end the shard later. In a container the limit of its control
group (cgroup) is below the host's memory, and /proc/meminfo shows the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from pscore.errors import LimitError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# Where a limit, the use, and the reclaimable part of the use stand: cgroup v2, then v1.
FILES_V2 = ("memory.max", "memory.current", "inactive_file")
FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_nbytes() -> int:
    """Returns the bytes that this process can still take: of the host, or of a tighter cgroup."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def require_host_memory(what: str, wanted: int, free_one: Callable[[], bool]) -> None:
    """Refuses an allocation that is larger than the free memory of this host or container.

    Args:
        free_one: Frees memory that is kept without need; returns whether there was any.

    Raises:
        LimitError: It does not fit, even after `free_one` has freed all it can.
    """
    while wanted > (available := available_nbytes()):
        if not free_one():
            raise LimitError(
                f"{what} needs {wanted} bytes of memory, {available} are left on its host"
            )


def _left_in_cgroups() -> Iterator[int]:
    """Yields the bytes left in each cgroup around this process that has a limit.

    A container usually sees its own cgroup as the root of `CGROUPS`, also where `OWN_CGROUPS`
    names another path, so both are read. A cgroup without readable files has no limit for us.
    """
    for root, path, files in _own_cgroups():
        folder = root / path.lstrip("/")
        for cgroup in (folder, *folder.parents):
            left = _left(cgroup, files)
            if left is not None:
                yield left
            if cgroup == root:
                break


def _own_cgroups() -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Yields root, path and names of files of the cgroups that limit this process's memory."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # Not Linux, or /proc is hidden.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield CGROUPS, path, FILES_V2
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory", path, FILES_V1


def _left(cgroup: Path, files: tuple[str, str, str]) -> int | None:
    """Returns limit less use of one cgroup; None without a limit. Page cache is not counted."""
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in files[:2])
        if limit == "max":
            return None
        rows = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        reclaimable = next((int(value) for name, value in rows if name == files[2]), 0)
    except OSError:
        return None
    return max(int(limit) - int(used) + reclaimable, 0)
