"""`psserver certs` and the files that `psserver start` takes: made once, private, and checked."""

import datetime
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pscore.errors import ConfigError
from psserver.access import certs
from psserver.exits import CommandError, Exit
from psserver.process.settings import resolve


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certs.make(folder, ["shard0", "10.1.2.3", "[fd00::1]"], days=30)
    return folder


def flags(files: Path, **changes: object) -> dict[str, object]:
    return {
        "server.host": "0.0.0.0",
        "server.tls_cert": files / "server.pem",
        "server.tls_key": files / "server.key",
        "server.tls_client_ca": files / "ca.pem",
        "server.token_file": files / "token",
    } | {f"server.{name}": value for name, value in changes.items()}


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_secrets_are_for_this_user_alone(files: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.iterdir()}
    secret = {name: 0o600 for name in ("ca.key", "server.key", "client.key", "token")}
    public = {name: 0o644 for name in ("ca.pem", "server.pem", "client.pem")}
    assert modes == secret | public


def test_the_shards_certificate_names_this_machine_and_the_hosts(files: Path) -> None:
    found = certificate(files / "server.pem")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "shard0"} <= set(names.get_values_for_type(x509.DNSName))
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "::1", "10.1.2.3", "fd00::1"}
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left.days == 29


def test_only_the_ca_signs(files: Path) -> None:
    basics = {
        name: certificate(files / f"{name}.pem")
        .extensions.get_extension_for_class(x509.BasicConstraints)
        .value.ca
        for name in ("ca", "server", "client")
    }
    assert basics == {"ca": True, "server": False, "client": False}


def test_nothing_is_replaced_unless_forced(tmp_path: Path) -> None:
    certs.make(tmp_path, [], days=1)
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(CommandError, match=r"holds ca.pem, .*already; .* --force") as caught:
        certs.make(tmp_path, [], days=1)
    assert caught.value.code is Exit.STATE_DIR
    assert (tmp_path / "ca.pem").read_bytes() == before
    certs.make(tmp_path, [], days=1, is_forced=True)
    assert (tmp_path / "ca.pem").read_bytes() != before


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_full_disk_leaves_no_part_of_a_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forced: bool
) -> None:
    """Half of a set would be refused by the next try, and spoil the old one with `--force`."""
    if is_forced:
        certs.make(tmp_path, [], days=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    original, opened = os.open, list[object]()

    def fill(*args: Any) -> int:
        opened.append(args)
        if len(opened) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    monkeypatch.setattr(os, "open", fill)
    with pytest.raises(CommandError, match="No space left on device"):
        certs.make(tmp_path, [], days=1, is_forced=is_forced)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    certs.make(tmp_path, [], days=1, is_forced=is_forced)


@pytest.mark.parametrize("host", ["", "a b", "a:7070", "http://a", "a,b", "\u00e4"])
def test_a_host_that_is_none_is_refused_before_anything_is_written(
    tmp_path: Path, host: str
) -> None:
    with pytest.raises(ConfigError, match="is neither a name nor an address; without a port"):
        certs.make(tmp_path / "new", [host], days=1)
    assert not (tmp_path / "new").exists()


def test_a_listener_for_all_needs_no_more_than_these_files(files: Path) -> None:
    trust = resolve(flags(files)).server.trust
    assert trust.token_file == str(files / "token")
    assert not trust.authorizer().is_open
    assert trust.context() is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls_key": None}, "--tls-cert and --tls-key belong together: --tls-key is missing"),
        ({"tls_cert": None}, "--tls-cert and --tls-key belong together: --tls-cert is missing"),
        ({"tls_cert": None, "tls_key": None}, "--tls-client-ca needs --tls-cert and --tls-key"),
        (
            {"tls_cert": None, "tls_key": None, "tls_client_ca": None},
            "give --tls-cert and --tls-key too .`psserver certs DIR --host NAME` makes the files",
        ),
        ({"token_file": None}, "could connect; give --token-file too"),
        ({"token_file": "none"}, "cannot read the token file .*none: No such file"),
        ({"tls_cert": "none"}, "cannot read --tls-cert .*none: No such file"),
        ({"tls_key": "client.key"}, "are not a certificate and its private key"),
        ({"tls_client_ca": "token"}, "token holds no certificate of a CA"),
        ({"tls_key": "open.key"}, "--tls-key .*open.key can be read by others .mode 0644.; run"),
    ],
)
def test_wrong_combinations_are_refused_at_the_start(
    files: Path, changes: dict[str, str | None], message: str
) -> None:
    (files / "open.key").write_bytes((files / "server.key").read_bytes())
    (files / "open.key").chmod(0o644)
    given = {
        name: None if value is None else Path(value) if value == "none" else files / value
        for name, value in changes.items()
    }
    with pytest.raises(ConfigError, match=message):
        resolve(flags(files, **given))
    (files / "open.key").unlink()
