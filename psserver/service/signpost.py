"""Calls that come while a shard moves, and after it has moved: they wait, then they are passed on.

A worker is told by `Describe` where the shard is, and connects there. Everybody else (commands, the
process that takes checkpoints) may go on to use the old address while this process lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1.publish_pb2 import WatchReply
from psserver.access.authorizer import CONTROL, DATA, HEALTH

HERE = ("/ps.v1.Standby/", HEALTH, CONTROL + "Drain")  # Always answered by this process.
# Calls that change the journals of a job.
CHANGED = ("Join", "Define", "Change", "Choose", "Barrier", "Meet", "Leave", "Forget")
CHANGES = {
    *(CONTROL + name for name in CHANGED),
    "/ps.v1.Checkpoints/Finish",
    "/ps.v1.Publications/Begin",
}
DESCRIBE = CONTROL + "Describe"
WATCH = "/ps.v1.Publications/Watch"
HOLD_S = 8.0  # A call waits so long at most; then it is to be repeated.
KEPT_KEYS = ("user-agent", "grpc-")  # Keys of metadata that each connection sets itself.


class Signpost(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers calls here, holds them, or passes them on to another process."""

    def __init__(
        self, await_kept: Callable[[], Awaitable[None]], stands_by: Callable[[], bool]
    ) -> None:
        """Starts with calls that are answered here.

        Args:
            await_kept: Waits until a process that follows has all that was changed.
            stands_by: Returns whether this process is a standby: workers may await it.
        """
        self._await_kept, self._stands_by = await_kept, stands_by
        self.address = ""  # Where calls are passed on to; empty: nowhere.
        self._channel: grpc.Channel | None = None
        self._is_open = asyncio.Event()
        self._is_open.set()

    def hold(self) -> None:
        """Holds calls from now on, until `release` or `show`."""
        self._is_open.clear()

    def release(self) -> None:
        """Ends the hold: calls are answered here, and those that were held are to be repeated."""
        self.close()
        self._is_open.set()

    def show(self, address: str, credentials: Credentials) -> None:
        """Passes calls on to `address`, each with the token that it came with."""
        self.close()
        self.address = address
        self._channel = replace(credentials, token="").channel(address)
        self._is_open.set()

    def close(self) -> None:
        """Ends the connection to the other process."""
        self.address = ""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, or one that holds the call and passes it on."""
        method = str(handler_call_details.method)
        if method.startswith(HERE) or (self._is_open.is_set() and not self.address):
            handler = await continuation(handler_call_details)
            is_change = method in CHANGES
            if is_change or method.startswith(DATA):
                return self._held(handler, is_change=is_change)
            return handler

        async def late(raw: bytes, context: Any) -> bytes:
            if self._stands_by() and method == DESCRIBE and _is_awaited(raw):
                own = await continuation(handler_call_details)
                reply = await own.unary_unary(own.request_deserializer(raw), context)
                return self._named(method, own.response_serializer(reply))
            return await self._late(method, raw, context)

        return grpc.unary_unary_rpc_method_handler(cast("Any", late))

    def _held(self, handler: Any, *, is_change: bool) -> Any:
        """Returns a method's handler; no answer leaves once calls are held or passed on.

        That of a call which changes journals waits until the changes are kept.
        """
        if handler is None or handler.unary_unary is None:
            return handler

        async def call(request: Any, context: Any) -> Any:
            reply = await handler.unary_unary(request, context)
            if is_change:
                await self._await_kept()
            if self.address or not self._is_open.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the shard may be elsewhere")
            return reply

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    async def _late(self, method: str, raw: bytes, context: Any) -> bytes:
        try:
            await asyncio.wait_for(self._is_open.wait(), HOLD_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the shard is being moved")
        if self._channel is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the shard has not been moved")
        assert self._channel is not None
        metadata = tuple(
            (key, value)
            for key, value in context.invocation_metadata()
            if not key.startswith(KEPT_KEYS)
        )
        call = self._channel.unary_unary(method, None, None).future(
            raw, timeout=context.time_remaining(), metadata=metadata
        )
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            loop.call_soon_threadsafe(done.set)

        call.add_done_callback(wake)
        await done.wait()
        if call.code() is not grpc.StatusCode.OK:
            await context.abort(call.code(), call.details(), call.trailing_metadata() or ())
        return self._named(method, call.result())

    def _named(self, method: str, raw: bytes) -> bytes:
        """Returns an answer; one that describes the shard names the address where it is now."""
        if method == DESCRIBE:
            about = pb.DescribeReply.FromString(raw)
            about.moved_to = about.moved_to or self.address
            return about.SerializeToString()
        if method == WATCH:
            news = WatchReply.FromString(raw)
            news.next_address = news.next_address or self.address
            return news.SerializeToString()
        if method == CONTROL + "Status":
            status = pb.StatusReply.FromString(raw)
            status.shard.moved_to = status.shard.moved_to or self.address
            return status.SerializeToString()
        return raw


def _is_awaited(raw: bytes) -> bool:
    """Returns whether a question for a description is that of a worker that awaits the shard."""
    try:
        return bool(pb.DescribeRequest.FromString(raw).awaited)
    except DecodeError:
        return False
