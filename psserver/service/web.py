"""The HTTP server of the metrics page and of the dashboard: uvicorn behind limits for strangers.

A connection carries one request. Its peer has a few seconds to send it, a TLS handshake included,
and as many to take the answer; the time that this process needs is not counted. There is a limited
number of places. When all are taken, a newcomer gets the place of a connection on which nothing
whole has come, or that is slow (`pscore.net.crowd.OpenExchanges`), so slow peers keep no probe
waiting, however many they are. If there is none, newcomers wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pscore.net import crowd, descriptors, sockets, tls
from pscore.net.crowd import ExchangeStage, OpenExchanges
from pscore.net.sockets import has_said

CONNECTIONS_MAX = 256
DESCRIPTORS_SHARE = 16  # Connections get one of so many file descriptors at most.
REQUEST_NBYTES_MAX = 8 << 10  # The head of a request; no body is read.
NEWCOMERS = 4  # Connections that are begun with in one turn of the loop.
PAUSE_S = 0.02
TICKS = 5  # The time of a peer is counted in so many parts.

Answer = Callable[[Request], Awaitable[Response]]
# An accepted connection, the address of its peer, and when it was accepted.
Newcomer = tuple[socket.socket, str, float]


class HttpExchange(H11Protocol):
    """One connection: a request and its answer."""

    def __init__(
        self,
        accepted: socket.socket,
        places: OpenExchanges[HttpExchange],
        config: Config,
        state: ServerState,
    ) -> None:
        """Waits for the connection over `accepted`, which holds one of the `places`."""
        super().__init__(config, state, {})
        self.accepted = accepted  # The socket.
        self.note = partial(places.advance, self)
        # Done when the connection is closed.
        self.ended: asyncio.Future[None] = self.loop.create_future()

    def data_received(self, data: bytes) -> None:
        """Notes whether the head of the request has come."""
        super().data_received(data)
        if self.scope is not None:
            self.note(ExchangeStage.ASKED)

    def on_response_complete(self) -> None:
        """Notes that the peer only has to take the answer."""
        self.note(ExchangeStage.ANSWERED)
        super().on_response_complete()

    def close(self) -> None:
        """Closes the connection, without the rest of the answer.

        A handshake is not cancelled: asyncio may have begun to watch a descriptor that is closed
        then, and that another connection has by now. It fails by itself.
        """
        if self.transport is not None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the exchange."""
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)


