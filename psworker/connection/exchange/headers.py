"""Headers of a worker's pushes, pulls and uploads, as the protocol defines them."""

from __future__ import annotations

from collections.abc import Sequence

from pscore.net import wire
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Push, Role, SliceSpec
from psworker.replica.ports import PullBuffer

WAIT_MS = 5_000  # A pull that cannot be answered by then is answered with the reason.


def push_header(
    spec: SliceSpec,
    push: Push,
    sender: data_pb2.Sender,
    compressor: str,
    *,
    shared: bool,
    minibatch: int,
) -> data_pb2.PushHeader:
    """Returns the header of a push.

    Args:
        spec: The slice.
        push: The push, for the shard's decision.
        sender: This worker and the table.
        compressor: Name of the compressor; empty: the payload is uncompressed.
        shared: Whether the shard reads the payload in shared memory.
        minibatch: Number of the gradient's minibatch; -1: it names none.
    """
    return data_pb2.PushHeader(
        sender=sender,
        slice=spec.index,
        step=push.step,
        base_version=push.base_version,
        role=data_pb2.Role.Name(int(push.role)),
        samples=push.samples,
        present=wire.pack_bits(push.present, len(spec.segments)),
        hyper=() if push.hyper is None else push.hyper.ravel().tolist(),
        shared=shared,
        may_wait=shared and push.may_wait,
        minibatch=minibatch + 1,
        compressor=compressor,
    )


def pull_header(
    index: int,
    clock: int,
    min_version: int,
    buffer: PullBuffer,
    sender: data_pb2.Sender,
    *,
    with_state: bool,
) -> data_pb2.PullHeader:
    """Returns the header of a pull.

    Args:
        index: Index of the slice.
        clock: Number of this worker's pushes that the answer waits for.
        min_version: The oldest version that will do.
        buffer: Memory for the answer.
        sender: This worker and the table.
        with_state: Whether the optimizer's state comes along.
    """
    return data_pb2.PullHeader(
        sender=sender,
        slice=index,
        clock=clock,
        min_version=min_version,
        with_state=with_state,
        wait_ms=WAIT_MS,
        begins=buffer.begins,
        look=buffer.is_look,
    )


def upload_header(
    index: int, role: Role, counts: Sequence[int], step: int, sender: data_pb2.Sender
) -> data_pb2.PushHeader:
    """Returns the header of an upload: the weights of one slice, or its weights and state.

    Args:
        index: Index of the slice.
        role: `WEIGHTS` or `STATE`.
        counts: Optimizer steps of each segment.
        step: The step of the weights.
        sender: This worker and the table.
    """
    return data_pb2.PushHeader(
        sender=sender,
        slice=index,
        step=step,
        role=data_pb2.Role.Name(int(role)),
        counts=counts,
    )
