"""A real Prometheus scrapes two shards of a training: every panel and rule of ours gets its series.

The job has a straggler, compressed pushes, a reported loss, a checkpoint, and a shard that is
killed. Grafana itself is not in the reach of pip or apt, so its dashboard is checked by the
expressions that it would send. Then a worker is killed, and the alert reaches an Alertmanager and
the receiver that it notifies.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import grafana
from scripts.printed import commands

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RULES = ROOT / "deploy" / "chart" / "files" / "rules.yaml"
TARGETS = "shard0:8070, shard1:8070"  # On the page.
ALERTMANAGER = next(
    filter(None, map(shutil.which, ("prometheus-alertmanager", "alertmanager"))), None
)
pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import time
import torch
import psworker

model = torch.nn.Linear(512, 512)
inner = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = psworker.DistributedOptimizer(
    inner, model.named_parameters(), mode="ssgd", compression="2bit", publish_every=1
)
end_s = time.monotonic() + 900
while time.monotonic() < end_s:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 512)).square().mean()
    loss.backward()
    time.sleep(0.2 * psworker.rank())
    optimizer.step()
    optimizer.report(loss=loss, tokens=8)
"""

READER = """
import psworker

subscriber = psworker.Subscriber(job="scraped")
weights = subscriber.wait()
while True:
    weights = subscriber.wait(newer_than=weights.version)
"""


def free_ports(count: int) -> int:
    """Returns the first of `count` free ports in a row; those of another process are others."""
    for first in range(21000 + 50 * (os.getpid() % 200), 60000, 50):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def ask(port: int, path: str, **fields: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]


def psserver(*words: str) -> str:
    done = subprocess.run([BIN / "psserver", *words], capture_output=True, text=True, check=True)
    return done.stdout


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stepped(servers: str) -> bool:
    """Returns whether the job has made some steps."""
    try:
        jobs = json.loads(psserver("status", "--servers", servers, "--json"))["jobs"]
    except subprocess.CalledProcessError:  # A shard that compiles its loops answers nobody.
        return False
    return any(job["step"] > 20 for job in jobs)


@dataclass
class Scraped:
    """A training with its Prometheus, and the alerts that a receiver has got."""

    port: int
    metrics: int  # Port of shard 0's page.
    servers: str
    has_alertmanager: bool
    told: list[dict[str, Any]] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(psserver("status", "--servers", self.servers, "--json"))
        return found


@contextmanager
def running(*words: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program until the end of the block."""
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        end(process)


@contextmanager
def receiver(told: list[dict[str, Any]]) -> Iterator[int]:
    """The port of a server that keeps the alerts that are sent to it."""

    class Keeper(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.extend(json.loads(body)["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Keeper) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A Prometheus that scrapes the shards of a training, and tells an Alertmanager of alerts."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("scraped")
    first = free_ports(30)
    metrics, port = first + 10, first + 20
    servers = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
    made = Scraped(port, metrics, servers, ALERTMANAGER is not None)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    targets = [f"127.0.0.1:{metrics + n}" for n in range(2)]
    config: dict[str, Any] = yaml.safe_load(
        commands("monitoring.md", "Prometheus", "yaml")[0].replace(TARGETS, ", ".join(targets))
    )
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    shutil.copy(RULES, folder)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:
        state = ("--state-dir", str(folder / "state"))
        psserver(
            *("start", "--shards", "2", "--port", str(first), "--metrics-port", str(metrics)),
            *(*state, "--checkpoint-s", "1000", "--detach"),
        )
        stack.callback(psserver, "stop", "--port", str(first), *state)
        if ALERTMANAGER is not None:
            hook = {"url": f"http://127.0.0.1:{stack.enter_context(receiver(made.told))}/"}
            route = {"receiver": "test", "group_wait": "1s", "group_by": ["alertname"]}
            receivers = [{"name": "test", "webhook_configs": [hook]}]
            (folder / "alerts.yml").write_text(json.dumps({"route": route, "receivers": receivers}))
            address = f"127.0.0.1:{first + 21}"
            words = (f"--config.file={folder}/alerts.yml", f"--web.listen-address={address}")
            rest = (f"--storage.path={folder}/alerts", "--cluster.listen-address=")
            stack.enter_context(running(ALERTMANAGER, *words, *rest, **quiet))
            managers = [{"static_configs": [{"targets": [address]}]}]
            config["alerting"] = {"alertmanagers": managers}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        workers = stack.enter_context(
            running(
                *(BIN / "psworker", "run", "--workers", "2", "--job", "scraped"),
                *("--on-failure", "continue", "--", str(script)),
                env={**os.environ, "PACELINE_SERVERS": made.servers},
                stdout=subprocess.DEVNULL,
            )
        )
        stack.enter_context(
            running(
                sys.executable, "-c", READER, env={**os.environ, "PACELINE_SERVERS": made.servers}
            )
        )
        stack.enter_context(
            running(
                *("prometheus", f"--config.file={folder}/prometheus.yml"),
                *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
                **quiet,
            )
        )
        while not stepped(made.servers):
            assert workers.poll() is None
            time.sleep(1.0)
        psserver("checkpoint", str(folder / "saved"), "--servers", made.servers)
        os.kill(made.status()["shards"][1]["pid"], signal.SIGKILL)
        yield made


def shown(port: int, expression: str) -> list[float]:
    """Returns the finite values of an expression now."""
    ready = expression.replace("$__rate_interval", "15s").replace("$job", ".*")
    found = [float(series["value"][1]) for series in ask(port, "query", query=ready)["result"]]
    return [value for value in found if math.isfinite(value)]


def test_the_page_of_a_shard_is_there_as_printed(scraped: Scraped) -> None:
    line = commands("monitoring.md")[0].splitlines()[0].replace("8070", str(scraped.metrics))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert "\npaceline_shard_workers" in done.stdout


def test_every_expression_of_the_dashboard_returns_series(scraped: Scraped) -> None:
    port = scraped.port
    wanted, deadline_s = grafana.expressions(), time.monotonic() + 300
    while missing := [each for each in wanted if not shown(port, each)]:
        assert time.monotonic() < deadline_s, missing
        time.sleep(2.0)
    while shown(port, "sum(paceline_recoveries_total)") != [1.0]:
        assert time.monotonic() < deadline_s
        time.sleep(1.0)
    assert shown(port, "max by (worker) (paceline_waited_for_seconds_total)")[1] > 1.0
    assert shown(port, 'paceline_compression_ratio{direction="received"}')[0] > 4.0
    (age_s,) = shown(port, "max(paceline_checkpoint_age_seconds)")
    assert 0.0 < age_s < 100.0
    groups = ask(port, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 8
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_the_alert_of_a_killed_worker_reaches_the_receiver_of_an_alertmanager(
    scraped: Scraped,
) -> None:
    if not scraped.has_alertmanager:
        pytest.skip("no Alertmanager is installed: apt-get install prometheus-alertmanager")
    (job,) = scraped.status()["jobs"]
    deadline_s = time.monotonic() + 300
    while not shown(scraped.port, "paceline_workers_lost_total"):  # A first value, to rise from.
        assert time.monotonic() < deadline_s
        time.sleep(1.0)
    os.kill(job["workers"][1]["pid"], signal.SIGKILL)
    while not scraped.told:
        assert time.monotonic() < deadline_s
        time.sleep(1.0)
    alert = scraped.told[0]
    assert (alert["status"], alert["labels"]["alertname"]) == ("firing", "PacelineWorkerLost")
    assert alert["labels"]["exported_job"] == "scraped"
    assert "1 lost worker(s) of scraped" in alert["annotations"]["summary"]
