"""Errors of gRPC methods: a refusal is answered, and any other exception ends the process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import ConfigError, DecodeError, PacelineError
from psserver.access.authorizer import abort

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Method = Callable[[Any, Any], Awaitable[Any]]
# Longest message of a method; its fields may take 40 times as much memory. Others carry numbers, or
# come from holders of the token for everything.
NBYTES_MAX = {"Define": 8 << 20} | dict.fromkeys(("SendResidual", "Write", "Put"), 24 << 20)
NBYTES_MAX |= dict.fromkeys(("Capture", "Prepare", "Offer"), 24 << 20)
SHORT_NBYTES_MAX = 1 << 20  # Longest message of any other method.


def refusing(method: Method) -> Method:
    """Returns a method that answers a `PacelineError` with its status code and class name."""

    async def call(request: object, context: Any) -> object:
        try:
            return await method(request, context)
        except PacelineError as error:
            await abort(context, error)
            raise

    return call


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request whose bytes are not the message of its method."""

    nbytes: int


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers refusals, and reports every other exception of a method, which only a bug raises."""

    def __init__(
        self,
        report: Callable[[BaseException], None],
        note_call: Callable[..., None] = lambda method, peer, is_answered: None,
    ) -> None:
        """Calls `report` with each exception that is no refusal.

        Args:
            note_call: Called with the method and peer of each call before it, and again after one
                that is not refused; `is_answered` tells which.
        """
        self._report = report
        self._note_call = note_call
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the method's handler inside ours; each is made once."""
        method = str(handler_call_details.method)
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return cast("Handler", handler)  # No such method, or a stream: the watch on health.
        self._handlers[method] = self._wrap(handler, method)
        return self._handlers[method]

    def _wrap(self, handler: Handler, name: str) -> Handler:
        method = refusing(cast("Method", handler.unary_unary))
        longest = NBYTES_MAX.get(name.rpartition("/")[2], SHORT_NBYTES_MAX)

        def parse(raw: bytes) -> object:
            assert handler.request_deserializer is not None
            if len(raw) > longest:
                return Malformed(len(raw))
            try:
                return handler.request_deserializer(raw)
            except ProtobufDecodeError:  # gRPC would answer UNKNOWN, and no reason.
                return Malformed(len(raw))

        async def call(request: object, context: Any) -> object:
            self._note_call(name, context.peer(), is_answered=False)
            try:
                if isinstance(request, Malformed):
                    text = f"{request.nbytes} bytes are no message for {name.rpartition('/')[2]}"
                    await abort(context, DecodeError(text))
                reply = await method(request, context)
            except grpc.aio.BaseError:
                raise  # A refusal, or a connection that is gone.
            except NotImplementedError:  # A relay's, which leaves methods of the service out.
                text = f"{name} is not answered by a relay: give the addresses of the shards"
                await abort(context, ConfigError(text))
                raise
            except Exception as problem:
                self._report(problem)
                raise
            self._note_call(name, context.peer(), is_answered=True)
            return reply

        return grpc.unary_unary_rpc_method_handler(
            cast("Any", call),
            parse if handler.request_deserializer else None,
            handler.response_serializer,
        )
