"""Every alert of deploy/chart/files/rules.yaml is provoked and cleared, on a real Prometheus.

The rules are those of the file with seconds in the place of minutes, and a checkpoint counts as old
after 8 s. Shards and workers are real; only a clock that is wrong is a page of this test.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import pytest
import yaml

from pscore.pb.ps.v1 import publish_pb2, publish_pb2_grpc
from scripts.printed import commands
from tests.deploy.test_prometheus import ROOT, RULES, ask, end, free_ports, running
from tests.integration import warm

BIN = Path(sys.executable).parent
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
LIMIT_S = 600.0  # Against a hang only.
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed: apt-get install prometheus",
    ),
    pytest.mark.timeout(1800),
]
# A file `slow-RANK` in its folder holds the seconds that each of its steps takes longer.
SCRIPT = """
import os, random, time
from pathlib import Path
import torch
import psworker

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = int(os.environ["INPUTS"])
model = torch.nn.Linear(inputs, inputs // 2)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3),
    model.named_parameters(),
    mode=os.environ["MODE"],
    publish_every=1,
)
slow = Path(__file__).parent / f"slow-{psworker.rank()}"
steps_s = random.Random(psworker.rank())
while not (Path(__file__).parent / "enough").exists():
    optimizer.zero_grad()
    model(torch.randn(1, inputs)).square().mean().backward()
    time.sleep(steps_s.uniform(0.05, float(os.environ["STEP_S"])))
    deadline_s = time.monotonic() + (float(slow.read_text()) if slow.exists() else 0.0)
    while time.monotonic() < deadline_s and slow.exists():
        time.sleep(0.05)
    optimizer.step()
"""


def quick(window_s: int = 10, old_s: int = 8) -> str:
    """Returns the rules with seconds instead of minutes; a checkpoint of `old_s` counts as old."""
    text = RULES.read_text()
    text = re.sub(r"\[\d+m\]", f"[{window_s}s]", text)
    text = text.replace("[1h]", "[2m]")  # Longer than a busy machine leaves out evaluations.
    text = re.sub(r"for: \d+m", "for: 5s", text)
    assert text.count("> 3600") == 1
    assert text.count("> 120") == 1
    return text.replace("> 3600", f"> {old_s}").replace("> 120", "> 2")


class Site:
    """A Prometheus whose targets are in a file."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.targets = folder / "targets.json"
        self.aim()
        (folder / "rules.yaml").write_text(quick())
        plain = {"job_name": "paceline", "file_sd_configs": [{"files": [str(self.targets)]}]}
        plain["file_sd_configs"][0]["refresh_interval"] = "1s"  # type: ignore[index]
        self.config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [plain],
        }

    def aim(self, *ports: int) -> None:
        """Sets the targets: pages on these ports."""
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}" for port in ports]}]))
        new.replace(self.targets)

    def write(self) -> None:
        (self.folder / "prometheus.yml").write_text(json.dumps(self.config))

    def alerts(self, name: str) -> list[dict[str, str]]:
        """Returns the labels of the alerts of a rule that fire."""
        found = ask(self.port, "alerts")["alerts"]
        labels = [each["labels"] for each in found if each["state"] == "firing"]
        return [each for each in labels if each["alertname"] == f"Paceline{name}"]

    def value(self, expression: str) -> list[float]:
        found = ask(self.port, "query", query=expression)["result"]
        return [float(series["value"][1]) for series in found]

    def labels(self, expression: str) -> list[dict[str, str]]:
        return [series["metric"] for series in ask(self.port, "query", query=expression)["result"]]

    def workers(self, name: str) -> set[int]:
        """Returns the ranks that the alerts of a rule name."""
        return {int(labels["worker"]) for labels in self.alerts(name)}

    def summary(self, name: str) -> str:
        """Returns the text of the first alert of a rule that fires; empty: none does."""
        found = ask(self.port, "alerts")["alerts"]
        texts = [
            each["annotations"]["summary"]
            for each in found
            if each["state"] == "firing" and each["labels"]["alertname"] == f"Paceline{name}"
        ]
        return texts[0] if texts else ""

    def use(self, rules: str) -> None:
        """Replaces the rules of the Prometheus that runs."""
        (self.folder / "rules.yaml").write_text(rules)
        url = f"http://127.0.0.1:{self.port}/-/reload"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
            pass

    def fires(self, name: str) -> dict[str, str]:
        until(lambda: self.alerts(name), f"{name} does not fire")
        return self.alerts(name)[0]

    def clears(self, name: str) -> None:
        until(lambda: not self.alerts(name), f"{name} still fires")


