"""Errors of gRPC methods: a refusal is answered, and any other exception ends the process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc

from pscore.errors import PacelineError
from psserver.access.authorizer import abort

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Method = Callable[[Any, Any], Awaitable[Any]]


def refusing(method: Method) -> Method:
    """Returns a method that answers a `PacelineError` with its status code and class name."""

    async def call(request: object, context: Any) -> object:
        try:
            return await method(request, context)
        except PacelineError as error:
            await abort(context, error)
            raise

    return call


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers refusals, and reports every other exception of a method, which only a bug raises."""

    def __init__(
        self,
        report: Callable[[BaseException], None],
        answered: Callable[[str, str], None] = lambda method, peer: None,
    ) -> None:
        """Calls `report` with each exception that is no refusal.

        Args:
            report: Gets the exception.
            answered: Called after each other call with its method and peer.
        """
        self._report = report
        self._answered = answered
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

        async def call(request: object, context: Any) -> object:
            try:
                reply = await method(request, context)
            except grpc.aio.BaseError:
                raise  # A refusal, or a connection that is gone.
            except Exception as problem:
                self._report(problem)
                raise
            self._answered(name, context.peer())
            return reply

        return grpc.unary_unary_rpc_method_handler(
            cast("Any", call), handler.request_deserializer, handler.response_serializer
        )
