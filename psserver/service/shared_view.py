"""One view of the shard for all readers that ask for it at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SHARE = 0.1  # Largest fraction of the event loop's time that goes into making views.


class SharedView(Generic[T]):
    """A value that is rebuilt for its readers, so that many readers cost as few do.

    A reader gets a value made after it has asked, never before: it sees every change that was made
    before it asked.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        """Makes nothing yet; `make` is called on the event loop, as seldom as `SHARE` demands."""
        self._make = make
        self._next: asyncio.Task[T] | None = None
        self._due_s = 0.0

    async def get(self) -> T:
        """Returns a value that is made from now on."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
        return await asyncio.shield(self._next)

    async def _make_next(self) -> T:
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        self._next = None  # A later reader has to see what happens from here on.
        begin_s = time.monotonic()
        try:
            return self._make()
        finally:
            end_s = time.monotonic()
            self._due_s = end_s + (end_s - begin_s) * (1 / SHARE - 1)
