"""The part that TCP and shared memory have in common: pushes and pulls as frames on sockets.

The other side is psserver/service/data_socket.py. Gradients have connections of their own, so that
a small request never waits behind megabytes going the same way. Within one host, where the worker
waits for the weights of the same step, a push and its pull are one request with one answer: beside
megabytes that stream through the caches each further frame takes a part of a millisecond of Python
on both sides. Requests without a reply are sent again when a connection has broken
(pscore/net/channel.py): every request may arrive twice, and the second one changes nothing.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pscore.errors import PacelineError
from pscore.net import sockets, tls
from pscore.net.channel import FrameChannel
from pscore.net.endpoint import Endpoint
from pscore.pb.ps.v1 import data_pb2 as pb
from psworker.transports.base import OutgoingPush, PullCall, Transport
from psworker.transports.daemon_threads import DaemonExecutor
from psworker.transports.retry import RetryPolicy


class PushConnection(NamedTuple):
    """A connection for pushes, and the thread that makes and sends them."""

    channel: FrameChannel[OutgoingPush]
    sender: DaemonExecutor


class SocketTransport(Transport):
    """One connection for requests alone, and one or more for gradients."""

    def __init__(self, endpoint: Callable[[], Endpoint], policy: RetryPolicy) -> None:
        """Starts to connect.

        Args:
            endpoint: Returns the shard's present addresses; asked again when a connection breaks.
        """
        self._is_holding = False
        self._kept: OutgoingPush | None = None  # A push that leaves with its pull.
        self._is_within_host = False  # Whether a connection for pushes is known to be.
        self._endpoint = endpoint
        self._limit_s = policy.limit_s
        self._reconnect = partial(policy.call, self._connect)
        self._adding = threading.Lock()  # Guards `_push_connections` and `_is_closed`.
        self._is_closed = False
        self._push_connections: list[PushConnection] = []
        self._add_push_connections(1)
        self._notices = FrameChannel[PullCall | OutgoingPush](
            self._reconnect, self._on_answered, "notice", self._limit_s, ("push", "pull")
        )
        self._notices.start()

    def push(self, push: OutgoingPush) -> None:
        """Sends one slice; while requests are held, together with the pull that follows."""
        self._send_kept()
        is_near = push.header.shared or self._is_within_host
        if self._is_holding and is_near and push.header.may_wait and not push.waits:
            self._kept = push
        else:
            self._send(push)

    def pull(self, call: PullCall) -> None:
        """Requests one slice, in the frame of its push if that is kept."""
        kept, self._kept = self._kept, None
        is_along = kept is not None and not call.request and _is_of_same(kept, call)
        if kept is not None:
            if is_along:
                kept.carry(call)
            self._send(kept)
        if not is_along:
            self._notices.request(call, pb.Envelope(pull=call.header), call.request)

    def hold(self) -> None:
        """Keeps pulls, and pushes whose gradients are in shared memory, until `let_go`.

        Another push is kept for its pull.
        """
        self._is_holding = True
        self._notices.hold()

    def let_go(self) -> None:
        """Sends the requests that are kept; further ones leave at once."""
        self._is_holding = False
        self._send_kept()
        self._notices.let_go()

    def renew(self) -> None:
        """Connects again, since the shard is at another address; a process there may be silent."""
        for connection in self._push_connections:
            connection.channel.renew()
        self._notices.renew()

    def close(self) -> None:
        """Closes all connections; calls under way fail."""
        with self._adding:
            self._is_closed = True
        for connection in self._push_connections:
            connection.sender.close()
        for connection in self._push_connections:
            connection.channel.close()
        self._notices.close()
        for connection in self._push_connections:
            connection.sender.join()

    # ----- of the planes

    @abstractmethod
    def _connect(self) -> tls.Stream:
        """Returns a connection on which the shard has answered the hello.

        Raises:
            PacelineError: This attempt failed.
        """

    def _land(self, call: PullCall, reply: pb.PullReply, incoming: sockets.Incoming) -> bool:
        """Stores the answer to a pull; returns False if the pull has to be repeated."""
        incoming.read_into(*call.targets(reply, incoming.payload_nbytes))
        return call.settle(reply)

    # ----- inside

    def _send_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._send(kept)

    def _send(self, push: OutgoingPush) -> None:
        """Sends one slice; a notice at once, unless a device has still to copy the gradient."""
        if push.header.shared and not push.waits:
            self._push_now(push)
        else:
            sender = self._push_connection(push).sender
            sender.start(lambda: self._push_now(push), push.done.set_exception)

    def _add_push_connections(self, num_wanted: int) -> None:
        """Opens connections for pushes until there are `num_wanted`."""
        with self._adding:
            while len(self._push_connections) < num_wanted and not self._is_closed:
                channel = FrameChannel[OutgoingPush](
                    self._reconnect, self._on_answered, "push", self._limit_s
                )
                channel.start()
                sender = DaemonExecutor(1, "data-send")
                self._push_connections.append(PushConnection(channel, sender))

    def _push_connection(self, push: OutgoingPush) -> PushConnection:
        """Returns the connection that a push takes: its slice's index decides.

        Pushes of one slice come one by one, each after the acknowledgement of the one before. So
        they stay in order, even if there are more connections by then.
        """
        return self._push_connections[push.header.slice % len(self._push_connections)]

    def _push_now(self, push: OutgoingPush) -> None:
        try:
            payload = push.payload()
        except PacelineError as problem:
            push.done.set_exception(problem)
            return
        envelope = _push_envelope(push)
        if push.header.shared:
            self._notices.request(push, envelope)
        else:
            self._push_connection(push).channel.request(push, envelope, payload)

    def _on_answered(
        self, envelope: pb.Envelope, call: PullCall | OutgoingPush, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        if isinstance(call, PullCall):
            return self._on_pulled(envelope, call, incoming)
        if call.pull is None:
            return self._on_pushed(envelope, call, incoming)
        return self._on_both(envelope.pulled, call, call.pull, incoming)

    def _on_pushed(
        self, envelope: pb.Envelope, push: OutgoingPush, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        incoming.read_into()
        push.done.set_result(envelope.pushed)
        return None

    def _on_pulled(
        self, envelope: pb.Envelope, call: PullCall, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        further = self._receive(envelope.pulled, call, incoming)
        if further is None:
            call.done.set_result(envelope.pulled)
        return further

    def _on_both(
        self, reply: pb.PullReply, push: OutgoingPush, pull: PullCall, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        """Completes a push and the pull with it, and repeats those that are not answered, alone.

        A push that has been counted meanwhile is acknowledged as a duplicate then.
        """
        further = self._receive(reply, pull, incoming)
        push.pull = None
        if is_counted := reply.HasField("pushed"):
            push.done.set_result(reply.pushed)
        if further is None:
            pull.done.set_result(reply)
        else:
            self._notices.request(pull, further)
        return None if is_counted else _push_envelope(push)

    def _receive(
        self, reply: pb.PullReply, call: PullCall, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        """Stores the answer to a pull; returns the request to be repeated if it is not ready."""
        if not reply.ready:
            incoming.read_into()
            call.put_off(reply)
        elif self._land(call, reply, incoming):
            return None
        return pb.Envelope(pull=call.header)


def _is_of_same(push: OutgoingPush, call: PullCall) -> bool:
    """Returns whether a push and a pull are of the same slice of the same table."""
    pushed, pulled = push.header, call.header
    return pushed.slice == pulled.slice and pushed.sender.table == pulled.sender.table


def _push_envelope(push: OutgoingPush) -> pb.Envelope:
    envelope = pb.Envelope(push=push.header)
    if push.pull is not None:
        pull = envelope.push.pull
        pull.CopyFrom(push.pull.header)
        pull.ClearField("sender")
        pull.ClearField("slice")
    return envelope
