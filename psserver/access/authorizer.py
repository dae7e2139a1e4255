"""Authorization on a shard: tokens, compared in constant time before anything else is read.

A token is for one job (its weights), or for everything (every job, and control: status, drain).
Health is open to all. A method that is not listed here as one of the workers' needs a token for
everything, so that a new method is closed until it is listed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import AccessError, DecodeError, PacelineError, RemoteProtocolError
from pscore.net.credentials import EVERY, READS, TOKEN_KEY, Token, read_tokens
from pscore.net.rpc import DATA_SERVICE, ERROR_KEY, SENDER_KEY, code_of
from pscore.pb.ps.v1 import data_pb2
from pscore.text import printable
from psserver.logs import setup

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Metadata = Sequence[tuple[str, str | bytes]] | None

HEALTH = "/grpc.health.v1.Health/"
CONTROL = "/ps.v1.Control/"
DATA = f"/{DATA_SERVICE}/"
PUBLICATIONS = "/ps.v1.Publications/"
# Methods of a worker, and of `psserver forget`; all but Describe name a job: the token's.
JOINED = (
    "Describe",
    "Join",
    "Define",
    "Change",
    "Choose",
    "Heartbeat",
    "SendResidual",
    "FetchResidual",
    "Barrier",
    "Meet",
    "Leave",
)
WORKERS_METHODS = {
    *(CONTROL + name for name in (*JOINED, "Forget")),
    *(DATA + name for name in ("Push", "Pull")),
    PUBLICATIONS + "Begin",
}
READERS_METHODS = {CONTROL + "Describe", PUBLICATIONS + "Watch"}
HOW = "set PACELINE_TOKEN_FILE (or token_file=) to a file with the token"


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of an admitted peer."""

    job: str  # `EVERY` for everything.
    reads: bool = False  # Published weights of the job, and nothing else.

    def require(self, job: str) -> None:
        """Raises AccessError for access to another job."""
        if self.reads:
            raise AccessError(f"the token reads published weights of job {self.job!r} only; {HOW}")
        self.require_read(job)

    def require_read(self, job: str) -> None:
        """Raises AccessError for to read published weights of another job."""
        if self.job not in (EVERY, job):
            raise AccessError(f"the token is for job {self.job!r}, not for {job!r}; {HOW} for that")

    def require_control(self, method: str) -> None:
        """Raises AccessError for a method that concerns all jobs to a token of one job."""
        if self.job != EVERY or self.reads:
            raise AccessError(
                f"the token is of job {self.job!r}, and {method} concerns every job; {HOW} for "
                f"everything ('{EVERY}' in the shards' token file)"
            )


