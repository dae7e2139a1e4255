"""Serves the page and its numbers over HTTP, with the TLS and the token that shards have.

    /            the page; /page.js and /page.css beside it
    /api/view    the newest status as JSON; ?since=T leaves out rows and events up to time T

A browser asks for a name and a password: the name does not matter, the password is the token. A
program may send `Authorization: Bearer TOKEN`. The page loads nothing from elsewhere, and shows
names of jobs and workers as text. Requests change nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from psserver.dashboard.history import History

REQUEST_S_MAX = 10.0
CONNECTIONS_MAX = 32
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Decides which requests are answered."""

    def __init__(self, token: str, *, is_local: bool) -> None:
        """Keeps the token.

        Args:
            token: Wanted of each request; empty: none is.
            is_local: Whether the server listens on loopback alone.
        """
        self._token = token.encode()
        self._is_local = is_local

    def names_us(self, host: str) -> bool:
        """Returns whether the Host header can be ours.

        Without a token, a page of another host could otherwise read the numbers, by a name that it
        points to this machine (DNS rebinding).
        """
        if self._token or not self._is_local:
            return True
        return split_host(host) in LOCAL

    def admits(self, authorization: str) -> bool:
        """Returns whether an Authorization header has the token."""
        if not self._token:
            return True
        scheme, _, rest = authorization.partition(" ")
        given = b""
        if scheme.lower() == "bearer":
            given = rest.strip().encode()
        elif scheme.lower() == "basic":
            try:
                given = base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        return hmac.compare_digest(given, self._token)


def split_host(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "psserver"
    sys_version = ""
    timeout = REQUEST_S_MAX
    server: Server

    def do_GET(self) -> None:
        """Answers a request for a file or for numbers."""
        url = urlsplit(self.path)
        if not self.server.guard.names_us(self.headers.get("Host", "")):
            self._send(403, "text/plain", b"the Host header names another machine\n")
        elif not self.server.guard.admits(self.headers.get("Authorization", "")):
            ask = {"WWW-Authenticate": 'Basic realm="psserver dashboard: the token as password"'}
            self._send(401, "text/plain", b"the token is missing or wrong\n", ask)
        elif url.path == "/api/view":
            body = json.dumps(self.server.history.view(_since(url.query))).encode()
            self._send(200, "application/json", body)
        elif url.path in self.server.files:
            body, kind = self.server.files[url.path]
            self._send(200, kind, body)
        else:
            self._send(404, "text/plain", b"there are / and /api/view\n")

    def _send(
        self, code: int, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a page asks every second."""


def _since(query: str) -> float:
    """Returns the time that a query names; 0 if it names none."""
    try:
        return float(parse_qs(query)["since"][0])
    except (KeyError, ValueError):
        return 0.0


class Server(ThreadingHTTPServer):
    """The server of the page: a thread for each connection, a few at once.

    Attributes:
        history: The numbers.
        guard: Decides which requests are answered.
        files: The page: body and type by path.
    """

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX

    def __init__(
        self,
        address: tuple[str, int],
        history: History,
        guard: Guard,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Binds.

        Args:
            address: Host and port to listen on; port 0 takes a free one.
            history: The numbers.
            guard: Decides which requests are answered.
            context: TLS; None: none.

        Raises:
            OSError: The address cannot be bound.
        """
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.history = history
        self.guard = guard
        folder = resources.files("psserver.dashboard") / "page"
        self.files = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, Handler)
        if context is not None:
            # The handshake is made by the thread of the connection, at its first read.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread of its own, unless there are too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection, and frees its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports nothing: a peer has closed its connection, or does not speak TLS."""
