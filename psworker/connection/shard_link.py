"""The connection from this worker to one shard: control calls, and the data plane beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from pscore.errors import ReplacedError, TransportError
from pscore.net import rpc, tls
from pscore.net.credentials import ANYONE, Credentials
from pscore.observe import spans
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, publish_pb2_grpc
from psworker.transports import Endpoint, Transport, choose
from psworker.transports.retry import RetryPolicy

log = logging.getLogger("paceline")
T = TypeVar("T")
CALL_TIMEOUT_S = 9.0  # Longer than a barrier waits; a hanging shard is reported within 10 s.


class Link:
    """One shard, as this worker sees it.

    Attributes:
        address: Address of the control plane: `host:port` or `unix:///path`.
        patience: Repeats calls while the shard does not answer.
        credentials: Token and certificates for the connection.
        control: The control service's methods, for `call`.
        publications: The methods of published weights, likewise.
    """

    def __init__(
        self, address: str, *, patience_s: float, credentials: Credentials = ANYONE
    ) -> None:
        """Prepares the connection; without an answer for `patience_s` seconds, calls raise."""
        self.address = address
        self.credentials = credentials
        self.patience = RetryPolicy(address, patience_s, lambda: tls.diagnose(address, credentials))
        self._tls = tls.client_context(credentials)
        self._channel = spans.traced(credentials.channel(address), "psworker")
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self.publications = publish_pb2_grpc.PublicationsStub(self._channel)
        self._transport: Transport | None = None
        self.instance = 0  # Number of the shard's process that this worker has joined; 0 before.
        self.joined_as = (-1, 0)  # Rank and incarnation.
        self.uneven = ""  # Which worker has left out steps, as last reported.
        self.epochs: dict[int, int] = {}  # Epoch of the peers of each table, as last reported.
        self.fastest_step_s = 0.0  # Of the fastest worker, as last reported; 0: not known.
        self.num_beats = 0  # Heartbeats answered.
        self.waiting_for = ""  # The cause of the job's wait, as last reported.

    def call(self, method: Callable[..., T], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Makes one control call, repeated while the shard does not answer.

        Raises:
            PacelineError: The shard refused the call.
            ServerUnavailableError: The shard did not answer in time.
        """
        return self.patience.call(lambda: method(request, timeout=timeout_s))

    def beat(self, request: pb.HeartbeatRequest, timeout_s: float) -> Sequence[pb.ResidualRequest]:
        """Renews this worker's lease once; a network failure is left to the next heartbeat.

        Returns:
            The residuals that the shard requests.

        Raises:
            RemoteProtocolError: The shard no longer counts this worker in.
        """
        try:
            reply = self.control.Heartbeat(request, timeout=timeout_s)
            self.waiting_for, self.patience.heard_s = reply.waiting_for, time.monotonic()
            if reply.uneven != self.uneven:
                self.uneven = reply.uneven
                if self.uneven:
                    log.warning("%s; call optimizer.skip_step() in its place", self.uneven)
            self._check(reply.instance)
            self.epochs = dict(reply.epochs)
            self.fastest_step_s = reply.fastest_step_s
            self.num_beats += 1
        except grpc.RpcError as failure:
            error = rpc.error_of(failure, self.address)
            if not isinstance(error, TransportError):
                raise error from None
            return ()
        return reply.residual_requests

    @property
    def silent_s(self) -> float:
        """Seconds since a heartbeat was answered."""
        return time.monotonic() - self.patience.heard_s

    def _check(self, instance: int) -> None:
        """Checks that the shard's process is the one that this worker has joined.

        Raises:
            ReplacedError: It is another, which lacks unsaved state; this worker must rejoin.
        """
        if self.instance not in (0, instance):
            raise ReplacedError(f"the shard at {self.address} has been restarted")

    def open(self, data_plane: str) -> None:
        """Chooses the data plane and connects it.

        Raises:
            ConfigError: The named data plane is not available.
        """
        if self._transport is not None:
            self._transport.close()
        self._transport = choose(
            data_plane, self.address, self.endpoint, self.patience, self.credentials
        )

    @property
    def transport(self) -> Transport:
        """The data plane, once `open` has been called."""
        assert self._transport is not None
        return self._transport

    @property
    def data_plane(self) -> str:
        """The data plane's name; empty before `open`."""
        return "" if self._transport is None else self._transport.name

    def close(self) -> None:
        """Ends all calls and closes the connections."""
        self.patience.is_over = True
        if self._transport is not None:
            self._transport.close()
        self._channel.close()

    def endpoint(self) -> Endpoint:
        """Returns the place of the shard's data sockets, which it asks the shard for."""
        reply = self.call(self.control.Describe, pb.DescribeRequest())
        self._check(reply.instance)
        host = self.address.rpartition(":")[0].strip("[]")
        is_unix = self.address.startswith("unix:")
        return Endpoint(
            host=host,
            port=0 if is_unix else reply.data_port,
            local=reply.data_local,
            token=self.credentials.token,
            tls=self._tls,
        )
