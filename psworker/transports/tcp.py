"""Pushes and pulls over TCP, with TLS if the shard has it."""

from __future__ import annotations

from typing import ClassVar

from pscore.net import sockets, tls
from pscore.net.endpoint import connect
from psworker.transports.socket_base import SocketTransport

# Within one host cores are the limit and not the link: while one connection brings a slice, the
# shard makes the step of another's.
PUSH_CONNECTIONS_LOCAL = 2


class TcpTransport(SocketTransport):
    """TCP: one connection for pushes to another host, two within one host."""

    name: ClassVar[str] = "tcp"

    def _connect(self) -> tls.Stream:
        connection = connect(self._endpoint(), is_local=False)
        if sockets.is_within_host(connection):
            self._add_push_connections(PUSH_CONNECTIONS_LOCAL)
        return connection