def until(is_so: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.3)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    port = free_ports(1)
    made = Site(tmp_path, port)
    made.write()
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--web.enable-lifecycle"]
    with running("prometheus", *words, **QUIET):
        until(lambda: is_up(port), "Prometheus does not answer")
        yield made


def is_up(port: int) -> bool:
    try:
        ask(port, "alerts")
    except OSError:
        return False
    return True


class Shard:
    """One shard, which may be started again at its ports."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_ports(40)
        self.metrics = self.port + 20
        self.servers = f"127.0.0.1:{self.port}"
        self.folder, self.options = folder, options
        self.stack = ExitStack()
        self.stderr: int | None = None  # As for subprocess; None: that of the test.

    def start(self, *more: str) -> None:
        words = ["start", "--port", str(self.port), "--metrics-port", str(self.metrics)]
        words += ["--lease-s", "2", "--cluster", "site", *self.options, *more]
        process = self.stack.enter_context(
            running(
                BIN / "psserver",
                *words,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
            )
        )
        assert process.stdout is not None
        with process.stdout as pipe:
            assert pipe.readline().startswith(b"PACELINE_SERVERS=")

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "psserver", *words, "--servers", self.servers],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def job(self) -> dict[str, Any]:
        """Returns the status of the one job."""
        (found,) = json.loads(self.call("status", "--json"))["jobs"]
        return dict(found)

    def stop(self) -> None:
        self.stack.close()


@contextmanager
def shard(folder: Path, *options: str) -> Iterator[Shard]:
    made = Shard(folder, *options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def workers(
    shard: Shard, mode: str = "ssgd", count: int = 2
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that train until the end of the block; each is a process of its own."""
    (shard.folder / "train.py").write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            started.append(worker(shard, mode, count, rank))
        yield started
    finally:
        for process in started:
            end(process)


def worker(shard: Shard, mode: str, count: int, rank: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(shard.folder / "train.py")]
    environment = variables(shard, mode, count, rank) | {"INPUTS": "2048", "STEP_S": "0.05"}
    devnull = subprocess.DEVNULL
    return subprocess.Popen(words, env=environment, stdout=devnull, stderr=devnull)


def variables(shard: Shard, mode: str, count: int, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "PACELINE_SERVERS": shard.servers,
        "PACELINE_NUM_WORKERS": str(count),
        "PACELINE_RANK": str(rank),
        "PACELINE_JOB": "job",
        "MODE": mode,
    }


