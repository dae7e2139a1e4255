"""The status and the view of a job that diverges are read by a strict parser."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job, results_of
from tests.integration.command import Command, eventually


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def diverge(me: Station) -> None:
    """Trains until the norm of the model is beyond float32, and waits."""
    weights = torch.nn.Parameter(torch.zeros(1000))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0), [("w", weights)], mode="dpsgd(average_every=1)"
    )
    for _ in range(3):
        weights.grad = torch.full((1000,), (0.5 + 0.5 * me.rank) * 1e38)
        optimizer.step()
    with optimizer.global_weights():
        pass
    me.tell()
    me.hear()


@pytest.mark.slow
def test_a_gossip_job_that_diverges_leaves_status_and_view_valid(
    shards: Shards, tmp_path: Path
) -> None:
    job, command = new_job(), Command(tmp_path)

    def reports(status: dict[str, Any]) -> list[dict[str, Any]]:
        (found,) = [each for each in status["jobs"] if each["name"] == job]
        peers = [report for worker in found["workers"] for report in worker["peers"]]
        return peers if len(peers) == 2 and all(peer["step"] == 3 for peer in peers) else []

    def reported() -> list[dict[str, Any]]:
        shown = command.run("status", "--json", "--servers", shards.servers).stdout
        peers = reports(strict(shown))
        return peers if all(peer["distance"] != 0.0 for peer in peers) else []

    with shards.workers(diverge, job=job) as workers:
        for worker in workers:
            worker.hear()
        assert {peer["distance"] for peer in eventually(reported)} == {None}
        for line in (("top", "--once", "--job", job), ("status",)):
            assert job in command.run(*line, "--servers", shards.servers).stdout
        flags = ("--listen", "127.0.0.1:0", "--servers", shards.servers)
        with command.spawn("dashboard", *flags) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2]
            with urllib.request.urlopen(f"{url}api/view", timeout=200) as answer:
                view = strict(answer.read().decode())
        assert {peer["distance"] for peer in reports(view["status"])} == {None}
        for worker in workers:
            worker.tell()
        results_of(workers)
