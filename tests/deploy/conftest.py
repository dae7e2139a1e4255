"""These tests need tools and minutes that the suite lacks: `make check-deploy` runs them.

At the end they say for each engine how many tests ran, and which could not and why.
"""

import datetime
import os
from collections import defaultdict

import pytest

# The engine that a file tests; another file is named as it is.
ENGINES = {
    "test_alerts": "Prometheus",
    "test_booted": "systemd",
    "test_docker": "Docker",
    "test_kubernetes_api": "Kubernetes",
    "test_kubernetes_page": "Kubernetes",
    "test_pods": "Kubernetes",
    "test_prometheus": "Prometheus",
    "test_ray": "Ray",
    "test_slurm": "Slurm",
    "test_torchrun": "torchrun",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("CHECK_DEPLOY"):
        return
    for item in items:
        if "tests/deploy/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="make check-deploy runs it"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get("CHECK_DEPLOY"):
        return
    ran: dict[str, list[bool]] = defaultdict(list)
    reasons: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            stem = report.nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
            engine = ENGINES.get(stem, stem.removeprefix("test_"))
            ran[engine] += [] if outcome == "skipped" else [outcome == "passed"]
            if outcome == "skipped":
                reasons[engine].add(str(report.longrepr[2]).removeprefix("Skipped: "))
    terminalreporter.section(f"engines on {datetime.datetime.now(datetime.UTC).date()}")
    for engine in sorted(ran):
        could_not = "; ".join(sorted(reasons[engine]))
        line = f"{engine}: {sum(ran[engine])} of {len(ran[engine])} tests passed"
        terminalreporter.line(f"{line}; not run: {could_not}" if could_not else line)
