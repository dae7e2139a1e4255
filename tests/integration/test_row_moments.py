"""A shard killed in the middle of a change of its rows: growth, eviction, a copy, a restore.

The rows of a job are afterwards those of the same job undisturbed, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from psserver.exits import CommandError
from psserver.remote import ask, checkpoint
from psserver.remote import checkpoint_files as files
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.command import lasting_ports, require_started
from tests.integration.moments import Dying
from tests.row_driver import crowded

STEPS, NEW, STOPS = 20, 90, (8, 16)
SEED, LRU = 2, 16_384
OLD = torch.from_numpy(crowded(SEED, 40, every=1024).view(np.int64))  # In four buckets.
Rows = dict[str, np.ndarray]


def ids_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Returns ids of which many are new, some come again, and more than a bucket keeps."""
    drawn = torch.Generator().manual_seed(1000 * rank + step)
    return {
        "grows": torch.randint(0, NEW * (step + 1), (NEW,), generator=drawn) * 7919,
        "waits": torch.randint(0, 120, (40,), generator=drawn),
        "keeps": OLD[torch.randint(0, len(OLD), (12,), generator=drawn)],
    }


def train(me: Station) -> Rows:
    """Trains, with some stops; returns all rows that may have changed."""
    torch.set_num_threads(1)
    tables = {
        "grows": psworker.Embedding(None, 3, name="grows"),
        "waits": psworker.Embedding(None, 3, name="waits", min_count=3, ttl=4),
        "keeps": psworker.Embedding(None, 3, name="keeps", seed=SEED, lru=LRU),
    }
    torch.manual_seed(5)
    top = torch.nn.Linear(3, 1)
    model = torch.nn.ModuleDict({**tables, "top": top})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.1),
        model.named_parameters(),
        rows=torch.optim.Adagrad([table.weight for table in tables.values()], lr=0.1),
        mode="ssgd",
    )
    for step in range(optimizer.steps, STEPS):
        if step in STOPS:
            psworker.barrier(f"step {step}")
            me.tell(step)
            me.hear()
        optimizer.zero_grad()
        found = [tables[name](ids).sum(0) for name, ids in ids_of(me.rank, step).items()]
        torch.autograd.backward(top(torch.stack(found).tanh()).square().sum())
        optimizer.step()
    psworker.barrier("trained")
    ranges = {"grows": torch.arange(NEW * STEPS) * 7919, "waits": torch.arange(120), "keeps": OLD}
    with torch.no_grad():
        rows = {name: tables[name](ids).numpy().copy() for name, ids in ranges.items()}
    return rows | {"top": top.weight.detach().numpy().copy()}


class Job:
    """Two workers."""

    def __init__(self, addresses: list[str], name: str) -> None:
        launched = {"WORLD_SIZE": "2", "PACELINE_SERVERS": ",".join(addresses)}
        self.workers = [
            Worker(train, rank, (), launched | {"PACELINE_JOB": name, "RANK": str(rank)})
            for rank in range(2)
        ]

    def stop_at(self, step: int) -> None:
        for worker in self.workers:
            assert worker.hear() == step

    def go_on(self) -> None:
        for worker in self.workers:
            worker.tell()

    def require(self, wanted: Rows) -> None:
        """Waits for the end, with the same rows for both workers."""
        for found in results_of(self.workers):
            require_same(found, wanted)


@contextmanager
def job(addresses: list[str], name: str) -> Iterator[Job]:
    found = Job(addresses, name)
    try:
        yield found
    finally:
        for worker in found.workers:
            worker.close()


def run(addresses: list[str], name: str) -> list[Rows]:
    """Trains to the end."""
    with job(addresses, name) as found:
        for step in STOPS:
            found.stop_at(step)
            found.go_on()
        return results_of(found.workers)


@contextmanager
def shards(folder: Path) -> Iterator[tuple[Dying, list[str]]]:
    command = Dying(folder)
    # No worker is lost on a busy machine: its steps would close without it.
    options = ("--shards", 2, *lasting_ports(), "--lease-s", 3000)
    with command.spawn("start", *options) as process:
        require_started(process)
        yield command, command.run_file()["addresses"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Returns the rows of the job without a kill."""
    with shards(tmp_path_factory.mktemp("calm")) as (_, addresses):
        first, second = run(addresses, "calm")
    require_same(first, second)
    return first


def require_same(found: Rows, wanted: Rows) -> None:
    for name, rows in wanted.items():
        np.testing.assert_array_equal(found[name], rows, name)


def require_equal(found: files.Checkpoint, wanted: files.Checkpoint) -> None:
    for one, other in zip(found.tables, wanted.tables, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for array, tensors in one.arrays.items():
            for name, values in tensors.items():
                np.testing.assert_array_equal(values, other.arrays[array][name], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        [("memory is made", 2)],
        [("index grows", 1)],
        [("index has grown", 1)],
        [("rows go", 1), ("rows come back", 1), ("rows go", 2)],
        [("rows have gone", 3)],
        [("rows come", 20), ("rows come back", 1), ("rows come back", 1)],
        [("rows were kept", 9), ("rows were kept", 3)],
    ],
    ids=str,
)
def test_a_shard_killed_in_a_step_comes_back_with_whole_steps(
    tmp_path: Path, calm: Rows, moments: list[tuple[str, int]]
) -> None:
    """Also one that is killed again while it takes the step back."""
    with shards(tmp_path) as (command, addresses):
        command.arm(*moments)
        for found in run(addresses, "killed"):
            require_same(found, calm)
        assert command.is_over


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["copy begins", "copy was made"])
def test_a_shard_killed_in_a_copy_of_changes_gives_all_rows_with_the_next(
    tmp_path: Path, calm: Rows, moment: str
) -> None:
    def copy(base: files.Checkpoint | None) -> files.Checkpoint:
        return checkpoint.capture(addresses, ANYONE, "copied", weights_only=False, base=base)

    with shards(tmp_path) as (command, addresses), job(addresses, "copied") as found:
        found.stop_at(STOPS[0])
        first = copy(None)
        base = files.in_files(files.write(tmp_path / "base", first, keep=1), first)
        found.go_on()
        found.stop_at(STOPS[1])
        command.arm((moment, 2))
        changes = copy(base)  # Begun again with the shard's next process, which knows no base.
        assert command.is_over
        whole = copy(None)
        for each in (changes, copy(base)):
            require_equal(each, whole)
        found.go_on()
        found.require(calm)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("rows are restored", 2), ("rows were restored", 1)])
def test_a_shard_killed_in_a_restore_is_restored_by_the_next(
    tmp_path: Path, calm: Rows, moment: tuple[str, int]
) -> None:
    with shards(tmp_path) as (command, addresses):
        with job(addresses, "first") as found:
            found.stop_at(STOPS[0])
            found.go_on()
            found.stop_at(STOPS[1])
            taken = checkpoint.capture(addresses, ANYONE, "first", weights_only=False)
        command.arm(moment)
        with pytest.raises(CommandError):
            checkpoint.restore(addresses, ANYONE, taken, "second")
        assert command.is_over
        ask.statuses(addresses, ANYONE, is_patient=True)  # The shard answers again.
        checkpoint.restore(addresses, ANYONE, taken, "second")
        with job(addresses, "second") as found:
            found.stop_at(STOPS[1])
            found.go_on()
            found.require(calm)