class WebServer:
    """An HTTP server inside the event loop of its process.

    Attributes:
        accepting: Serves, once it has started; it ends by `stop`, or by a bug.
        connections_max: Number of places.
    """

    def __init__(
        self, answer: Answer, *, seconds_max: float, context: ssl.SSLContext | None = None
    ) -> None:
        """Listens to nothing yet.

        Args:
            answer: Returns the response to a request, in one piece; the body of HEAD is left out.
            seconds_max: Seconds that a peer may take for its request, and for the answer.
            context: TLS (`pscore.net.tls.server_context`); None: none.
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
        self.connections_max = min(CONNECTIONS_MAX, descriptors.limit() // DESCRIPTORS_SHARE)
        self._places: OpenExchanges[HttpExchange] = OpenExchanges(TICKS)
        self._serving: dict[asyncio.Task[None], HttpExchange] = {}
        self.accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; raises OSError if the port cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=sockets.BACKLOG)
        listener.setblocking(False)
        sockets.defer_silent(listener)
        self.accepting = asyncio.create_task(self._run(listener))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, and closes all connections."""
        if self.accepting is None:
            return
        self.accepting.cancel()
        await asyncio.wait([self.accepting])
        for exchange in self._serving.values():
            exchange.close()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._answer(Request(scope)))(scope, receive, send)

    async def _run(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as duties:
            duties.create_task(self._accept(listener))
            duties.create_task(self._limit_time())

    async def _limit_time(self) -> None:
        while True:
            await asyncio.sleep(self._seconds_max / TICKS)
            for exchange in self._places.tick():
                exchange.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        newcomers: list[Newcomer] = []  # Connections that are not begun with.
        speaking: list[Newcomer] = []  # Those of them on which something has come.
        try:
            while True:
                num_before = len(newcomers)
                try:
                    if not newcomers:
                        accepted, (host, *_) = await loop.sock_accept(listener)
                        newcomers.append((accepted, host, loop.time()))
                    others = sockets.accept_waiting(listener, self.connections_max - len(speaking))
                    newcomers += [(*one, loop.time()) for one in others]
                except OSError as problem:  # It has ended by itself, unless descriptors are short.
                    if problem.errno in descriptors.EXHAUSTED:
                        self._make_room()
                        await asyncio.sleep(PAUSE_S)
                is_done = len(newcomers) == num_before
                speaking, newcomers = self._thin_out(newcomers, loop.time() - self._seconds_max)
                num_begun = 0
                while speaking and num_begun < NEWCOMERS and self._has_room():
                    accepted, host, _ = speaking.pop(0)
                    self._start_serving(accepted, host)
                    num_begun += 1
                newcomers = speaking + newcomers
                # A few newcomers in a turn of the loop, then the others.
                await asyncio.sleep(PAUSE_S if is_done and newcomers and not num_begun else 0)
        finally:
            for one in (listener, *(accepted for accepted, *_ in newcomers)):
                one.close()

    def _thin_out(
        self, newcomers: list[Newcomer], before_s: float
    ) -> tuple[list[Newcomer], list[Newcomer]]:
        """Returns the newcomers that speak, and those that say nothing, as far as they may wait.

        A crowd that comes at once is closed as fast as the kernel hands it over, so its connections
        do not fill the kernel's queue, where those of others would be lost. It costs this process
        as little as may be: it may have a small share of a busy machine.

        Args:
            newcomers: Connections, the oldest first.
            before_s: One that was accepted before, and says nothing, is closed.
        """
        poll = select.poll()
        for accepted, *_ in newcomers:
            poll.register(accepted, select.POLLIN)
        ready = {number for number, _ in poll.poll(0)}
        speaking = [one for one in newcomers if one[0].fileno() in ready and has_said(one[0])]
        silent = [one for one in newcomers if one[0].fileno() not in ready]
        room = max(NEWCOMERS, self.connections_max - len(self._places) - len(speaking))
        waiting = [(one, host) for one, host, at_s in silent if at_s >= before_s]
        closing = {one for one, *_ in newcomers if one.fileno() in ready}  # They have ended.
        closing.difference_update(one for one, *_ in speaking)
        closing.update(one for one, _, at_s in silent if at_s < before_s)
        closing.update(crowd.to_close(waiting, len(waiting) - room) if len(waiting) > room else ())
        left = [one for one in silent if one[0] not in closing]
        sockets.close_all(closing)
        return speaking, left

    def _has_room(self) -> bool:
        """Returns whether there is a place for a newcomer, and makes one if that may be."""
        return len(self._places) < self.connections_max or self._make_room()

    def _make_room(self) -> bool:
        """Closes the connection that has the least claim to its place, if one may be closed."""
        chosen = self._places.choose()
        for exchange in chosen:
            self._places.leave(exchange)
            exchange.close()
        return bool(chosen)

    def _start_serving(self, accepted: socket.socket, address: str) -> None:
        exchange = HttpExchange(accepted, self._places, self._config, self._state)
        self._places.enter(exchange, address)
        task = asyncio.create_task(self._serve(exchange))
        self._serving[task] = exchange
        task.add_done_callback(self._end_serving)

    def _end_serving(self, task: asyncio.Task[None]) -> None:
        exchange = self._serving.pop(task)
        self._places.leave(exchange)
        exchange.accepted.close()

    async def _serve(self, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        tls.on_greeted.set(partial(exchange.note, ExchangeStage.BEGUN))
        with contextlib.suppress(OSError):  # Also of TLS.
            await loop.connect_accepted_socket(
                lambda: exchange, exchange.accepted, ssl=self._context
            )
            await exchange.ended
