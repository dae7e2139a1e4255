"""The dashboard in headless Chromium, during a run with a straggler and a shard that is killed.

Its numbers are compared with `psserver status --json` before and after. With PACELINE_PICTURES=1
the test also writes docs/pictures/dashboard-*.png, which a person has to look at.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_prometheus import end, free_ports, psserver

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
BIN = Path(sys.executable).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
IS_POSED = bool(os.environ.get("PACELINE_PICTURES"))
# A name that a careless page would run.
JOB = "night-run" if IS_POSED else "<img src=x onerror=alert(1)>"
STRAGGLER = 2
# Numbers that only rise.
COUNTS = ("step", "num_updates", "pushed_nbytes", "pulled_nbytes")
# Name, width and height in pixels, theme.
SHOTS = (
    ("laptop", 1440, 1300, "light"),
    ("phone", 390, 1500, "light"),
    ("dark", 1440, 1300, "dark"),
)
pytestmark = pytest.mark.timeout(1500)

SCRIPT = f"""
import time
import torch
import psworker

torch.manual_seed(0)
layers = torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)
model = torch.nn.Sequential(*layers)
inner = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = psworker.DistributedOptimizer(
    inner, model.named_parameters(), mode="ssgd", compression="2bit"
)
data = torch.randn(64, 1024)
target = torch.tanh(data.roll(3, 1))
end_s = time.monotonic() + 1200
while time.monotonic() < end_s:
    optimizer.zero_grad()
    index = torch.randint(0, 64, (16,))
    loss = (model(data[index]) - target[index]).square().mean()
    loss.backward()
    time.sleep(0.5 if psworker.rank() == {STRAGGLER} else 0.05)
    optimizer.step()
    optimizer.report(loss=loss, tokens=16)
"""


class Page(HTMLParser):
    """The numbers of a page: value by key, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        if key := found.get("data-key"):
            self.values[key] = found.get("data-value") or ""

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def browse(url: str, *options: str) -> str:
    words = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        "--virtual-time-budget=4000",
    )
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *words, *options, url], capture_output=True, text=True, timeout=400, check=True
    )
    return done.stdout


class Cluster:
    """Two shards, three workers and the dashboard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first = free_ports(30)
        self.state = folder / "state"
        self.port = first
        self.servers = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
        psserver(
            *("start", "--shards", "2", "--port", str(first), "--metrics-port", "0", "--detach"),
            *("--state-dir", str(self.state), "--checkpoint-s", "30"),
        )
        (folder / "train.py").write_text(SCRIPT)
        environment = {**os.environ, "PACELINE_SERVERS": self.servers, "PACELINE_JOB": JOB}
        self.workers = subprocess.Popen(
            [BIN / "psworker", "run", "--workers", "3", "--", str(folder / "train.py")],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        self.page = subprocess.Popen(
            [
                *(BIN / "psserver", "dashboard", "--servers", self.servers),
                *("--listen", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.page.stdout is not None
        found = re.search(r"http://\S+/", self.page.stdout.readline())
        assert found is not None
        self.url = found[0]

    def status(self) -> dict[str, Any]:
        """Returns the status, also while a shard is silent."""
        words: list[str | Path] = [BIN / "psserver", "status", "--servers", self.servers, "--json"]
        done = subprocess.run(words, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def until(self, claim: Any, wait_s: float = 400.0) -> dict[str, Any]:
        deadline_s = time.monotonic() + wait_s
        while not (status := self.status())["jobs"] or not claim(status):
            assert time.monotonic() < deadline_s, status
            time.sleep(1.0)
        return status

    def close(self) -> None:
        end(self.workers)
        end(self.page)  # type: ignore[arg-type]
        assert self.page.stdout is not None
        self.page.stdout.close()
        psserver("stop", "--port", str(self.port), "--state-dir", str(self.state))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_browser_shows_the_numbers_of_status(cluster: Cluster) -> None:
    begin = cluster.until(lambda status: status["jobs"][0]["step"] > 20)
    cluster.until(lambda status: status["jobs"][0]["step"] > 40)
    before = cluster.until(lambda status: status["jobs"][0]["checkpoint_age_s"] is not None)
    page = Page(browse(cluster.url, "--dump-dom"))
    after = cluster.status()
    compare(page, before, after)
    # The name of the job is text.
    assert "img" not in page.tags
    assert JOB in page.text
    # Others wait for the straggler, and not for the worker that is first.
    # The first steps are left out: then all wait for the one whose interpreter starts last.
    waits = [[each["waited_for_s"] for each in now["jobs"][0]["workers"]] for now in (begin, after)]
    shares = [late - early for early, late in zip(*waits, strict=True)]
    assert shares[STRAGGLER] > 3 * shares[0]
    assert f"worker {STRAGGLER}" in page.text  # In the waits.

    victim = after["shards"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    back = cluster.until(lambda status: len(status["shards"]) == 2)
    step = back["jobs"][0]["step"]
    before = cluster.until(lambda status: status["jobs"][0]["step"] > step + 5)
    page = Page(browse(cluster.url, "--dump-dom"))
    compare(page, before, cluster.status())
    assert page.values["shard-1-pid"] == str(before["shards"][1]["pid"]) != str(victim)
    assert page.values["shard-1-recoveries"] == "1"
    assert "shard 1 " in page.text
    assert re.search("does not answer|died and was started again", page.text)
    if IS_POSED:
        take_pictures(cluster)


def compare(page: Page, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Checks that each number lies between those of two moments."""
    first, last = before["jobs"][0], after["jobs"][0]
    for key in COUNTS:
        assert first[key] <= int(page.values[key]) <= last[key], key
    assert page.values["workers"] == "3"
    for old, new in zip(first["workers"], last["workers"], strict=True):
        key = f"worker-{old['rank']}-"
        assert old["step"] <= int(page.values[key + "step"]) <= new["step"]
        assert page.values[key + "state"] == new["state"] == "live"
    for shard in after["shards"]:
        assert page.values[f"shard-{shard['index']}-state"] == "answers"
        assert page.values[f"shard-{shard['index']}-pid"] == str(shard["pid"])


def take_pictures(cluster: Cluster) -> None:
    time.sleep(75.0)
    for name, width, height, theme in SHOTS:
        path = PICTURES / f"dashboard-{name}.png"
        browse(
            f"{cluster.url}?theme={theme}",
            *(f"--window-size={width},{height}", f"--screenshot={path}"),
        )
