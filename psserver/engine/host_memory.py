"""What the host has left: it is asked before memory is taken, and not noticed by a kill later."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from pscore.errors import LimitError


def require_host_memory(what: str, wanted: int, free_one: Callable[[], bool]) -> None:
    """Refuses what would take more memory than this host has.

    Args:
        what: It, for the message.
        wanted: Bytes that it takes.
        free_one: Frees the memory of something that is kept without need; returns whether it did.

    Raises:
        LimitError: There is not so much, also when all of that is freed.
    """
    while wanted > (available := psutil.virtual_memory().available):
        if not free_one():
            raise LimitError(
                f"{what} wants {wanted} bytes of memory, {available} are left on its host"
            )
