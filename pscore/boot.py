"""Which boot of which machine this is: what shares a monotonic clock, and memory-mapped files."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Returns the kernel's number of this boot; empty if it tells none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
