"""The files of a shard for access: certificate, key, CA of the clients, tokens.

Part of a shard's plan, which must load fast: large modules are imported only where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pscore.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    import grpc

    from psserver.access.authorizer import Authorizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Paths in a shard's plan; secrets are in files and nowhere else."""

    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None  # Clients must show a certificate that it has signed.
    token_file: str | None = None

    def check(self) -> None:
        """Reads all files once.

        Raises:
            ConfigError: One of them cannot be used; the message names it and the remedy.
        """
        if self.token_file is not None:
            self.authorizer()
        if self.cert is None or self.key is None:
            return
        from pscore.net.credentials import readable, require_private

        for path, flag in (
            (self.cert, "--tls-cert"),
            (self.key, "--tls-key"),
            (self.client_ca, "--tls-client-ca"),
        ):
            if path is not None:
                readable(Path(path), flag)
        require_private(Path(self.key), "--tls-key")
        self.context()

    def authorizer(self) -> Authorizer:
        """Returns the tokens of the token file.

        Raises:
            ConfigError: The token file cannot be used.
        """
        from psserver.access.authorizer import Authorizer

        return Authorizer.of(self.token_file)

    def ends_s(self) -> float | None:
        """Returns when the first of the certificates ends, in seconds since 1970; None for none.

        Raises:
            ConfigError: A certificate cannot be read.
        """
        if self.cert is None:
            return None
        from pscore.net.tls import first_end_s

        paths = [path for path in (self.cert, self.client_ca) if path is not None]
        return min(first_end_s(Path(path)) for path in paths)

    def context(self, *, mutual: bool = True) -> ssl.SSLContext | None:
        """Returns the TLS of our own sockets; None for none.

        Args:
            mutual: Whether clients have to show a certificate, if there is a CA for them.

        Raises:
            ConfigError: A certificate cannot be used.
        """
        if self.cert is None or self.key is None:
            return None
        from pscore.net.tls import server_context

        client_ca = Path(self.client_ca) if mutual and self.client_ca is not None else None
        return server_context(Path(self.cert), Path(self.key), client_ca)

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """Returns the TLS of gRPC; None for none."""
        if self.cert is None or self.key is None:
            return None
        import grpc

        pair = (Path(self.key).read_bytes(), Path(self.cert).read_bytes())
        client_ca = None if self.client_ca is None else Path(self.client_ca).read_bytes()
        return grpc.ssl_server_credentials(
            [pair], root_certificates=client_ca, require_client_auth=client_ca is not None
        )


def require_whole(trust: Trust) -> None:
    """Raises ConfigError for a certificate without its key, or a key without its certificate."""
    if (trust.cert is None) != (trust.key is None):
        missing = "--tls-key" if trust.key is None else "--tls-cert"
        raise ConfigError(f"--tls-cert and --tls-key belong together: {missing} is missing")
    if trust.client_ca is not None and trust.cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
