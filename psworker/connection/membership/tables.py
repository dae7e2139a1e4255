"""Declares a table of a job at every shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pscore.errors import ShardMapError, StateLostError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.types import Origin
from psworker.connection.shard_link import Link


def declare(
    links: Sequence[Link], request: pb.DefineRequest, progress: Mapping[str, int], *, again: bool
) -> tuple[int, Origin]:
    """Returns the table's index, the same at every shard, and where its steps begin.

    Args:
        links: One per shard, in the order of the shards.
        request: The worker and its declaration.
        progress: Step of each table that had weights when the worker joined.
        again: Whether the job has this table already.

    Raises:
        JobMismatchError: The job's table of this name is a different one; names the difference.
        StateLostError: A shard does not know a table that was declared before.
        ShardMapError: The shards number their tables differently.
    """
    name = request.table.name
    step = progress.get(name)
    tables, origins = set(), []
    for link in links:
        reply = link.call(link.control.Define, request)
        tables.add(reply.table)
        origins.append((reply.clock, reply.step))
        if (again and reply.created) or (step is not None and not reply.has_weights):
            raise _without_weights(link.address, request.job, name, step)
    if len(tables) != 1:
        raise ShardMapError(f"table {name!r} has different numbers on different shards: {tables}")
    return int(tables.pop()), Origin(*max(origins))  # A shard may have no slice of the table.


def _without_weights(address: str, job: str, table: str, step: int | None) -> StateLostError:
    known = "" if step is None else f"; other shards have them at step {step}"
    return StateLostError(
        f"the shard at {address} is without the weights of {table!r} of job {job!r}: it was "
        f"started again, or the job was forgotten there{known}. Restore a checkpoint with "
        f"`psserver restore DIR --job {job}`, or run `psserver forget {job}` to start over; with "
        "--state-dir shards keep what they have"
    )
