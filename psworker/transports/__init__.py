"""Data planes, and the choice between them for one shard.

`auto` uses shared memory if worker and shard are on one host and of one user, else sockets over
TCP, else gRPC; `PACELINE_DATA_PLANE` names one of them.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable

from pscore.errors import ConfigError, TransportError
from pscore.memory.segment import keeps_order
from pscore.net.credentials import ANYONE, Credentials
from pscore.net.endpoint import Endpoint, connect
from psworker.transports.base import OutgoingPush, PullCall, Transport
from psworker.transports.grpc import GrpcTransport
from psworker.transports.request_future import RequestFuture
from psworker.transports.retry import RetryPolicy
from psworker.transports.shared_memory import SharedMemoryTransport
from psworker.transports.socket_base import SocketTransport
from psworker.transports.tcp import TcpTransport

log = logging.getLogger("paceline")
DATA_PLANES = ("auto", "local", "tcp", "grpc")

__all__ = [
    "DATA_PLANES",
    "Endpoint",
    "OutgoingPush",
    "PullCall",
    "RequestFuture",
    "Transport",
    "choose",
]


def choose(
    wanted: str,
    address: str,
    endpoint: Callable[[], Endpoint],
    policy: RetryPolicy,
    credentials: Credentials = ANYONE,
) -> Transport:
    """Returns the data plane to one shard; a fall-back is logged with its reason.

    Args:
        wanted: One of `DATA_PLANES`.
        address: The shard's address of the control plane.
        endpoint: Returns the shard's present addresses of the socket planes.

    Raises:
        ConfigError: There is no such data plane, or the one that was named does not work.
    """
    if wanted not in DATA_PLANES:
        raise ConfigError(f"data plane is {wanted!r}, must be one of {', '.join(DATA_PLANES)}")
    reasons: list[str] = []
    planes: tuple[type[SocketTransport], ...] = (SharedMemoryTransport, TcpTransport)
    for plane in planes:
        if wanted not in ("auto", plane.name):
            continue
        reason = _obstacle(endpoint, is_local=plane.shares_memory)
        if reason is None:
            if reasons:  # Expected between hosts; a hint on one host.
                log.info("data plane to %s is %s (%s)", address, plane.name, "; ".join(reasons))
            return plane(endpoint, policy)
        reasons.append(f"{plane.name}: {reason}")
    if wanted in ("local", "tcp"):
        raise ConfigError(f"no {wanted!r} data plane to {address}: {'; '.join(reasons)}")
    if wanted == "auto":
        log.warning("data plane to %s is gRPC (%s)", address, "; ".join(reasons))
    return GrpcTransport(address, policy, credentials)


def _obstacle(endpoint: Callable[[], Endpoint], *, is_local: bool) -> str | None:
    """Returns the reason why a socket plane does not work, or None.

    A shard that is killed between its answer and the attempt is asked again, once it is back.
    """
    reason: str | None = None
    for _ in range(2):
        found = endpoint()
        if is_local and not found.local:
            return "the shard is on another host"
        if is_local and not keeps_order():
            return f"this host is {platform.machine()}, and shared memory needs x86-64"
        if not is_local and not found.port:
            return "the shard has no data port"
        try:
            connect(found, is_local=is_local).close()
            return None
        except TransportError as problem:
            reason = str(problem)
            if isinstance(problem.__cause__, TimeoutError):  # A firewall drops what is sent there.
                return reason
    return reason
