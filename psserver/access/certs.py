"""`psserver certs`: a CA for development, certificates for shards and clients, and a token.

Users with a CA of their own give its files to `psserver start` instead: only the names in the
certificates matter.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pscore.errors import ConfigError
from psserver.exits import CommandError, Exit

LOCAL = ("localhost", "127.0.0.1", "::1")
BEFORE = datetime.timedelta(hours=1)  # Clocks that go wrong by less do no harm.
FILES = ("ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key", "token")
Key = ec.EllipticCurvePrivateKey


def make(
    folder: Path,
    hosts: Sequence[str],
    *,
    days: int,
    is_forced: bool = False,
    now: datetime.datetime | None = None,
) -> None:
    """Writes the files into `folder`; keys and the token are for this user alone.

    Args:
        folder: Made if it is not there.
        hosts: Names and addresses of the shards, besides this machine's own.
        is_forced: Whether files that are there may be replaced.
        now: When they begin to be good; by default now.

    Raises:
        ConfigError: A host is neither a name nor an address.
        CommandError: Files are there already, or cannot be written.
    """
    there = [name for name in FILES if (folder / name).exists()]
    if there and not is_forced:
        raise CommandError(
            Exit.STATE_DIR,
            f"{folder} holds {', '.join(there)} already; take another directory, or replace them "
            "with --force: clients that use the old ones can then no longer connect",
        )
    begins = (datetime.datetime.now(datetime.UTC) if now is None else now) - BEFORE
    until = begins + BEFORE + datetime.timedelta(days=days)
    names = [_name(host) for host in dict.fromkeys([*LOCAL, socket.gethostname(), *hosts])]
    ca_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _authority(ca_key, begins, until)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    server = _leaf("shards", server_key, ca, ca_key, usages, names)
    client = _leaf("clients", client_key, ca, ca_key, usages[1:], [])
    made = (("ca", ca, ca_key), ("server", server, server_key), ("client", client, client_key))
    contents = {"token": f"{secrets.token_hex(32)}\n".encode()}
    for name, certificate, key in made:
        contents[f"{name}.pem"] = certificate.public_bytes(serialization.Encoding.PEM)
        contents[f"{name}.key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_all(folder, contents)
    except OSError as problem:
        raise CommandError(
            Exit.STATE_DIR, f"cannot write into {folder}: {problem.strerror or problem}"
        ) from problem


def next_steps(folder: Path, hosts: Sequence[str]) -> list[str]:
    """Returns what to do with the files, line by line."""
    place = shlex.quote(str(folder))
    listen = "0.0.0.0" if hosts else "127.0.0.1"
    named = ", ".join(dict.fromkeys([*LOCAL, socket.gethostname(), *hosts]))
    return [
        f"certificates for {named} are in {folder}; other names: --host NAME",
        "the shards (with --tls-client-ca only clients with client.pem and client.key "
        "can connect):",
        f"  psserver start --host {listen} --tls-cert {place}/server.pem --tls-key "
        f"{place}/server.key --tls-client-ca {place}/ca.pem --token-file {place}/token",
        "workers, psserver status and the other commands (copy these four files to each machine):",
        f"  export PACELINE_TLS_CA={place}/ca.pem PACELINE_TOKEN_FILE={place}/token",
        f"  export PACELINE_TLS_CERT={place}/client.pem PACELINE_TLS_KEY={place}/client.key",
        f"{place}/ca.key signs new certificates: no other machine needs it, so keep it in a safe "
        "place",
    ]


def _authority(key: Key, begins: datetime.datetime, until: datetime.datetime) -> x509.Certificate:
    name = _common("Paceline development CA")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    name: str,
    key: Key,
    ca: x509.Certificate,
    ca_key: Key,
    usages: Sequence[x509.ObjectIdentifier],
    names: Sequence[x509.GeneralName],
) -> x509.Certificate:
    """Returns a certificate that is good as long as its CA's."""
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_common(f"Paceline {name}"))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ca.not_valid_before_utc)
        .not_valid_after(ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        .add_extension(authority, critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _common(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(host: str) -> x509.GeneralName:
    """Returns a host in the form that a certificate uses."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host.isascii() or not host or any(letter in host for letter in " :/,"):
        raise ConfigError(f"host {host!r} is neither a name nor an address; without a port")
    return x509.DNSName(host)


def _write_all(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files; if one cannot be written, those that were there before stay as they are.

    Certificates are for all to read, the rest for this user alone.

    Raises:
        OSError: A file cannot be written.
    """
    drafts = {name: folder / f".{name}.{os.getpid()}" for name in contents}
    try:
        for name, content in contents.items():
            mode = 0o644 if name.endswith(".pem") else 0o600
            file = os.open(drafts[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(file, "wb") as draft:
                draft.write(content)
        for name, path in drafts.items():
            path.replace(folder / name)
    finally:
        for path in drafts.values():
            path.unlink(missing_ok=True)
