"""Ports of a shard or a relay: their servers of gRPC, and why a port cannot be bound."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from pscore.net import descriptors
from pscore.net.rpc import SERVER_OPTIONS
from pscore.text import join_address
from psserver.access.files import Trust
from psserver.exits import CommandError, Exit


def make_server(interceptors: Sequence[Any], connections_max: int) -> grpc.aio.Server:
    """Returns a server of gRPC without ports."""
    limit = ("grpc.max_allowed_incoming_connections", connections_max)
    return grpc.aio.server(options=(*SERVER_OPTIONS, limit), interceptors=interceptors)


def bind_server(server: grpc.aio.Server, host: str, port: int, trust: Trust, flag: str) -> int:
    """Binds a server of gRPC to a port; returns its number.

    Raises:
        CommandError: It cannot be bound; the message names the reason.
    """
    credentials, address = trust.grpc_credentials(), join_address(host, port)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as problem:
        raise bind_error(probe(host, port), host, port, flag) from problem


@contextlib.contextmanager
def binding(host: str, port: int, flag: str) -> Iterator[None]:
    """Raises a `CommandError` for a port that cannot be bound inside of a `with` block."""
    try:
        yield
    except OSError as problem:
        raise bind_error(problem, host, port, flag) from problem


def probe(host: str, port: int) -> OSError:
    """Returns the system's reason for not letting us listen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen()
    except OSError as problem:
        return problem
    return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))  # Free again by now.


def bind_error(problem: OSError, host: str, port: int, flag: str) -> CommandError:
    """Explains why a port cannot be bound, and names a remedy."""
    address = join_address(host, port)
    is_unknown = (problem.errno or 0) < 0  # As of `socket.gaierror`, also where asyncio wraps it.
    if is_unknown or problem.errno == errno.EADDRNOTAVAIL:
        return CommandError(
            Exit.HOST,
            f"cannot listen on {host!r}, which is not an address of this machine; "
            "give --host one that is, or 127.0.0.1",
        )
    if problem.errno == errno.EADDRINUSE:
        return CommandError(
            Exit.PORT_TAKEN,
            f"cannot listen on {address}: another process does; stop it (psserver status shows "
            f"ours), or choose other ports with {flag}",
        )
    if problem.errno in (errno.EACCES, errno.EPERM):
        return CommandError(
            Exit.NOT_PERMITTED,
            f"cannot listen on {address}: {os.strerror(problem.errno).lower()}; ports below 1024 "
            f"need rights that this user lacks, choose one above with {flag}",
        )
    what = f"cannot listen on {address}: {problem.strerror or problem}"
    if problem.errno in descriptors.EXHAUSTED:
        what += f"; {descriptors.limit()} file descriptors are allowed (ulimit -n)"
    return CommandError(Exit.SHARD_DIED, what)
