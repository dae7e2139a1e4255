"""Workers whose hosts do not reach each other, though both reach the shards: a real cut link.

Each worker is in a network namespace of its own; packets between two of them are dropped.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from benchmarks import netlab
from benchmarks.forked import enter
from psserver.process.embedded import start_embedded
from tests.inside import gossip_of
from tests.integration.cluster import Station, Worker, WorkerError, new_job
from tests.integration.models import backward, batch, make_model

NUM, SHARD = 3, 3  # Hosts of workers, and the host of the shard.
LEASE_S, TIMEOUT_S = 1.5, 1.0


def serve(me: Station, namespace: str, host: str) -> None:
    """Runs a shard until told."""
    enter(namespace)
    with start_embedded(1, host=host, lease_s=LEASE_S) as servers:
        me.tell(servers.addresses)
        me.hear()


def train(me: Station, namespace: str, mode: str) -> Any:
    """Trains until told; tells after 10 steps, behind an exchange given up, and as a new one."""
    enter(namespace)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        named_parameters=model.named_parameters(),
        mode=mode,
    )
    gossip, again_at, loss = gossip_of(optimizer), 0.0, 0.0
    for step in itertools.count():
        optimizer.zero_grad()
        loss = backward(model, *batch(me.rank, step))
        optimizer.step()
        if step == 10:
            me.tell(step)
        if gossip_of(optimizer) is not gossip:
            gossip = gossip_of(optimizer)
            me.tell("back")
        exchanges = gossip.sight.num_exchanges
        if mode.startswith("adpsgd") and gossip.counts["refused"] and not again_at:
            again_at = exchanges + 5
        if 0 < again_at <= exchanges:
            me.tell(exchanges)
            again_at = math.inf
        time.sleep(0.005)
        if me.is_told():
            break
    psworker.shutdown()
    return loss


@pytest.fixture
def lab() -> Iterator[netlab.Lab]:
    if (reason := netlab.available()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with netlab.Lab(NUM + 1, "1gbit") as made:
        yield made


def cut(lab: netlab.Lab, one: int, other: int) -> None:
    """Drops all packets between two hosts."""
    for here, there in ((one, other), (other, one)):
        command = ["ip", "-n", lab.name(here), "route", "add", "blackhole", lab.address(there)]
        subprocess.run(command, check=True)


def begin(
    stack: ExitStack, lab: netlab.Lab, mode: str, timeout_s: float = TIMEOUT_S
) -> list[Worker]:
    """Starts a shard and the workers, each on its host; returns when all train."""
    shard = Worker(serve, 0, (lab.name(SHARD), lab.address(SHARD)), {"WORLD_SIZE": "1"})
    stack.callback(shard.close)
    env = {"WORLD_SIZE": str(NUM), "PACELINE_JOB": new_job(), "PACELINE_SERVERS": shard.hear()[0]}
    env |= {"PACELINE_TIMEOUT_S": str(timeout_s)}
    workers = []
    for rank in range(NUM):
        workers.append(Worker(train, rank, (lab.name(rank), mode), env | {"RANK": str(rank)}))
        stack.callback(workers[-1].close)
    for worker in workers:
        worker.hear()
    return workers


def test_a_worker_whose_messages_do_not_arrive_ends_and_names_the_other(lab: netlab.Lab) -> None:
    with ExitStack() as stack:
        workers = begin(stack, lab, "sgp(graph='0>1 1>2 2>0')")
        cut(lab, 0, 2)
        with pytest.raises(WorkerError, match=r"worker 0 at 10\.77\.0\.1:\d+ has not answered"):
            workers[2].result()
        for worker in workers[:2]:
            worker.tell()
        for worker in workers[:2]:
            assert np.isfinite(worker.result())


def test_workers_of_adpsgd_exchange_with_others_where_a_link_is_cut(lab: netlab.Lab) -> None:
    with ExitStack() as stack:
        workers = begin(stack, lab, "adpsgd(graph=complete)")
        cut(lab, 0, 2)
        for rank in (0, 2):
            workers[rank].hear()
        for worker in workers:
            worker.tell()
        for worker in workers:
            assert np.isfinite(worker.result())


def test_workers_that_were_apart_from_all_others_come_back(lab: netlab.Lab) -> None:
    with ExitStack() as stack:
        workers = begin(stack, lab, "dpsgd(graph=complete, average_every=5)", timeout_s=60.0)
        lab.cut(2)
        time.sleep(2 * LEASE_S)
        lab.cut(2, restore=True)
        assert workers[2].hear() == "back"
        for worker in workers:
            worker.tell()
        for worker in workers:
            assert np.isfinite(worker.result())
        assert "worker 2 rejoins" in workers[2].written()
