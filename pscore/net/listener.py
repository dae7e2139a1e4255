"""Accepts connections on TCP, with or without TLS, and on Unix sockets of the same host.

A new connection has a few seconds for the TLS handshake and for its first message. If too many are
still at that, one of them is closed on which nothing whole has come, or that is slow
(`crowd.OpenExchanges`), so slow peers cannot exhaust the listener; if there is none, newcomers
wait. If there are too many connections in all, or there is no file descriptor or thread for one
more, one of a stranger is closed; without any, new connections are refused, which is logged
sparsely, and the listener continues: it ends when its owner stops it, and in no other way.

A connection to a Unix socket is accepted only from a process of the same user.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pscore.net import connection as connections
from pscore.net import descriptors, sockets, tls
from pscore.net.budget import Budget
from pscore.net.connection import Connection, Service
from pscore.net.crowd import ExchangeStage, OpenExchanges
from pscore.net.endpoint import peer_user
from pscore.threads import OwnedThread

CONNECTIONS_MAX = 4096
PENDING_MAX = 256  # Connections before their first message.
PENDING_SHARE = 4  # They get at most one of so many descriptors.
UNKNOWN_NBYTES = 32 << 20  # Bytes of long headers from all peers that are not known yet.
RECOVERED_S = 3.0  # Without a refusal for lack of resources; then the listener is well again.
PAUSE_S = 0.1
AT_ONCE = 16  # Connections that are accepted in one turn.
TICK_S = 1.0  # The time of a peer is counted in so long parts, while others want its place.
STOP_TIMEOUT_S = 1.0  # For the threads of all connections together.
THIS_HOST = "this host"  # Other end of a Unix socket, for the log.

Serve = Callable[[socket.socket], None]


class Strangers:
    """Connections of peers that are not known yet; too many of them are closed (`crowd`)."""

    def __init__(self, num_max: int) -> None:
        """Keeps at most `num_max`."""
        self.num_max = num_max
        self._lock = threading.Lock()
        self._held: OpenExchanges[socket.socket] = OpenExchanges(math.inf)
        self._ticked_s = -math.inf

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, accepted: socket.socket) -> bool:
        return accepted in self._held

    def add(self, accepted: socket.socket, address: str) -> None:
        """Adds a connection."""
        with self._lock:
            self._held.enter(accepted, address)

    def note_greeted(self, accepted: socket.socket) -> None:
        """Notes that the first message of a handshake, or a request, has come."""
        with self._lock:
            self._held.advance(accepted, ExchangeStage.BEGUN)

    def remove(self, accepted: socket.socket) -> None:
        """Removes a connection whose peer is known now, or that has ended."""
        with self._lock:
            self._held.leave(accepted)

    def has_room(self) -> bool:
        """Returns whether there is a place for a newcomer, and makes one if that may be."""
        return len(self) < self.num_max or self.drop_some()

    def trim(self) -> None:
        """Shuts down those that are too many, as far as they may go."""
        if (excess := len(self) - self.num_max) > 0:
            self.drop_some(excess)

    def drop_some(self, count: int = 1) -> bool:
        """Shuts so many connections down; returns whether there was one that may go."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._ticked_s >= TICK_S:
                self._ticked_s = now_s
                self._held.tick()
            chosen = self._held.choose(count)
        for dropped in chosen:
            self.drop(dropped)
        return bool(chosen)

    def drop(self, accepted: socket.socket) -> None:
        """Shuts a connection down, unless its peer has become known, or it has ended."""
        with self._lock, contextlib.suppress(OSError):
            if accepted in self._held:
                self._held.leave(accepted)
                accepted.shutdown(socket.SHUT_RDWR)


