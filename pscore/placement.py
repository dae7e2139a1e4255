"""Thresholds that decide how a worker moves its gradients and weights.

The thresholds of a shard are in `psserver/engine/placement.py`. The values were measured on a
machine of 2 cores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlacement:
    """The thresholds of every worker."""

    push_connections_local: int = 2
    """Connections on which a worker pushes over TCP to a shard of its own host.

    Within one host cores are the limit and not the link: while one connection brings a slice, the
    shard makes the step of another's. Gain: 72 -> 76 to 78 % of the rate of plain sockets for one
    tensor, 60 -> 64 % for 161 tensors, by `python -m benchmarks.transport --planes tcp`.
    """

    streamed_nbytes_min: int = 32 << 20
    """Smallest model, in bytes, that is copied past the caches (non-temporal stores).

    It is the size of a large third-level cache: a smaller model is read again from there. Gain:
    29.5 -> 24.3 ms a step for one tensor of 102 MB, 40.8 -> 33.4 ms for 161 tensors, through shared
    memory, by `python -m benchmarks.transport --planes local`.
    """

    grad_view_nbytes_min: int = 256 << 10
    """Smallest `.grad`, in bytes, that becomes a view of the flat gradients, where that is allowed.

    A view costs a few microseconds of Python a step, the copy of a smaller gradient less. Gain: 0.7
    to 1.0 instead of 1.7 gradients' worth of memory above plain torch in ssgd with
    two workers.
    """

    together_nbytes_max: int = 1 << 20
    """Bytes of gradients whose notices leave together, for the shards to read in shared memory.

    Several small slices are then one system call and one switch of threads, and the shard still
    begins with a large slice while the next one is prepared.
    """

    mapped_nbytes_min: int = 1 << 20
    """Smallest state of a local update, in bytes, that is mapped and not taken from the heap.

    In the heap it would lie between gradients, and the allocator could neither join nor return the
    memory of those. Gain: in ssd 2.7 to 3.7 instead of 4.7 gradients' worth of memory above plain
    torch, together with the views, in the same trial.
    """


WORKER = WorkerPlacement()
