"""The portable data plane: frames as raw bytes in gRPC's unary calls, on the control plane's port.

Pushes and pulls run on a few threads each, so that a pull that waits never stands in the way of a
push that somebody else's pull waits for.
"""

from __future__ import annotations

from typing import ClassVar

from pscore.net import faults, rpc, wire
from pscore.net.credentials import ANYONE, Credentials
from pscore.pb.ps.v1 import data_pb2
from psworker.transports.base import PullCall, PushCall, Transport
from psworker.transports.daemon_threads import Crew
from psworker.transports.retry import CALL_TIMEOUT_S, Patience


class GrpcTransport(Transport):
    """Unary calls, with a connection for pushes and one for pulls."""

    name: ClassVar[str] = "grpc"

    def __init__(
        self,
        address: str,
        patience: Patience,
        credentials: Credentials = ANYONE,
        num_threads: int = 2,
    ) -> None:
        """Connects lazily.

        Args:
            address: `host:port` or `unix:///path`.
            patience: How calls are repeated.
            credentials: What to connect with.
            num_threads: Pushes, and pulls, that are under way at once.
        """
        self._patience = patience
        self._channels = [credentials.channel(address) for _ in range(2)]
        push = self._channels[0].unary_unary(f"/{rpc.DATA_SERVICE}/Push", None, None)
        pull = self._channels[1].unary_unary(f"/{rpc.DATA_SERVICE}/Pull", None, None)
        wanted = faults.from_environment()
        self._push = faults.caller(wanted.at("push"), push)
        self._pull = faults.caller(wanted.at("pull"), pull)
        self._pushers = Crew(num_threads, "push")
        self._pullers = Crew(num_threads, "pull")

    def push(self, call: PushCall) -> None:
        """Sends one slice."""
        self._pushers.submit(lambda: self._push_now(call), call.done)

    def pull(self, call: PullCall) -> None:
        """Asks for one slice."""
        self._pullers.submit(lambda: self._pull_now(call), call.done)

    def close(self) -> None:
        """Ends all calls."""
        crews = (self._pushers, self._pullers)
        for crew in crews:
            crew.close()
        for channel in self._channels:
            channel.close()
        for crew in crews:
            crew.join()

    def _push_now(self, call: PushCall) -> data_pb2.PushReply:
        header, payload = call.make()
        frame = wire.encode(header.SerializeToString(), *payload)
        named = _naming(header.sender)
        raw, _ = self._patience.insist(
            lambda: wire.decode(self._push(frame, timeout=CALL_TIMEOUT_S, metadata=named))
        )
        return data_pb2.PushReply.FromString(bytes(raw))

    def _pull_now(self, call: PullCall) -> data_pb2.PullReply:
        while True:
            raw, payload = self._ask(call)
            reply = data_pb2.PullReply.FromString(bytes(raw))
            if reply.ready:
                call.land(reply, payload)
                if call.settle(reply):
                    return reply
            else:
                call.put_off(reply)

    def _ask(self, call: PullCall) -> tuple[memoryview, memoryview]:
        frame = wire.encode(call.header.SerializeToString())
        named = _naming(call.header.sender)
        return self._patience.insist(
            lambda: wire.decode(self._pull(frame, timeout=CALL_TIMEOUT_S, metadata=named))
        )


def _naming(sender: data_pb2.Sender) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata of a call, so that the shard knows its worker before it reads more."""
    return ((rpc.SENDER_KEY, sender.SerializeToString()),)
