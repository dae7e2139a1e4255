"""The connection from this worker to one shard: control calls, and the data plane beside them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import grpc

from pscore.errors import ReplacedError, ServerUnavailableError, TransportError
from pscore.net import rpc, tls
from pscore.net.credentials import ANYONE, Credentials
from pscore.observe import spans
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, publish_pb2_grpc
from pscore.threads import OwnedThread
from psworker.connection.movable import MovableChannel
from psworker.transports import Endpoint, Transport, choose
from psworker.transports.retry import DELAY_S_MAX, RetryPolicy

log = logging.getLogger("paceline")
T = TypeVar("T")
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
ELSEWHERE_S = 1.0  # Timeout of a question to the next address of a shard that has gone.
AWAIT_S = 8.0  # The longest wait at that address for the shard, in one call.
AGAIN_S = 0.1  # Before another one.
AWAY_S = 15.0  # A standby that does not answer may be so long about its journals, or start again.
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
        self._channel = MovableChannel(self._connect(address))
        self.control = control_pb2_grpc.ControlStub(cast("grpc.Channel", self._channel))
        self.publications = publish_pb2_grpc.PublicationsStub(cast("grpc.Channel", self._channel))
        self._next = ""  # Where the shard will soon be, as last reported; empty: it stays.
        self._away_since_s: float | None = None  # Since when nobody answers there.
        self._at_next: grpc.Channel | None = None  # Open while the shard is awaited there.
        self._moving = threading.Lock()  # Lock of the three above and of `address` in a move.
        self._transport: Transport | None = None
        self.instance = 0  # Number of the shard's process that this worker has joined; 0 before.
        self.joined_as = (-1, 0)  # Rank and incarnation.
        self._seen = 0  # Number of the process that was there last; 0: not known.
        self.uneven = ""  # How workers differ, as last reported.
        self.epochs: dict[int, int] = {}  # Epoch of the peers of each table, as last reported.
        self.fastest_step_s = 0.0  # Of the fastest worker, as last reported; 0: not known.
        self.num_beats = 0  # Heartbeats answered.
        self.awaited_at: Sequence[str] = ()  # Where others wait for this worker, if it asks.
        self.awaited_by: Sequence[int] = ()  # Those that came later, and wait for its step.
        self.others_step = False  # Whether others have made steps since it asks.
        self._is_there = False  # Whether the last one was, or the join; or a standby may have it.
        self.waiting_for = ""  # The cause of the job's wait, as last reported.

    def call(self, method: Callable[..., T], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Makes one control call, repeated while the shard does not answer.

        Raises:
            PacelineError: The shard refused the call.
            ServerUnavailableError: The shard did not answer in time.
        """

        def attempt() -> T:
            address = self.address
            try:
                return method(request, timeout=timeout_s)
            except grpc.RpcError as failure:
                self._look_elsewhere(failure)
                self._require_same(failure, address)
                raise

        return self.patience.call(attempt)

    def _connect(self, address: str) -> grpc.Channel:
        return spans.traced(self.credentials.channel(address), "psworker")

    def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> pb.DescribeReply:
        """Returns the description of the shard, and follows it if it has moved.

        Raises:
            PacelineError: The shard did not answer in time, or another one does.
        """
        reply = self.call(self.control.Describe, pb.DescribeRequest(), timeout_s)
        while reply.moved_to and reply.moved_to != self.address:
            self._follow(reply.moved_to)
            reply = self.call(self.control.Describe, pb.DescribeRequest(), timeout_s)
        return reply

    def _follow(self, address: str) -> None:
        """Makes all further calls at another address."""
        with self._moving:
            self._expect("")
            if address == self.address:
                return
            log.warning("the shard at %s has moved to %s", self.address, address)
            self._channel.move(self._connect(address))
            self.address = self.patience.address = address
        if self._transport is not None:
            self._transport.renew()

    def _expect(self, address: str) -> None:
        """Notes where the shard will soon be, and waits for it there, on a thread of its own."""
        if address == self._next:
            return
        self._next, self._away_since_s = address, None
        self.patience.delay_s_max = AGAIN_S if address else DELAY_S_MAX
        if self._at_next is not None:
            self._at_next.close()
            self._at_next = None
        if address and not self.patience.is_over:
            self._at_next = self.credentials.channel(address)
            wait = partial(self._await_next, address, self._at_next)
            OwnedThread(wait, "next-shard", lambda error: log.error("%s", error)).start()

    def _await_next(self, address: str, channel: grpc.Channel) -> None:
        """Follows the shard as soon as the process at its next address serves in its place."""
        while self._at_next is channel and not self.patience.is_over:
            with contextlib.suppress(grpc.RpcError, ValueError):  # It is closed, or that is away.
                describe = control_pb2_grpc.ControlStub(channel).Describe
                request = pb.DescribeRequest(awaited=self.instance, wait_ms=int(1e3 * AWAIT_S))
                reply = describe(request, timeout=AWAIT_S + ELSEWHERE_S)
                if reply.instance == self.instance and not reply.moved_to:
                    self._follow(address)
                    return
            time.sleep(AGAIN_S)

    def _look_elsewhere(self, failure: grpc.RpcError) -> bool:
        """Follows the shard to its next address, if the present one is gone and it is there.

        Returns:
            Whether it is there, or a standby that may have everything.
        """
        address = self._next
        reply = self._ask(address) if address and failure.code() in SILENT else None
        is_there = reply is not None and reply.instance == self.instance and not reply.moved_to
        if is_there:
            self._follow(address)
        return is_there or (reply is not None and reply.stands_by)

    def _ask(self, address: str) -> pb.DescribeReply | None:
        """Returns the description of the process at another address; None: it does not answer."""
        channel = self.credentials.channel(address)
        try:
            stub = control_pb2_grpc.ControlStub(channel)
            return stub.Describe(pb.DescribeRequest(), timeout=ELSEWHERE_S)
        except grpc.RpcError:
            return None
        finally:
            channel.close()

    def beat(self, request: pb.HeartbeatRequest, timeout_s: float) -> Sequence[pb.ResidualRequest]:
        """Renews this worker's lease once; a network failure is left to the next heartbeat.

        Returns:
            The residuals that the shard requests.

        Raises:
            RemoteProtocolError: The shard no longer counts this worker in.
        """
        request.instance, address = self.instance, self.address
        try:
            reply = self.control.Heartbeat(request, timeout=timeout_s)
            self.waiting_for, self.patience.heard_s = reply.waiting_for, time.monotonic()
            if reply.uneven != self.uneven:
                self.uneven = reply.uneven
                if self.uneven:
                    log.warning("%s", self.uneven)
            self._check(reply.instance, reply.former_instance, address)
            self.epochs = dict(reply.epochs)
            with self._moving:
                self._expect("" if reply.next_address == self.address else reply.next_address)
            self.fastest_step_s = reply.fastest_step_s
            self.awaited_at, self.awaited_by = reply.awaited_at, reply.awaited_by
            self.others_step = reply.others_step
            self.num_beats += 1
            self._is_there = True
        except grpc.RpcError as failure:
            error = rpc.error_of(failure, self.address)
            if not isinstance(error, TransportError):
                with contextlib.suppress(ServerUnavailableError):
                    self._require_same(failure, address)
                    self._is_there = False
                    raise error from None
                self._is_there = True
                return ()
            self._is_there = self._look_elsewhere(failure) or self.address != address
            return ()
        except ServerUnavailableError:
            return ()
        return reply.residual_requests

    @property
    def reached(self) -> int:
        """The shard's number while it answers this worker, or a standby may have it; else 0."""
        return self.instance if self._is_there and not self.is_bare else 0

    @property
    def silent_s(self) -> float:
        """Seconds since a heartbeat was answered."""
        return time.monotonic() - self.patience.heard_s

    def _check(self, instance: int, former: int, address: str) -> None:
        """Checks that the shard's process is the one that this worker has joined, or its heir.

        Args:
            instance: Number of the shard's process.
            former: Its number before it went on without its standby, which has that number still.
            address: Where it was when it was asked.

        Raises:
            ServerUnavailableError: It is another, and the shard is or may soon be at its standby.
            ReplacedError: It is another, which lacks unsaved state; this worker must rejoin.
        """
        if self.instance and self.instance == former:
            self.instance = instance
        if self.instance not in (0, instance) and self._is_awaited_elsewhere(address):
            raise ServerUnavailableError(f"{self.address} is empty, and its standby has the shard")
        self._seen = instance
        self.require_whole()

    @property
    def is_bare(self) -> bool:
        """Whether another process than this worker has joined is there, which lacks the job."""
        return bool(self.instance) and self._seen not in (0, self.instance)

    def require_whole(self) -> None:
        """Raises ReplacedError if the shard came back without the job; this worker must rejoin."""
        if self.is_bare:
            raise ReplacedError(f"the shard at {self.address} has been restarted")

    def look(self) -> bool:
        """Returns whether the shard has come back without the job, once it answers.

        Raises:
            PacelineError: The shard does not answer in time.
        """
        address = self.address
        reply = self.describe()
        with contextlib.suppress(ReplacedError):
            self._check(reply.instance, reply.former_instance, address)
        return self.is_bare

    def joined(self, instance: int, rank: int, incarnation: int) -> None:
        """Records a join at the process that is there now."""
        self.instance = self._seen = instance
        self.joined_as, self._is_there = (rank, incarnation), True

    def _require_same(self, failure: grpc.RpcError, address: str) -> None:
        """Raises ServerUnavailableError if an empty process refused a call in the shard's place.

        Args:
            address: Where the shard was when it was called.
        """
        if failure.code() in SILENT:
            return
        with self._moving:
            has_moved, is_to_move = self.address != address, bool(self._next)
        if has_moved:
            raise ServerUnavailableError(f"the shard is no longer at {address}")
        if is_to_move:
            with contextlib.suppress(grpc.RpcError, ReplacedError):
                reply = self.control.Describe(pb.DescribeRequest(), timeout=ELSEWHERE_S)
                self._check(reply.instance, reply.former_instance, address)

    def _is_awaited_elsewhere(self, address: str) -> bool:
        """Returns whether a standby has the shard, or may have everything of it.

        Args:
            address: Where an empty process was.
        """
        with self._moving:
            has_moved, there = self.address != address, self._next
        if has_moved or not there:
            return has_moved
        reply = self._ask(there)
        if reply is not None:
            self._away_since_s = None
            return reply.stands_by or reply.instance == self.instance
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        return now_s - self._away_since_s < AWAY_S

    def cut(self) -> None:
        """Closes the data plane; requests under way fail."""
        if self._transport is not None:
            self._transport.close()

    def open(self, data_plane: str) -> None:
        """Chooses the data plane and connects it.

        Raises:
            ConfigError: The named data plane is not available.
        """
        self.cut()
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
        with self._moving:
            self._expect("")
        self._channel.close()

    def endpoint(self) -> Endpoint:
        """Returns the place of the shard's data sockets, which it asks the shard for."""
        address = self.address
        reply = self.describe()
        self._check(reply.instance, reply.former_instance, address)
        host = self.address.rpartition(":")[0].strip("[]")
        is_unix = self.address.startswith("unix:")
        return Endpoint(
            host=host,
            port=0 if is_unix else reply.data_port,
            local=reply.data_local,
            token=self.credentials.token,
            tls=self._tls,
        )
