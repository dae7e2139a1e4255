"""The listening end of this worker: its address, and the secret that admits others there.

The directory passes both on to the other workers. It is reached over a connection that is secured
already; so each worker makes a secret of its own, which takes the place of the job's token between
workers (of which a job may have several, while one is changed), and with TLS a certificate.
"""

from __future__ import annotations

import os
import secrets
import socket

from pscore.errors import ConfigError
from pscore.net.listener import Listener
from pscore.pb.ps.v1 import control_pb2
from pscore.text import join_address
from psworker.connection.membership.session import Session
from psworker.peers import certificate
from psworker.peers.service import PeerService

LOOPBACK = "127.0.0.1"


def make_secret() -> str:
    """Returns a secret that only the workers of this job learn."""
    return secrets.token_hex(16)


def open_listener(session: Session, service: PeerService) -> tuple[Listener, control_pb2.Peer]:
    """Binds this worker's sockets; nothing is accepted yet.

    Returns:
        The listener, and this worker as the directory is to describe it.

    Raises:
        ConfigError: This worker cannot listen.
    """
    first = session.links[0]
    shown, context = (b"", None) if first.credentials.ca is None else certificate.make()
    host = session.peer_host or _own_host(first.address)
    local = f"paceline-worker-{os.getpid()}-{secrets.token_hex(8)}"
    problem = OSError("no port is given")
    for port in session.peer_ports:
        try:
            listener = Listener(service, host, port, local, context=context, others=service.others)
        except OSError as failure:
            problem = failure
            continue
        own = control_pb2.Peer(
            host=host, port=listener.port, local=local, certificate=shown, secret=service.secret
        )
        return listener, own
    raise ConfigError(_explain(session, host, problem)) from problem


def _explain(session: Session, host: str, problem: OSError) -> str:
    """Returns the reason why this worker cannot listen, and the remedy."""
    ports = session.peer_ports
    where, remedy = host, ""
    if ports[0]:
        last = f" to {ports[-1]}" if len(ports) > 1 else ""
        where = f"{join_address(host, ports[0])}{last}"
        remedy = "; PACELINE_PEER_PORTS needs a free port for each worker of this host"
    if session.peer_host:
        remedy += "; PACELINE_PEER_HOST must be an address of this host"
    return (
        f"worker {session.rank} cannot listen at {where} for other workers, which its mode needs: "
        f"{problem}{remedy}"
    )


def _own_host(address: str) -> str:
    """Returns the address of this machine from which a shard is reached: its peers reach it too."""
    if address.startswith("unix:"):
        return LOOPBACK
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # Sends nothing.
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
