"""TLS for stream sockets, with readable reasons when a handshake fails.

Python's SSLSocket must not be read by one thread while another writes, which data connections do
all the time. `TLSSocket` holds a lock on OpenSSL's state for at most one record (16 KiB), and waits
for the network without it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError, TLSError
from pscore.net import congestion, receive_windows
from pscore.net.credentials import Credentials

HANDSHAKE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
# OpenSSL's X509_V_ERR_ numbers.
NOT_YET_VALID, EXPIRED, HOST_MISMATCH, ADDRESS_MISMATCH = 9, 10, 62, 64
CLOCKS = "check the clocks of both machines (timedatectl status; psworker doctor compares them)"
NEW = "make new ones with `psserver certs` and start the shards again"
OWN = (
    "set PACELINE_TLS_CERT and PACELINE_TLS_KEY to ones that its --tls-client-ca has signed, the "
    "client.pem and client.key of `psserver certs`"
)

# Called when the first message of the peer is whole, in the handshake of a server.
on_greeted: ContextVar[Callable[[], None]] = ContextVar("greeted", default=lambda: None)


class TLSSocket:
    """A TLS connection that one thread may read while another writes."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Owns a non-blocking connection whose handshake is done."""
        self._tls = connection
        self._lock = threading.Lock()
        self._timeout_s: float | None = None
        self._silence_s: float | None = None

    @property
    def family(self) -> socket.AddressFamily:
        """Returns that of the socket beneath."""
        return socket.AddressFamily(self._tls.family)

    def getsockname(self) -> Any:
        """Returns that of the socket beneath."""
        return self._tls.getsockname()

    def getpeername(self) -> Any:
        """Returns that of the socket beneath."""
        return self._tls.getpeername()

    def settimeout(self, timeout_s: float | None) -> None:
        """Limits how long one call waits, in seconds."""
        self._timeout_s = timeout_s

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Sets an option of the socket beneath."""
        self._tls.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        """Returns an option of the socket beneath."""
        return self._tls.getsockopt(level, option, nbytes)

    def limit_silence(self, limit_s: float) -> None:
        """Limits reads to `limit_s` seconds; then they raise BlockingIOError."""
        self._silence_s = limit_s

    def recv_into(self, target: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Reads up to one record; returns 0 when the peer has closed. `flags` are ignored."""
        while True:
            with self._lock:
                try:
                    return self._tls.recv_into(target, nbytes or target.nbytes)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            try:
                limit_s = self._silence_s if self._timeout_s is None else self._timeout_s
                wait(self._tls, event, limit_s)
            except TimeoutError:
                if self._timeout_s is not None:
                    raise
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    def sendmsg(
        self, parts: Iterable[memoryview], ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        """Sends parts; with MSG_DONTWAIT only as far as the peer takes them at once.

        The next call must begin with the rest of this one: OpenSSL has started to encrypt it.
        """
        sent = 0
        for part in parts:
            done = 0
            while done < part.nbytes:
                with self._lock:
                    try:
                        count = self._tls.send(part[done:])
                        event = 0
                    except ssl.SSLWantWriteError:
                        count, event = 0, select.POLLOUT
                    except ssl.SSLWantReadError:
                        count, event = 0, select.POLLIN
                done, sent = done + count, sent + count
                if event and flags & socket.MSG_DONTWAIT:
                    if sent:
                        return sent
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                if event:
                    wait(self._tls, event, None)
        return sent

    def shutdown(self, how: int) -> None:
        """Shuts the socket beneath down, which wakes waiting threads."""
        # SSLSocket's own method would continue without TLS.
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._tls.close()

    def __enter__(self) -> TLSSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Stream = socket.socket | TLSSocket


def client_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Returns the TLS context of connections to listeners; None: no TLS.

    Raises:
        ConfigError: A certificate cannot be used.
    """
    if credentials.ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _trust(context, credentials.ca)
    if credentials.cert is not None and credentials.key is not None:
        _show(context, credentials.cert, credentials.key)
    return context


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Returns the TLS context of a listener; with `client_ca` clients need a certificate of it.

    Raises:
        ConfigError: A certificate cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # No client resumes sessions, and without tickets none can be replayed.
    context.sni_callback = lambda *_: on_greeted.get()()
    _show(context, cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, client_ca)
    return context


def secure(
    connection: socket.socket,
    context: ssl.SSLContext,
    *,
    host: str | None = None,
    deadline_s: float | None = None,
) -> TLSSocket:
    """Makes the TLS handshake and returns the connection.

    Args:
        connection: A connected socket, which is detached.
        host: The server's name, which its certificate must have; None: this side is the server.
        deadline_s: Deadline by the monotonic clock; None: `HANDSHAKE_TIMEOUT_S` from now.

    Raises:
        OSError: The handshake failed, or the deadline has passed.
    """
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S if deadline_s is None else deadline_s
    waiting = congestion.FOLLOWED.take(connection)
    window = receive_windows.FOLLOWED.take(connection)
    wrapped = context.wrap_socket(
        connection,
        server_side=host is None,
        server_hostname=host,
        do_handshake_on_connect=False,
    )
    try:
        wrapped.setblocking(False)
        while True:
            try:
                wrapped.do_handshake()
                if waiting is not None:
                    congestion.choose(wrapped, waiting.usual)
                if window is not None:
                    receive_windows.FOLLOWED.add(wrapped, window)
                return TLSSocket(wrapped)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            wait(wrapped, event, deadline_s - time.monotonic())
    except OSError:
        wrapped.close()
        raise


def wait(connection: socket.socket, event: int, timeout_s: float | None) -> None:
    """Waits until a socket can be read or written.

    Raises:
        OSError: The time is over, or the socket was closed.
    """
    number = connection.fileno()
    if number < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(number, event)
    if not poll.poll(None if timeout_s is None else max(0.0, 1e3 * timeout_s)):
        raise TimeoutError("timed out")


def diagnose(address: str, credentials: Credentials) -> TLSError | None:
    """Returns the reason why TLS with the shard at `address` fails; None if it does not."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or address.startswith("unix:"):
        return None
    context = client_context(credentials)
    try:
        if context is None:
            with socket.create_connection((host, int(port)), PROBE_TIMEOUT_S) as plain:
                return _speaks_tls(plain, address)
        # A shard that refuses our certificate closes each time; one that is just ending, only once.
        closed = [_is_closed(host, int(port), context) for _ in range(2)]
    except ssl.SSLCertVerificationError as problem:
        begins = None
        if problem.verify_code == NOT_YET_VALID:
            begins = _begins(shown(host, int(port), credentials), credentials.ca)
        return explain(problem, address, begins)
    except OSError as problem:
        return explain(problem, address)
    if not all(closed):
        return None
    if credentials.cert is None:
        return TLSError(f"{address} asks for a certificate of this side; {OWN}")
    return TLSError(
        f"{address} does not accept this side's certificate {credentials.cert} "
        f"({_validity(credentials.cert)} by the clock there); {OWN}"
    )


def shown(host: str, port: int, credentials: Credentials) -> bytes | None:
    """Returns the certificate of a port as DER, trusted or not; None: it has none."""
    context = client_context(credentials)
    assert context is not None
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            return wrapped.getpeercert(binary_form=True)
    except OSError:
        return None


def first_end_s(path: Path) -> float:
    """Returns when the first certificate in a file ends, in seconds since 1970.

    Raises:
        ConfigError: The file has no certificate that can be read.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read the certificates in {path}: {problem}") from problem
    return min(each.not_valid_after_utc.timestamp() for each in found)


def not_yet_valid(begins: datetime.datetime | None, now: datetime.datetime | None = None) -> str:
    """Returns the part of a message about a certificate that is not valid yet, with both times.

    Args:
        begins: The start of its validity; None: unknown.
        now: The time on this machine's clock; None: now.
    """
    since = "yet" if begins is None else f"before {begins:%Y-%m-%d %H:%M} UTC"
    now = now or datetime.datetime.now(datetime.UTC)
    return f"is not valid {since}, and this machine's clock says {now:%Y-%m-%d %H:%M} UTC"


def _begins(der: bytes | None, ca: Path | None) -> datetime.datetime | None:
    """Returns the time from which a certificate and the CA that should have signed it are valid."""
    from cryptography import x509  # A tenth of a second, which only this message needs.

    found = [] if der is None else [x509.load_der_x509_certificate(der)]
    with contextlib.suppress(OSError, ValueError):  # Readable before; the message can do without.
        found += [] if ca is None else x509.load_pem_x509_certificates(ca.read_bytes())
    return max((certificate.not_valid_before_utc for certificate in found), default=None)


def _validity(cert: Path) -> str:
    """Returns the validity of a certificate, in words."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(cert.read_bytes())
    except (OSError, ValueError):
        return "of unreadable dates"
    since = max(certificate.not_valid_before_utc for certificate in found)
    until = min(certificate.not_valid_after_utc for certificate in found)
    return f"valid from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"


def _is_closed(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Returns whether a shard closes after a handshake that succeeded on this side."""
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), PROBE_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        try:
            return not wrapped.recv(1)  # Else it is the beginning of HTTP/2.
        except ConnectionResetError:
            return True


def explain(
    problem: OSError, address: str, begins: datetime.datetime | None = None
) -> TLSError | None:
    """Returns the meaning of a failed handshake and the remedy; None if TLS is not the cause.

    Args:
        begins: The start of the validity of its certificate and CA, if known.
    """
    if not isinstance(problem, ssl.SSLError):
        return None
    text = (problem.reason or str(problem)).upper()
    if isinstance(problem, ssl.SSLCertVerificationError):
        if problem.verify_code == NOT_YET_VALID:
            what = f"{not_yet_valid(begins)}; {CLOCKS}"
        elif problem.verify_code == EXPIRED:
            what = f"has expired; {NEW}"
        elif problem.verify_code in (HOST_MISMATCH, ADDRESS_MISMATCH):
            what = (
                f"is not valid for this name ({problem.verify_message.rstrip('.')}); connect by "
                "a name that it has, or make one with `psserver certs --host NAME`"
            )
        else:
            what = (
                f"is not signed by the CA in PACELINE_TLS_CA ({problem.verify_message}); take the "
                "ca.pem that the shard's certificate was made with"
            )
        return TLSError(f"the certificate of {address} {what}")
    if "CERTIFICATE_REQUIRED" in text:
        return TLSError(f"{address} asks for a certificate of this side; {OWN}")
    if "ALERT" in text:
        said = text.replace("_", " ").lower()
        return TLSError(f"{address} does not accept this side's certificate ({said}); {OWN}")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text or "PACKET_LENGTH" in text:
        return TLSError(
            f"{address} does not speak TLS, but this side is set to use TLS; start the shards with "
            "--tls-cert and --tls-key, or unset PACELINE_TLS_CA"
        )
    return None


def _speaks_tls(plain: socket.socket, address: str) -> TLSError | None:
    """Returns an error if the peer of a plain connection speaks TLS; trusts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain):
            pass
    except OSError:
        return None
    return TLSError(
        f"{address} speaks TLS only; set PACELINE_TLS_CA (or tls_ca=) to the CA that signed its "
        "certificate, the ca.pem of `psserver certs`"
    )


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(f"{ca} holds no certificate of a CA: {problem}") from problem


def _show(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its private key without a passphrase: "
            f"{problem}"
        ) from problem
