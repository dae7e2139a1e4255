"""The connection from this worker to one shard: calls with deadlines, retries, and clear errors.

Pushes and pulls run on a few threads each, so that a pull that waits never stands in the way of a
push that somebody else's pull waits for. A call that fails because the network or the shard failed
is sent again until `patience_s` is over: every request may be sent twice, the second time changes
nothing.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from pscore import rpc, wire
from pscore.errors import PacelineError, ServerUnavailableError, TransportError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, data_pb2

log = logging.getLogger("paceline")
T = TypeVar("T")

CALL_TIMEOUT_S = 20.0
RETRY_DELAY_S = 0.1
RETRY_DELAY_S_MAX = 2.0
JOIN_TIMEOUT_S = 2.0
SAY_AFTER_S = 5.0  # A wait is reported after this, and then each time it has doubled.


class Crew:
    """A few daemon threads and a queue.

    `ThreadPoolExecutor` would be it, but the interpreter joins its threads before any exit handler
    runs, so that a script that ends while a call waits could not end.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts the threads."""
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call; its result, or what it raised, is in the future."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def close(self) -> None:
        """Lets the threads end after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Waits for the threads; a thread inside gRPC when the interpreter ends would abort it."""
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as problem:  # noqa: BLE001 - the future carries it to its owner
                future.set_exception(problem)


class Link:
    """One shard, as this worker sees it."""

    def __init__(self, address: str, *, patience_s: float, num_threads: int = 2) -> None:
        """Connects lazily.

        Args:
            address: `host:port` or `unix:///path`.
            patience_s: How long a call is repeated while nobody answers, in seconds.
            num_threads: Pushes, and pulls, that are under way at once.
        """
        self.address = address
        self.patience_s = patience_s
        self._channels = [grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS) for _ in range(3)]
        self.control = control_pb2_grpc.ControlStub(self._channels[0])
        self._push = self._channels[1].unary_unary(f"/{rpc.DATA_SERVICE}/Push", None, None)
        self._pull = self._channels[2].unary_unary(f"/{rpc.DATA_SERVICE}/Pull", None, None)
        self._pushers = Crew(num_threads, "push")
        self._pullers = Crew(num_threads, "pull")
        self._is_closed = False

    # ----- calls

    def call(self, method: Callable[..., T], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Makes one control call, repeated while nobody answers.

        Raises:
            PacelineError: What the shard refused it with, or `ServerUnavailableError`.
        """
        return self._insist(lambda: method(request, timeout=timeout_s))

    def beat(self, request: pb.HeartbeatRequest, timeout_s: float) -> None:
        """Renews this worker's lease once; a network that fails is left to the next time.

        Raises:
            RemoteProtocolError: The shard no longer counts this worker in.
        """
        try:
            self.control.Heartbeat(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            error = rpc.error_of(failure, self.address)
            if not isinstance(error, TransportError):
                raise error from None

    def push(self, make_frame: Callable[[], bytes]) -> Future[data_pb2.PushReply]:
        """Sends a frame, which is made on one of this link's threads."""
        return self._pushers.submit(lambda: self._push_now(make_frame))

    def pull(
        self, header: data_pb2.PullHeader, land: Callable[[data_pb2.PullReply, memoryview], None]
    ) -> Future[data_pb2.PullReply]:
        """Asks until the answer is there, and lands it on one of this link's threads."""
        return self._pullers.submit(lambda: self._pull_now(header, land))

    def close(self) -> None:
        """Ends all calls."""
        self._is_closed = True
        crews = (self._pushers, self._pullers)
        for crew in crews:
            crew.close()
        for channel in self._channels:
            channel.close()
        for crew in crews:
            crew.join()

    # ----- inside

    def _push_now(self, make_frame: Callable[[], bytes]) -> data_pb2.PushReply:
        frame = make_frame()
        answer = self._insist(lambda: self._push(frame, timeout=CALL_TIMEOUT_S))
        header, _ = wire.decode(answer)
        return data_pb2.PushReply.FromString(bytes(header))

    def _pull_now(
        self, header: data_pb2.PullHeader, land: Callable[[data_pb2.PullReply, memoryview], None]
    ) -> data_pb2.PullReply:
        frame = wire.encode(header.SerializeToString())
        started_s = time.monotonic()
        say_s = SAY_AFTER_S
        while True:
            answer = self._insist(lambda: self._pull(frame, timeout=CALL_TIMEOUT_S))
            raw, payload = wire.decode(answer)
            reply = data_pb2.PullReply.FromString(bytes(raw))
            if reply.ready:
                land(reply, payload)
                return reply
            waited_s = time.monotonic() - started_s
            if waited_s >= say_s - 0.5:
                say_s *= 2
                log.warning(
                    "worker %d has waited %.0f s for %s",
                    header.sender.worker,
                    waited_s,
                    reply.waiting_for,
                )

    def _insist(self, attempt: Callable[[], T]) -> T:
        started_s = time.monotonic()
        delay_s, said_s = RETRY_DELAY_S, SAY_AFTER_S
        while True:
            try:
                return attempt()
            except grpc.RpcError as failure:
                error = rpc.error_of(failure, self.address)
                if self._is_closed or not isinstance(error, TransportError):
                    raise error from None
                waited_s = time.monotonic() - started_s
                if waited_s >= self.patience_s:
                    raise self._unavailable(waited_s, error) from None
                if waited_s >= said_s:
                    said_s *= 2
                    log.warning("%s has not answered for %.0f s", self.address, waited_s)
            time.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_DELAY_S_MAX)

    def _unavailable(self, waited_s: float, error: PacelineError) -> ServerUnavailableError:
        port = self.address.rpartition(":")[2]
        return ServerUnavailableError(
            f"no shard answers at {self.address} after {waited_s:.1f} s ({error}); start one with "
            f"`psserver start --port {port}`, or set PACELINE_SERVERS or servers= to where it is"
        )
