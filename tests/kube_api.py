"""A real API server of Kubernetes with an etcd of its own, and the files of pods' accounts."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from psserver.access import certs
from tests.etcd import running_etcd
from tests.house.source import ROOT
from tests.integration.command import eventually, free_ports

BINARIES = ROOT / ".kubernetes"
ADMIN = "admin-of-the-test"
AUDIENCE = "https://kubernetes.default.svc"


class KubeApi:
    """An API server on loopback, with RBAC and tokens of accounts.

    Attributes:
        port: Its port.
        kubeconfig: File by which kubectl and helm are its administrator.
    """

    def __init__(self, folder: Path, etcd: str, names: Sequence[str] = ()) -> None:
        """Makes certificates, also for more names, and keys; `start` starts it."""
        (self.port,) = free_ports(1)
        self.kubeconfig = folder / "kubeconfig"
        self._certs = folder / "certs"
        certs.make(self._certs, ["127.0.0.1", *names], days=2)
        (folder / "tokens").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        key = ec.generate_private_key(ec.SECP256R1())
        form = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, *form)
        (folder / "accounts.key").write_bytes(pem)
        options = {
            "etcd-servers": f"http://{etcd.partition('://')[2]}",
            "bind-address": "127.0.0.1",
            "secure-port": self.port,
            "tls-cert-file": self._certs / "server.pem",
            "tls-private-key-file": self._certs / "server.key",
            "service-account-key-file": folder / "accounts.key",
            "service-account-signing-key-file": folder / "accounts.key",
            "service-account-issuer": AUDIENCE,
            "api-audiences": AUDIENCE,
            "authorization-mode": "RBAC",
            "token-auth-file": folder / "tokens",
            "service-cluster-ip-range": "10.96.0.0/24",
            "allow-privileged": "true",
            "cert-dir": folder / "run",
        }
        self._line = [program("kube-apiserver"), *(f"--{it}={is_}" for it, is_ in options.items())]
        self._log = folder / "apiserver.log"
        self._process: subprocess.Popen[bytes] | None = None
        cluster = {"server": self.url, "certificate-authority": str(self._certs / "ca.pem")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": ADMIN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._line, stdout=log, stderr=log)
        eventually(self._is_ready)

    def stop(self) -> None:
        """Kills it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def call(self, method: str, path: str, body: object = None, token: str = ADMIN) -> Any:
        """Returns an answer; raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(self._certs / "ca.pem"))
        with urllib.request.urlopen(asked, timeout=20, context=context) as answer:
            return json.load(answer)

    def write_account(self, folder: Path, namespace: str, name: str) -> None:
        """Writes the files that a pod of an account has; makes the account if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        try:
            self.call("POST", accounts, {"metadata": {"name": name}})
        except urllib.error.HTTPError as problem:
            if problem.code != 409:
                raise
        wanted = {"spec": {"audiences": [AUDIENCE], "expirationSeconds": 3600}}
        token = self.call("POST", f"{accounts}/{name}/token", wanted)["status"]["token"]
        (folder / "token").write_text(token)
        (folder / "namespace").write_text(namespace)
        shutil.copy(self._certs / "ca.pem", folder / "ca.crt")

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            self.call("GET", "/api/v1/namespaces/default")
        except OSError:
            return False
        return True


def program(name: str) -> str:
    """Returns the path of a program of Kubernetes; skips the test where it is not."""
    found = shutil.which(name, path=str(BINARIES))
    if found is None:
        pytest.skip(f"no {name}: scripts/make_kubernetes builds it from Debian's source package")
    return found


@contextmanager
def running_kube_api(folder: Path, names: Sequence[str] = ()) -> Iterator[KubeApi]:
    """Starts etcd and an API server, with more names for others, with their files in a folder."""
    program("kube-apiserver")
    with running_etcd(folder / "etcd") as etcd:
        api = KubeApi(folder, etcd, names)
        api.start()
        try:
            yield api
        finally:
            api.stop()
