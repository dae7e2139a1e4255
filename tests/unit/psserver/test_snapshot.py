"""Snapshots of a shard: what comes back, and what a broken file or a full folder does."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from pscore.compressors.none import NoCompression
from pscore.rules import ASGD, DCASGD, SSGD
from pscore.rules.base import Rule
from pscore.types import Push, Role, TensorSpec
from psserver import snapshot
from psserver.actions import Answer
from psserver.driver import Driver
from psserver.membership import Member, Presence
from psserver.shard import Address, Job, Shard
from psserver.store import SliceStore
from psserver.table import TableSpec

HYPER = np.array([[0.5, 0.9, 0.0, 0.0, 0.0, 0.0]])


class Token:
    """Stands for a request; the desk's calls about it come to nothing."""


def make(rule: Rule) -> tuple[Driver, Job]:
    driver = Driver(Shard(0, 1, 10.0), num_threads=1, now=lambda: 5.0)
    member = Member(rank=0, incarnation=7, restart=0, host="a", pid=1, heard_s=5.0)
    job = driver.join("run/1", 2, member, 1)
    spec = TableSpec(
        name="model",
        tensors=(TensorSpec(name="w", shape=(3, 2), dtype="float32"),),
        num_shards=1,
        rule=rule,
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
    )
    driver.define(job, spec)
    return driver, job


def store_of(driver: Driver) -> SliceStore:
    (lane,) = driver.intake.lanes.values()
    return lane.store


def fill(driver: Driver, job: Job) -> None:
    """Leaves a shard as after some training: version 4, state, counts, clocks."""
    store = store_of(driver)
    arrays = {"weights": np.arange(16, dtype=np.float32), "counts": np.array([4])}
    arrays |= {"state.0": np.full(16, 2.0, dtype=np.float32)}
    arrays |= {"memory.w_bak.0": np.full(16, 3.0, dtype=np.float32)}
    store.restore(arrays, 4)
    clock = job.tables["model"].clocks[0]
    clock.restore(4, {0: 4, 1: 3})


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    driver, job = make(ASGD())
    fill(driver, job)
    job.membership.members[0].spent = (9, 5)
    assert driver.snapshot(tmp_path) == 1
    again = Driver(Shard(0, 1, 10.0), num_threads=1, now=lambda: 100.0)
    assert again.restore(tmp_path) == ["run/1"]
    ours, theirs = store_of(driver).export(), store_of(again).export()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array)
    clock = again.shard.jobs["run/1"].tables["model"].clocks[0]
    assert (clock.version, clock.clock(0), clock.clock(1)) == (4, 4, 3)
    membership = again.shard.jobs["run/1"].membership
    assert membership.size == "1 to 2"
    member = membership.members[0]
    assert (member.presence, member.incarnation, member.spent) == (Presence.LIVE, 7, (9, 5))
    assert member.lease_ends_s == 110.0


def test_what_had_entered_an_open_step_is_not_counted() -> None:
    driver, job = make(SSGD())
    fill(driver, job)
    clock = job.tables["model"].clocks[0]
    assert clock.clock(0) == clock.clock(1) == 4


def test_the_end_of_a_job_is_saved_once(tmp_path: Path) -> None:
    """Else its workers would be live again for whoever restores it, and their ranks taken."""
    driver, job = make(SSGD())
    fill(driver, job)
    assert driver.snapshot(tmp_path) == 1
    for rank, member in job.membership.members.items():
        driver.leave("run/1", rank, member.incarnation, "finished")
    assert [driver.snapshot(tmp_path), driver.snapshot(tmp_path)] == [1, 0]
    again = Driver(Shard(0, 1, 10.0), num_threads=1)
    again.restore(tmp_path)
    assert again.shard.jobs["run/1"].membership.is_over


def test_the_same_table_is_known_again(tmp_path: Path) -> None:
    driver, job = make(DCASGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    again = Driver(Shard(0, 1, 10.0), num_threads=1)
    again.restore(tmp_path)
    _, created = again.define(again.shard.jobs["run/1"], job.tables["model"].spec)
    assert not created


def test_a_snapshot_of_another_shard_is_left_alone(tmp_path: Path) -> None:
    driver, job = make(SSGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    assert Driver(Shard(0, 2, 10.0), num_threads=1).restore(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "format"])
def test_a_file_that_is_no_snapshot_is_left_alone(tmp_path: Path, damage: str) -> None:
    driver, job = make(SSGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    if damage == "format":
        content = content.replace(b'\\"format\\": 1', b'\\"format\\": 9')
        assert content != path.read_bytes()
    path.write_bytes({"cut": content[:-5], "empty": b"", "format": content}[damage])
    assert Driver(Shard(0, 1, 10.0), num_threads=1).restore(tmp_path) == []


def test_a_snapshot_that_cannot_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, job = make(SSGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        driver.snapshot(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_is_plain_safetensors(tmp_path: Path) -> None:
    driver, job = make(SSGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("0/0/weights"), np.arange(16))
        meta = json.loads(file.metadata()["paceline"])
    assert meta["job"] == "run/1"
    assert meta["tables"][0]["slices"]["0"]["version"] == 4


def test_training_goes_on_from_what_came_back(tmp_path: Path) -> None:
    driver, job = make(ASGD())
    fill(driver, job)
    driver.snapshot(tmp_path)
    again = Driver(Shard(0, 1, 10.0), num_threads=1)
    again.restore(tmp_path)
    clock = again.shard.jobs["run/1"].tables["model"].clocks[0]
    push = Push(worker=0, step=4, base_version=4, role=Role.GRADIENT, hyper=HYPER)
    actions = clock.push(push, Token())
    assert clock.version == 5
    assert not any(isinstance(action, Answer) for action in actions)
    assert Address("run/1", 0, 0).job in again.shard.jobs
