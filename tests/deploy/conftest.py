"""These tests need tools and minutes that the suite lacks: `make check-deploy` runs them.

At the end they say for each engine how many tests ran, in how many seconds, and which could not and
why. `make check-deploy CHECK_DEPLOY=write` keeps that in docs/results for the pages, of engines
whose tests were all part of the run and did not fail.
"""

import datetime
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.check_deploy import make_tools

# The engine that a file tests; another file is named as it is.
ENGINES = {
    "test_alerts": "Prometheus",
    "test_booted": "systemd",
    "test_browser": "Chromium",
    "test_chart": "Kubernetes",
    "test_docker": "Docker",
    "test_docker_faults": "Docker",
    "test_docker_hosts": "Docker",
    "test_images": "Docker",
    "test_kubernetes_api": "Kubernetes",
    "test_kubernetes_page": "Kubernetes",
    "test_kubernetes_register": "Kubernetes",
    "test_machines": "shell",
    "test_pods": "Kubernetes",
    "test_prometheus": "Prometheus",
    "test_ray": "Ray",
    "test_registers": "etcd",
    "test_slurm": "Slurm",
    "test_standby": "etcd",
    "test_start": "shell",
    "test_torchrun": "torchrun",
}
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "check-deploy.json"
# Arguments of pytest: all tests of `make check-deploy`.
TESTS = Path(__file__).parent / "tests.txt"


@dataclass
class Ran:
    """The tests of one engine."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    ids: set[str] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)

    def line(self) -> str:
        """Returns how many ran in how many seconds, and why others could not."""
        count = f"{self.passed} of {self.passed + self.failed}" if self.failed else self.passed
        line = f"{count} passed, {self.seconds:.0f} s"
        could_not = "; ".join(sorted(self.reasons))
        return f"{line}; not run: {could_not}" if could_not else line


def pytest_configure(config: pytest.Config) -> None:
    # Before tests are collected, which are skipped where helm is missing; once for all processes.
    if os.environ.get("CHECK_DEPLOY") and not hasattr(config, "workerinput"):
        with suppress(subprocess.CalledProcessError):
            make_tools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/deploy/" not in str(item.path):
            continue
        if not os.environ.get("CHECK_DEPLOY"):
            item.add_marker(pytest.mark.skip(reason="make check-deploy runs it"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get("CHECK_DEPLOY"):
        return
    engines = tally(terminalreporter)
    today = str(datetime.datetime.now(datetime.UTC).date())
    terminalreporter.section(f"engines on {today}")
    for engine, ran in sorted(engines.items()):
        terminalreporter.line(f"{engine}: {ran.line()}")
    if os.environ["CHECK_DEPLOY"] == "write":
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        reasons = incomplete(engines)
        for engine, ran in engines.items():
            if engine in reasons:
                terminalreporter.line(f"{engine}: its line is not written: {reasons[engine]}")
            else:
                found[engine] = {"date": today, "said": ran.line()}
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def incomplete(engines: dict[str, Ran]) -> dict[str, str]:
    """Returns why the pages must not say what ran of an engine, for each such engine."""
    words = (sys.executable, "-m", "pytest", "--collect-only", "--quiet", f"@{TESTS}")
    environment = {**os.environ, "CHECK_DEPLOY": "1"}
    done = subprocess.run(
        words, cwd=TESTS.parents[2], env=environment, capture_output=True, text=True, check=True
    )
    wanted = {line for line in done.stdout.splitlines() if "::" in line}
    left = wanted.difference(*(ran.ids for ran in engines.values()))
    missing = Counter(engine_of(test) for test in left)
    reasons = {}
    for engine, ran in engines.items():
        if ran.failed or not ran.passed:
            reasons[engine] = f"{ran.failed} failed" if ran.failed else "none passed"
        elif missing[engine]:
            reasons[engine] = f"{missing[engine]} of its tests were not part of this run"
    return reasons


def engine_of(test: str) -> str:
    """Returns the engine that a test is for."""
    stem = test.partition("::")[0].rpartition("/")[2].removesuffix(".py")
    return ENGINES.get(stem, stem.removeprefix("test_"))


def tally(terminalreporter: pytest.TerminalReporter) -> dict[str, Ran]:
    """Returns what was run, by engine."""
    engines: dict[str, Ran] = defaultdict(Ran)
    for outcome in ("", "passed", "failed", "error", "skipped"):  # "": begins and ends of tests.
        for report in terminalreporter.stats.get(outcome, []):
            ran = engines[engine_of(report.nodeid)]
            ran.ids.add(report.nodeid)
            ran.seconds += report.duration
            ran.passed += outcome == "passed"
            ran.failed += outcome in ("failed", "error")
            if outcome == "skipped":
                ran.reasons.add(str(report.longrepr[2]).removeprefix("Skipped: "))
    return engines
