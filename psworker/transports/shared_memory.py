"""Pushes and pulls through shared memory, within one host and user; a Unix socket carries notices.

The worker passes the file descriptor of its gradients to the shard and receives that of the table's
weights (pscore/memory/segment.py). A push then says that a gradient is ready; an answer to a pull
says which of a slice's two buffers holds the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pscore.errors import PacelineError
from pscore.memory import streaming
from pscore.memory.segment import Segment, WeightsMap
from pscore.net import sockets, tls
from pscore.net.attach import attach as pass_segment
from pscore.net.endpoint import Endpoint, connect
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import FloatArray, IntArray, SliceSpec
from psworker.transports.base import PullCall
from psworker.transports.retry import RetryPolicy
from psworker.transports.socket_base import SocketTransport


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A table whose gradients and weights lie in shared memory."""

    sender: pb.Sender
    grads: Segment
    layout: WeightsMap
    specs: Sequence[SliceSpec]
    weights: Segment | None = None
    # Each slice's two buffers and their versions. Both are of one segment, also for a thread that
    # reads them while the table is attached again.
    maps: dict[int, tuple[list[FloatArray], IntArray]] = field(default_factory=dict)
    # Copies weights; the finiteness result is ignored.
    copy: Callable[[FloatArray, FloatArray], bool] = field(init=False)

    def __post_init__(self) -> None:
        self.copy = streaming.copier(4 * sum(spec.numel for spec in self.specs))


class SharedMemoryTransport(SocketTransport):
    """Shared memory, and a Unix socket for notices and for tables that are not attached."""

    name = "local"
    shares_memory = True

    def __init__(self, endpoint: Callable[[], Endpoint], policy: RetryPolicy) -> None:
        """Starts to connect.

        Args:
            endpoint: Returns the shard's present addresses; asked again when a connection breaks.
        """
        self._attachments: dict[int, Attachment] = {}  # By table.
        super().__init__(endpoint, policy)

    def pull(self, call: PullCall) -> None:
        """Requests one slice, in the frame of its push if that is kept."""
        call.header.shared = call.header.sender.table in self._attachments
        super().pull(call)

    def attach(self, sender: pb.Sender, grads: Segment, specs: Sequence[SliceSpec]) -> None:
        """Shares a table's gradients with the shard, and maps its weights.

        Args:
            sender: This worker, and the table.
            grads: The gradients of the whole table, float32.
            specs: The table's slices on this shard, in the order of their index.

        Raises:
            PacelineError: The shard cannot map them.
        """
        attachment = Attachment(sender=sender, grads=grads, layout=WeightsMap(specs), specs=specs)
        attach(self._endpoint(), attachment)
        self._attachments[sender.table] = attachment

    def _connect(self) -> tls.Stream:
        endpoint = self._endpoint()
        connection = connect(endpoint, is_local=True)
        try:
            for attachment in list(self._attachments.values()):
                attach(endpoint, attachment)
        except PacelineError:
            connection.close()
            raise
        return connection

    def _land(self, call: PullCall, reply: pb.PullReply, incoming: sockets.Incoming) -> bool:
        if reply.buffer:
            incoming.read_into()
            if not call.copy_on_wait:
                return self._copy(call, reply)
            call.fetch = partial(self._copy, call, reply)
            return True
        if call.copy_on_wait:  # Slow readers of other versions hold both mapped buffers.
            payload = bytearray(incoming.payload_nbytes)
            incoming.read_into(memoryview(payload))
            call.fetch = partial(_land_on_wait, call, reply, memoryview(payload))
            return True
        return super()._land(call, reply, incoming)

    def _copy(self, call: PullCall, reply: pb.PullReply) -> bool:
        """Copies weights from shared memory; returns False if they changed meanwhile."""
        attachment = self._attachments[call.header.sender.table]
        buffers, versions = attachment.maps[call.header.slice]
        number = reply.buffer - 1
        attachment.copy(buffers[number], call.weights)
        return bool(versions[number] == reply.version)


def attach(endpoint: Endpoint, attachment: Attachment) -> None:
    """Passes the gradients' descriptor to the shard and maps the weights of its answer.

    Raises:
        TransportError: The connection failed.
        RemoteProtocolError: The shard refused, or answered something else.
    """
    layout, request = attachment.layout, pb.Attach(sender=attachment.sender)
    weights = pass_segment(endpoint, request, attachment.grads, layout.nbytes, may_be_file=True)
    attachment.weights = weights
    for spec in attachment.specs:
        maps = layout.buffers(weights, spec.index), layout.versions(weights, spec.index)
        attachment.maps[spec.index] = maps


def _land_on_wait(call: PullCall, reply: pb.PullReply, payload: memoryview) -> bool:
    call.land(reply, payload)
    return True