class Authorizer:
    """The tokens of one shard; without any, every peer may do everything."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        """Keeps digests of the tokens, which all have the same length."""
        self._known = [(_digest(token.secret), token.job) for token in tokens]

    @classmethod
    def of(cls, token_file: str | None) -> Authorizer:
        """Returns the authorizer of a token file; without a file, one that admits all.

        Raises:
            ConfigError: The file cannot be used.
        """
        return cls(() if token_file is None else read_tokens(Path(token_file)))

    @property
    def is_open(self) -> bool:
        """Whether peers need no token."""
        return not self._known

    def admit(self, secret: str) -> Grant:
        """Returns the rights of the bearer of a token.

        Raises:
            AccessError: The token is empty, or not known here.
        """
        if self.is_open:
            return Grant(EVERY)
        if not secret:
            raise AccessError(
                f"a token is required, and none was sent; {HOW}: that for '{EVERY}', if more than "
                "one job is concerned"
            )
        digest, found = _digest(secret), ""
        for known, job in self._known:  # All of them, so that the time reveals nothing.
            found = job if hmac.compare_digest(known, digest) else found
        if not found:
            raise AccessError(
                f"this shard does not know the token that was sent; {HOW} that it knows"
            )
        return Grant(found.removesuffix(READS), reads=found.endswith(READS))

    def admit_call(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Grant:
        """Returns the rights of the caller of a gRPC method.

        Raises:
            AccessError: Its token is missing or wrong.
        """
        if self.is_open:
            return Grant(EVERY)
        shown = [value for key, value in metadata or () if key == TOKEN_KEY]
        return self.admit(str(shown[0]) if len(shown) == 1 else "")

    def refused(self, error: PacelineError, where: str, peer: str = "") -> None:
        """Logs a refusal, unless one of this peer was logged just now."""
        reason = str(error)
        setup.sparsely("refused", peer, kind=f"refused at {where}", where=where, reason=reason)


Heard = Callable[[str, int, int], object]  # Job, rank, incarnation; raises if there is none.


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits calls by their token, before their message is read.

    A push or pull also names its worker beside the message, which may be of many megabytes. The
    message of a worker that is not live here is refused unread, also where no token is needed.
    """

    def __init__(self, authorizer: Authorizer, heard: Heard) -> None:
        self._authorizer = authorizer
        self._heard = heard
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the method's handler, or one that refuses."""
        method = str(handler_call_details.method)
        if method.startswith(HEALTH):
            return cast("Handler", await continuation(handler_call_details))
        try:
            metadata = cast("Metadata", handler_call_details.invocation_metadata)
            visitor = self._authorizer.admit_call(metadata)
            if method not in WORKERS_METHODS | READERS_METHODS:
                visitor.require_control(method.rpartition("/")[2])
            if method.startswith(DATA):
                sender = _sender(metadata)
                visitor.require(sender.job)
                self._heard(sender.job, sender.worker, sender.incarnation)
        except PacelineError as error:
            if not method.startswith(DATA) or isinstance(error, AccessError | DecodeError):
                self._authorizer.refused(error, method)
            return _refusal(error)
        if self._authorizer.is_open:
            return cast("Handler", await continuation(handler_call_details))
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None or not method.startswith((CONTROL, PUBLICATIONS)):
                return cast("Handler", handler)
            self._handlers[method] = self._checked(handler, method)
        return self._handlers[method]

    def _checked(self, handler: Handler, method: str) -> Handler:
        """Returns the handler behind a comparison of the request's job with the token's."""
        inner = cast("Callable[[Any, Any], Awaitable[object]]", handler.unary_unary)

        async def call(request: Any, context: Any) -> object:
            if hasattr(request, "job"):
                try:
                    visitor = self._authorizer.admit_call(context.invocation_metadata())
                    if method in READERS_METHODS:
                        visitor.require_read(request.job)
                    else:
                        visitor.require(request.job)
                except AccessError as error:
                    self._authorizer.refused(error, method)
                    await abort(context, error)
            return await inner(request, context)

        return grpc.unary_unary_rpc_method_handler(
            cast("Any", call), handler.request_deserializer, handler.response_serializer
        )


def _sender(metadata: Metadata) -> data_pb2.Sender:
    """Returns the sender of a push or pull.

    Raises:
        RemoteProtocolError: The call does not name one.
    """
    shown = [value for key, value in metadata or () if key == SENDER_KEY]
    if len(shown) != 1 or not isinstance(shown[0], bytes):
        raise RemoteProtocolError(
            f"a push or pull over gRPC must name its worker in {SENDER_KEY}, and this one does "
            "not; install the same version of paceline everywhere"
        )
    try:
        return data_pb2.Sender.FromString(shown[0])
    except ProtobufDecodeError as problem:
        raise DecodeError(f"{SENDER_KEY} holds no worker") from problem


def _refusal(error: PacelineError) -> Handler:
    """Returns a handler that ends the call without reading its message.

    It is a stream's handler, since a unary one is called only with the whole message.
    """

    async def refuse(messages: AsyncIterator[object], context: Any) -> None:
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(cast("Any", refuse))


async def abort(context: Any, error: PacelineError) -> None:
    """Ends a call with the status code and the class name of `error`."""
    await context.abort(
        code_of(error), printable(str(error), keep="\n"), ((ERROR_KEY, type(error).__name__),)
    )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
