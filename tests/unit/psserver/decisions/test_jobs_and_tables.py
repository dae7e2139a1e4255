"""Jobs, tables and workers of one shard: sharing, refusals and limits."""

import dataclasses

import numpy as np
import pytest

from pscore.compressors.fp16 import FP16
from pscore.compressors.none import NoCompression
from pscore.contents import FLAT, LONG
from pscore.errors import (
    ConfigError,
    JobMismatchError,
    LimitError,
    RankTakenError,
    RemoteProtocolError,
    ReplacedError,
    UnknownJobError,
)
from pscore.rules import ASGD, SSGD
from pscore.table_spec import TableSpec
from pscore.types import Pull, Push, Role, TensorSpec, Verdict
from psserver.decisions import shard as shard_module
from psserver.decisions.membership import Member, Presence
from psserver.decisions.orders import Acknowledge, Answer, Update
from psserver.decisions.shard import JOBS_MAX, NAME_LENGTH_MAX, Actions, Address, Job, Shard
from psserver.decisions.table import GROUPS_MAX

LEASE_S = 10.0
HYPER = np.zeros((1, 6))


def member(rank: int, incarnation: int = 1, *, restart: int = 0, heard_s: float = 0.0) -> Member:
    return Member(
        rank=rank, incarnation=incarnation, restart=restart, host="a", pid=rank, heard_s=heard_s
    )


def tensor(name: str, *shape: int, group: int = 0) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32", group=group)


SPEC = TableSpec(
    name="model",
    tensors=(tensor("fc1.weight", 8, 4), tensor("fc1.bias", 8)),
    num_shards=1,
    rule=SSGD(),
    compressor=NoCompression(),
    optimizer="sgd",
    num_groups=1,
)


def job_of(shard: Shard, num_workers: int, name: str = "run") -> Job:
    for rank in range(num_workers):
        shard.decide_join(name, num_workers, member(rank))
    return shard.jobs[name]


def ready(num_workers: int, spec: TableSpec = SPEC) -> tuple[Shard, Job, Address]:
    """A shard with one job whose weights are there."""
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, num_workers)
    table, created = shard.define(job, spec)
    assert created
    address = Address(job.name, table.index, 0)
    shard.decide_push(
        job, address, Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS), "init"
    )
    return shard, job, address


def push(shard: Shard, job: Job, address: Address, worker: int, step: int) -> Actions:
    message = Push(worker=worker, step=step, base_version=0, hyper=HYPER)
    return shard.decide_push(job, address, message, f"{worker}@{step}")


# ----- joining


def test_the_first_worker_makes_the_job_and_others_join_it() -> None:
    shard = Shard(0, 1, LEASE_S)
    first, _ = shard.decide_join("run", 2, member(0))
    assert shard.decide_join("run", 2, member(1))[0] is first
    assert shard.decide_join("other", 2, member(0))[0] is not first


@pytest.mark.parametrize("name", ["", "x" * (NAME_LENGTH_MAX + 1)])
def test_a_job_has_a_name_of_limited_length(name: str) -> None:
    shard = Shard(0, 1, LEASE_S)
    with pytest.raises(ConfigError, match=rf"must have 1\.\.{NAME_LENGTH_MAX} characters"):
        shard.decide_join(name, 1, member(0))
    assert not shard.jobs
    shard.decide_join("x" * NAME_LENGTH_MAX, 1, member(0))


def test_another_number_of_workers_is_refused() -> None:
    shard = Shard(0, 1, LEASE_S)
    shard.decide_join("run", 2, member(0))
    with pytest.raises(
        JobMismatchError, match=r"'run' has 2 workers, this worker was started for 3"
    ):
        shard.decide_join("run", 3, member(1))


def test_a_join_that_is_refused_leaves_no_job_behind() -> None:
    """Else a client that asks for impossible ranks fills the shard with jobs that never end."""
    shard = Shard(0, 1, LEASE_S)
    for index in range(JOBS_MAX + 1):
        with pytest.raises(RankTakenError, match="rank 7 wanted in a job of 2 workers"):
            shard.decide_join(f"run{index}", 2, member(7))
    assert not shard.jobs
    shard.decide_join("run", 2, member(0))


