"""The last checkpoint before a stop, for which a shard that is asked to end still serves.

An engine stops all shards at once. The start of shard 0 takes the checkpoint, and announces to the
others when it begins and when it is over; until then each of them serves as before.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

# Share of the time in which shard 0, perhaps asked to end later, has to announce it.
WORD_PART = 0.5
RECENT_S = 10.0  # One that was over so recently is of the same stop.


class LastCheckpoint:
    """The last checkpoint before a stop, as one shard hears of it; used in its event loop."""

    def __init__(self) -> None:
        """Represents none so far."""
        self._has_begun = asyncio.Event()
        self._is_over = asyncio.Event()
        self._over_s = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether that of the same stop is over."""
        return time.monotonic() - self._over_s < RECENT_S

    def note(self, *, is_over: bool) -> None:
        """Records that it begins, or is over."""
        if is_over:
            self._over_s = time.monotonic()
            self._is_over.set()
            self._has_begun.set()
        else:
            self._is_over.clear()
            self._has_begun.set()

    async def wait(self, limit_s: float) -> None:
        """Returns when it is over, after `limit_s` at most; after half of that if none begins."""
        if self.is_over:
            return
        if self._is_over.is_set():  # That of an earlier stop of shard 0.
            self._is_over.clear()
            self._has_begun.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                async with asyncio.timeout(WORD_PART * limit_s):
                    await self._has_begun.wait()
                await self._is_over.wait()
