r"""Tokens and certificates: how a process and a shard prove who they are to each other.

A token file holds one token for everything, or a token for each job:

    9fd1...e2                a single token: every job, and control (status, stop)
    mnist 77ab...10          the token of job "mnist": its weights, nothing else
    mnist:read 0c41...7d     reads the published weights of job "mnist", nothing else
    * 9fd1...e2              the same as a single token, in a file with others

Empty lines and lines that begin with # are ignored. A job may have two tokens, so that one can be
replaced while workers run. Shards and workers read the same format; a worker uses the line of its
job, else the one for everything. The file, like a private key, must not be readable by others.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pscore.errors import ConfigError
from pscore.net.rpc import CHANNEL_OPTIONS, ChannelOptions

TOKEN_KEY = "paceline-token"  # Key of the metadata of a gRPC call.
EVERY = "*"  # Stands for all jobs, and control.
READS = ":read"  # Behind a job's name: a token for its published weights alone.
TOKENS_MAX = 1024
FILE_NBYTES_MAX = 1 << 19
TOKEN = re.compile(r"[!-~]{16,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One line of a token file."""

    job: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The certificates and the token with which a process connects to shards."""

    ca: Path | None = None  # The CA of the shards' certificates; None: no TLS.
    cert: Path | None = None  # This side's certificate, for shards that require one.
    key: Path | None = None
    token: str = field(default="", repr=False)

    def channel(self, address: str, options: ChannelOptions = ()) -> grpc.Channel:
        """Returns a gRPC channel to a shard; each call carries the token.

        Args:
            options: Options beside `CHANNEL_OPTIONS`.
        """
        options = (*CHANNEL_OPTIONS, *options)
        if self.ca is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            own = self.cert is not None and self.key is not None
            secrets = grpc.ssl_channel_credentials(
                self.ca.read_bytes(),
                self.key.read_bytes() if own and self.key else None,
                self.cert.read_bytes() if own and self.cert else None,
            )
            channel = grpc.secure_channel(address, secrets, options=options)
        return grpc.intercept_channel(channel, _Shows(self.token)) if self.token else channel


ANYONE = Credentials()


def read_credentials(
    variables: Mapping[str, str] = os.environ,
    *,
    job: str = EVERY,
    token_file: str | None = None,
    reads: bool = False,
) -> Credentials:
    """Returns the credentials named by PACELINE_TLS_CA, _CERT, _KEY and PACELINE_TOKEN_FILE.

    Args:
        job: The job whose token is wanted; `EVERY` for control.
        token_file: Used if the variable is not set.
        reads: Whether a token that only reads published weights will do, and is preferred.

    Raises:
        ConfigError: A file cannot be used; the message has the reason and the remedy.
    """
    ca, cert, key = (
        readable(Path(path), name) if (path := variables.get(name)) else None
        for name in ("PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")
    )
    if key is not None:
        require_private(key, "PACELINE_TLS_KEY")
    if ca is not None and (cert is None) != (key is None):
        raise ConfigError(
            "PACELINE_TLS_CERT and PACELINE_TLS_KEY belong together, and one of them is not set"
        )
    path = variables.get("PACELINE_TOKEN_FILE") or token_file
    token = pick(read_tokens(Path(path)), job, Path(path), reads=reads) if path else ""
    return Credentials(ca=ca, cert=cert, key=key, token=token)


def read_tokens(path: Path) -> list[Token]:
    """Returns the tokens in a file.

    Raises:
        ConfigError: It cannot be read, is open to others, or has a malformed line. The message
            never holds a token.
    """
    require_private(readable(path, "the token file"), "the token file")
    if path.stat().st_size > FILE_NBYTES_MAX:
        raise ConfigError(
            f"{path} is longer than {FILE_NBYTES_MAX} bytes, the most for a token file"
        )
    lines = [
        line.split() for line in path.read_text(encoding="utf-8", errors="replace").split("\n")
    ]
    rows = [
        (number, words)
        for number, words in enumerate(lines, start=1)
        if words and not words[0].startswith("#")
    ]
    tokens = [_token(path, number, words) for number, words in rows]
    if not tokens or len(tokens) > TOKENS_MAX:
        raise ConfigError(f"{path} holds {len(tokens)} tokens, must hold 1 to {TOKENS_MAX}")
    secrets = [token.secret for token in tokens]
    if len(set(secrets)) != len(secrets):
        raise ConfigError(f"{path} holds the same token twice: give each job its own")
    return tokens


def pick(tokens: Sequence[Token], job: str, path: Path, *, reads: bool = False) -> str:
    """Returns the token for a job, or for control; empty if there is none for control.

    Raises:
        ConfigError: There is none for this job.
    """
    for wanted in (*([job + READS] if reads else []), job, EVERY):
        for token in tokens:
            if token.job == wanted:
                return token.secret
    if job == EVERY:
        return ""  # Health needs none; for the rest the shard reports what is missing.
    listed = ", ".join(sorted({repr(token.job) for token in tokens}))
    raise ConfigError(f"{path} has no token for job {job!r}, only for {listed}")


def readable(path: Path, what: str) -> Path:
    """Returns `path` if it is a file that this process can read.

    Raises:
        ConfigError: It cannot be read; the message says why.
    """
    try:
        with path.open("rb"):
            return path
    except PermissionError as problem:
        raise ConfigError(
            f"cannot read {what} {path.absolute()}: {problem.strerror} for user {os.geteuid()}; "
            f"give it to that user: chown {os.geteuid()} {path.absolute()}"
        ) from problem
    except OSError as problem:
        raise ConfigError(f"cannot read {what} {path.absolute()}: {problem.strerror}") from problem


def require_private(path: Path, what: str) -> None:
    """Raises an error if others can read or change a file of secrets.

    Raises:
        ConfigError: Others can; the message says how to change that.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"{what} {path} can be read by others (mode {mode:04o}); run: chmod 600 {path}"
        )


def _token(path: Path, number: int, words: Sequence[str]) -> Token:
    if len(words) > 2:  # noqa: PLR2004 - a job and its token
        raise ConfigError(f"line {number} of {path} has {len(words)} words, must be: job token")
    if not TOKEN.fullmatch(words[-1]):
        raise ConfigError(
            f"line {number} of {path} ends in {len(words[-1])} characters, a token is 16 to 256 "
            "printable ones; make one with: openssl rand -hex 32"
        )
    return Token(job=words[0] if len(words) > 1 else EVERY, secret=words[-1])


class _Details(grpc.ClientCallDetails):
    """The details of a call, with the token in its metadata."""

    def __init__(self, former: Any, token: str) -> None:
        self.method, self.timeout = former.method, former.timeout
        self.credentials, self.wait_for_ready = former.credentials, former.wait_for_ready
        self.compression = former.compression
        self.metadata = (*(former.metadata or ()), (TOKEN_KEY, token))


class _Shows(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Adds the token to each call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Makes the call with the token."""
        return continuation(_Details(details, self._token), request)