def test_a_refused_join_does_not_end_the_job_that_is_over() -> None:
    shard, job, _ = ready(1)
    shard.decide_leave("run", 0, 1, "finished")
    with pytest.raises(RankTakenError):
        shard.decide_join("run", 1, member(5, 2))
    assert shard.jobs["run"] is job


def test_a_job_that_is_over_starts_over() -> None:
    shard, job, _ = ready(2)
    shard.decide_leave("run", 0, 1, "finished")
    shard.decide_leave("run", 1, 1, "finished")
    again, _ = shard.decide_join("run", 3, member(0, 2))
    assert again is not job
    assert again.tables == {}


def test_a_repeated_join_after_the_job_is_over_does_not_begin_it_again() -> None:
    shard, job, _ = ready(1)
    shard.decide_leave("run", 0, 1, "finished")
    assert shard.decide_join("run", 1, member(0))[0] is job
    assert shard.decide_join("run", 1, member(-1))[0] is job
    assert job.membership.members[0].presence is Presence.LEFT


def test_a_worker_comes_back_as_another_process_while_others_continue() -> None:
    shard, job, _ = ready(2)
    shard.decide_leave("run", 0, 1, "finished")
    assert shard.decide_join("run", 2, member(0, 2))[0] is job
    assert job.membership.members[0].presence is Presence.LIVE


def test_a_worker_that_begins_when_others_have_ended_belongs_to_their_job() -> None:
    shard = Shard(0, 1, LEASE_S)
    job, _ = shard.decide_join("run", 2, member(0))
    shard.decide_leave("run", 0, 1, "finished")
    assert shard.decide_join("run", 2, member(1))[0] is job


def test_a_job_without_live_workers_continues_with_one_that_returns() -> None:
    shard, job, _ = ready(1)
    shard.tick(LEASE_S + 1.0)
    back = dataclasses.replace(member(0, 2), returns=True)
    assert shard.decide_join("run", 1, back)[0] is job


def test_a_connection_that_breaks_shortens_a_lease_that_a_heartbeat_restores() -> None:
    shard, job, _ = ready(2)
    for rank in (0, 1):
        shard.heard("run", rank, 1, 20.0)
        job.membership.suspect(rank, 1, 20.0)
    shard.heard("run", 0, 1, 21.0)
    lost, _ = shard.tick(20.0 + 0.41 * LEASE_S)
    assert [member.rank for _, member in lost] == [1]


def test_a_restarted_worker_replaces_the_live_one() -> None:
    shard, job, _ = ready(2)
    assert shard.decide_join("run", 2, member(0, 2, restart=1))[0] is job
    with pytest.raises(ReplacedError):
        shard.heard("run", 0, 1, 1.0)
    assert shard.heard("run", 0, 2, 1.0) is job


def test_jobs_have_a_limit_that_is_reached_and_not_passed() -> None:
    shard = Shard(0, 1, LEASE_S)
    for index in range(JOBS_MAX):
        shard.decide_join(f"run{index}", 1, member(0))
    with pytest.raises(LimitError, match=f"{JOBS_MAX} jobs have not ended on shard 0"):
        shard.decide_join("more", 1, member(0))
    shard.decide_join("run3", 1, member(0))  # A repeated join needs no room.
    shard.decide_leave("run5", 0, 1, "finished")
    shard.decide_join("more", 1, member(0))
    assert "run5" not in shard.jobs
    assert len(shard.jobs) == JOBS_MAX


def test_nobody_is_heard_of_a_job_that_is_not_there() -> None:
    with pytest.raises(UnknownJobError, match="no job 'run' on shard 3"):
        Shard(3, 4, LEASE_S).heard("run", 0, 1, 0.0)


# ----- tables


def test_a_repeated_declaration_finds_the_table() -> None:
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, 2)
    first, created = shard.define(job, SPEC)
    again, created_again = shard.define(job, dataclasses.replace(SPEC))
    assert (created, created_again) == (True, False)
    assert again is first
    assert job.table(0) is first


