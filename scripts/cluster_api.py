"""As much of the API of Kubernetes as `helm template --dry-run=server` asks, with one StatefulSet.

No cluster is needed to test a template that looks at the objects of a release that is installed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP = {"groupVersion": "apps/v1", "version": "v1"}


def resources(group: str, *kinds: str) -> dict[str, Any]:
    """Returns the list of the kinds that a group has."""
    listed = [
        {
            **{"name": f"{kind.lower()}s", "kind": kind, "singularName": "", "namespaced": True},
            "verbs": ["get", "list"],
        }
        for kind in kinds
    ]
    return {"kind": "APIResourceList", "groupVersion": group, "resources": listed}


@contextmanager
def serving(namespace: str, stateful_set: Mapping[str, Any]) -> Iterator[str]:
    """Yields the address of an API that has this object and no other.

    Args:
        namespace: Namespace of the object.
        stateful_set: The object.
    """
    name = stateful_set["metadata"]["name"]
    objects: dict[str, Mapping[str, Any]] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": resources("v1", "ConfigMap", "Secret", "Service"),
        "/apis": {
            "kind": "APIGroupList",
            "groups": [{"name": "apps", "versions": [GROUP], "preferredVersion": GROUP}],
        },
        "/apis/apps/v1": resources("apps/v1", "StatefulSet"),
        f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}": stateful_set,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = objects.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
