"""The page and its numbers over HTTP, with the TLS and the token that shards have.

    /            the page; /page.js and /page.css beside it
    /api/view    the newest status as JSON; ?since=T leaves out rows and events up to time T

A browser asks for a name and a password: the name does not matter, the password is the token. A
program may send `Authorization: Bearer TOKEN`. The page loads nothing from elsewhere, and shows
names of jobs and workers as text. Requests change nothing.
"""

from __future__ import annotations

import base64
import hmac
from importlib import resources

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pscore.json_text import to_json
from psserver.dashboard.history import History

REQUEST_S_MAX = 30.0  # Limit for one connection; a view of six hours has megabytes.
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
            except ValueError:  # Not base64, or not even ASCII.
                return False
        return hmac.compare_digest(given, self._token)


def split_host(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class Page:
    """The page, its files and its numbers."""

    def __init__(self, history: History, guard: Guard) -> None:
        self._history = history
        self.guard = guard  # Decides which requests are answered.
        folder = resources.files("psserver.dashboard") / "page"
        # Body and type by path.
        self.files = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }

    async def answer(self, request: Request) -> Response:
        """Returns the response to a request."""
        response = self._response(request)
        response.headers.update(HEADERS)
        return response

    def _response(self, request: Request) -> Response:
        path = request.scope["path"]
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("GET or HEAD\n", 405)
        if not self.guard.names_us(request.headers.get("host", "")):
            return PlainTextResponse("the Host header names another machine\n", 403)
        if not self.guard.admits(request.headers.get("authorization", "")):
            ask = {"WWW-Authenticate": 'Basic realm="psserver dashboard: the token as password"'}
            return PlainTextResponse("the token is missing or wrong\n", 401, ask)
        if path == "/api/view":
            since_s = _since(request.query_params.get("since", ""))
            body = to_json(self._history.view(since_s)).encode()
            return Response(body, media_type="application/json")
        if path in self.files:
            body, kind = self.files[path]
            return Response(body, headers={"content-type": kind})
        return PlainTextResponse("there are / and /api/view\n", 404)


def _since(text: str) -> float:
    """Returns the time that a query names; 0 if it names none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
