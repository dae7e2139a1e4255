"""gRPC for both sides: channel options, and errors as status codes.

Our code uses only status codes that the gRPC library never generates, so that a client can tell a
refusal from a failing network. The name of the error's class travels beside the code:

    INVALID_ARGUMENT     DecodeError, ConfigError
    NOT_FOUND            UnknownJobError
    ALREADY_EXISTS       RankTakenError, NotOverError
    FAILED_PRECONDITION  JobMismatchError, ProtocolVersionError, ShardMapError, RemoteProtocolError
    ABORTED              ReplacedError
    OUT_OF_RANGE         LimitError
    PERMISSION_DENIED    AccessError

UNAVAILABLE and DEADLINE_EXCEEDED come from gRPC and mean: try again. So does CANCELLED, the status
of a call that arrives while a shard stops.
"""

from __future__ import annotations

import grpc

from pscore import errors
from pscore.text import printable

MESSAGE_NBYTES_MAX = 80 << 20  # More than the largest frame (wire.py).
CONNECTIONS_MAX = 4096  # gRPC, one shard; fewer where file descriptors are few.
DATA_SERVICE = "ps.v1.Data"
SENDER_KEY = "paceline-sender-bin"  # Key of the metadata of a push or pull: its `Sender`.
ERROR_KEY = "paceline-error"

ChannelOptions = tuple[tuple[str, int | str], ...]
CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # Each channel has a connection of its own.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # A peer that was away is found soon after that.
    ("grpc.enable_http_proxy", 0),  # Shards are in the same network; http_proxy is for others.
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_concurrent_streams", 256),  # On one connection.
    ("grpc.max_connection_idle_ms", 300_000),  # Workers send heartbeats; the next call connects.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # A peer that only connects is dropped.
    ("grpc.so_reuseport", 0),  # A port that is taken is an error, not a second listener.
    # A message that nobody reads takes 64 KiB; with the probe as much as the delay suggests.
    ("grpc.http2.bdp_probe", 0),
)

CODES: dict[type[errors.PacelineError], grpc.StatusCode] = {
    errors.DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AccessError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnknownJobError: grpc.StatusCode.NOT_FOUND,
    errors.RankTakenError: grpc.StatusCode.ALREADY_EXISTS,
    errors.JobMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ShardMapError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RemoteProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ReplacedError: grpc.StatusCode.ABORTED,
    errors.LimitError: grpc.StatusCode.OUT_OF_RANGE,
}
# For people, instead of the details in which gRPC has the first part.
SILENCES = {
    "http1.x server": "a web page is there, perhaps a shard's metrics; give the shard's own port",
    "Connection refused": "connection refused: nothing listens there",
}
RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def code_of(error: errors.PacelineError) -> grpc.StatusCode:
    """Returns the status code that `error` travels under."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def error_of(failure: grpc.RpcError, address: str) -> errors.PacelineError:
    """Returns the error that the peer at `address` raised, or a `TransportError`."""
    assert isinstance(failure, grpc.Call)
    details = printable(failure.details() or "", keep="\n")
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, str):
            kind = getattr(errors, value, errors.RemoteProtocolError)
            known = isinstance(kind, type) and issubclass(kind, errors.PacelineError)
            return (kind if known else errors.RemoteProtocolError)(details)
    if failure.code() in RETRYABLE:
        why = next((plain for known, plain in SILENCES.items() if known in details), details)
        return errors.ServerUnavailableError(f"{address}: {why or failure.code().name}")
    return errors.TransportError(f"{address}: {failure.code().name}: {details}")
