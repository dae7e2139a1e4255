"""Workers whose hosts do not reach each other, though both reach the shards: a real cut link.

Each worker is in a network namespace of its own; packets between two of them are dropped.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
LEASE_S = 4.0


def serve(me: Station, namespace: str, host: str, lease_s: float) -> None:
    """Runs a shard until told."""
    enter(namespace)
    with start_embedded(1, host=host, lease_s=lease_s) as servers:
        me.tell(servers.addresses)
        me.hear()


def train(me: Station, namespace: str, mode: str) -> Any:
    """Trains until told without a word, and then ends.

    It tells when it has made 10 steps, and as many again behind every word it hears; when 5
    exchanges follow one that was given up; and when it has joined anew.
    """
    enter(namespace)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        named_parameters=model.named_parameters(),
        mode=mode,
    )
    gossip, again_at, tell_at, loss = gossip_of(optimizer), 0.0, 10, 0.0
    for step in itertools.count():
        optimizer.zero_grad()
        loss = backward(model, *batch(me.rank, step))
        optimizer.step()
        if step == tell_at:
            me.tell(step)
        if gossip_of(optimizer) is not gossip:
            gossip = gossip_of(optimizer)
            me.tell("back")
        exchanges = gossip.stats.num_exchanges
        if mode.startswith("adpsgd") and gossip.counts["refused"] and not again_at:
            again_at = exchanges + 5
        if 0 < again_at <= exchanges:
            me.tell(exchanges)
            again_at = math.inf
        time.sleep(0.005)
        if me.is_told():
            if me.hear() is None:
                break
            tell_at = step + 10
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


@contextmanager
def begun(
    lab: netlab.Lab, *modes: str, lease_s: float = LEASE_S, timeout_s: float
) -> Iterator[list[list[Worker]]]:
    """Starts a shard and the workers of a job for each mode, each on its host; all train."""
    with ExitStack() as stack:
        shard = Worker(
            serve, 0, (lab.name(SHARD), lab.address(SHARD), lease_s), {"WORLD_SIZE": "1"}
        )
        stack.callback(shard.close)
        env = {"WORLD_SIZE": str(NUM), "PACELINE_SERVERS": shard.hear()[0]}
        env |= {"PACELINE_TIMEOUT_S": str(timeout_s)}
        jobs: list[list[Worker]] = []
        for mode in modes:
            env["PACELINE_JOB"] = new_job()
            jobs.append([])
            for rank in range(NUM):
                worker = Worker(train, rank, (lab.name(rank), mode), env | {"RANK": str(rank)})
                stack.callback(worker.close)
                jobs[-1].append(worker)
        for worker in itertools.chain(*jobs):
            worker.hear()
        yield jobs


def end(workers: Sequence[Worker]) -> None:
    """Ends workers, and asserts that they have trained."""
    for worker in workers:
        worker.tell()
    for worker in workers:
        assert np.isfinite(worker.result())


@pytest.mark.slow
def test_where_a_link_is_cut_a_worker_ends_or_exchanges_with_others(lab: netlab.Lab) -> None:
    """A worker of `sgp`, whose messages do not arrive, names the other; those of `adpsgd` go on.

    All other workers have 10 s for an answer, and the shard does not lose one that is slow.
    """
    modes = "sgp(graph='0>1 1>2 2>0')", "adpsgd(graph=complete)"
    with begun(lab, *modes, lease_s=5.0, timeout_s=5.0) as (sgp, adpsgd):
        cut(lab, 0, 2)
        with pytest.raises(WorkerError, match=r"worker 0 at 10\.77\.0\.1:\d+ has not answered"):
            sgp[2].result()
        end(sgp[:2])
        for rank in (0, 2):
            adpsgd[rank].hear()
        end(adpsgd)


@pytest.mark.slow
def test_workers_that_were_apart_from_all_others_come_back(lab: netlab.Lab) -> None:
    with begun(lab, "dpsgd(graph=complete, average_every=5)", timeout_s=60.0) as (workers,):
        lab.cut(2)
        workers[0].tell("go on")  # It does so without worker 2, once the shard has lost it.
        workers[0].hear()
        lab.cut(2, restore=True)
        assert workers[2].hear() == "back"
        end(workers)
        assert "worker 2 rejoins" in workers[2].written()
