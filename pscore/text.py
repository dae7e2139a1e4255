"""Text from peers and files, made safe for people: printable characters, of bounded number.

Names and reasons come from peers and from files. On a terminal an escape sequence in one of them
would move the cursor, colour lines or hide them; in a log a line end would begin a line of its own.
"""

from __future__ import annotations

import ipaddress

LENGTH_MAX = 2048


def printable(text: str, length_max: int = LENGTH_MAX, keep: str = "") -> str:
    r"""Returns `text` with all that is not printed escaped, as in `\x1b`, and its end cut off.

    Args:
        length_max: Characters; longer ones are cut, and the cut is marked.
        keep: Characters that stay though they are not printed, such as line ends.
    """
    if len(text) > length_max:
        text = f"{text[:length_max]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