class Listener:
    """Listens for connections of peers and gives each one a thread.

    Attributes:
        local: Name of the abstract Unix socket, without its leading zero byte.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        local: str,
        *,
        context: ssl.SSLContext | None = None,
        others: Mapping[str, Serve] | None = None,
    ) -> None:
        """Binds all sockets; nothing is accepted yet.

        Args:
            port: Port to listen on; 0 for a free one.
            local: Name of the abstract Unix socket.
            context: TLS of the TCP port; None: none.
            others: Further Unix sockets for messages that are not frames on a stream (such as file
                descriptors): suffix of the name, and the function that serves one connection. A
                call has `HELLO_TIMEOUT_S` for each read and write, and the connection is closed
                when it returns.

        Raises:
            OSError: An address is not available.
        """
        self._service = service
        self._context = context
        share = PENDING_SHARE if context is None else 2 * PENDING_SHARE  # TLS needs a copy.
        self._pending = Strangers(min(PENDING_MAX, descriptors.limit() // share))
        self._greeted = Strangers(CONNECTIONS_MAX)  # Their first message named no known worker.
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._refused_s = -math.inf  # Time of the last refusal for lack of resources.
        self._unknown = Budget(UNKNOWN_NBYTES, "")
        self._connections: dict[Connection, threading.Thread] = {}  # With their reading threads.
        self.local = local
        self._listeners: list[tuple[socket.socket, Serve]] = []
        with contextlib.ExitStack() as undo:
            listener, self._congestion = sockets.listen(host, port)
            self._listeners.append((undo.enter_context(listener), self._serve))
            self.port = int(listener.getsockname()[1])
            served: dict[str, Serve] = {"": self._serve}
            for suffix, serve in (others or {}).items():
                served[suffix] = _served_within(self._pending, serve)
            for suffix, serve in served.items():
                listener = undo.enter_context(_listen_locally(local + suffix))
                self._listeners.append((listener, serve))
            undo.pop_all()

    def start(self) -> None:
        """Starts to accept."""
        for listener, serve in self._listeners:
            listener.setblocking(False)
            poll = select.poll()  # Made here: `stop` may close the listener before a thread runs.
            poll.register(listener, select.POLLIN)
            accept = partial(self._accept, listener, poll, serve)
            thread = OwnedThread(accept, "data-accept", self._service.broke)
            self._threads.append(thread)
            thread.start()

    @property
    def is_well(self) -> bool:
        """Whether connections are accepted, and none was refused just now for lack of resources."""
        is_late = time.monotonic() - self._refused_s >= RECOVERED_S
        return is_late and all(thread.is_alive() for thread in self._threads)

    def stop(self) -> bool:
        """Closes the listeners and all connections, and waits a moment for their handlers.

        Returns:
            Whether all handlers have ended.
        """
        self._is_closing = True
        for listener, _ in self._listeners:
            with contextlib.suppress(OSError):  # Closing alone would not wake its thread.
                listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # Else one might wait for another file with this number.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(STOP_TIMEOUT_S)
        for listener, _ in self._listeners:
            listener.close()
        served = list(self._connections.items())
        for connection, _ in served:
            connection.close()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for _, thread in served:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for _, thread in served)

    def _accept(self, listener: socket.socket, poll: select.poll, serve: Serve) -> None:
        spare, own = descriptors.SpareDescriptor(), listener.fileno()
        silent: dict[int, tuple[socket.socket, float]] = {}  # With their deadlines, oldest first.
        while not self._is_closing:
            # `accept` would not wait if there is no descriptor left.
            events = poll.poll(1e3 * TICK_S if silent else None)
            events.sort(key=lambda event: event[0] == own)  # First those that have spoken.
            for number, _ in events:
                if number != own:
                    poll.unregister(number)
                    self._start_serving(silent.pop(number)[0], serve)
                elif self._pending.has_room():
                    deadline_s = time.monotonic() + connections.HELLO_TIMEOUT_S
                    for accepted in self._accept_some(listener, spare):
                        poll.register(accepted, select.POLLIN)
                        silent[accepted.fileno()] = accepted, deadline_s
                    self._pending.trim()
                else:
                    time.sleep(PAUSE_S)
            for accepted, deadline_s in list(silent.values()):
                if deadline_s > time.monotonic():
                    break
                self._pending.drop(accepted)  # Its end is an event.
        spare.close()
        for accepted, _ in silent.values():
            accepted.close()

    def _accept_some(
        self, listener: socket.socket, spare: descriptors.SpareDescriptor
    ) -> Iterator[socket.socket]:
        """Accepts connections, which get a thread when their peers have said something."""
        try:
            waiting = sockets.accept_waiting(listener, AT_ONCE)
        except OSError as problem:
            self._on_accept_failed(problem, listener, spare)
            return
        for accepted, host in waiting:
            is_full = len(self._connections) >= CONNECTIONS_MAX
            is_scarce = descriptors.is_scarce(accepted.fileno())
            dropped = (is_full or is_scarce) and (
                self._pending.drop_some() or self._greeted.drop_some()
            )
            if (is_full or is_scarce) and not dropped:
                few = f"few of the {descriptors.limit()} file descriptors are left"
                self._note_refusal(few if is_scarce else f"{CONNECTIONS_MAX} connections are open")
            elif _is_of_this_user(accepted):
                self._pending.add(accepted, host or THIS_HOST)
                yield accepted
                continue
            accepted.close()

    def _on_accept_failed(
        self, problem: OSError, listener: socket.socket, spare: descriptors.SpareDescriptor
    ) -> None:
        """Turns a connection away if no descriptor is left; else it has ended by itself."""
        if self._is_closing:
            return
        if problem.errno not in descriptors.EXHAUSTED:
            time.sleep(PAUSE_S)
            return
        self._note_refusal(problem.strerror or str(problem))
        with contextlib.suppress(OSError):
            if not spare.turn_away(listener):
                time.sleep(PAUSE_S)

    def _start_serving(self, accepted: socket.socket, serve: Serve) -> None:
        """Starts a thread for a connection, unless it has ended, or had to go."""
        try:
            if accepted in self._pending and sockets.has_said(accepted):
                OwnedThread(partial(serve, accepted), "data-read", self._service.broke).start()
                return
        except RuntimeError as problem:
            self._note_refusal(str(problem))
        self._pending.remove(accepted)
        accepted.close()

    def _note_refusal(self, reason: str) -> None:
        self._refused_s = time.monotonic()
        self._service.log("data connection refused: too many are open", reason=reason)

    def _serve(self, accepted: socket.socket) -> None:
        """Serves one connection to its end."""
        deadline_s = time.monotonic() + connections.HELLO_TIMEOUT_S
        peer = peer_of(accepted)
        with accepted:
            try:
                sockets.tune(accepted, self._congestion)
                stream = self._secured(accepted, deadline_s)
            except OSError as problem:
                self._pending.remove(accepted)
                event, reason = "data handshake failed", str(problem)
                self._service.log(event, peer, level=logging.INFO, reason=reason)
                return
            connection = Connection(
                stream,
                self._service,
                peer=peer,
                on_asked=lambda: self._on_asked(accepted, peer),
                on_answered=lambda: self._greeted.add(accepted, peer),  # It is silent again.
                on_known=lambda: self._on_known(accepted),
                unknown=self._unknown,
            )
            self._connections[connection] = threading.current_thread()
            if self._is_closing:  # `stop` may not have seen this connection.
                connection.close()
            try:
                connection.serve(deadline_s)
            finally:
                self._on_known(accepted)
                del self._connections[connection]

    def _on_asked(self, accepted: socket.socket, peer: str) -> None:
        self._pending.remove(accepted)
        self._greeted.add(accepted, peer)
        self._greeted.note_greeted(accepted)

    def _on_known(self, accepted: socket.socket) -> None:
        self._pending.remove(accepted)
        self._greeted.remove(accepted)

    def _secured(self, accepted: socket.socket, deadline_s: float) -> tls.Stream:
        """Returns the connection, with TLS if it came over TCP and there is a context."""
        if self._context is None or accepted.family == socket.AF_UNIX:
            return accepted
        tls.on_greeted.set(partial(self._pending.note_greeted, accepted))
        # A copy: TLS detaches its socket, and this one must stay so that it can be shut down.
        copied = accepted.dup()
        try:
            return tls.secure(copied, self._context, deadline_s=deadline_s)
        except OSError:
            copied.close()  # Without effect once TLS has detached it.
            raise


def peer_of(accepted: socket.socket) -> str:
    """Returns the host at the other end, for the log."""
    if accepted.family == socket.AF_UNIX:
        return THIS_HOST
    try:
        return str(accepted.getpeername()[0])
    except OSError:
        return "gone"


def _served_within(pending: Strangers, serve: Serve) -> Serve:
    """Returns a function that serves a connection of one short exchange, and closes it."""

    def serve_once(accepted: socket.socket) -> None:
        with accepted:
            try:
                accepted.settimeout(connections.HELLO_TIMEOUT_S)
                serve(accepted)
            finally:
                pending.remove(accepted)

    return serve_once


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name.encode())
        listener.listen(256)
    except OSError:
        listener.close()
        raise
    return listener


def _is_of_this_user(accepted: socket.socket) -> bool:
    """Returns whether the peer of a Unix socket is this user; True for TCP, where tokens decide."""
    return accepted.family != socket.AF_UNIX or peer_user(accepted) == os.geteuid()
