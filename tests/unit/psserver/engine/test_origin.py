"""Where the steps of a job's training are counted from, as its shards keep it and tell workers."""

from pathlib import Path
from typing import Any

import pytest

from pscore.errors import ConfigError
from pscore.json_text import COUNT_MAX
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import Origin
from psserver.durability.journal_dir import JournalDir
from psserver.engine.resume import recover
from tests.unit.psserver.front import (
    JOB,
    Context,
    Front,
    Refused,
    grad,
    play,
    played,
    pull_header,
    push_header,
)


async def origin(front: Front, rank: int = 0, **fields: Any) -> tuple[int, int]:
    """Returns what a worker is told that declares the table again."""
    reply = await front.define(rank, **fields)
    return reply.clock, reply.step


async def change(front: Front, rank: int, step: int, rule: str = "") -> None:
    request = pb.ChangeRequest(job=JOB, worker=rank, incarnation=100 + rank, number=1, step=step)
    if rule:
        request.rule.name = rule
    await front.control.Change(request, Context())


async def load(front: Front, step: int) -> None:
    """Loads weights and momentum of a step."""
    header = push_header(0, step, role=data_pb2.ROLE_STATE, hyper=[])
    await front.push(header, grad(1.0), grad(0.0))


@played
async def test_a_job_begins_at_step_0(front: Front) -> None:
    await front.ready()
    assert await origin(front) == (0, 0)


@played
async def test_a_loaded_state_brings_its_step(front: Front) -> None:
    await front.ready(num_workers=1)
    for step in range(3):
        await front.push(push_header(0, step), grad(1.0))
    await load(front, 40)
    assert await origin(front) == (3, 40)


@played
async def test_the_worker_that_is_furthest_says_where_a_new_mode_begins(front: Front) -> None:
    """Two asynchronous workers of 2 steps and 1 have made 3 versions, where all continue."""
    asgd = pb.Plugin(name="asgd")
    await front.ready(rule=asgd)
    for rank in (0, 1):
        await front.pull(pull_header(rank, 0, 0))
    for rank, step in ((0, 0), (0, 1), (1, 0)):
        await front.push(push_header(rank, step), grad(1.0))
    for rank, step in ((0, 2), (1, 1)):
        await change(front, rank, step)
    for rank, step in ((0, 2), (1, 1)):
        await change(front, rank, step, "ssgd")
    assert await origin(front, rule=pb.Plugin(name="ssgd")) == (3, 2)


@pytest.mark.parametrize("mode", ["asgd", "ssgd"])
def test_it_outlives_a_killed_shard(tmp_path: Path, mode: str) -> None:
    async def scene(_: Front) -> None:
        rule = pb.Plugin(name=mode)
        journals = JournalDir(tmp_path / "journals")
        front = Front(journals)
        await front.ready(num_workers=1, rule=rule)
        await load(front, 40)
        journals.close()
        after = Front(JournalDir(tmp_path / "journals"))
        recover(after.engine)
        assert await origin(after, rule=rule) == (0, 40)

    play(scene)


@played
async def test_a_step_that_nobody_comes_to_is_refused(front: Front) -> None:
    """It could not be read back from a file."""
    await front.ready(num_workers=1)
    with pytest.raises(Refused, match=f"a state of step {COUNT_MAX + 1}, beyond"):
        await load(front, COUNT_MAX + 1)
    with pytest.raises(Refused, match=f"worker 0 is at step {COUNT_MAX + 1}, beyond"):
        await change(front, 0, COUNT_MAX + 1)
    assert await origin(front) == (0, 0)


@played
async def test_the_step_in_a_file_is_checked(front: Front) -> None:
    await front.ready()
    entry = front.job.table(0).spec.to_json()
    assert TableSpec.from_json(entry).origin == Origin()
    entry["origin"] = [0, -1]
    with pytest.raises(ConfigError, match=r"the first step is -1, must be an integer in 0\.\."):
        TableSpec.from_json(entry)
    del entry["origin"]  # Of a former version.
    assert TableSpec.from_json(entry).origin == Origin()


@played
async def test_the_progress_of_a_job_is_that_of_its_slowest_worker(front: Front) -> None:
    await front.ready(rule=pb.Plugin(name="asgd"))
    for rank in (0, 1):
        await front.pull(pull_header(rank, 0, 0))
    for rank, step in ((0, 0), (0, 1), (1, 0)):
        await front.push(push_header(rank, step), grad(1.0))
    clock = front.job.table(0).clock(0)
    assert clock.progress() == 1
    for rank in (0, 1):
        await front.control.Leave(
            pb.LeaveRequest(job=JOB, worker=rank, incarnation=100 + rank), Context()
        )
    assert clock.progress() == 2  # Nobody is left: that of the last one.
