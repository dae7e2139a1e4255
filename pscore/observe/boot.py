"""The identity of a boot: its processes share a monotonic clock and memory-mapped files."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19  # Index of the start time, in ticks, in /proc/PID/stat behind the name.


def boot_id() -> str:
    """Returns the kernel's number of this boot; empty if there is none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def began(pid: int) -> str:
    """Returns a unique name of a process by its start; empty if there is no such process.

    The start counts from the boot: the time of day changes when the clock is set.
    """
    try:
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"{boot_id()}/{about.rpartition(')')[2].split()[STARTED]}"
