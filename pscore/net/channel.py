"""The requesting half of the socket plane; connection.py is the answering half.

A request is remembered until its reply has come. When the connection breaks, the channel connects
again and repeats the requests that have no reply yet, in order. So every request may arrive twice,
and the answering side must not count it twice.

A channel knows frames and ids. The meaning of a reply is a function given to it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pscore.awake import awake_s
from pscore.errors import DecodeError, PacelineError, TransportError
from pscore.net import faults, sockets, tls
from pscore.net.endpoint import error_of, parse_envelope
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.threads import OwnedThread

JOIN_TIMEOUT_S = 5.0
STEADY_S = 5.0  # A connection that has lasted so long was a good one.
PAUSE_S = 0.05  # Before another connection in place of one that was not.
HELD_MAX = 8  # Frames that leave in one call: the other side begins while more are prepared.


class Call(Protocol):
    """One request of the caller's."""

    @property
    def done(self) -> Future[Any]:
        """The reply, or the error."""


C = TypeVar("C", bound=Call)


class Unanswered(NamedTuple, Generic[C]):
    """A request without a reply, as it is sent again."""

    call: C
    point: str  # At which faults strike.
    header: bytes
    payload: Sequence[memoryview]


class FrameChannel(Generic[C]):
    """One connection to a listener, made again when it breaks; used from any thread."""

    def __init__(
        self,
        connect: Callable[[], tls.Stream],
        on_reply: Callable[[pb.Envelope, C, sockets.Incoming], pb.Envelope | None],
        name: str,
        limit_s: float = math.inf,
        points: Sequence[str] = (),
    ) -> None:
        """Does not connect yet.

        Args:
            connect: Returns a connection that has been admitted (`endpoint.connect`). It repeats
                failed attempts itself; if it raises a `PacelineError`, the channel ends with that.
            on_reply: Reads the payload of a reply and completes its call, on the reading thread.
                It returns None, or a further request of the same call, with the same payload.
            limit_s: Longest time in which connections break again and again without a reply, in
                seconds; then the channel ends.
            points: Points at which faults strike, each for the requests of that kind; none: `name`,
                for all of them.
        """
        self._connect = connect
        self._on_reply = on_reply
        self._numbers = itertools.count(1)
        self._open: dict[int, Unanswered[C]] = {}  # By id.
        self._held: list[Unanswered[C]] = []  # Those of `_open` that `let_go` sends.
        self._holds = False
        self._lock = threading.Lock()  # Guards `_open` and `_failure`.
        self._sending = threading.Lock()  # Guards `_stream`, `_held`; held while a frame is sent.
        self._stream: tls.Stream | None = None
        self._is_closed = False
        self._failure: PacelineError | None = None
        self._name = name
        lines = faults.from_environment().at_each(points or (name,))
        self._faulty = {at: faults.sender(line, sockets.send_all) for at, line in lines.items()}
        self._points = points
        self._limit_s = limit_s
        self._broke_s = math.inf  # Time of the first break since a reply, or a steady connection.
        self._thread = OwnedThread(self._run, f"data-{name}", self._fail)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._stream is not None

    def start(self) -> None:
        """Starts the thread that connects and reads."""
        self._thread.start()

    def request(self, call: C, envelope: pb.Envelope, payload: Sequence[memoryview] = ()) -> None:
        """Sends a request, now or when there is a connection.

        Args:
            call: Completed when the reply has come.
            envelope: The header; its id is set here.
            payload: Must not change until `call.done` is set.
        """
        number = envelope.id = next(self._numbers)
        point = envelope.WhichOneof("body") or "" if self._points else self._name
        sent = Unanswered(call, point, envelope.SerializeToString(), payload)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._open[number] = sent
        if failure is not None:
            call.done.set_exception(failure)
            return
        with self._sending:
            if self._stream is not None:
                self._held.append(sent)
                if not self._holds or payload or len(self._held) == HELD_MAX:
                    self._send_held()

    def hold(self) -> None:
        """Keeps requests without a payload from now on, so that several leave in one call."""
        self._holds = True

    def let_go(self) -> None:
        """Sends the requests that `hold` has kept; further ones leave at once."""
        self._holds = False
        with self._sending:
            if self._stream is not None and self._held:
                self._send_held()

    def renew(self) -> None:
        """Ends the present connection; the next one is made to the present address."""
        self._shut()

    def close(self, *, waits: bool = True) -> None:
        """Closes the connection; calls without a reply fail.

        Args:
            waits: Whether this returns only when they have failed, or after some seconds.
        """
        self._is_closed = True
        self._shut()  # Without the lock: a thread that sends to a silent peer holds it.
        if waits and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _send_held(self) -> None:
        """Sends under the lock; the reading thread replaces a connection that breaks."""
        assert self._stream is not None
        held, self._held = self._held, []
        is_sent = False
        try:
            frames = [sockets.frame_parts(sent.header, sent.payload) for sent in held]
            if self._faulty:
                for sent, frame in zip(held, frames, strict=True):
                    self._faulty.get(sent.point, sockets.send_all)(self._stream, frame)
            else:
                sockets.send_all(self._stream, [part for frame in frames for part in frame])
            is_sent = True
        except TransportError:
            pass
        finally:
            if not is_sent:  # No other frame may come behind a part of one.
                self._shut()

    def _shut(self) -> None:
        """Ends the connection, which the reading thread notices and closes."""
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError):  # It has ended already.
                stream.shutdown(socket.SHUT_RDWR)

    # ----- the reading thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                stream = self._connect()
                began_s = awake_s()
                with stream:
                    self._resume(stream)
                    problem = self._read(stream)
                with self._sending:
                    self._stream = None
                self._note_break(began_s, problem)
            self._fail(TransportError("the connection was closed"))
        except PacelineError as error:
            self._fail(error)

    def _resume(self, stream: tls.Stream) -> None:
        """Sends the requests without a reply again, in order."""
        with self._sending:
            self._stream = stream
            if self._is_closed:  # `close` may have come before there was a stream to shut down.
                self._shut()
            with self._lock:
                unanswered = [sent for _, sent in sorted(self._open.items())]
            self._held.clear()
            for sent in unanswered:
                self._held.append(sent)
                self._send_held()

    def _read(self, stream: tls.Stream) -> str:
        """Reads replies until the connection breaks; returns the reason."""
        reader = sockets.ReadAhead(stream)
        try:
            while (incoming := sockets.read_header(reader)) is not None:
                self._dispatch(incoming)
                self._broke_s = math.inf
        except (TransportError, DecodeError) as problem:
            return str(problem)  # The caller connects again and repeats the requests.
        return "the other side has closed it"

    def _note_break(self, began_s: float, problem: str) -> None:
        """Pauses before the next connection, unless this one has lasted.

        Raises:
            TransportError: No connection has lasted, and no reply has come, for `limit_s`.
        """
        now_s = awake_s()
        if now_s - began_s >= STEADY_S:
            self._broke_s = math.inf
        if self._broke_s == math.inf:
            self._broke_s = now_s
            return
        if now_s - self._broke_s >= self._limit_s:
            raise TransportError(
                f"the connection breaks again and again, and no reply has come for "
                f"{now_s - self._broke_s:.1f} s: {problem}"
            )
        time.sleep(PAUSE_S)

    def _dispatch(self, incoming: sockets.Incoming) -> None:
        envelope = parse_envelope(incoming.header)
        with self._lock:
            sent = self._open.get(envelope.id)
        if sent is None or sent.call.done.done():
            self._forget(envelope.id)
            incoming.skip()
            return
        call = sent.call
        if envelope.WhichOneof("body") == "failed":
            incoming.read_into()
            self._forget(envelope.id)
            call.done.set_exception(error_of(envelope.failed))
            return
        further = self._on_reply(envelope, call, incoming)
        self._forget(envelope.id)
        if further is not None:
            self.request(call, further, sent.payload)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)

    def _fail(self, error: PacelineError) -> None:
        with self._lock:
            self._failure = error
            unanswered = list(self._open.values())
            self._open.clear()
        for sent in unanswered:
            if not sent.call.done.done():
                sent.call.done.set_exception(error)
