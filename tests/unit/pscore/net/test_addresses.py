"""Addresses as people write them, and the reason why nothing listens at one."""

import socket
import threading
from collections.abc import Iterator

import pytest

from pscore.errors import ConfigError
from pscore.net import addresses
from pscore.net.addresses import explain_silence, is_open_elsewhere, parse_addresses


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://10.0.0.1:7070", r"no scheme; leave out 'http://': 10\.0\.0\.1:7070"),
        ("https://gpu3:7070/", "no scheme"),
        ("a:7070;b:7070", "separate addresses with commas"),
        ("a:7070 b:7070", "separate addresses with commas"),
        ("gpu3", "the port is missing, such as gpu3:7070"),
        ("[::1]", r"the port is missing, such as \[::1\]:7070"),
        (":7070", "the host is missing"),
        ("gpu3:", "the port is ''"),
        ("gpu3:0", "the port is '0', and ports are 1 to 65535"),
        ("gpu3:65536", "the port is '65536'"),
        ("gpu3:7070/", "the port is '7070/'"),
        ("gpu3:x", "the port is 'x'"),
        ("fe80::1:7070", r"into brackets: \[fe80::1\]:7070"),
        ("user@gpu3:7070", "'user@gpu3' is not the name"),
        ("[gpu3]:7070", r"'\[gpu3\]' is not the name"),
        ("gpu3..cluster:7070", "'gpu3..cluster' is not the name"),
        (f"{'g' * 64}.cluster:7070", "g.cluster' is not the name"),
    ],
)
def test_a_malformed_address_is_refused_with_its_fault(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"must look like host:port or unix:///path: .*{reason}"):
        parse_addresses(text)


@pytest.mark.parametrize(
    "text", ["gpu-3.cluster_a:7070", "10.0.0.1:1", "[::1]:65535", "[fe80::1%eth0]:70", "unix:///a"]
)
def test_an_address_is_kept_as_it_is_written(text: str) -> None:
    assert parse_addresses(f" {text} ") == (text,)


def test_addresses_are_a_comma_list_in_the_order_of_the_shards() -> None:
    assert parse_addresses(" a:1 , b:2") == ("a:1", "b:2")
    assert parse_addresses(["[::1]:70", "unix:///run/shard0"]) == ("[::1]:70", "unix:///run/shard0")
    assert parse_addresses(None) == ()


@pytest.mark.parametrize(
    ("text", "entry"),
    [("a:1,,b:1", 2), ("a:1,b:1,", 3), (",a:1", 1), ("a:1, ,b:1", 2), (["a:1", ""], 2)],
)
def test_an_empty_entry_is_refused(text: str | list[str], entry: int) -> None:
    """One of a script's variables is not set: the job would be on the shards that are left."""
    with pytest.raises(ConfigError, match=rf"entry {entry} of .* is empty: .* leave the comma out"):
        parse_addresses(text)


def test_an_address_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_addresses("a:1,a:1")


@pytest.fixture
def on_loopback() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def own_host(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns an address at which nothing of `on_loopback` listens, declared to be this machine's.

    It is loopback too, so that the test runs on a machine without a network.
    """
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["127.0.0.1", "127.8.9.1"])
    monkeypatch.setattr(addresses, "is_loopback", lambda host: host == "127.0.0.1")
    return "127.8.9.1"


def test_a_shard_of_this_machine_that_listens_on_loopback_is_named(
    on_loopback: int, own_host: str
) -> None:
    found = explain_silence(f"{own_host}:{on_loopback}")
    assert f"port {on_loopback} of this machine listens on loopback only" in found
    assert f"psserver start --host {own_host}" in found
    assert is_open_elsewhere(on_loopback) is False


def test_a_closed_port_of_another_machine_has_two_likely_causes(
    on_loopback: int, own_host: str
) -> None:
    found = explain_silence(f"127.8.9.2:{on_loopback}")
    assert "no shard runs there, or it listens on loopback only" in found
    assert "psserver start --host 127.8.9.2" in found


def test_an_open_port_has_a_silent_process_behind_it(own_host: str) -> None:
    with socket.create_server((own_host, 0)) as listener:
        port = listener.getsockname()[1]
        found = explain_silence(f"{own_host}:{port}")
        assert found.startswith(f"port {port} is open there")
        assert "busy or stopped" in found  # As a shard is that compiles, or restores a job.
        assert is_open_elsewhere(port) is True


def test_a_web_page_is_no_shard() -> None:
    """A worker that got the metrics port waited, and took the shard for a busy one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):  # The first connection only looks whether the port is open.
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(4):
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

        page = threading.Thread(target=answer)
        page.start()
        port = listener.getsockname()[1]
        found = explain_silence(f"127.0.0.1:{port}")
        page.join()
    assert found.startswith(f"port {port} there is that of a web page")
    assert "give the shard's own port, 7070" in found


def test_a_host_that_is_unknown_or_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem: OSError = socket.gaierror("no such name")

    def fail(*_: object) -> None:
        raise problem

    monkeypatch.setattr(socket, "create_connection", fail)
    assert "'nowhere' is not the name of a known host" in explain_silence("nowhere:7070")
    problem = TimeoutError()
    found = explain_silence("198.51.100.7:7070")
    assert found.startswith("198.51.100.7 does not answer there")
    assert "open port 7070 in its firewall" in found


def test_a_loopback_address_is_not_explained() -> None:
    assert explain_silence("127.0.0.1:1") == ""
    assert explain_silence("unix:///run/nothing") == ""


def test_a_machine_without_a_network_has_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["127.0.0.1", "::1"])
    assert is_open_elsewhere(1) is None
