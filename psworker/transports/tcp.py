"""Pushes and pulls over TCP, with TLS if the shard has it."""

from __future__ import annotations

from pscore.net import sockets, tls
from pscore.net.endpoint import connect
from pscore.placement import WORKER
from psworker.transports.socket_base import SocketTransport


class TcpTransport(SocketTransport):
    """TCP: one connection for pushes to another host, more within one host."""

    name = "tcp"

    @property
    def is_near(self) -> bool:
        """Whether the shard is on this host; asks it by a connection of its own.

        Raises:
            PacelineError: The shard does not answer.
        """
        with self._reconnect() as connection:
            return sockets.is_within_host(connection)

    def _connect(self) -> tls.Stream:
        connection = connect(self._endpoint(), is_local=False)
        self._is_within_host = sockets.is_within_host(connection)
        if self._is_within_host:
            self._add_push_connections(WORKER.push_connections_local)
        return connection
