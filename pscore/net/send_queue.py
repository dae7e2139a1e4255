"""The sending half of a connection that must never wait for its peer.

A short frame is sent by the thread that has it, as far as the peer takes it at once. The rest of
it, and long frames, are left to a thread of the connection: a slow reader delays no other peer, and
one core can receive while another sends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pscore.errors import LimitError, TransportError
from pscore.net import sockets, tls
from pscore.net.budget import Budget
from pscore.threads import OwnedThread

AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # A number: flags take long to join.


@dataclass(slots=True, kw_only=True)
class Unsent:
    """A frame, or the rest of one, that waits for the writing thread."""

    parts: list[memoryview]
    release: Callable[[], None] | None
    header: bytes | None = None  # If set, `parts` are only the payload, without a checksum yet.
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(part.nbytes for part in self.parts)

    def frame(self) -> list[memoryview]:
        """Returns the parts to be sent."""
        if self.header is None:
            return self.parts
        return sockets.frame_parts(self.header, self.parts)


class SendQueue:
    """Sends frames on one connection, in order, from any thread, without waiting for the peer."""

    def __init__(
        self,
        stream: tls.Stream,
        budget: Budget,
        long_nbytes: int,
        on_overflow: Callable[[LimitError], None],
    ) -> None:
        """Sends on `stream`, which is closed by its owner.

        Args:
            budget: Bytes that may wait for peers. One connection may have half of them, so that
                the others have the rest.
            long_nbytes: Smallest payload of a long frame.
            on_overflow: Called once with the reason when the connection is cut off because its
                peer does not read.
        """
        self._stream = stream
        self._budget = budget
        self._long_nbytes = long_nbytes
        self._on_overflow = on_overflow
        self._lock = threading.Lock()
        self._unsent: deque[Unsent] = deque()
        self._unsent_nbytes = 0
        self._has_unsent = threading.Event()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._holder = 0  # The thread whose frames without a payload are held.
        self._held: list[memoryview] = []  # Only that thread uses it.

    def send(
        self,
        header: bytes,
        payload: Sequence[memoryview] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame; a long one later, from the writing thread.

        Args:
            release: Called when the payload is no longer read. Without it the payload is only valid
                during this call: the part that the peer does not take at once is copied.
        """
        if not payload and release is None and self._holder == threading.get_ident():
            self._held += sockets.frame_parts(header, payload)
            return
        if release is None or sum(part.nbytes for part in payload) < self._long_nbytes:
            self.send_parts(sockets.frame_parts(header, payload), release)
            return
        with self._lock, contextlib.suppress(LimitError):  # The peer may take it at once.
            if not self._is_closed:
                self._leave(Unsent(parts=list(payload), release=release, header=header))
                return
        self.send_parts(sockets.frame_parts(header, payload), release)

    def hold(self) -> None:
        """Keeps the frames without a payload of this thread until `let_go`, which it must call."""
        self._holder = threading.get_ident()

    def let_go(self) -> None:
        """Sends the frames that are held, in one call."""
        if self._held:
            held, self._held = self._held, []
            self.send_parts(held)

    def send_parts(
        self, parts: list[memoryview], release: Callable[[], None] | None = None
    ) -> None:
        """Sends the parts of a frame as far as the peer takes them now, and the rest later."""
        with self._lock:
            if not self._is_closed and not self._unsent:
                parts = self._send_now(parts)
            if not self._is_closed and parts:
                try:
                    self._leave(Unsent(parts=parts, release=release))
                    return
                except LimitError as problem:
                    self._on_overflow(problem)
                    self._is_closed = True
                    self.cut()
        if release is not None:
            release()

    def cut(self) -> None:
        """Shuts the connection down in both directions; the reading thread sees its end."""
        with contextlib.suppress(OSError):  # The peer may have closed it already.
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drops the frames that wait, releases their payloads, and cuts the connection."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._unsent)
            self._unsent.clear()
            for unsent in dropped:
                self._give_back(unsent)
            self._has_unsent.set()
        for unsent in dropped:
            if unsent.release is not None:
                unsent.release()
        self.cut()

    def _leave(self, unsent: Unsent) -> None:
        """Leaves a frame to the writing thread; called under the lock.

        Raises:
            LimitError: Too many bytes wait already.
        """
        budget = self._budget
        if self._unsent_nbytes + unsent.nbytes > budget.nbytes // 2:
            raise LimitError(
                f"{self._unsent_nbytes} bytes wait for it, at most {budget.nbytes // 2} may"
            )
        if self._writer is None:
            writer = OwnedThread(self._write, "data-write", lambda _: self.close())
            try:
                writer.start()
            except RuntimeError as problem:
                raise LimitError(f"no thread can be started to send them: {problem}") from problem
            self._writer = writer
        budget.take(unsent.nbytes, "an answer")
        self._unsent_nbytes += unsent.nbytes
        if unsent.release is None:
            unsent.parts = [memoryview(bytes(part)) for part in unsent.parts]
        self._unsent.append(unsent)
        self._has_unsent.set()

    def _give_back(self, unsent: Unsent) -> None:
        self._unsent_nbytes -= unsent.nbytes
        self._budget.give(unsent.nbytes)

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Sends the bytes that the kernel takes without waiting; returns the rest."""
        try:
            while parts:
                sent = self._stream.sendmsg(parts, [], AT_ONCE)
                parts = sockets.advance(parts, sent)
        except BlockingIOError:
            pass
        except OSError:
            self._is_closed = True  # The reading thread sees the end too, and cleans up.
            return []
        return parts

    def _write(self) -> None:
        """Sends the waiting frames one by one, as fast as the peer reads."""
        while True:
            self._has_unsent.wait()
            with self._lock:
                if self._is_closed:
                    return
                unsent = self._unsent[0]
            try:
                sockets.send_all(self._stream, unsent.frame())
            except TransportError:
                self.close()
                return
            with self._lock:
                if self._is_closed:
                    return  # `close` has released the payload that was being sent.
                self._unsent.popleft()
                self._give_back(unsent)
                if not self._unsent:
                    self._has_unsent.clear()
            if unsent.release is not None:
                unsent.release()