def test_a_worker_may_take_the_slices_that_the_job_has() -> None:
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, 2)
    first, _ = shard.define(job, SPEC, adopts=True)
    other = dataclasses.replace(SPEC, content=LONG)
    with pytest.raises(JobMismatchError, match=r"content is .* here and .* in the job"):
        shard.define(job, other)
    assert shard.define(job, other, adopts=True) == (first, False)
    assert first.spec.content == FLAT
    with pytest.raises(JobMismatchError, match="compression is fp16 here"):
        shard.define(job, dataclasses.replace(other, compressor=FP16()), adopts=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rule": ASGD()}, "job 'run': mode is asgd here and ssgd(backup=0) in the job"),
        ({"compressor": FP16()}, "job 'run': compression is fp16 here and none in the job"),
        ({"optimizer": "adam"}, "job 'run': optimizer is adam here and sgd in the job"),
        ({"num_groups": 2}, "job 'run': number of parameter groups is 2 here and 1 in the job"),
        (
            {"tensors": (tensor("fc1.weight", 8, 4), tensor("fc1.bias", 9))},
            "job 'run': tensor 1 is 'fc1.bias' [9] float32 in parameter group 0 here and "
            "'fc1.bias' [8] float32 in parameter group 0 in the job",
        ),
        (
            {"tensors": (tensor("fc1.weight", 8, 4),)},
            "job 'run': 1 tensors here and 2 in the job; the first one only in the job is "
            "'fc1.bias' [8] float32 in parameter group 0",
        ),
    ],
)
def test_another_declaration_is_told_in_what_it_differs(
    change: dict[str, object], sentence: str
) -> None:
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, 2)
    shard.define(job, SPEC)
    with pytest.raises(JobMismatchError) as caught:
        shard.define(job, dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"num_shards": 2}, "table for 2 shards, there are 1"),
        ({"optimizer": "rprop"}, "no optimizer 'rprop'; there are adagrad, adam, "),
        ({"num_groups": 0}, rf"0 parameter groups, must be 1\.\.{GROUPS_MAX}"),
        ({"num_groups": GROUPS_MAX + 1}, f"{GROUPS_MAX + 1} parameter groups"),
        ({"tensors": (tensor("w", 4, group=1),)}, "a group beyond the 1 declared"),
        ({"tensors": (tensor("w", 4, group=-1),)}, "a group beyond the 1 declared"),
        ({"tensors": ()}, "has 0 trainable tensors"),
        ({"rule": SSGD(backup=2)}, "ssgd.backup is 2, must be less than the 2 workers"),
    ],
)
def test_a_declaration_that_cannot_be_served_is_refused(
    change: dict[str, object], pattern: str
) -> None:
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, 2)
    with pytest.raises(ConfigError, match=pattern):
        shard.define(job, dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]
    assert job.tables == {}


def test_tables_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "TABLES_MAX", 2)
    shard = Shard(0, 1, LEASE_S)
    job = job_of(shard, 1)
    for name in ("a", "b"):
        shard.define(job, dataclasses.replace(SPEC, name=name))
    with pytest.raises(LimitError, match="job 'run' already has 2 tables"):
        shard.define(job, dataclasses.replace(SPEC, name="c"))
    assert shard.define(job, dataclasses.replace(SPEC, name="b"))[1] is False


def test_a_table_or_slice_that_is_not_there_is_named() -> None:
    shard, job, address = ready(1)
    with pytest.raises(UnknownJobError, match="job 'run' has no table 4"):
        push(shard, job, address._replace(table=4), 0, 0)
    with pytest.raises(
        RemoteProtocolError, match=r"slice 9 of 'model' is not on this shard \(1 slices"
    ):
        push(shard, job, address._replace(slice=9), 0, 0)


def test_each_shard_has_its_own_slices() -> None:
    spec = dataclasses.replace(SPEC, num_shards=2, tensors=(tensor("w", 1 << 13),))
    owned = []
    for index in range(2):
        shard = Shard(index, 2, LEASE_S)
        table, _ = shard.define(job_of(shard, 1), spec)
        owned.append(set(table.clocks))
        assert table.nbytes == 4 * (1 << 12)
    assert owned == [{0}, {1}]


# ----- pushes, pulls and departures


def test_jobs_share_nothing() -> None:
    shard, job, address = ready(1)
    other = job_of(shard, 1, "other")
    table, _ = shard.define(other, SPEC)
    push(shard, job, address, 0, 0)
    assert table.clock(0).version == -1
    assert job.table(0).clock(0).version == 1


def test_a_push_is_counted_for_status() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 0, 0)
    push(shard, job, address, 1, 0)
    assert (job.counters.num_pushes, job.counters.num_updates) == (3, 1)
    assert job.steps == {0: 1, 1: 1}


