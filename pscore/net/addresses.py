"""Addresses of shards: reads what people write, and explains why nothing listens at one."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable

import psutil

from pscore.errors import ConfigError
from pscore.text import is_loopback

PORT_MAX = (1 << 16) - 1
PROBE_TIMEOUT_S = 2.0
HTTP_TIMEOUT_S = 0.5
SHAPE = "must look like host:port or unix:///path"


def parse_addresses(text: str | Iterable[str] | None, *, port_min: int = 1) -> tuple[str, ...]:
    """Returns addresses from `host:port,host:port` or a list of them.

    Args:
        port_min: The lowest port; 0 where an address may name a port that is not known yet.

    Raises:
        ConfigError: One of them is not an address; says what is wrong with it.
    """
    listed = text.split(",") if isinstance(text, str) else text or ()
    given: object = listed  # A script may pass anything.
    if not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"servers is {text!r}, must be text as host:port,host:port, or a list")
    addresses = tuple(address.strip() for address in listed) if text else ()
    if text and not any(addresses):  # Two variables that are not set, with a comma.
        raise ConfigError(
            f"servers is {text!r}, which names no address: give host:port,host:port, or nothing"
        )
    for number, address in enumerate(addresses, 1):
        if not address:
            raise ConfigError(
                f"entry {number} of the addresses {text!r} is empty: give the address that is "
                "missing there, or leave the comma out"
            )
        if not address.startswith("unix:"):
            split_address(address, port_min=port_min)
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"a server address is given twice in {', '.join(addresses)}")
    return addresses


def split_address(address: str, *, port_min: int = 1) -> tuple[str, int]:
    """Returns host and port of `host:port`; the host of an IPv6 address has no brackets.

    Raises:
        ConfigError: It is none; says what is wrong with it.
    """
    if reason := _fault(address, port_min):
        raise ConfigError(f"server address {address!r} {SHAPE}: {reason}")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _fault(address: str, port_min: int) -> str:
    """Returns the reason why a text is no `host:port`; empty if it is one."""
    scheme, found, rest = address.partition("://")
    if found:
        return f"an address has no scheme; leave out {scheme + '://'!r}: {rest}"
    if re.search(r"[;\s]", address):
        return "separate addresses with commas, without spaces or semicolons"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"the port is missing, such as {address}:7070"
    if not host:
        return "the host is missing"
    is_bracketed = re.fullmatch(r"\[[0-9A-Fa-f:.]+(%\w+)?\]", host) is not None
    if ":" in host and not is_bracketed:
        return f"put an IPv6 address into brackets: [{host}]:{port}"
    if not (is_bracketed or _is_name(host)):
        return f"{host!r} is not the name or the address of a host"
    if not re.fullmatch("[0-9]{1,5}", port) or not port_min <= int(port) <= PORT_MAX:
        return f"the port is {port!r}, and ports are {port_min} to {PORT_MAX}"
    return ""


def _is_name(host: str) -> bool:
    """Returns whether a host may be asked for; the resolver raises for an empty or long label."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return re.fullmatch(r"[\w.-]+", host) is not None


def is_closed(address: str) -> bool:
    """Returns whether an address is of a host that refuses: nothing listens there."""
    return not address.startswith("unix:") and _probe(*split_address(address)) == "refused"


def explain_silence(address: str) -> str:
    """Returns the likely reason why no shard can be reached at an address; empty: none is known.

    A shard that listens on loopback is the usual one: it works on its own machine, and every other
    machine finds its port closed. The kernel opens connections also for a process that is stopped.
    """
    if address.startswith("unix:"):
        return ""
    host, port = split_address(address)
    state = _probe(host, port)
    if state == "open" and _speaks_http(host, port):
        return (
            f"port {port} there is that of a web page, perhaps of a shard's metrics: give the "
            "shard's own port, 7070 and following by default"
        )
    if state == "open":
        return (
            f"port {port} is open there, and the process behind it is silent: it is busy or "
            "stopped, hangs, or is no shard"
        )
    if is_loopback(host):
        return ""
    if state == "unknown":
        return (
            f"{host!r} is not the name of a known host: correct the address, or the name service "
            "of this machine"
        )
    if state == "silent":
        return (
            f"{host} does not answer there, not even to refuse: correct the address, start that "
            f"machine, or open port {port} in its firewall"
        )
    remedy = f"psserver start --host {host}"
    if _is_own(host) and _probe("127.0.0.1", port) == "open":
        return (
            f"the server on port {port} of this machine listens on loopback only, which no other "
            f"machine reaches: stop it, and start it with `{remedy}`"
        )
    return (
        f"{host} can be reached, and its port {port} is closed: no shard runs there, or it listens "
        f"on loopback only, the default of psserver start; start it there with `{remedy}`"
    )


def is_open_elsewhere(port: int) -> bool | None:
    """Returns whether a port that is open on loopback is open for other machines too.

    None: this machine has no address that others could reach.
    """
    own = [host for host in own_hosts() if not is_loopback(host)]
    return any(_probe(host, port) == "open" for host in own) if own else None


def own_hosts() -> list[str]:
    """Returns the IP addresses of this machine, without those that need a scope."""
    families = (socket.AF_INET, socket.AF_INET6)
    listed = [each for entries in psutil.net_if_addrs().values() for each in entries]
    return [each.address for each in listed if each.family in families and "%" not in each.address]


def _is_own(host: str) -> bool:
    """Returns whether a host is this machine."""
    own = set(own_hosts())
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(str(entry[4][0]) in own for entry in found)


def _speaks_http(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), HTTP_TIMEOUT_S) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def _probe(host: str, port: int) -> str:
    """Returns `open`, `refused`, `unknown` (the host's name) or `silent`."""
    try:
        socket.create_connection((host, port), PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except (socket.gaierror, UnicodeError):
        return "unknown"
    except OSError:
        return "silent"
    return "open"
