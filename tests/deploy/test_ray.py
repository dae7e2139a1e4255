"""examples/ray_train.py on a real Ray: actors are killed, and a node of several is lost."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy.plain import WORKERS, train_plain
from tests.house.source import ROOT

BIN = ROOT / ".venv-ray" / "bin"
STEPS = 3000
PORT = 24870  # Ray's workers have the ports from 10002 to 19999.

pytestmark = [
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="no Ray: make test-ray installs it"),
    pytest.mark.timeout(3600),
]


def line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Cluster:
    """A Ray of one or several nodes, and the example on it."""

    def __init__(self, log: Path, *num_cpus: int) -> None:
        """Starts a head with the first number of processors, and a node with each further one.

        Each has an address of its own: the head this machine's, the others 127.0.0.2 and so on.
        """
        self.log = log
        self.folder = Path(f"/tmp/ray-{os.getpid()}")  # Ray's sockets need a short path.
        self.before = set(psutil.pids())
        common = ["--object-store-memory=200000000", "--disable-usage-stats"]
        head = ["--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        self.state = log.parent / "state"
        self.nodes: list[list[psutil.Process]] = []
        for number, count in enumerate(num_cpus, 1):
            words = [f"--num-cpus={count}", *common]
            own = [f"--node-ip-address=127.0.0.{number}", "--address=127.0.0.1:6399"]
            words += own if self.nodes else head
            self.nodes.append(self._start(*words))
        words = [str(BIN / "python"), "examples/ray_train.py", "--steps", str(STEPS)]
        words += ["--state-dir", str(self.state)]
        environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:6399", "RAY_DEDUP_LOGS": "0"}
        with log.open("wb") as output:
            self.driver = subprocess.Popen(
                [*words, "--port", str(PORT)],
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _start(self, *options: str) -> list[psutil.Process]:
        """Starts a node; returns its daemons."""
        before = set(psutil.pids())
        words = [str(BIN / "ray"), "start", *options]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return [
            it
            for it in psutil.process_iter()
            if it.pid not in before and str(self.folder) in line(it)
        ]

    def lose(self, node: int) -> None:
        """Kills the daemons of a node and everything below them, as a machine that loses power."""
        for process in self.nodes[node]:
            below = process.children(recursive=True) if process.is_running() else []
            for each in (process, *below):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    def job(self) -> dict[str, Any]:
        """Returns the status of the job; empty while there is none."""
        found = re.search(r"shards at (\S+)", self.log.read_text())
        if found is None:
            return {"step": 0, "workers": []}
        words = [str(BIN / "psserver"), "status", "--json", "--servers", found[1]]
        done = subprocess.run(words, capture_output=True, text=True)
        jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
        return jobs[0] if jobs else {"step": 0, "workers": []}

    def pid(self, title: str) -> int:
        """Returns the process of an actor."""
        return next(it.pid for it in psutil.process_iter() if line(it).startswith(f"ray::{title}"))

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 1500  # Against a hang.
        while not is_so():
            assert time.monotonic() < end_s, f"{what}: {self.log.read_text()[-3000:]}"
            assert self.driver.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.3)

    def close(self) -> None:
        """Ends the processes of this Ray; `ray stop` would end every Ray of the machine."""
        self.driver.kill()
        self.driver.wait()
        daemons = [process for node in self.nodes for process in node]
        for process in daemons:
            if process.is_running():
                process.terminate()
        psutil.wait_procs(daemons, timeout=20)
        words = (str(BIN), str(self.folder), "ray::")
        left = [it for it in psutil.process_iter() if it.pid not in self.before]
        for process in [it for it in left if any(word in line(it) for word in words)]:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    running = Cluster(tmp_path / "log", *getattr(request, "param", (6,)))
    try:
        yield running
    finally:
        running.close()


def test_a_job_ends_like_a_plain_run_although_an_actor_of_each_kind_is_killed(
    cluster: Cluster,
) -> None:
    cluster.wait("steps", lambda: cluster.job()["step"] > STEPS // 10)
    psutil.Process(cluster.pid("ShardActor")).kill()
    at = cluster.job()["step"]
    cluster.wait("steps after the kill of a shard", lambda: cluster.job()["step"] > at + 20)
    victim = cluster.pid("RayTrainWorker")
    psutil.Process(victim).kill()
    at = cluster.job()["step"]
    cluster.wait("steps after the kill of a worker", lambda: cluster.job()["step"] > at + 20)
    check(cluster)


# The head has room for the shards alone, and each other node for both workers.
@pytest.mark.parametrize("cluster", [(2, 2, 2)], indirect=True)
def test_workers_of_a_lost_node_continue_on_another(cluster: Cluster) -> None:
    cluster.wait("steps", lambda: cluster.job()["step"] > STEPS // 10)
    pids = {worker["pid"] for worker in cluster.job()["workers"]}
    (node,) = (
        index
        for index, daemons in enumerate(cluster.nodes)
        if pids & {below.pid for it in daemons for below in it.children(recursive=True)}
    )
    assert node > 0
    cluster.lose(node)
    at = cluster.job()["step"]
    cluster.wait("steps after the loss", lambda: cluster.job()["step"] > at + 20)
    check(cluster)


def check(cluster: Cluster) -> None:
    """Checks that the job continued at its step, and ended like a plain run."""
    assert cluster.driver.wait(1500) == 0, cluster.log.read_text()[-3000:]
    text = cluster.log.read_text()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text)]
    assert len(begun) >= 2 * WORKERS
    assert max(begun) > STEPS // 10  # The workers after the kill began where the job was.
    # A set, because Ray may print a line twice.
    ended = set(re.findall(r"rank (\d) ends with loss ([\d.]+)", text))
    assert sorted(rank for rank, _ in ended) == [str(rank) for rank in range(WORKERS)]
    losses = [float(loss) for _, loss in ended]
    assert losses == pytest.approx([train_plain(STEPS)] * WORKERS, abs=1e-5)
    left = [line(it) for it in psutil.process_iter() if it.pid not in cluster.before]
    assert not [words for words in left if "psserver" in words and str(PORT) in words]
