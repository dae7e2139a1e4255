"""A worker's own certificate, made when it begins to listen; its peers get it from the directory.

The directory is reached over a connection that is secured already, so peers trust exactly the
certificate that it names, and nobody has to give workers certificates for their host names.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pscore.net.tls import server_context

GOOD_FOR = datetime.timedelta(days=3650)
BEFORE = datetime.timedelta(days=1)  # Clocks that differ by less do no harm.


def make() -> tuple[bytes, ssl.SSLContext]:
    """Returns a new certificate, in PEM, and the context of a listener that shows it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Paceline worker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(now + GOOD_FOR)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    shown = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with _in_memory(shown) as cert_path, _in_memory(private) as key_path:
        return shown, server_context(cert_path, key_path, None)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[Path]:
    """Context manager: a file in memory, for OpenSSL, which reads files alone.

    A key is never on a disk, which may be full too.
    """
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")
