"""The kill loop of `benchmarks.recovery` in its short form: nothing is lost or counted twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration import warm
from tests.integration.cluster import ROOT, clean_environment


def kill_loop(folder: Path, *kinds: str, mode: str, lease_s: int = 3) -> dict[str, Any]:
    """Runs a kill loop on loopback and returns its figures."""
    options = ["--workers", "2", "--numel", "65536", "--gap-s", "0.5", "--no-net", "--no-disk"]
    options += ["--think-ms", "25", "--seconds", "1", "--lease-s", str(lease_s), "--mode", mode]
    options += ["--out", str(folder), "--json"]
    command = ["-m", "benchmarks.recovery", *options, "--kinds", *kinds]
    done = warm.run(command, cwd=ROOT, env=clean_environment(), timeout=800)
    assert done.stdout, done.stderr
    assert done.returncode in (0, 1), done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["pushes"] > 0, done.stdout
    for wrong in ("lost", "double", "torn", "partial", "healthy_ended"):
        assert figures[wrong] == 0, done.stdout
    assert figures["workers_failed"] == 0, done.stdout
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kinds"),
    [("ssgd", ("worker", "shard", "status polled")), ("asgd", ("coordinator", "power cut"))],
)
def test_no_push_is_lost_or_counted_twice(
    tmp_path: Path, mode: str, kinds: tuple[str, ...]
) -> None:
    """Each kind of fault strikes once, however long the machine takes for it."""
    figures = kill_loop(tmp_path, *kinds, mode=mode)
    assert figures["faults"] >= len(kinds)


@pytest.mark.slow
def test_idle_connections_and_stopped_workers_keep_nobody_out(tmp_path: Path) -> None:
    """A worker that is killed meanwhile joins again, and probes are answered."""
    figures = kill_loop(tmp_path, "idle connections", "workers stopped", mode="asgd")
    assert figures["recovery"]["idle connections"]["count"] == 1
    assert figures["idle_connections"] > 0
    assert figures["probes"] > 0
    assert figures["probe_s_max"] > 0.0


@pytest.mark.slow
def test_no_push_is_lost_where_a_shard_is_killed_in_a_moment_of_another_process(
    tmp_path: Path,
) -> None:
    """The moments are those in which a worker sends again, rejoins or joins, or a job is saved.

    Only a worker whose lease outlasts the start of a shard sends again.
    """
    missing = ["resend", "rejoin", "constructor", "checkpoint"]
    for _ in range(3):  # On a busy machine a process may come to its moment too late.
        kinds = [f"kill in a {moment}" for moment in missing]
        figures = kill_loop(tmp_path, *kinds, mode="asgd", lease_s=10)
        assert figures["stuck_waits"] == 0
        missing = [moment for moment in missing if not figures[f"{moment}_kills"]]
        if not missing:
            break
    assert not missing
