"""The address and ports at which a worker listens for other workers."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.errors import ConfigError
from pscore.net.endpoint import Endpoint, connect
from psworker.peers.mailbox import Mailbox
from psworker.peers.own_end import open_listener
from psworker.peers.process_group import PeerStore
from psworker.peers.service import PeerService

HAS_IPV6 = socket.has_ipv6


def session_of(address: str, **found: Any) -> Any:
    """Returns the part of a session that decides where this worker listens."""
    first = SimpleNamespace(address=address, credentials=SimpleNamespace(ca=None))
    known = {"peer_host": "", "peer_ports": range(1), "rank": 3, "links": [first]}
    return SimpleNamespace(**known | found)


def service() -> PeerService:
    return PeerService("j", "secret", Mailbox())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "host"),
    [("127.0.0.1:7070", "127.0.0.1"), ("unix:///tmp/shard", "127.0.0.1"), ("[::1]:7070", "::1")],
)
def test_a_worker_listens_where_it_reaches_the_first_shard(address: str, host: str) -> None:
    listener, own = open_listener(session_of(address), service())
    listener.start()
    assert own.host == host
    endpoint = Endpoint(host=own.host, port=own.port, local="", token=own.secret)
    connect(endpoint, is_local=False).close()
    listener.stop()
    PeerStore(host)  # Of torch.distributed.


def test_workers_of_a_host_take_ports_of_a_range_until_none_is_free() -> None:
    first = free_port()
    session = session_of("10.0.0.1:7070", peer_host="127.0.0.1", peer_ports=range(first, first + 1))
    with contextlib.ExitStack() as stack:
        listener, own = open_listener(session, service())
        stack.callback(listener.stop)
        assert (own.host, own.port) == ("127.0.0.1", first)
        said = rf"worker 3 cannot listen at 127.0.0.1:{first} for .* PACELINE_PEER_PORTS needs a fr"
        with pytest.raises(ConfigError, match=said):
            open_listener(session, service())


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="PACELINE_PEER_HOST must be an address of this host"):
        open_listener(session_of("127.0.0.1:7070", peer_host="192.0.2.1"), service())
