"""The chart and its standbys with a real API server of Kubernetes, which no kubelet asks.

The chart asks for a newer one than Debian's 1.20, so its copy here asks for none, and has neither
PodDisruptionBudget, whose group has another version there, nor constraints of its newer fields.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from psserver.standby.kubernetes_register import CLAIM
from tests.deploy.pods import SWITCH
from tests.deploy.test_pods import HELM, end, prepared, pytestmark, start_shards
from tests.house.source import ROOT
from tests.kube_api import KubeApi, running_kube_api

__all__ = ["pytestmark"]

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/paceline-shard-0-of-1"
VALUES = "podDisruptionBudget.enabled=false,spread=false,standby.enabled=true,shards=1"
OWN = "app.kubernetes.io/instance=paceline"


class Release:
    """A release of the chart in an API server."""

    def __init__(self, api: KubeApi, folder: Path) -> None:
        self.api = api
        self._chart = folder / "chart"
        shutil.copytree(ROOT / "deploy" / "chart", self._chart)
        about = self._chart / "Chart.yaml"
        about.write_text(re.sub("^kubeVersion.*\n", "", about.read_text(), flags=re.MULTILINE))
        self._environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}

    def helm(self, verb: str, *values: str) -> str:
        """Returns what Helm prints of a release called paceline; fails with its message."""
        more: list[str | Path] = (
            [] if verb == "uninstall" else [self._chart, "--set", ",".join((VALUES, *values))]
        )
        return self._call(HELM, verb, "paceline", *more)

    def find(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the objects of the release of some kinds."""
        words = ["get", ",".join(kinds), "--selector", OWN, "--output", "json"]
        return list(json.loads(self._call(HELM.with_name("kubectl"), *words))["items"])

    def may(self, verb: str, what: str) -> bool:
        """Whether the account of the shards' pods may do something."""
        account = ["--as", "system:serviceaccount:default:paceline"]
        words = [str(HELM.with_name("kubectl")), "auth", "can-i", verb, what, *account]
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True)
        assert done.stdout.strip() in ("yes", "no"), done.stderr
        return str(done.stdout).strip() == "yes"

    def _call(self, *words: str | Path) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    """A release that is installed, with one shard and its standby."""
    folder = tmp_path / "kube"
    folder.mkdir()
    with running_kube_api(folder, [SWITCH]) as api:
        found = Release(api, folder)
        found.helm("install")
        yield found


@pytest.mark.timeout(1800)
def test_upgrades_and_a_new_installation_keep_claims_and_secrets(release: Release) -> None:
    lease = release.api.call("GET", LEASE)
    lease["metadata"]["annotations"][CLAIM] = "claim"
    lease["spec"] = {"holderIdentity": "a:1"}
    release.api.call("PUT", LEASE, lease)
    before = release.find("secret")
    release.helm("upgrade", "image.tag=next")
    (shards, _) = release.find("statefulset")
    assert shards["spec"]["template"]["spec"]["containers"][0]["image"] == "paceline:next"
    with pytest.raises(AssertionError, match=r"runs with persistence\.size 20Gi"):
        release.helm("upgrade", "persistence.size=1Ti")
    release.helm("uninstall")
    assert not release.find("statefulset", "service", "role", "serviceaccount")
    release.helm("install")
    lease = release.api.call("GET", LEASE)
    assert lease["metadata"]["annotations"][CLAIM] == "claim"
    assert lease["spec"] == {"holderIdentity": "a:1"}
    after = release.find("secret")
    assert [each["data"] for each in after] == [each["data"] for each in before]
    # The account of the shards has the rights that they need, and no others.
    name = LEASE.rpartition("/")[2]
    allowed = [release.may(verb, f"leases/{name}") for verb in ("get", "update", "patch", "delete")]
    assert allowed == [True, True, False, False]
    for verb, what in (("get", "leases/other"), ("list", "leases"), ("get", "secrets")):
        assert not release.may(verb, what)


@pytest.mark.timeout(1800)
def test_a_killed_pods_standby_takes_over_by_a_lease_once_the_api_server_is_back(
    tmp_path: Path, release: Release
) -> None:
    job = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "indexed-job.yaml").read_text())
    documents = release.find("statefulset", "service", "configmap", "secret")
    with prepared(tmp_path, [*documents, job]) as cluster:
        first, second = "paceline-0", "paceline-standby-0"
        workers = [name for name in cluster.pods if name.startswith("mnist-")]

        def said(name: str, text: str) -> bool:
            return text in cluster.pods[name].log.read_text()

        cluster.account = tmp_path / "account"
        release.api.write_account(cluster.account, "default", "paceline")
        cluster.account.chmod(0o755)
        for name in (first, second):
            cluster.pods[name].more["KUBERNETES_SERVICE_HOST"] = SWITCH
            cluster.pods[name].more["KUBERNETES_SERVICE_PORT"] = str(release.api.port)
        with cluster.reaching(release.api.port):
            start_shards(cluster)
            cluster.wait("no standby", lambda: said(first, "the shard has a standby"))
            for name in workers:
                cluster.start(name)
            cluster.wait("no epoch", lambda: said("mnist-0", "accuracy"))
            release.api.stop()
            cluster.kill(first)
            cluster.wait("no try", lambda: said(second, "the standby cannot take over yet"))
            assert not said(second, "this standby takes over")
            release.api.start()
            cluster.wait("nobody took over", lambda: said(second, "this standby takes over"))
            cluster.start(first)
            cluster.wait("no standby again", lambda: said(second, "the shard has a standby"))
            for name in workers:
                end(cluster, name)
        found = release.api.call("GET", LEASE)["spec"]
        assert found["holderIdentity"] == f"{second}.paceline.default.svc:7070"
