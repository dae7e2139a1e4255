"""Thresholds that decide which thread of a shard does which work.

A switch of threads costs 20 to 50 us in Python. Work that takes less stays on the thread that has
it, and longer work goes to another thread, if a core is free for that one. The values were measured
on a machine of 2 cores.

The thresholds of a worker are in `pscore/placement.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW_CORES = 2  # No more than the connections on which one worker pushes to a shard of its host.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The thresholds of one shard, chosen once, at its start."""

    inline_numel_max: int = 1 << 15
    """Largest slice, in elements, whose actions run at once on the thread that decided them.

    128 KiB of float32 take about 20 us, less than a switch of threads. The thread holds the
    engine's lock meanwhile. Gain: 754 -> 881 to 914 steps/s of a small model in shared memory, by
    `python -m benchmarks.small`.
    """

    queued_nbytes_min: int = 256 << 10
    """Smallest payload of an answer, in bytes, that is left to the connection's writing thread.

    Its checksum and copy take about 50 us, as long as a switch of threads. Measured together with
    `steps_on_receive_thread`; either alone gains little.
    """

    steps_on_receive_thread: bool = False
    """Whether the thread that has received an uncompressed gradient also adds it and makes the step
    that follows, whatever the size of the slice.

    The gradient is then still in that core's cache. Worth it on few cores, where the threads that
    receive keep all cores busy. Gain over TCP, one worker and one shard: 63 -> 70 % of the rate of
    plain sockets; with two workers and two shards 5 % slower. Measured by
    `python -m benchmarks.transport --planes tcp`.
    """

    @classmethod
    def for_cores(cls, num_cores: int) -> Placement:
        """Returns the thresholds of a shard that has `num_cores` cores for itself."""
        return cls(steps_on_receive_thread=num_cores <= FEW_CORES)
