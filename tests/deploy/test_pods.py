"""The chart's shards and the example's workers, run as pods, train through a drained node."""

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.deploy.pods import Cluster, Document
from tests.house.source import ROOT

HELM = ROOT / ".venv-deploy" / "bin" / "helm"
TOOLS = ("ip", "unshare", "setpriv")

pytestmark = [
    pytest.mark.skipif(not HELM.exists(), reason="no helm: make check-deploy installs it"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"
    ),
]


def rendered() -> list[Document]:
    done = subprocess.run(
        [HELM, "template", "paceline", ROOT / "deploy" / "chart"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    job = (ROOT / "deploy" / "kubernetes" / "indexed-job.yaml").read_text()
    return [each for text in (done.stdout, job) for each in yaml.safe_load_all(text) if each]


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.mark.timeout(900)
def test_training_continues_through_a_drained_node(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/") and parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    with Cluster(rendered(), tmp_path, path, ROOT) as cluster:
        shards = [name for name in cluster.pods if name.startswith("paceline-")]
        workers = [name for name in cluster.pods if name.startswith("mnist-")]
        assert (len(shards), len(workers)) == (2, 2)
        for name in shards:
            cluster.start(name)
        for name in shards:
            cluster.wait(f"{name} is not ready", partial(cluster.is_ready, name), 60)
        for name in workers:
            cluster.start(name)
        cluster.wait("no epoch", lambda: "accuracy" in cluster.pods["mnist-0"].log.read_text(), 120)
        # A node goes with a shard and a worker; both come back, the shard with its claim.
        assert cluster.drain("paceline-1") == 0
        assert cluster.drain("mnist-1") == -signal.SIGTERM
        cluster.start("paceline-1")
        cluster.start("mnist-1")
        for name in workers:
            process = cluster.pods[name].process
            assert process is not None
            cluster.wait(f"{name} has not ended", partial(has_ended, process), 150)
            assert process.returncode == 0, cluster.pods[name].log.read_text()[-3000:]
        for name in shards:
            assert cluster.is_ready(name)
            assert cluster.drain(name) == 0
