"""The wait of one RPC at a barrier."""

from __future__ import annotations

import asyncio
import contextlib

from psserver.decisions.shard import Job
from psserver.engine.barrier_waits import Arrival
from psserver.engine.engine import Engine

WAIT_S_MAX = 10.0  # One call; the worker asks again.


async def wait_at_barrier(
    engine: Engine,
    job: Job,
    name: str,
    number: int,
    rank: int,
    wait_s: float,
    value: float = 0.0,
) -> Arrival:
    """Arrives at round `number` of a barrier, and waits until it is open or time is up.

    Args:
        engine: The shard.
        job: The worker's job.
        name: Of the barrier.
        number: Of the round.
        rank: Of the worker.
        wait_s: The longest wait, in seconds; at most `WAIT_S_MAX`.
        value: The worker's number; all workers get the largest of a round.
    """
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(woken.set)

    deadline_s = engine.now() + min(wait_s, WAIT_S_MAX)
    arrival = engine.barriers.arrive(job, name, number, rank, value, wake)
    try:
        while not arrival.is_open and (left_s := deadline_s - engine.now()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), left_s)
            woken.clear()
            arrival = engine.barriers.arrive(job, name, number, rank, value, wake)
    finally:
        engine.barriers.stop_waiting(job, name, wake)
    return arrival
