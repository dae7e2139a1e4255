"""The wait of one RPC at a barrier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from psserver.engine.barrier_waits import Arrival
from psserver.engine.job import RunningJob

WAIT_S_MAX = 10.0  # One call; the worker asks again.


async def wait_at_barrier(
    job: RunningJob,
    now: Callable[[], float],
    name: str,
    number: int,
    rank: int,
    wait_s: float,
    value: float = 0.0,
    *,
    holds: bool = False,
) -> Arrival:
    """Arrives at round `number` of a barrier, and waits until it is open or time is up.

    Args:
        now: The engine's clock, in seconds.
        wait_s: The longest wait, in seconds; at most `WAIT_S_MAX`.
        value: The worker's number; all workers get the largest of a round.
        holds: Whether no worker joins from then on until the workers meet again.
    """
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(woken.set)

    deadline_s = now() + min(wait_s, WAIT_S_MAX)
    arrival = job.barriers.arrive(name, number, rank, value, wake, holds=holds)
    try:
        while not arrival.is_open and (left_s := deadline_s - now()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), left_s)
            woken.clear()
            arrival = job.barriers.arrive(name, number, rank, value, wake, holds=holds)
    finally:
        job.barriers.stop_waiting(name, wake)
    return arrival
