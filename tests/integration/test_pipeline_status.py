"""The work of a pipeline's stages in status."""

from typing import Any

import pytest
import torch
from torch import nn

import psworker
from psserver.remote import ask, status
from tests.integration.cluster import Shards, Station, new_job, wait_until
from tests.paper import test_pipeline as model

TOTAL = 4


def train(me: Station) -> None:
    """Trains four minibatches, and waits."""
    run = psworker.Pipeline(
        nn.Sequential(*model.make_stages(2)).float(),
        torch.zeros(1, model.WIDTH),
        model.loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        [("0.2", 1), ("1.2", 1)],
    )
    for x, y in model.data(TOTAL):
        run.step(x.float(), y.float())
    me.tell()
    me.hear()
    run.finish()


def test_status_shows_the_work_of_each_stage(
    shards: Shards, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    job = new_job()

    def picture() -> dict[str, Any]:
        replies = ask.statuses(shards.addresses)
        return status.only(status.combine(shards.addresses, replies), job)

    def stages() -> list[Any]:
        return [worker["stage"] for worker in picture()["jobs"][0]["workers"]]

    # A forward of the first stage keeps its input and the result of `tanh`, of two samples.
    kept = 4 * 2 * 2 * model.WIDTH
    both = {"replica": 0, "minibatch": TOTAL}
    first = both | {
        "stage": 0,
        "version": TOTAL - 1,
        "in_flight": 1,
        "activation_nbytes": kept,
        "versions_held": 2,
    }
    second = both | {
        "stage": 1,
        "version": TOTAL,
        "in_flight": 0,
        "activation_nbytes": 0,
        "versions_held": 1,
    }

    def are_told() -> bool:
        """Whether both have; a heartbeat may also tell of the middle of the last minibatch."""
        found = stages()
        return (
            None not in found
            and all(stage.pop("waits_s") > 0 for stage in found)
            and (found == [first, second])
        )

    with shards.workers(train, job=job) as running:
        for worker in running:
            worker.hear()
        wait_until(are_told)
        status.show(picture())
        for worker in running:
            worker.tell()
        for worker in running:
            worker.result()
    shown = capsys.readouterr().out
    assert "versions held" in shown
    assert "activations" in shown
