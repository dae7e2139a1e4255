"""Statistics of the bytes that a worker has sent and received."""

from __future__ import annotations

from dataclasses import dataclass

from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import data_pb2
from psworker.replica.ports import PullBuffer


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Payload bytes sent and received, and numbers of pushes and pulls."""

    pushed_nbytes: int = 0
    pulled_nbytes: int = 0
    num_pushes: int = 0
    num_pulls: int = 0
    num_too_late: int = 0
    num_steps: int = 0  # Steps of the optimizer, that sent and received these bytes.


def ddp_nbytes(numel: int, num_workers: int) -> float:
    """Returns the bytes that a worker of DDP sends in a step, and receives: a ring of all workers.

    Args:
        numel: Elements of the model; they travel as float32.
        num_workers: Workers of the ring, 1 or more.
    """
    return FLOAT_NBYTES * numel * 2 * (num_workers - 1) / num_workers


def pulled_nbytes(reply: data_pb2.PullReply, pull_buffer: PullBuffer) -> int:
    """Returns the payload bytes of an answer; shared memory counts as if it had been sent."""
    if reply.fingerprint and not reply.whole:
        return sum(reply.deltas)
    if not reply.counts:
        return pull_buffer.weights.nbytes
    return sum(tensor.nbytes for tensor in (pull_buffer.weights, *pull_buffer.state))
