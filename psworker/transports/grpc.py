"""The portable data plane: frames as raw bytes in gRPC's unary calls, on the control plane's port.

Pushes and pulls have threads of their own: a pull that waits must never block a push on which
another worker's pull depends.
"""

from __future__ import annotations

from pscore.net import faults, rpc, wire
from pscore.net.credentials import ANYONE, Credentials
from pscore.pb.ps.v1 import data_pb2
from psworker.transports.base import OutgoingPush, PullCall, Transport
from psworker.transports.daemon_threads import DaemonExecutor
from psworker.transports.retry import CALL_TIMEOUT_S, RetryPolicy

NUM_THREADS = 2  # Pushes, and pulls, under way at once.


class GrpcTransport(Transport):
    """Unary calls, with a connection for pushes and one for pulls."""

    name = "grpc"

    def __init__(
        self, address: str, policy: RetryPolicy, credentials: Credentials = ANYONE
    ) -> None:
        """Connects at the first call.

        Args:
            address: `host:port` or `unix:///path`.
            credentials: Certificates and token.
        """
        self._policy = policy
        self._channels = [credentials.channel(address) for _ in range(2)]
        push = self._channels[0].unary_unary(f"/{rpc.DATA_SERVICE}/Push", None, None)
        pull = self._channels[1].unary_unary(f"/{rpc.DATA_SERVICE}/Pull", None, None)
        wanted = faults.from_environment()
        self._push = faults.caller(wanted.at("push"), push)
        self._pull = faults.caller(wanted.at("pull"), pull)
        self._push_threads = DaemonExecutor(NUM_THREADS, "push")
        self._pull_threads = DaemonExecutor(NUM_THREADS, "pull")

    def push(self, push: OutgoingPush) -> None:
        """Sends one slice."""
        self._push_threads.submit(lambda: self._push_now(push), push.done)

    def pull(self, call: PullCall) -> None:
        """Requests one slice."""
        self._pull_threads.submit(lambda: self._pull_now(call), call.done)

    def close(self) -> None:
        """Ends all calls."""
        executors = (self._push_threads, self._pull_threads)
        for executor in executors:
            executor.close()
        for channel in self._channels:
            channel.close()
        for executor in executors:
            executor.join()

    def _push_now(self, push: OutgoingPush) -> data_pb2.PushReply:
        payload = push.payload()
        frame = wire.encode(push.header.SerializeToString(), *payload)
        metadata = _metadata_of(push.header.sender)
        raw, _ = self._policy.call(
            lambda: wire.decode(self._push(frame, timeout=CALL_TIMEOUT_S, metadata=metadata))
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
        frame = wire.encode(call.header.SerializeToString(), *call.request)
        metadata = _metadata_of(call.header.sender)
        return self._policy.call(
            lambda: wire.decode(self._pull(frame, timeout=CALL_TIMEOUT_S, metadata=metadata))
        )


def _metadata_of(sender: data_pb2.Sender) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata of a call: the shard checks its worker before it reads the message."""
    return ((rpc.SENDER_KEY, sender.SerializeToString()),)
