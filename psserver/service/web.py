"""The HTTP server of the metrics page and of the dashboard: uvicorn behind limits for strangers.

A connection carries one request, and has a few seconds from its begin to the last byte of the
answer, a TLS handshake included. There is a limited number of places. When all are taken, a
newcomer gets the place of a connection that has not sent its request yet (`pscore.net.crowd`), so
slow peers keep no probe waiting, however many they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pscore.net import crowd, descriptors, sockets

CONNECTIONS_MAX = 256
DESCRIPTORS_SHARE = 16  # Connections get one of so many file descriptors at most.
REQUEST_NBYTES_MAX = 8 << 10  # The head of a request; no body is read.
NEWCOMERS = 4  # Connections that are begun with in one turn of the loop.
ACCEPTING_S_MAX = 0.02  # Time for accepting connections in one turn of the loop.
SILENT_S = 5  # Time for which the kernel keeps a connection on which nothing has come.
PAUSE_S = 0.1

Answer = Callable[[Request], Awaitable[Response]]
Newcomer = tuple[socket.socket, tuple[Any, ...]]  # An accepted connection, and its peer.


class HttpExchange(H11Protocol):
    """One connection: a request and its answer.

    Attributes:
        address: Host at the other end.
        ended: Done when the connection is closed.
    """

    def __init__(self, address: str, config: Config, state: ServerState) -> None:
        """Waits for the connection of a peer at `address`."""
        super().__init__(config, state, {})
        self.address = address
        self.ended: asyncio.Future[None] = self.loop.create_future()

    @property
    def has_asked(self) -> bool:
        """Whether the head of the request has come."""
        return self.scope is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the exchange."""
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)


class WebServer:
    """An HTTP server inside the event loop of its process.

    Attributes:
        accepting: Accepts connections, once it has started; it ends by `stop`, or by a bug.
    """

    def __init__(
        self, answer: Answer, *, seconds_max: float, context: ssl.SSLContext | None = None
    ) -> None:
        """Listens to nothing yet.

        Args:
            answer: Returns the response to a request; the body of HEAD is left out.
            seconds_max: Seconds for one connection.
            context: TLS; None: none.
        """
        self._answer = answer
        self._seconds_max = seconds_max
        self._context = context
        self._config = Config(
            self._app,
            http=HttpExchange,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=REQUEST_NBYTES_MAX,
        )
        self._state = ServerState()
        self._state.default_headers = [(b"connection", b"close")]
        self._connections_max = min(CONNECTIONS_MAX, descriptors.limit() // DESCRIPTORS_SHARE)
        self._open: dict[asyncio.Task[None], HttpExchange] = {}  # In order of arrival.
        self.accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port.

        Raises:
            OSError: The port cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=sockets.BACKLOG)
        listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux: no turn is spent on silent connections.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
        self.accepting = asyncio.create_task(self._accept(listener))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, and closes all connections."""
        if self.accepting is None:
            return
        tasks = [self.accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._answer(Request(scope)))(scope, receive, send)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        newcomers: list[Newcomer] = []
        try:
            while True:
                try:
                    if not newcomers:
                        newcomers.append(await loop.sock_accept(listener))
                    end_s = loop.time() + ACCEPTING_S_MAX
                    while len(newcomers) < self._connections_max and loop.time() < end_s:
                        newcomers.append(listener.accept())
                except BlockingIOError:
                    pass  # No more of them wait.
                except OSError as problem:  # It has ended by itself, unless descriptors are short.
                    if problem.errno in descriptors.EXHAUSTED:
                        self._make_room()
                        await asyncio.sleep(PAUSE_S)
                newcomers = self._thin_out(newcomers)
                for accepted, (address, *_) in newcomers[:NEWCOMERS]:
                    self._start_serving(accepted, address)
                del newcomers[:NEWCOMERS]
                await asyncio.sleep(0)  # A few newcomers in a turn of the loop, then the others.
        finally:
            for one in (listener, *(accepted for accepted, _ in newcomers)):
                one.close()

    def _thin_out(self, newcomers: list[Newcomer]) -> list[Newcomer]:
        """Returns the newcomers without those that say nothing, as far as there are too many.

        A crowd that comes at once is closed as fast as the kernel hands it over, so its connections
        do not fill the kernel's queue, where those of others would be lost.
        """
        excess = len(newcomers) - max(NEWCOMERS, self._connections_max - len(self._open))
        if excess <= 0:
            return newcomers
        poll = select.poll()
        for accepted, _ in newcomers:
            poll.register(accepted, select.POLLIN)
        speaking = {number for number, _ in poll.poll(0)}
        silent = [(one, peer[0]) for one, peer in newcomers if one.fileno() not in speaking]
        closing = set(crowd.to_close(silent, excess))
        for accepted in closing:
            accepted.close()
        return [newcomer for newcomer in newcomers if newcomer[0] not in closing]

    def _start_serving(self, accepted: socket.socket, address: str) -> None:
        if len(self._open) >= self._connections_max:
            self._make_room()
        exchange = HttpExchange(address, self._config, self._state)
        task = asyncio.create_task(self._serve(accepted, exchange))
        self._open[task] = exchange
        task.add_done_callback(lambda _: accepted.close())
        task.add_done_callback(lambda task: self._open.pop(task, None))

    def _make_room(self) -> None:
        """Closes the connection that has the least claim to its place, if there is one."""
        held = [
            (task, exchange.address, exchange.has_asked) for task, exchange in self._open.items()
        ]
        waiting = [(task, address) for task, address, has_asked in held if not has_asked]
        if held:
            (task,) = crowd.to_close(waiting or [(task, address) for task, address, _ in held])
            del self._open[task]
            task.cancel()

    async def _serve(self, accepted: socket.socket, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        transport: asyncio.Transport | None = None
        try:
            with contextlib.suppress(OSError):  # Also of TLS, and the end of the time.
                async with asyncio.timeout(self._seconds_max):
                    transport, _ = await loop.connect_accepted_socket(
                        lambda: exchange, accepted, ssl=self._context
                    )
                    await exchange.ended
        finally:
            if transport is not None:
                transport.abort()
