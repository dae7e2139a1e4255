"""The kill loop of `benchmarks.recovery` in its short form: nothing is lost or counted twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import ROOT, clean_environment


def kill_loop(folder: Path, *kinds: str, mode: str, seconds: int = 16) -> dict[str, Any]:
    """Runs a kill loop on loopback and returns its figures."""
    options = ["--workers", "2", "--numel", "262144", "--gap-s", "0.5", "--no-net", "--no-disk"]
    options += ["--seconds", str(seconds), "--mode", mode, "--out", str(folder), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", *options, "--kinds", *kinds],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    assert done.returncode in (0, 1), done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["pushes"] > 0, done.stdout
    assert (figures["lost"], figures["double"], figures["torn"]) == (0, 0, 0), done.stdout
    assert figures["workers_failed"] == 0, done.stdout
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asgd", "ssgd"])
def test_no_push_is_lost_or_counted_twice_when_workers_are_killed(
    tmp_path: Path, mode: str
) -> None:
    figures = kill_loop(tmp_path, "worker", "worker stopped", mode=mode)
    assert figures["recovery"]["worker"]["count"] >= 1


@pytest.mark.slow
def test_no_push_is_lost_or_counted_twice_when_shards_are_killed(tmp_path: Path) -> None:
    figures = kill_loop(tmp_path, "shard", "coordinator", "shard stopped", mode="asgd", seconds=24)
    assert figures["recovery"]["shard"]["count"] >= 1
