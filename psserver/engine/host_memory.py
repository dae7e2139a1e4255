"""Checks the free memory of the host before a table is made, so that no process is killed later."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from pscore.errors import LimitError


def require_host_memory(what: str, wanted: int, free_one: Callable[[], bool]) -> None:
    """Refuses an allocation that is larger than the free memory of this host.

    Args:
        what: The allocation, for the message.
        wanted: Its size in bytes.
        free_one: Frees memory that is kept without need; returns whether there was any.

    Raises:
        LimitError: It does not fit, even after `free_one` has freed all it can.
    """
    while wanted > (available := psutil.virtual_memory().available):
        if not free_one():
            raise LimitError(
                f"{what} needs {wanted} bytes of memory, {available} are left on its host"
            )
