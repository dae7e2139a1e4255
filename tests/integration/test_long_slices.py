"""Slices of 16 MiB through shared memory: a shard that is killed has lost no bit of them."""

import hashlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import psworker
from pscore.contents import LONG
from pscore.net.credentials import ANYONE
from pscore.partition import LONG_NUMEL_MAX
from psserver.exits import CommandError
from psserver.remote import checkpoint
from psserver.remote.checkpoint_files import TableState
from psworker.connection.exchange.exchange import Exchange
from tests.inside import table_of
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.command import Command, eventually, gone, lasting_ports, require_started
from tests.integration.test_journal import Shards

STEPS, HALF = 8, 4
KILLED_PUSHES = (3, 6)  # The other slice of its round has not left, and has left.


def train(me: Station, modes: tuple[str, str]) -> tuple[str, str]:
    """Trains, in another mode from half way on; worker 0 tells some of its pushes, and the half.

    Returns:
        Digests of the weights half way and at the end.
    """
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.zeros(2 * LONG_NUMEL_MAX))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=0.1, momentum=0.9), [("weights", weights)], mode=modes[0]
    )
    assert table_of(optimizer).exchange.spec.content == LONG
    push, numbers = Exchange.push, iter(range(1, 100))

    def telling(exchange: Exchange, *arguments: Any, **options: Any) -> None:
        push(exchange, *arguments, **options)
        if me.rank == 0 and next(numbers) in KILLED_PUSHES:
            me.tell("pushed")
            me.hear()

    def digest() -> str:
        with optimizer.global_weights():
            return hashlib.sha256(weights.detach().numpy()).hexdigest()

    half = ""
    with mock.patch.object(Exchange, "push", telling):
        for step in range(STEPS):
            if step == HALF:
                half = digest()
                psworker.barrier("half")
                if me.rank == 0:
                    me.tell("half")
                    me.hear()
                psworker.barrier("on")
                optimizer.set_mode(modes[1])
            generator = torch.Generator().manual_seed(2 * step + me.rank)
            weights.grad = torch.randn(weights.shape, generator=generator)
            optimizer.step()
    return half, digest()


def run(shards: Shards, job: str, modes: tuple[str, str], *, kills: bool) -> list[tuple[str, str]]:
    """Runs two workers; returns their digests, and with kills that of a checkpoint of the half."""
    (address,) = addresses = shards.addresses()
    variables = {"WORLD_SIZE": "2", "PACELINE_SERVERS": address, "PACELINE_JOB": job}
    workers = [Worker(train, rank, (modes,), variables | {"RANK": str(rank)}) for rank in range(2)]
    read: Callable[..., TableState] = vars(checkpoint)["_read"]

    def kill() -> None:
        (pid,) = shards.pids()
        os.kill(pid, signal.SIGKILL)
        eventually(partial(gone, pid))

    def kill_and_read(*arguments: Any) -> TableState:
        kill()
        return read(*arguments)

    capture = partial(checkpoint.capture, addresses, ANYONE, job, weights_only=False)
    found = []
    try:
        for _ in range(1 + len(KILLED_PUSHES)):
            is_half = workers[0].hear() == "half"
            if kills and is_half:
                killing = mock.patch.object(checkpoint, "_read", kill_and_read)
                with killing, pytest.raises(CommandError):
                    capture()
                arrays = capture().tables[0].arrays["weights"]
                found.append(hashlib.sha256(arrays["weights"]).hexdigest())
            elif kills:
                kill()
            workers[0].tell()
        return results_of(workers) + ([(found[0], "")] if kills else [])
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes", [("ssgd", "ssd(steps=2)"), ("diloco(steps=2)", "diloco(steps=2, fragments=2)")]
)
def test_a_shard_that_is_killed_in_a_push_or_a_checkpoint_changes_no_bit(
    tmp_path: Path, modes: tuple[str, str]
) -> None:
    """Journals hold each slice as of its last acknowledged push; workers send others again."""
    command = Command(tmp_path)
    with command.spawn("start", "--shards", 1, *lasting_ports(1)) as process:
        require_started(process)
        shards = Shards(command)
        calm, other = run(shards, "calm", modes, kills=False)
        assert other == calm
        one, another, saved = run(shards, "killed", modes, kills=True)
        assert one == another == calm
        assert saved[0] == calm[0]