@contextmanager
def crowd(shard: Shard, count: int) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts small workers, as forks of one interpreter, whose steps take 0.05 to 1.8 s.

    Yields:
        A function that starts the worker of a rank again, and returns it.
    """
    (shard.folder / "train.py").write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int) -> subprocess.Popen[bytes]:
        environment = variables(shard, "ssgd", count, rank)
        environment |= {"INPUTS": "8", "STEP_S": "1.8", "PACELINE_DATA_PLANE": "tcp"}
        started.append(warm.Popen([shard.folder / "train.py"], env=environment, cwd=ROOT, **QUIET))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def slow(shard: Shard, rank: int, seconds: float) -> Path:
    path = shard.folder / f"slow-{rank}"
    path.write_text(str(seconds))
    return path


def test_every_alert_has_a_test() -> None:
    names = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }  # fmt: skip
    text = Path(__file__).read_text()
    assert {f"Paceline{name}" for name in re.findall(r'\.fires\("(\w+)"\)', text)} == names
    assert {f"Paceline{name}" for name in re.findall(r'\.clears\("(\w+)"\)', text)} == names


def test_a_shard_that_is_down(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one:
        site.aim(one.metrics)
        until(lambda: site.value("up") == [1.0], "no target")
        one.stop()
        assert site.fires("ShardDown")["instance"].endswith(str(one.metrics))
        one.start()
        site.clears("ShardDown")


def test_a_shard_that_is_no_target_any_more(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one, workers(one):
        site.aim(one.metrics)
        until(lambda: site.value("paceline_shard_workers") == [2.0], "no workers")
        site.aim()
        found = site.fires("ShardMissing")
        assert (found["cluster"], found["shard"]) == ("site", "0")
        site.aim(one.metrics)
        site.clears("ShardMissing")


def test_workers_that_do_not_push_and_a_straggler(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one:
        files = [slow(one, rank, 1000.0) for rank in range(2)]
        with workers(one):
            site.aim(one.metrics)
            assert site.fires("NobodyPushes")["exported_job"] == "job"
            for file in files:
                file.unlink()
            site.clears("NobodyPushes")
            lagging = slow(one, 1, 0.5)
            assert site.fires("Straggler")["worker"] == "1"
            lagging.unlink()
            site.clears("Straggler")


def test_pushes_that_come_too_late(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one:
        site.aim(one.metrics)
        slow(one, 1, 0.2)
        with workers(one, "ssgd(backup=1)"):
            site.fires("ManyPushesTooLate")
        site.clears("ManyPushesTooLate")


def test_a_lost_worker_until_it_is_back_and_no_alert_for_a_stop(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one, workers(one) as started:
        site.aim(one.metrics)
        until(lambda: site.value("paceline_workers_live") == [2.0], "no workers")
        started[1].kill()
        started[1].wait()
        site.fires("WorkerLost")
        # It stays, also beyond the window of any rate, until the worker is back.
        until(lambda: site.value("paceline_workers_away offset 20s") == [1.0], "not away")
        assert site.alerts("WorkerLost")
        started[1] = worker(one, "ssgd", 2, 1)
        site.clears("WorkerLost")
        until(lambda: site.value("paceline_workers_live") == [2.0], "no workers")
        stopped = 'max_over_time(ALERTS{alertname="PacelineWorkerLost", alertstate="firing"}[5s])'
        until(lambda: not site.value(stopped), "an alert of before")
        begin_s = time.monotonic()
        for process in started:
            process.send_signal(signal.SIGTERM)
        # As long as the rule waits, and longer.
        gone = "max_over_time(paceline_workers_live[10s])"
        until(lambda: site.value(gone) == [0.0], "live workers")
        since = f"[{int(time.monotonic() - begin_s) + 1}s]"
        assert not site.value(stopped.replace("[5s]", since))


def test_of_64_workers_the_slow_and_the_lost_are_named_and_no_others(
    site: Site, tmp_path: Path
) -> None:
    """Steps of all workers vary by themselves, which is no reason for an alert."""
    site.use(quick(window_s=60, old_s=3600))
    slow_ones, lost_ones = {5, 40}, {7, 21, 63}
    firing = 'max_over_time(ALERTS{exported_job="job", alertstate="firing"}[1h])'
    named = f"count by (alertname, worker) ({firing})"
    with shard(tmp_path, "--lease-s", "30") as one, crowd(one, 64) as start:
        site.aim(one.metrics)
        started = [start(rank) for rank in range(64)]
        until(lambda: site.value("paceline_workers_live") == [64.0], "not 64 workers")
        # All rates are over a whole window, and alerts have had the time to fire.
        until(lambda: site.value("paceline_workers_live offset 80s") == [64.0], "not 64 workers")
        assert site.labels(named) == []
        for rank in slow_ones:
            slow(one, rank, 6.0)
        until(lambda: site.workers("Straggler") == slow_ones, "other workers are named as slow")
        for rank in lost_ones:
            started[rank].kill()
            started[rank].wait()
        until(lambda: "3 lost worker" in site.summary("WorkerLost"), "not 3 workers are lost")
        workers = one.job()["workers"]
        assert {each["rank"] for each in workers if each["state"] == "lost"} == lost_ones
        for rank in slow_ones:
            (tmp_path / f"slow-{rank}").unlink()
        for rank in lost_ones:
            start(rank)
        site.clears("WorkerLost")
        site.clears("Straggler")
        until(lambda: site.value("paceline_workers_live") == [64.0], "not 64 workers")
        found = site.labels(named)
    # A lost worker makes the others wait until its lease ends.
    assert {label["alertname"] for label in found} == {"PacelineStraggler", "PacelineWorkerLost"}
    assert {int(label["worker"]) for label in found if "worker" in label} <= slow_ones | lost_ones


def test_old_gradients(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one:
        site.aim(one.metrics)
        lagging = slow(one, 1, 4.0)
        with workers(one, "asgd"):
            site.fires("Stale")
            lagging.unlink()
            site.clears("Stale")


def test_a_reader_that_is_behind_and_one_that_gets_weights_whole(
    site: Site, tmp_path: Path
) -> None:
    """The reader says itself which version it uses, and how many slices have come whole."""
    said = publish_pb2.Reader(id=7, host="far", pid=9, number=0)
    over, resyncs = Event(), Event()
    with shard(tmp_path) as one, workers(one, count=1), grpc.insecure_channel(one.servers) as line:
        stub = publish_pb2_grpc.PublicationsStub(line)

        def read() -> None:
            while not over.wait(0.5):
                asked = publish_pb2.WatchRequest(job="job", table="model", after=-1, reader=said)
                stub.Watch(asked)
                if resyncs.is_set():
                    said.number = 1 << 40  # Newer than any.
                    said.resyncs += 1

        site.aim(one.metrics)
        thread = Thread(target=read)
        thread.start()
        try:
            assert site.fires("ReaderBehind")["host"] == "far"
            resyncs.set()
            assert site.fires("ReaderResyncs")["pid"] == "9"
            site.clears("ReaderBehind")
            resyncs.clear()
            site.clears("ReaderResyncs")
        finally:
            over.set()
            thread.join()


def test_slices_without_a_journal(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the process stands for a full disk; it meets shared memory and a log file too."""
    monkeypatch.setenv("PACELINE_DATA_PLANE", "tcp")
    one = Shard(tmp_path, "--state-dir", str(tmp_path / "state"))
    one.stderr = subprocess.DEVNULL
    first_step = slow(one, 0, 1000.0)
    with ExitStack() as stack:
        stack.callback(one.stop)
        one.start()
        stack.enter_context(
            workers(one, count=6)
        )  # More pushes at once than the first room of the journals.
        site.aim(one.metrics)
        until(lambda: site.value("paceline_workers_live") == [6.0], "no worker")
        (path,) = (tmp_path / "state").glob("*/run.json")
        (process,) = json.loads(path.read_text())["shards"]
        no_limit = resource.RLIM_INFINITY
        resource.prlimit(process["pid"], resource.RLIMIT_FSIZE, (0, no_limit))
        first_step.unlink()
        assert site.fires("SlicesExposed")["exported_job"] == "job"
        resource.prlimit(process["pid"], resource.RLIMIT_FSIZE, (no_limit, no_limit))
        site.clears("SlicesExposed")


