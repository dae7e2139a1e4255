"""A register in Kubernetes: a Lease has the newest claim on a shard, changed by compare-and-set."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError
from psserver.standby.succession import Claim

SCHEME = "kubernetes"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # Files that a pod has.
CLAIM = "paceline.dev/claim"  # The annotation with the claim.
TIMEOUT_S = 2.0


class KubernetesRegister:
    """The newest claim on one shard: `kubernetes://night`, the Lease `night-shard-1-of-2`.

    The Lease is in the pod's namespace, and is there before: the pod's account needs no more than
    `get` and `update` of its name, and a Lease that was deleted gives the shard to nobody. An
    update names the version that was read, and is refused where another one was first. Holder and
    number of changes are for people (`kubectl get leases`); neither duration nor clock is used.
    """

    def __init__(self, url: str, shard: str) -> None:
        """Asks nobody yet; raises ConfigError if the URL has not that form, or this is no pod."""
        name = url.partition("://")[2]
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            raise ConfigError(f"{url} is no register: it must be like {SCHEME}://night")
        try:
            host, port = (os.environ[f"KUBERNETES_SERVICE_{it}"] for it in ("HOST", "PORT"))
        except KeyError as problem:
            raise ConfigError(f"{url} is a register for pods, and this is none") from problem
        self._server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._name = f"{name}-{shard}"

    def newest(self) -> Claim | None:
        """Returns the claim with the largest epoch; None: there is none yet."""
        return _claim_in(self._ask())

    def create(self, claim: Claim) -> bool:
        """Writes a claim; returns False if there is one of its epoch, or of a later one."""
        while True:
            lease = self._ask()
            newest = _claim_in(lease)
            if newest is not None and newest.epoch >= claim.epoch:
                return False
            annotations = lease["metadata"].get("annotations", {})
            lease["metadata"]["annotations"] = {**annotations, CLAIM: json.dumps(claim.to_json())}
            lease["spec"] = {"holderIdentity": claim.address, "leaseTransitions": claim.epoch}
            if self._ask(lease):
                return True

    def _ask(self, lease: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the Lease, after it was replaced if one is given; empty if another was first.

        Token and CA are read for each call, since the kubelet renews them.

        Raises:
            OSError: The API server refuses, or does not answer.
        """
        namespace = (ACCOUNT / "namespace").read_text().strip()
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{self._name}"
        request = urllib.request.Request(
            self._server + path,
            method="GET" if lease is None else "PUT",
            data=None if lease is None else json.dumps(lease).encode(),
            headers={
                "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
                "Content-Type": "application/json",
            },
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.load_verify_locations(ACCOUNT / "ca.crt")
        # The proxies of the environment are for other addresses.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
                if not (isinstance(found, dict) and found.get("kind") == "Lease"):
                    raise ValueError("this is not Kubernetes")
                return found
        except urllib.error.HTTPError as problem:
            if lease is not None and problem.code == http.client.CONFLICT:
                return {}
            reason = problem.read(1000).decode(errors="replace")
            raise OSError(f"{self._server} answers {problem.code}: {reason}") from problem
        except (http.client.HTTPException, ValueError) as problem:
            raise OSError(f"{self._server}: {problem}") from problem


def _claim_in(lease: dict[str, Any]) -> Claim | None:
    """Returns the claim of a Lease; raises ValueError if it has something else."""
    text = lease["metadata"].get("annotations", {}).get(CLAIM)
    return None if text is None else Claim.from_json(json.loads(text))
