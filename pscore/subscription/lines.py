"""The connection of a reader to one shard: its newest version over gRPC, the bytes over a socket.

A reader has connections of its own, so its bytes never wait among those of workers, and the shard
can pace them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass, field

import grpc
import numpy as np

from pscore.awake import awake_s
from pscore.errors import DamagedError, DecodeError, PacelineError, ShardMapError, TransportError
from pscore.net import endpoint, rpc, sockets, tls
from pscore.net.credentials import Credentials
from pscore.net.endpoint import Endpoint
from pscore.pb.ps.v1 import control_pb2, control_pb2_grpc, data_pb2, publish_pb2, publish_pb2_grpc
from pscore.subscription.assembly import Fetch, WatchFor
from pscore.types import ByteArray

log = logging.getLogger("paceline")
PAUSE_S = 0.1  # After a call that was not answered.
CALL_S = 5.0
SILENCE_S = 20.0
MAY_MOVE_S = 3.0  # The longest wait for a shard that may be at its next address meanwhile.
ELSEWHERE_S = 1.0  # Timeout of a question to that address.
ANSWER_S = 1.5  # A shard has at least so long for an answer, also once the reader's time is up.


@dataclass(slots=True, kw_only=True)
class ReaderLine:
    """One shard, as a reader sees it; used by one thread at a time."""

    address: str  # Address of the shard's control plane.
    index: int
    num_shards: int
    credentials: Credentials
    job: str
    table: str
    trouble: str = ""  # Why the last call was not answered; empty: it was.
    _is_checked: bool = False  # Whether the address is that of the shard.
    _instance: int = 0  # Number of the shard; 0: not known, or a relay.
    _next: str = ""  # Where it will soon be, or its standby is; empty: it stays.
    _channel: grpc.Channel = field(init=False)
    _stub: publish_pb2_grpc.PublicationsStub = field(init=False)
    _stream: tls.Stream | None = None
    _reader: sockets.ReadAhead | None = None
    _number: int = 0

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._channel = self.credentials.channel(self.address)
        self._stub = publish_pb2_grpc.PublicationsStub(self._channel)

    def watch(
        self,
        ask: WatchFor,
        wait_s: float,
        known: str,
        reader: publish_pb2.Reader,
        end_s: float | None = None,
    ) -> publish_pb2.WatchReply | None:
        """Returns the shard's newest version; None: the shard does not answer.

        Args:
            known: Fingerprint of the table's declaration that this reader knows; empty: none.
            end_s: Time by `awake_s` at which the caller wants to be told; None: no time.

        Raises:
            ShardMapError: The address is that of another shard.
            PacelineError: The shard refuses it.
        """
        limit_s = wait_s + CALL_S
        if self._next:
            wait_s, limit_s = min(wait_s, ELSEWHERE_S), MAY_MOVE_S
        request = publish_pb2.WatchRequest(
            job=self.job,
            table=self.table,
            lineage=ask.lineage,
            after=ask.after,
            wait_ms=int(1e3 * wait_s),
            fingerprint=known,
            reader=reader,
        )
        try:
            if not self._is_checked:
                self._describe(patience_s(CALL_S, end_s))
            reply = self._stub.Watch(request, timeout=patience_s(limit_s, end_s))
        except grpc.RpcError as failure:
            if not self._has_moved(end_s):
                self._note(rpc.error_of(failure, self.address))
            return None
        is_same = self._instance in (0, reply.instance, reply.former_instance)
        if not is_same and not reply.lineage:  # An empty process is there.
            if self._has_moved(end_s):
                return None
        else:
            self._instance, self._next = reply.instance, reply.next_address
        self.trouble = reply.waiting_for
        return reply

    def fetch(
        self, ask: Fetch, reader: int, end_s: float | None = None
    ) -> tuple[data_pb2.FetchReply, ByteArray] | None:
        """Returns slices and their bytes; None: the shard does not answer.

        Args:
            end_s: As for `watch`; bytes that come then are waited for.

        Raises:
            PacelineError: The shard refuses it.
        """
        header = data_pb2.FetchHeader(
            job=self.job,
            table=self.table,
            lineage=ask.lineage,
            target=ask.target,
            reader=reader,
            slices=[
                data_pb2.HeldSlice(slice=index, number=number, fingerprint=known)
                for index, number, known in ask.held
            ],
        )
        self._number += 1
        envelope = data_pb2.Envelope(id=self._number, fetch=header)
        try:
            return self._exchange(envelope, end_s)
        except (DamagedError, TransportError) as failure:
            self._drop()
            problem: PacelineError = TransportError(str(failure))
        except grpc.RpcError as failure:
            problem = rpc.error_of(failure, self.address)
        except PacelineError as refusal:  # An empty process may be there.
            problem = refusal
        if not self._has_moved(end_s):
            self._note(problem)
        return None

    def _exchange(
        self, envelope: data_pb2.Envelope, end_s: float | None
    ) -> tuple[data_pb2.FetchReply, ByteArray]:
        if self._stream is None:
            self._stream = self._connect(patience_s(CALL_S, end_s))
            self._reader = sockets.ReadAhead(self._stream)
        assert self._reader is not None
        silence_s = patience_s(MAY_MOVE_S if self._next else SILENCE_S, end_s)
        sockets.limit_silence(self._stream, silence_s)
        sockets.send_all(self._stream, sockets.frame_parts(envelope.SerializeToString(), ()))
        while True:
            deadline_s = time.monotonic() + silence_s
            incoming = sockets.read_header(self._reader, deadline_s=deadline_s)
            self._reader.settimeout(None)
            if incoming is None:
                raise TransportError("the shard has closed the connection")
            reply = endpoint.parse_envelope(incoming.header)
            payload = np.empty(incoming.payload_nbytes, dtype=np.uint8)
            incoming.read_into(memoryview(payload))
            if reply.id != envelope.id:
                self._heed(reply)
                continue
            if reply.WhichOneof("body") == "failed":
                raise endpoint.error_of(reply.failed)
            if reply.WhichOneof("body") != "fetched":
                raise DecodeError(f"a shard answers a reader with {reply.WhichOneof('body')!r}")
            return reply.fetched, payload

    def _describe(self, timeout_s: float) -> control_pb2.DescribeReply:
        """Returns the shard's description of itself."""
        control = control_pb2_grpc.ControlStub(self._channel)
        about = control.Describe(control_pb2.DescribeRequest(), timeout=timeout_s)
        if (about.shard, about.num_shards) != (self.index, self.num_shards):
            raise ShardMapError(
                f"{self.address} is shard {about.shard} of {about.num_shards}, and the list of "
                f"servers has it as shard {self.index} of {self.num_shards}: give all, in order"
            )
        self._is_checked = True
        return about

    def _heed(self, reply: data_pb2.Envelope) -> None:
        """Notes the shard's next address if a frame names it."""
        if reply.WhichOneof("body") == "next":
            self._next = reply.next.address

    def _hear(self) -> None:
        """Reads the frames that came without a request, and closes the connection for weights."""
        with contextlib.suppress(DamagedError, DecodeError, TransportError):
            while self._reader is not None:
                incoming = sockets.read_header(self._reader, deadline_s=time.monotonic())
                if incoming is None:
                    break
                incoming.read_into()
                self._heed(endpoint.parse_envelope(incoming.header))
        self._drop()

    def _has_moved(self, end_s: float | None) -> bool:
        """Follows the shard to its next address; returns whether it is there."""
        self._hear()
        address, limit_s = self._next, patience_s(ELSEWHERE_S, end_s)
        if not address:
            return False
        with contextlib.suppress(grpc.RpcError), self.credentials.channel(address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            about = control.Describe(control_pb2.DescribeRequest(), timeout=limit_s)
            is_it = self._instance in (about.instance, about.former_instance)
            if is_it and not about.moved_to:
                self._follow(address)
        return self.address == address

    def _follow(self, address: str) -> None:
        log.warning("the shard at %s has moved to %s", self.address, address)
        self._drop()
        self._channel.close()
        self.address, self._next, self._is_checked = address, "", False
        self._open()

    def _connect(self, timeout_s: float) -> tls.Stream:
        about = self._describe(timeout_s)
        if about.moved_to:
            self._follow(about.moved_to)
            about = self._describe(timeout_s)
        place = Endpoint(
            host=self.address.rpartition(":")[0].strip("[]"),
            port=about.data_port,
            local=about.data_local,
            token=self.credentials.token,
            tls=tls.client_context(self.credentials),
        )
        try:
            stream = endpoint.connect(place, is_local=True)
        except TransportError:  # The shard is on another host.
            stream = endpoint.connect(place, is_local=False)
            sockets.limit_unacknowledged(stream, SILENCE_S)
        return stream

    def _note(self, problem: PacelineError) -> None:
        """Notes that a call was not answered, and pauses."""
        if not isinstance(problem, TransportError):
            raise problem
        self.trouble = (
            f"shard {self.index} does not answer: {problem} (if it has moved, make a reader with "
            "its new address)"
        )
        time.sleep(PAUSE_S)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = self._reader = None

    def close(self, reader: publish_pb2.Reader) -> None:
        """Ends the reading, also at the shard if it answers, and closes the connections."""
        request = publish_pb2.WatchRequest(job=self.job, table=self.table, reader=reader)
        try:
            self._stub.Watch(request, timeout=ANSWER_S)
        except grpc.RpcError as failure:
            log.info("could not take leave of %s: %s", self.address, failure)
        self._drop()
        self._channel.close()


def patience_s(limit_s: float, end_s: float | None) -> float:
    """Returns how long a shard may take for an answer, in seconds: at most `limit_s`."""
    if end_s is None:
        return limit_s
    return min(limit_s, max(0.0, end_s - awake_s()) + ANSWER_S)


def this_process(number: int) -> publish_pb2.Reader:
    """Returns the description of this process as a reader."""
    return publish_pb2.Reader(id=number, host=socket.gethostname(), pid=os.getpid(), number=-1)
