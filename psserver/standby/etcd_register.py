"""A register in etcd, by the JSON form of its API (3.4 or later): a claim is a key, made once."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from psserver.standby.succession import Claim

SCHEMES = {"etcd": "http", "etcds": "https"}
TIMEOUT_S = 2.0  # Then the next member of etcd is asked.


class EtcdRegister:
    """The claims of one shard in etcd: `etcd://host:2379,host:2379/night`, `etcds://` with TLS.

    A key is made on the condition that it was never made. Of TLS the variables of etcdctl name the
    files: ETCDCTL_CACERT, and ETCDCTL_CERT and ETCDCTL_KEY of a client.
    """

    def __init__(self, url: str, shard: str) -> None:
        """Asks nobody yet; raises ConfigError if the URL has not that form, or a file is wrong."""
        scheme, _, rest = url.partition("://")
        members, _, path = rest.partition("/")
        if not (members and path):
            raise ConfigError(f"{url} is no register: it must be like {scheme}://host:2379/night")
        try:
            addresses = parse_addresses(members)
        except ConfigError as problem:
            raise ConfigError(f"register {url}: {problem}") from problem
        self._members = [f"{SCHEMES[scheme]}://{address}" for address in addresses]
        self._prefix = f"{path.strip('/')}/{shard}."
        # The proxies of the environment are for other addresses.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if scheme == "etcds":
            handlers.append(urllib.request.HTTPSHandler(context=_tls()))
        self._opener = urllib.request.build_opener(*handlers)

    def newest(self) -> Claim | None:
        """Returns the claim with the largest epoch; None: there is none yet."""
        first, end = self._prefix.encode(), self._prefix[:-1].encode() + b"/"  # Behind the dot.
        wanted = {"key": _text(first), "range_end": _text(end)}
        answer = self._ask("range", {**wanted, "sort_order": "DESCEND", "limit": 1})
        found = answer.get("kvs", [])
        return Claim.from_json(json.loads(base64.b64decode(found[0]["value"]))) if found else None

    def create(self, claim: Claim) -> bool:
        """Writes a claim; returns False if there is one of its epoch, which stays."""
        key = _text(f"{self._prefix}{claim.epoch:012d}".encode())  # Keys are sorted as words.
        value = _text(json.dumps(claim.to_json()).encode())
        is_new = {"key": key, "target": "CREATE", "create_revision": 0}
        put = {"request_put": {"key": key, "value": value}}
        return bool(self._ask("txn", {"compare": [is_new], "success": [put]}).get("succeeded"))

    def _ask(self, method: str, request: Mapping[str, object]) -> dict[str, Any]:
        """Returns the answer of the first member that has one; that of a majority stands behind it.

        A claim that was written without an answer is found by the next member.

        Raises:
            OSError: No member answers.
        """
        data, problems = json.dumps(request).encode(), []
        for member in self._members:
            url = f"{member}/v3/kv/{method}"
            try:
                with self._opener.open(url, data, TIMEOUT_S) as answer:
                    found: dict[str, Any] = json.load(answer)
                if "header" not in found:
                    raise ValueError("this is not etcd")
                return found
            except (OSError, ValueError, http.client.HTTPException) as problem:
                problems.append(f"{urllib.parse.urlsplit(url).netloc}: {problem}")
        raise OSError("; ".join(problems))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tls() -> ssl.SSLContext:
    """Returns how members are checked; raises ConfigError if a file cannot be read."""
    named = os.environ.get
    try:
        context = ssl.create_default_context(cafile=named("ETCDCTL_CACERT"))
        if cert := named("ETCDCTL_CERT"):
            context.load_cert_chain(cert, named("ETCDCTL_KEY"))
    except OSError as problem:
        raise ConfigError(f"a file of ETCDCTL_CACERT, _CERT or _KEY: {problem}") from problem
    return context