def test_checkpoints_without_their_copies(site: Site, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    places = ("--state-dir", str(tmp_path / "state"), "--checkpoint-copies", str(copies))
    with shard(tmp_path, *places, "--checkpoint-s", "1") as one, workers(one, count=1):
        site.aim(one.metrics)
        until(lambda: any(copies.glob("job-*")), "no copy")
        copies.rename(tmp_path / "away")
        copies.touch()  # No folder, as where a mount has gone.
        site.fires("CopiesBroken")
        copies.unlink()
        site.clears("CopiesBroken")


def test_jobs_that_are_set_back(site: Site, tmp_path: Path) -> None:
    first, second = shards = Shard(tmp_path), Shard(tmp_path)
    second.port, second.metrics = first.port + 1, first.metrics + 1
    first.servers = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
    for index, each in enumerate(shards):
        each.options = ("--shards", "2", "--shard-index", str(index), "--lease-s", "60")
        each.options += ("--shard-addresses", first.servers, "--checkpoint-s", "1")
        each.options += ("--state-dir", str(tmp_path / f"state-{index}"))
    with ExitStack() as stack:
        for each in shards:
            stack.callback(each.stop)
            each.start()
        stack.enter_context(workers(first, count=1))
        site.aim(first.metrics, second.metrics)
        saved = tmp_path / "state-0" / "checkpoints"
        until(lambda: any(saved.glob("job-*")), "no checkpoint")
        until(lambda: site.value("paceline_mended_jobs_total") == [0.0, 0.0], "no counters")
        second.stop()
        shutil.rmtree(tmp_path / "state-1")
        second.start()
        site.fires("JobsSetBack")
        site.clears("JobsSetBack")


def test_a_standby_that_is_away(site: Site, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(shard(tmp_path, "--state-dir", str(tmp_path / name)))
            for name in ("a", "b")
        )
        stack.enter_context(workers(first, count=1))
        site.aim(first.metrics)
        first.call("standby", second.servers, "--same-host")
        until(lambda: site.value("paceline_standby_in_sync") == [1.0], "no standby")
        second.stop()
        assert site.fires("StandbyAway")["instance"].endswith(str(first.metrics))
        second.start()
        site.clears("StandbyAway")


def test_an_old_checkpoint(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one, workers(one, count=1):
        site.aim(one.metrics)
        site.fires("CheckpointOld")
        one.call("checkpoint", str(tmp_path / "saved"))
        site.clears("CheckpointOld")


def test_memory_that_is_nearly_used_up(site: Site, tmp_path: Path) -> None:
    with shard(tmp_path) as one, workers(one, count=1):
        site.aim(one.metrics)
        until(lambda: (site.value("paceline_table_bytes") or [0.0])[0] > 0, "no table")
        (nbytes,) = site.value("paceline_table_bytes")
    limit_mb = int(nbytes) // (1 << 20) + 1
    assert nbytes > 0.9 * (limit_mb << 20)
    with shard(tmp_path, "--memory-mb", str(limit_mb)) as one:
        site.aim(one.metrics)
        with workers(one, count=1):
            site.fires("MemoryShort")
        one.call("forget", "job", "--force")
        site.clears("MemoryShort")


def test_a_clock_that_is_wrong(site: Site) -> None:
    ahead_s = [30.0]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"paceline_time_seconds {time.time() + ahead_s[0]}\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            site.aim(server.server_port)
            site.fires("ClockSkew")
            ahead_s[0] = 0.0
            site.clears("ClockSkew")
        finally:
            server.shutdown()
            thread.join()


def test_a_certificate_that_ends(tmp_path: Path) -> None:
    def make(days: int) -> None:
        words = ("certs", str(tmp_path), "--host", "127.0.0.1", "--days", str(days), "--force")
        subprocess.run([BIN / "psserver", *words], check=True, capture_output=True)

    make(7)
    one = Shard(
        tmp_path,
        *("--tls-cert", f"{tmp_path}/server.pem", "--tls-key", f"{tmp_path}/server.key"),
        *("--token-file", f"{tmp_path}/token"),
    )
    port = one.port + 30
    site = Site(tmp_path, port)
    (scraped,) = site.config["scrape_configs"]
    printed = commands("monitoring.md", "Prometheus", "yaml")[0]
    scraped |= yaml.safe_load(re.sub(r"^    # (\w+: )", r"    \1", printed, flags=re.M))[
        "scrape_configs"
    ][0] | {"static_configs": []}
    site.write()
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}"]
    with running("prometheus", *words, **QUIET):
        until(lambda: is_up(port), "Prometheus does not answer")
        try:
            one.start()
            site.aim(one.metrics)
            site.fires("CertificateEnds")
            one.stop()
            make(365)
            one.start()
            site.clears("CertificateEnds")
            until(lambda: site.value("up") == [1.0], "the new certificate is not taken")
            line = commands("monitoring.md")[0].splitlines()[1]
            subprocess.run(
                ["bash", "-c", line.replace("shard0:8070", f"127.0.0.1:{one.metrics}")],
                cwd=tmp_path, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            one.stop()
