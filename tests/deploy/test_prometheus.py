"""A real Prometheus scrapes two shards of a training: every panel and rule of ours gets its series.

The job has a straggler, compressed pushes, a reported loss, a checkpoint, and a shard that is
killed. Grafana itself is not in the reach of pip or apt, so its dashboard is checked by the
expressions that it would send.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import grafana

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RULES = ROOT / "deploy" / "chart" / "files" / "rules.yaml"
pytestmark = pytest.mark.timeout(280)

SCRIPT = """
import time
import torch
import psworker

model = torch.nn.Linear(512, 512)
inner = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = psworker.DistributedOptimizer(
    inner, model.named_parameters(), mode="ssgd", compression="2bit"
)
end_s = time.monotonic() + 240
while time.monotonic() < end_s:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 512)).square().mean()
    loss.backward()
    time.sleep(0.2 * psworker.rank())
    optimizer.step()
    optimizer.report(loss=loss, tokens=8)
"""


def free_ports(count: int) -> int:
    """Returns the first of `count` free ports in a row."""
    for first in range(21000, 60000, 50):
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
    with urllib.request.urlopen(url, timeout=10) as answer:
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
    jobs = json.loads(psserver("status", "--servers", servers, "--json"))["jobs"]
    return any(job["step"] > 20 for job in jobs)


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[int]:
    """The port of a Prometheus that scrapes the shards of a training."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    first = free_ports(2)
    metrics, port = first + 10, first + 20
    state = tmp_path / "state"
    psserver(
        *("start", "--shards", "2", "--port", str(first), "--metrics-port", str(metrics)),
        *("--state-dir", str(state), "--checkpoint-s", "1000", "--detach"),
    )
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "paceline",
                "static_configs": [{"targets": [f"127.0.0.1:{metrics + n}" for n in range(2)]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    servers = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
    workers = subprocess.Popen(
        [BIN / "psworker", "run", "--workers", "2", "--job", "scraped", "--", str(script)],
        env={**os.environ, "PACELINE_SERVERS": servers},
        stdout=subprocess.DEVNULL,
    )
    prometheus = subprocess.Popen(
        [
            *("prometheus", f"--config.file={tmp_path}/prometheus.yml"),
            *(f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        while not stepped(servers):
            assert workers.poll() is None
            time.sleep(1.0)
        psserver("checkpoint", str(tmp_path / "saved"), "--servers", servers)
        status = json.loads(psserver("status", "--servers", servers, "--json"))
        os.kill(status["shards"][1]["pid"], signal.SIGKILL)
        yield port
    finally:
        end(workers)
        end(prometheus)
        psserver("stop", "--port", str(first), "--state-dir", str(state))


def shown(port: int, expression: str) -> list[float]:
    """Returns the finite values of an expression now."""
    ready = expression.replace("$__rate_interval", "15s").replace("$job", ".*")
    found = [float(series["value"][1]) for series in ask(port, "query", query=ready)["result"]]
    return [value for value in found if math.isfinite(value)]


def test_every_expression_of_the_dashboard_returns_series(scraped: int) -> None:
    wanted, deadline_s = grafana.expressions(), time.monotonic() + 60
    while missing := [each for each in wanted if not shown(scraped, each)]:
        assert time.monotonic() < deadline_s, missing
        time.sleep(2.0)
    while shown(scraped, "sum(paceline_recoveries_total)") != [1.0]:
        assert time.monotonic() < deadline_s
        time.sleep(1.0)
    assert shown(scraped, "max by (worker) (paceline_waited_for_seconds_total)")[1] > 1.0
    assert shown(scraped, 'paceline_compression_ratio{direction="received"}')[0] > 4.0
    (age_s,) = shown(scraped, "max(paceline_checkpoint_age_seconds)")
    assert 0.0 < age_s < 100.0
    groups = ask(scraped, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 8
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
