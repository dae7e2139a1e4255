"""`psserver dashboard` and `psserver top`: watch shards until they are interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pscore.errors import ConfigError
from pscore.text import is_loopback, join_address
from psserver.access.files import Trust, require_whole
from psserver.commands.find import FoundServers
from psserver.dashboard import terminal
from psserver.dashboard.history import History
from psserver.dashboard.server import REQUEST_S_MAX, Guard, Page
from psserver.dashboard.watch import POLL_S, Asker, ShardWatch
from psserver.process.ports import binding
from psserver.remote import ask
from psserver.remote.status import WIDTH
from psserver.service.web import WebServer

PORT_MAX = 65535


def run_page(
    found: FoundServers, listen: str, cert: Path | None, key: Path | None, *, is_insecure: bool
) -> None:
    """Serves the page until it is interrupted.

    Args:
        listen: Host and port of the page; port 0 takes a free one.
        cert: Certificate of the page; None: no TLS.
        key: Its private key.
        is_insecure: Whether other machines may read it without TLS and token.

    Raises:
        ConfigError: An argument is wrong.
        CommandError: The address cannot be bound, or no shard answers.
    """
    host, port = split_listen(listen)
    token = found.credentials.token
    context = _context(cert, key)
    if not (is_loopback(host) or is_insecure) and (context is None or not token):
        raise ConfigError(
            f"--listen {listen} is open to other machines, which needs --tls-cert and --tls-key, "
            "and a token (PACELINE_TOKEN_FILE); give these, or --insecure if nobody else uses the "
            "network, or listen on 127.0.0.1"
        )
    ask.answers(found.addresses, found.credentials)
    history = History()
    page = Page(history, Guard(token, is_local=is_loopback(host)))
    server = WebServer(page.answer, seconds_max=REQUEST_S_MAX, context=context)
    watch = ShardWatch(Asker(found.addresses, found.credentials), history)

    async def serve() -> None:
        with binding(host, port, "--listen"):
            bound = await server.start(host, port)
        watch.start()
        scheme = "http" if context is None else "https"
        login_hint = " (any user name; the password is the token)" if token else ""
        sys.stdout.write(f"dashboard at {scheme}://{join_address(host, bound)}/{login_hint}\n")
        sys.stdout.flush()
        assert server.accepting is not None
        await server.accepting

    try:
        asyncio.run(serve())
    finally:
        watch.end()


def run_top(found: FoundServers, job: str | None, *, once: bool) -> None:
    """Shows the status in the terminal until it is interrupted.

    Args:
        job: Show only this job; None: all with live workers.
        once: Show it once, a second after the start, and end. So does a run without a terminal.

    Raises:
        CommandError: No shard answers.
    """
    ask.answers(found.addresses, found.credentials)
    watch = ShardWatch(Asker(found.addresses, found.credentials), History())
    is_wide = not (sys.stdout.isatty() or "COLUMNS" in os.environ)  # Nothing is cut off then.
    console = Console(highlight=False, width=WIDTH if is_wide else None)
    try:
        watch.start()
        if once or not console.is_terminal:
            time.sleep(POLL_S)
            watch.look()
            console.print(terminal.picture(watch.history.view(), job))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view = watch.history.view()
                live.update(terminal.picture(view, job, console.height), refresh=True)
                time.sleep(POLL_S)
    finally:
        watch.end()


def split_listen(listen: str) -> tuple[str, int]:
    """Returns the host and port of `--listen`; raises ConfigError if it is not an address."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = -1
    with contextlib.suppress(ValueError):
        number = int(port)
    if not host or not 0 <= number <= PORT_MAX:
        raise ConfigError(f"--listen is {listen!r}, must be host:port, such as 127.0.0.1:8090")
    return host, number


def _context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Returns the TLS of the page; None for none."""
    trust = Trust(cert=None if cert is None else str(cert), key=None if key is None else str(key))
    require_whole(trust)
    trust.check()
    return trust.context(mutual=False)
