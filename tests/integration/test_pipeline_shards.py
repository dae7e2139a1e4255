"""A pipeline whose first shard, which has the directory of the workers, is killed or moves."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from pscore.net.credentials import ANYONE
from psserver.remote.drain import move
from tests.integration.cluster import Station, Worker, new_job
from tests.integration.command import Command, eventually, free_ports, lasting_ports
from tests.integration.test_drain import Place
from tests.paper import test_pipeline as model
from tests.paper.test_pipeline_flush import one_process

TOTAL, STOP_AT, REPLICAS = 8, 5, (2, 1)


def train(me: Station, schedule: str) -> Any:
    """Trains; the last stage stops in the middle of a minibatch."""
    seen = 0

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        if seen == STOP_AT:
            me.tell()
            me.hear()
        seen += 1
        return model.loss_of(outputs, targets)

    run = psworker.Pipeline(
        nn.Sequential(*model.make_stages(2)).float(),
        torch.zeros(1, model.WIDTH),
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=model.LR, momentum=0.9),
        [(f"{stage}.2", count) for stage, count in enumerate(REPLICAS)],
        schedule=schedule,
        minibatches=None if schedule == "1f1b" else 4,
    )
    for x, y in model.data(TOTAL):
        run.step(x.float(), y.float())
    run.finish()
    return {name: value.double().numpy() for name, value in run.state_dict().items()}


@contextmanager
def stopped_in_a_minibatch(servers: str, schedule: str) -> Iterator[list[Worker]]:
    """Workers, of which the last has stopped; they go on at the end, and end as one process."""
    workers, where = [], {"PACELINE_SERVERS": servers, "PACELINE_JOB": new_job()}
    try:
        for rank in range(sum(REPLICAS)):
            env = where | {"RANK": str(rank), "WORLD_SIZE": str(sum(REPLICAS))}
            workers.append(Worker(train, rank, (schedule,), env))
        workers[-1].hear()
        yield workers
        workers[-1].tell()
        results = [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    if schedule == "1f1b":
        expected = [versions[-1] for versions in model.oracle("stash", REPLICAS, "sgd", TOTAL)]
    else:
        alone, _ = one_process(2, 4, TOTAL)
        expected = [{**stage.state_dict()} for stage in alone.children()]
    for found, stage in zip(results, (0, 0, 1), strict=True):
        for name, value in expected[stage].items():
            own = torch.from_numpy(found[f"{stage}.{name}"])
            torch.testing.assert_close(own, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "ScheduleGPipe"])
def test_training_continues_when_shard_0_is_killed(tmp_path: Path, schedule: str) -> None:
    command = Command(tmp_path)
    with (
        command.detached("--shards", 2, *lasting_ports(), "--lease-s", 60) as run,
        stopped_in_a_minibatch(",".join(run["addresses"]), schedule),
    ):
        pid = run["shards"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: command.run_file()["shards"][0]["pid"] != pid)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "ScheduleGPipe"])
def test_training_continues_when_shard_0_moves_and_its_old_process_ends(
    tmp_path: Path, schedule: str
) -> None:
    indices = {"a": 0, "b": 1, "c": 0}
    ports = dict(zip(indices, free_ports(3), strict=True))
    places = {name: Place(tmp_path, indices[name], ports[name], name) for name in indices}
    servers = f"{places['a'].address},{places['b'].address}"
    with ExitStack() as stack:
        there = {name: stack.enter_context(place.running()) for name, place in places.items()}
        stack.enter_context(stopped_in_a_minibatch(servers, schedule))
        move(places["a"].address, places["c"].address, 0, ANYONE, print)
        there["a"].terminate()
        there["a"].wait()
