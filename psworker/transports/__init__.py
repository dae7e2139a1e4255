"""Data planes, and the choice between them for one shard.

`auto` takes shared memory where worker and shard are on one host and of one user, else bulk
connections over TCP, else gRPC; `PACELINE_DATA_PLANE` names one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pscore.errors import ConfigError, TransportError
from pscore.net.credentials import ANYONE, Credentials
from psworker.transports.base import PullCall, PushCall, Transport
from psworker.transports.grpc import GrpcTransport
from psworker.transports.retry import Patience
from psworker.transports.socket import Endpoint, SocketTransport, connect

log = logging.getLogger("paceline")
DATA_PLANES = ("auto", "local", "tcp", "grpc")

__all__ = ["DATA_PLANES", "Endpoint", "PullCall", "PushCall", "Transport", "choose"]


def choose(
    wanted: str,
    address: str,
    endpoint: Callable[[], Endpoint],
    patience: Patience,
    credentials: Credentials = ANYONE,
) -> Transport:
    """Returns the data plane to one shard; a fall-back is logged with its reason.

    Args:
        wanted: One of `DATA_PLANES`.
        address: Of the control plane.
        endpoint: Returns where the bulk data plane listens.
        patience: How connecting is repeated.
        credentials: What gRPC connects with.

    Raises:
        ConfigError: There is no such data plane, or the one that was named cannot be had.
    """
    if wanted not in DATA_PLANES:
        raise ConfigError(f"data plane is {wanted!r}, must be one of {', '.join(DATA_PLANES)}")
    found = endpoint()
    reasons: list[str] = []
    for name, is_local in (("local", True), ("tcp", False)):
        if wanted not in ("auto", name):
            continue
        reason = _obstacle(found, is_local=is_local)
        if reason is None:
            if reasons:  # What is to be expected between hosts, and a hint on one host.
                log.info("data plane to %s is %s (%s)", address, name, "; ".join(reasons))
            return SocketTransport(endpoint, patience, is_local=is_local)
        reasons.append(f"{name}: {reason}")
    if wanted in ("local", "tcp"):
        raise ConfigError(f"no {wanted!r} data plane to {address}: {'; '.join(reasons)}")
    if wanted == "auto":
        log.warning("data plane to %s is gRPC (%s)", address, "; ".join(reasons))
    return GrpcTransport(address, patience, credentials)


def _obstacle(endpoint: Endpoint, *, is_local: bool) -> str | None:
    """Returns why a bulk connection cannot be had, or None."""
    if is_local and not endpoint.local:
        return "the shard is on another host"
    if not is_local and not endpoint.port:
        return "the shard has no bulk port"
    try:
        connect(endpoint, is_local=is_local).close()
    except TransportError as problem:
        return str(problem)
    return None
