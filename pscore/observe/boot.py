"""Which boot of which machine this is: what shares a monotonic clock, and memory-mapped files."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19  # Among the fields of /proc/PID/stat behind the name: ticks since the boot.


def boot_id() -> str:
    """Returns the kernel's number of this boot; empty if it tells none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def began(pid: int) -> str:
    """Returns when a process began, as nothing but this process has it; empty: there is none.

    It counts from the boot: the time of day would be another one once the clock has been set.
    """
    try:
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"{boot_id()}/{about.rpartition(')')[2].split()[STARTED]}"