def test_a_push_that_waited_for_its_turn_is_a_step_when_it_is_added() -> None:
    shard, job, address = ready(2)
    waits = Push(worker=1, step=0, base_version=0, hyper=HYPER, may_wait=True)
    assert shard.decide_push(job, address, waits, "1@0") == []
    assert job.steps == {}
    push(shard, job, address, 0, 0)
    assert (job.steps, job.counters.num_updates) == ({0: 1, 1: 1}, 1)


def test_a_push_that_waits_for_room_is_not_a_step_that_was_made() -> None:
    """Its number is whatever the peer wrote; status has 64 bits for it, and no more."""
    shard, job, address = ready(2)
    assert push(shard, job, address, 0, (1 << 64) - 1) == []
    assert job.steps == {}


def test_updates_that_follow_a_departure_are_counted_as_well() -> None:
    shard, job, address = ready(3)
    push(shard, job, address, 0, 0)
    shard.decide_leave("run", 1, 1, "finished")
    assert job.counters.num_updates == 0
    shard.tick(LEASE_S + 1)
    assert job.table(0).clock(0).version == 1
    assert job.counters.num_updates == 1


def test_leaving_releases_waiting_workers() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 0, 0)
    pull = Pull(worker=0, clock=1, min_version=1)
    assert shard.decide_pull(job, address, pull, "pull") == []
    actions = shard.decide_leave("run", 1, 1, "finished")
    assert [type(action) for _, action in actions] == [Update, Answer]
    assert {at for at, _ in actions} == {address}
    assert shard.decide_leave("run", 1, 1, "finished") == []
    assert shard.decide_leave("nothing", 0, 1, "finished") == []


def test_an_expired_lease_releases_waiting_workers() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 0, 0)
    shard.heard("run", 0, 1, LEASE_S)
    assert shard.tick(LEASE_S) == ([], [])
    lost, actions = shard.tick(LEASE_S + 0.5)
    assert [(job.name, who.rank) for job, who in lost] == [("run", 1)]
    assert [type(action) for _, action in actions] == [Update]
    with pytest.raises(ReplacedError, match="declared lost"):
        shard.heard("run", 1, 1, LEASE_S + 1)


def test_a_departure_reaches_every_table() -> None:
    shard, job, address = ready(2)
    second, _ = shard.define(job, dataclasses.replace(SPEC, name="other"))
    other = address._replace(table=second.index)
    shard.decide_push(job, other, Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS), "init")
    push(shard, job, address, 0, 0)
    push(shard, job, other, 0, 0)
    assert [at for at, _ in shard.decide_leave("run", 1, 1, "finished")] == [address, other]


def test_a_duplicate_is_answered_with_what_became_of_the_first() -> None:
    shard, job, address = ready(1)
    push(shard, job, address, 0, 0)
    ((_, action),) = push(shard, job, address, 0, 0)
    assert action == Acknowledge(token="0@0", verdict=Verdict.DUPLICATE, version=1)


# ----- in words


def test_the_reason_of_a_waiting_pull_is_a_sentence() -> None:
    shard = Shard(0, 1, LEASE_S)
    shard.decide_join("run", 7, member(0))
    job = shard.jobs["run"]
    table, _ = shard.define(job, SPEC)
    address = Address("run", table.index, 0)
    assert shard.waiting_for(job, address) == (
        "the initial weights of slice 0 of 'model' on shard 0, from worker 0 (process 0 on a)"
    )
    shard.decide_push(
        job, address, Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS), "init"
    )
    push(shard, job, address, 0, 0)
    assert shard.waiting_for(job, address) == (
        "step 0 of worker 1 (has not joined yet), worker 2 (has not joined yet), "
        "worker 3 (has not joined yet), worker 4 (has not joined yet) and 2 more, "
        "at slice 0 of 'model' on shard 0"
    )


# ----- barriers


def test_a_barrier_does_not_wait_for_workers_that_have_left() -> None:
    shard, job, _ = ready(3)
    both = "worker 1 (process 1 on a), worker 2 (process 2 on a) at barrier 'epoch'"
    assert shard.barrier(job, "epoch", 0, 0) == both
    shard.decide_leave("run", 1, 1, "finished")
    assert shard.barrier(job, "epoch", 0, 2) == ""
    assert shard.barrier(job, "epoch", 0, 0) == ""
