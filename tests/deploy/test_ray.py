"""examples/ray_train.py on a real Ray: actors are killed, and nodes are lost."""

import contextlib
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

from psserver.exits import CommandError
from psserver.remote.ask import statuses
from psserver.remote.status import combine
from scripts.printed import commands
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
    """A Ray of one or several nodes, and a script on it."""

    def __init__(self, log: Path) -> None:
        """Starts nothing."""
        self.log = log
        self.driver: subprocess.Popen[bytes] | None = None
        self.folder = Path(f"/tmp/ray-{os.getpid()}")  # Ray's sockets need a short path.
        self.before = set(psutil.pids())
        self.nodes: list[list[psutil.Process]] = []

    def start(self, *num_cpus: int) -> None:
        """Starts nodes with these numbers of processors; the first node of all is the head.

        Each has an address of its own: the head this machine's, the others 127.0.0.2 and so on.
        """
        common = ["--object-store-memory=200000000", "--disable-usage-stats"]
        head = ["--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        for number, count in enumerate(num_cpus, 1 + len(self.nodes)):
            words = [f"--num-cpus={count}", *common]
            own = [f"--node-ip-address=127.0.0.{number}", "--address=127.0.0.1:6399"]
            words += own if self.nodes else head
            self.nodes.append(self._start(*words))

    def drive_example(self) -> None:
        """Starts examples/ray_train.py."""
        words = ["examples/ray_train.py", "--steps", str(STEPS), "--port", str(PORT)]
        self.drive(*words, "--state-dir", str(self.log.parent / "state"))

    def drive(self, *words: str) -> None:
        """Starts a script, whose output is the log from now on."""
        environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:6399", "RAY_DEDUP_LOGS": "0"}
        environment["PATH"] = f"{BIN}:{environment['PATH']}"
        with self.log.open("wb") as output:
            self.driver = subprocess.Popen(
                [str(BIN / "python"), *words],
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

    def end(self) -> int:
        """Returns the exit status of the script, once it has ended."""
        assert self.driver is not None
        return self.driver.wait(1500)

    @property
    def servers(self) -> str:
        """Addresses of the shards; empty until the example has printed them."""
        found = re.search(r"shards at (\S+)", self.log.read_text())
        return found[1] if found else ""

    def job(self) -> dict[str, Any]:
        """Returns the status of the job; empty while there is none."""
        addresses = self.servers.split(",") if self.servers else []
        # In this process: each `psserver status` would take a second from the training.
        try:
            jobs = combine(addresses, statuses(addresses))["jobs"] if addresses else []
        except CommandError:
            jobs = []
        return jobs[0] if jobs else {"step": 0, "workers": []}

    def pid(self, title: str) -> int:
        """Returns the process of an actor."""
        return next(it.pid for it in psutil.process_iter() if line(it).startswith(f"ray::{title}"))

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 1500  # Against a hang.
        while not is_so():
            assert time.monotonic() < end_s, f"{what}: {self.log.read_text()[-3000:]}"
            assert self.driver is not None
            assert self.driver.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.3)

    def close(self) -> None:
        """Ends the processes of this Ray; `ray stop` would end every Ray of the machine."""
        if self.driver is not None:
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
    running = Cluster(tmp_path / "log")
    try:
        running.start(*getattr(request, "param", (6,)))
        yield running
    finally:
        running.close()


def test_a_job_ends_like_a_plain_run_although_an_actor_of_each_kind_is_killed(
    cluster: Cluster,
) -> None:
    cluster.drive_example()
    cluster.wait("steps", lambda: cluster.job()["step"] > STEPS // 10)
    psutil.Process(cluster.pid("ShardActor")).kill()
    at = cluster.job()["step"]
    cluster.wait("steps after the kill of a shard", lambda: cluster.job()["step"] > at + 20)
    victim = cluster.pid("RayTrainWorker")
    psutil.Process(victim).kill()
    at = cluster.job()["step"]
    cluster.wait("steps after the kill of a worker", lambda: cluster.job()["step"] > at + 20)
    check(cluster)


@pytest.mark.parametrize("cluster", [(2,)], indirect=True)
def test_workers_of_a_lost_node_continue_on_another(cluster: Cluster) -> None:
    cluster.drive_example()
    cluster.wait("shards, for which the head has room", lambda: bool(cluster.servers))
    cluster.start(2, 2)  # Each for both workers.
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


# The head has room for neither; each other node for all.
@pytest.mark.parametrize("cluster", [(0, 4, 4)], indirect=True)
def test_a_shards_lost_node_ends_the_job_and_the_pages_script_continues_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No weights begin anew beside old ones; each shard has a half of the model."""
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    save, restore = (
        re.findall(rf"`(psserver {verb} DIR .*?)`", page)[0].replace("DIR", str(tmp_path / "saved"))
        for verb in ("checkpoint", "restore")
    )
    cluster.drive(str(write_script(cluster, "first", "psserver health --servers ADDRESSES")))
    cluster.wait("steps", lambda: cluster.job()["step"] > STEPS // 10)
    save = save.replace("ADDRESSES", cluster.servers)
    subprocess.run([BIN / "psserver", *save.split()[1:]], check=True)
    host = cluster.servers.partition(":")[0]
    cluster.lose(int(host.rpartition(".")[2]) - 1)
    shutil.rmtree(tmp_path / "first" / "shard-0")  # On a disk of that node.
    assert cluster.end() != 0
    assert "StateLostError" in cluster.log.read_text()
    assert "ends with loss" not in cluster.log.read_text()
    cluster.drive(str(write_script(cluster, "again", restore)))
    check(cluster, 1, train_plain(STEPS, *WIDE))


WIDE = (1024, 0.0001)  # Hidden units for a slice on each shard, and their learning rate.
# A command of the page's table, between the start of the shards and that of the workers.
CALL = """
def call(command):
    import subprocess
    addresses = ",".join(shards.addresses())
    print("shards at " + addresses, flush=True)
    command = command.replace("NAME", shards.cluster).replace("ADDRESSES", addresses)
    subprocess.run(command.split(), check=True)

"""


def write_script(cluster: Cluster, name: str, command: str) -> Path:
    """Writes the page's script with the example's loop, a wider model, and a command in between."""
    example = (ROOT / "examples" / "ray_train.py").read_text().partition("def main")[0]
    (printed,) = commands("ray.md", language="python")
    hidden, lr = WIDE
    here = {
        'config["steps"]': str(STEPS),
        "(8, 32)": f"(8, {hidden})",
        "(32, 1)": f"({hidden}, 1)",
        "0.002": str(lr),
        "Shards(2, ": f"Shards(2, port={PORT}, ",
        "/var/lib/paceline": str(cluster.log.parent / name),
        "num_workers=4, use_gpu=True": f"num_workers={WORKERS}",
        "trainer = ": f"call({command!r})\ntrainer = ",
    }
    text = example + CALL + printed
    for word, other in here.items():
        assert text.count(word) == 1, word
        text = text.replace(word, other)
    script = cluster.log.parent / f"{name}.py"
    script.write_text(text)
    return script


def check(cluster: Cluster, num_groups: int = 2, loss: float | None = None) -> None:
    """Checks that the job continued at its step, and ended like a plain run."""
    assert cluster.end() == 0, cluster.log.read_text()[-3000:]
    text = cluster.log.read_text()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text)]
    assert len(begun) >= num_groups * WORKERS
    assert max(begun) > STEPS // 10  # The workers after the kill began where the job was.
    # A set, because Ray may print a line twice.
    ended = set(re.findall(r"rank (\d) ends with loss ([\d.]+)", text))
    assert sorted(rank for rank, _ in ended) == [str(rank) for rank in range(WORKERS)]
    losses = [float(loss) for _, loss in ended]
    assert losses == pytest.approx([loss or train_plain(STEPS)] * WORKERS, abs=1e-5)
    left = [line(it) for it in psutil.process_iter() if it.pid not in cluster.before]
    assert not [words for words in left if "psserver" in words and str(PORT) in words]
