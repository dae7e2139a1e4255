"""Leases of Kubernetes: as much of its API as a register asks, and places for registers in both."""

from __future__ import annotations

import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from psserver.access import certs
from psserver.standby import kubernetes_register
from tests.integration.command import eventually
from tests.kube_api import KubeApi

PATH = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"


class Leases:
    """An API server that keeps Leases by their names.

    Attributes:
        found: The Leases.
        refuse: Returns the status and the body of the answer to a call, or None for the right one.
        account: Folder with the files of the account that may ask.
    """

    def __init__(self, folder: Path) -> None:
        """Makes certificates and the account's files; starts nothing."""
        self.found: dict[str, dict[str, Any]] = {}
        self.refuse: Callable[[str], tuple[int, str] | None] = lambda _: None
        self.lock = threading.Lock()
        self.account = folder / "account"
        self.account.mkdir()
        certs.make(folder / "certs", ["127.0.0.1"], days=2)
        (self.account / "ca.crt").write_bytes((folder / "certs" / "ca.pem").read_bytes())
        (self.account / "token").write_text("first\n")
        (self.account / "namespace").write_text("default")
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(folder / "certs" / "server.pem", folder / "certs" / "server.key")

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, str]:
        """Returns the status and the body of an answer."""
        lease = self.found.get(path.removeprefix(f"{PATH}/"))
        refused = self.refuse(method)
        if token != f"Bearer {(self.account / 'token').read_text().strip()}":
            refused = 401, "Unauthorized"
        if refused is not None:
            return refused
        if lease is None:
            return 404, "not found"
        if method == "PUT":
            new = json.loads(body)
            if new["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
                return 409, "the object has been modified"
            new["metadata"]["resourceVersion"] = str(int(lease["metadata"]["resourceVersion"]) + 1)
            lease.update(new)
        return 200, json.dumps(lease)

    def add(self, name: str) -> None:
        """Makes a Lease without a claim."""
        self.found[name] = {"kind": "Lease", "metadata": {"name": name, "resourceVersion": "1"}}


@contextmanager
def serving(leases: Leases) -> Iterator[int]:
    """Serves Leases; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with leases.lock:
                token = self.headers["Authorization"]
                status, text = leases.answer(self.command, self.path, token, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = leases.tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def enter_pod(patch: pytest.MonkeyPatch, account: Path, port: int) -> None:
    """Makes this process look like one in a pod of an account."""
    patch.setattr(kubernetes_register, "ACCOUNT", account)
    patch.setattr(kubernetes_register, "TIMEOUT_S", 60.0)  # The machine may be busy.
    patch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    patch.setenv("KUBERNETES_SERVICE_PORT", str(port))


def make_place(api: KubeApi, account: Path, shard: str) -> str:
    """Makes a Lease for a shard, and an account with the chart's rights; returns the register."""
    name = f"night-{uuid.uuid4().hex[:8]}"
    lease = f"{name}-{shard}"
    api.call("POST", PATH, {"metadata": {"name": lease}})
    api.write_account(account, "default", name)
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    rule |= {"verbs": ["get", "update"], "resourceNames": [lease]}
    api.call("POST", f"{ROLES}/roles", {"metadata": {"name": name}, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    api.call("POST", f"{ROLES}/rolebindings", binding)
    wait_for_role(api, account, lease)
    return f"kubernetes://{name}"


def wait_for_role(api: KubeApi, account: Path, lease: str) -> None:
    """Waits until an API server knows the roles, soon after they are made and it has started."""

    def may_get() -> bool:
        try:
            api.call("GET", f"{PATH}/{lease}", token=(account / "token").read_text())
        except OSError:
            return False
        return True

    eventually(may_get)
