"""A journal gives back the numbers that were written, or is refused by name: never zeros."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.errors import ReplacedError, StateLostError
from pscore.memory.segment import PAGE
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules import SSGD
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.decisions.auto_mode import ModeChoice
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member
from psserver.decisions.orders import Skip
from psserver.decisions.shard import Job, Shard
from psserver.durability.journal_dir import JobJournal, JournalDir
from psserver.durability.recovery import Recovery
from psserver.durability.sealed import read_json, write_json
from psserver.engine.engine import Engine
from psserver.engine.resume import recover
from psserver.slices.journal import SliceJournal
from psserver.slices.store import SliceStore
from tests.unit.psserver.front import stores_of
from tests.unit.psserver.ordered import last_of
from tests.unit.psserver.process.test_loading import WRONG, places_in, replaced

STEPS = 30
SPEC = TableSpec(
    name="model",
    tensors=(TensorSpec(name="w", shape=(64, 64), dtype="float32"),),
    num_shards=1,
    rule=SSGD(),
    compressor=NoCompression(),
    optimizer="sgd",
    num_groups=1,
)


def worker(incarnation: int = 7) -> Member:
    return Member(rank=0, incarnation=incarnation, restart=0, host="a", pid=1, heard_s=0.0)


def begin(shard: Shard) -> Job:
    return shard.decide_join("run", 3, worker(), 1)[0]


class Process:
    """One life of a shard with a journals."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.journals = JournalDir(folder)
        shard = Shard(0, 1, 10.0, limits)
        self.engine = Engine(shard, journals=self.journals, now=lambda: 0.0)
        self.names = recover(self.engine)

    def train(self, name: str, num_workers: int = 1) -> None:
        """Makes a job with weights of version `STEPS`."""
        job = self.engine.join(name, num_workers, worker())
        self.engine.define(job, SPEC)
        store, weights = self.store(), np.arange(4096, dtype=np.float32)
        for version in range(STEPS - 3, STEPS + 1):  # So that both buffers have been used.
            arrays = {"weights": weights + version, "counts": np.array([version])}
            store.restore({**arrays, "state.0": weights}, version)
        job.job.tables["model"].clocks[0].restore(STEPS, {0: STEPS})
        job.recorder.note()

    def store(self) -> SliceStore:
        return stores_of(next(iter(self.engine.jobs.values())))[0]

    def kill(self) -> None:
        self.journals.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a shard with a job `a` was killed."""
    process = Process(tmp_path / "v")
    process.train("a")
    process.kill()
    return tmp_path / "v"


def job_folder(folder: Path) -> Path:
    (found,) = folder.glob("*/")
    return found


def test_a_written_job_is_restored(folder: Path) -> None:
    process = Process(folder)
    assert process.names == ["a"]
    np.testing.assert_array_equal(process.store().weights, np.arange(4096) + STEPS)
    assert process.store().counts.tolist() == [STEPS]
    process.kill()
    assert Process(folder).names == ["a"]


def test_peers_have_other_epochs_in_each_process(folder: Path) -> None:
    """One that came anew got the epoch that a peer knew, which then noticed nothing."""
    epochs = set()
    for _ in range(3):
        process = Process(folder)
        epochs.add(process.engine.jobs["a"].job.directory(0).epoch)
        process.kill()
    assert len(epochs - {0}) == 3


def test_a_table_keeps_the_number_that_it_has_on_the_first_shard(folder: Path) -> None:
    """Workers may have been killed when they had declared a table there alone."""
    process = Process(folder)
    job = process.engine.jobs["a"]
    others = [
        process.engine.define(job, replace(SPEC, name=name), number=number).index
        for name, number in {"third": 3, "its number is taken": 3, "first shard's": None}.items()
    ]
    assert others == [3, 4, 5]
    process.kill()
    again = Process(folder)
    assert again.names == ["a"]
    assert [table.index for table in again.engine.shard.jobs["a"].tables.values()] == [0, 3, 4, 5]


def test_the_mode_that_a_job_has_chosen_outlives_the_process(folder: Path) -> None:
    process = Process(folder)
    assert not process.engine.shard.jobs["a"].choice.mode
    process.engine.shard.jobs["a"].choice = ModeChoice("od", "auto takes od")
    process.engine.jobs["a"].recorder.note()
    process.kill()
    choice = Process(folder).engine.shard.jobs["a"].choice
    assert (choice.mode, choice.text) == ("od", "auto takes od")


def test_late_workers_and_rounds_without_them_outlive_the_process(tmp_path: Path) -> None:
    """The others waited for ever at the next round for one that did not know of the last."""
    process = Process(tmp_path / "v")
    process.train("a", 3)
    job = process.engine.shard.jobs["a"]
    for rank, joined_s in ((1, 2.0), (2, 1.0)):
        process.engine.join("a", 3, replace(worker(), rank=rank, heard_s=joined_s))
    job.barriers.arrive("epoch", 1, 0)
    job.barriers.excuse("epoch", 1, 0, [1])
    process.engine.jobs["a"].recorder.note()
    process.kill()
    again = Process(tmp_path / "v").engine.shard.jobs["a"]
    late = {member.joined_s: member.rank for member in again.membership.members.values()}
    assert [late[joined_s] for joined_s in sorted(late)] == [0, 2, 1]
    assert [again.membership.members[rank].came_late for rank in range(3)] == [False, True, True]
    again.barriers.excuse("epoch", 1, 0, [1])  # It asks again.
    assert again.barriers.by_name["epoch"].missing([0, 1]) == []
    assert again.barriers.arrive("epoch", 1, 1) is again.barriers.arrive("epoch", 2, 0)


@pytest.mark.parametrize("is_killed", [True, False])
def test_steps_that_are_left_out_leave_a_journal_that_is_believed(
    folder: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(folder)
    if is_killed:
        monkeypatch.setattr(SliceJournal, "commit", lambda _: None)
    process.store().skip(Skip(former=STEPS, version=STEPS + 9))
    monkeypatch.undo()
    process.kill()
    again = Process(folder)
    assert again.names == ["a"]
    clock = again.engine.shard.jobs["a"].tables["model"].clocks[0]
    assert clock.version == STEPS + (0 if is_killed else 9)
    np.testing.assert_array_equal(again.store().weights, np.arange(4096) + STEPS)


def test_a_late_request_of_a_former_life_is_refused_after_a_kill_too(tmp_path: Path) -> None:
    """It starts no life of the job either: a refused join changes nothing."""
    process = Process(tmp_path / "v")
    process.train("a")
    job = process.engine.shard.jobs["a"]
    process.engine.leave("a", 0, 7, "killed", failed=True)
    job.membership.begin_again()
    process.engine.jobs["a"].recorder.note()
    process.kill()
    again = Process(tmp_path / "v").engine
    with pytest.raises(ReplacedError, match="came late"):
        again.join("a", 1, worker(7))
    assert again.shard.jobs["a"].life.number == 1
    assert again.join("a", 1, worker(8)) is again.jobs["a"]
    assert again.shard.jobs["a"].membership.members[0].spent == (7,)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def resealed(path: Path, **changes: object) -> None:
    """Writes values of wrong types, with the right hash."""
    write_json(path, {**read_json(path), **changes})


def refill(path: Path) -> None:
    """Overwrites a file with zeros, except for its end."""
    content = path.read_bytes()
    path.write_bytes(bytes(len(content) - PAGE) + content[-PAGE:])


def blank(path: Path, offset: int, nbytes: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes(nbytes) + content[offset + nbytes :])


def exchange_weights(folder: Path) -> None:
    """Puts the weights file of another job, of the same model, in place of the job's own."""
    other = Process(folder.parent / "other")
    other.train("a")
    other.kill()
    shutil.copy(next((folder.parent / "other").glob("*/0.weights")), job_folder(folder))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights missing": lambda job: (job / "0.weights").unlink(),
    "weights empty": lambda job: (job / "0.weights").write_bytes(b""),
    "weights cut": lambda job: cut(job / "0.weights", 1),
    "weights cut by pages": lambda job: cut(job / "0.weights", 2 * PAGE),
    "weights longer": lambda job: cut(job / "0.weights", -1),
    "weights zeros": lambda job: refill(job / "0.weights"),
    "weights of another job": lambda job: exchange_weights(job.parent),
    "version of the weights": lambda job: flip(job / "0.weights", 0, 1),
    "arena missing": lambda job: (job / "arena").unlink(),
    "arena empty": lambda job: (job / "arena").write_bytes(b""),
    "arena cut": lambda job: os.truncate(job / "arena", 2 * PAGE),
    "arena zeros": lambda job: refill(job / "arena"),
    "roots zeros": lambda job: blank(job / "arena", PAGE, 64),
    "number of the record": lambda job: flip(job / "arena", PAGE),
    "place of a record": lambda job: flip(job / "arena", PAGE + 8, 6),
    "place of the other record": lambda job: flip(job / "arena", PAGE + 32, 6),
    "job missing": lambda job: (job / "job.json").unlink(),
    "job flipped": lambda job: flip(job / "job.json", 100),
    "job empty": lambda job: (job / "job.json").write_bytes(b""),
    "job wrong types": lambda job: resealed(job / "job.json", num_workers="three", members=7),
    "job no members": lambda job: resealed(job / "job.json", members=[{"rank": None}]),
    "table missing": lambda job: (job / "0.json").unlink(),
    "table a list": lambda job: (job / "0.json").write_text("[1, 2]"),
    "table deep": lambda job: (job / "0.json").write_text("[" * 100_000),
    "table wrong types": lambda job: resealed(job / "0.json", roots=[1], spec={"name": 3}),
    "table unknown rule": lambda job: resealed(job / "0.json", former=["no such rule", {}]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_job_is_refused_by_name_and_not_started_over(folder: Path, damage: str) -> None:
    before = JournalDir(folder)
    before.close()
    DAMAGES[damage](job_folder(folder))
    process = Process(folder)
    assert process.names == []
    assert process.journals.instance != before.instance  # So that its workers know.
    text = r"shard 0 had job 'a' and cannot continue it: .*psserver restore DIR --job a.* forget"
    with pytest.raises(StateLostError, match=text):
        process.engine.join("a", 1, worker(8))
    process.engine.join("b", 1, worker(8))  # Others are free to begin.
    process.kill()
    again = Process(folder)  # Not forgotten with the process either.
    with pytest.raises(StateLostError, match=text):
        again.engine.join("a", 1, worker(9))
    assert again.engine.forget("a", is_forced=False) == (True, 0)
    again.engine.join("a", 1, worker(9))
    again.kill()
    assert Process(folder).engine.shard.lifetimes.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["job.json", "0.json", "../stamp.json"])
def test_no_value_of_a_journal_ends_a_shard(folder: Path, name: str, wrong: object) -> None:
    """Each value in turn is wrong, under a hash that fits."""
    path = job_folder(folder) / name
    content = path.read_bytes()
    for place in places_in(read_json(path)):
        path.write_bytes(content)
        write_json(path, replaced(read_json(path), place, wrong))
        copied = folder.parent / "copied"
        shutil.copytree(folder, copied)
        process = Process(copied)
        rank = process.engine.join("b", 1, worker(8)).welcome(worker(8))
        assert rank.num_workers == 1
        pb.DescribeReply(instance=process.journals.instance)
        for job in process.engine.jobs.values():
            pb.JoinReply(life=job.job.life.number)
        process.kill()
        shutil.rmtree(copied)


@pytest.mark.parametrize("where", ["weights", "state"])
@pytest.mark.parametrize(("num_ticks", "is_noticed"), [(1, False), (2, True)])
def test_a_flipped_bit_is_noticed_where_the_slice_was_quiet(
    tmp_path: Path, where: str, num_ticks: int, is_noticed: bool
) -> None:
    """Between two ticks without an update weights and state are hashed, and not before."""
    process = Process(tmp_path / "v")
    process.train("a")
    for _ in range(num_ticks):
        process.engine.tick()
    store = process.store()
    assert isinstance(store, SliceStore)
    array = store.weights if where == "weights" else store.state[0]
    array.view(np.uint32)[3000] ^= 1
    process.kill()
    after = Process(tmp_path / "v")
    assert after.names == ([] if is_noticed else ["a"])
    reasons = [reason for _, reason in after.engine.shard.lifetimes.lost.values()]
    told = f"are not those that were hashed after update {STEPS}: bits have changed"
    assert [told in reason for reason in reasons] == [True] * is_noticed


def test_an_update_after_the_hash_is_believed(tmp_path: Path) -> None:
    process = Process(tmp_path / "v")
    process.train("a")
    for _ in range(3):  # Hashed once.
        process.engine.tick()
    store = process.store()
    store.restore(
        {**last_of(store.export()), "weights": np.ones(4096, dtype=np.float32)}, STEPS + 1
    )
    process.kill()
    after = Process(tmp_path / "v")
    assert after.names == ["a"]
    assert np.array_equal(after.store().weights, np.ones(4096))


def test_a_job_with_a_checkpoint_is_restored_in_the_place_of_its_damaged_journal(
    folder: Path,
) -> None:
    DAMAGES["weights missing"](job_folder(folder))
    process = Process(folder)
    process.engine.begin_restored("a", 1, 0)
    process.engine.join("a", 1, worker(8))
    process.kill()
    assert Process(folder).names == ["a"]
    assert len(list(folder.glob("*/"))) == 1


def test_a_job_that_wants_more_memory_than_there_is_waits_for_more(folder: Path) -> None:
    process = Process(folder, Limits(memory_nbytes=1 << 10))
    with pytest.raises(StateLostError, match="memory_mb"):
        process.engine.join("a", 1, worker(8))
    process.kill()
    assert Process(folder).names == ["a"]


def test_a_job_that_was_killed_while_it_was_restored_is_refused(tmp_path: Path) -> None:
    """Else the first worker's weights would take the places that are still empty."""
    process = Process(tmp_path / "v")
    process.engine.define(process.engine.begin_restored("a", 1, 0), SPEC)
    process.kill()
    with pytest.raises(StateLostError, match="killed while the job was restored"):
        Process(tmp_path / "v").engine.join("a", 1, worker())


def test_a_copy_of_the_weights_of_another_time_is_refused(tmp_path: Path) -> None:
    process = Process(tmp_path / "v")
    process.train("a")
    job = job_folder(tmp_path / "v")
    early = (job / "0.weights").read_bytes()
    arrays = {"weights": np.zeros(4096, np.float32), "counts": np.array([0])}
    for version in (STEPS + 1, STEPS + 2):
        process.store().restore({**arrays, "state.0": arrays["weights"]}, version)
    process.kill()
    (job / "0.weights").write_bytes(early)
    again = Process(tmp_path / "v")
    ((_, reason),) = again.engine.shard.lifetimes.lost.values()
    assert f"are of version {STEPS}, its journal is of version {STEPS + 2}" in reason


def test_an_ended_job_that_is_damaged_is_no_loss(folder: Path) -> None:
    process = Process(folder)
    process.engine.leave("a", 0, 7, "finished")
    process.kill()
    DAMAGES["weights missing"](job_folder(folder))
    assert Process(folder).engine.shard.lifetimes.lost == {}
    assert not list(folder.glob("*/"))


def test_the_same_command_continues_at_once_where_all_processes_were_killed(folder: Path) -> None:
    """Its former worker has a lease there, but has not been heard since."""
    process, again = Process(folder), worker(8)
    process.engine.join("a", 1, again)
    assert f"job 'a' continues at step {STEPS}" in again.news
    process.kill()
    assert Process(folder).engine.shard.jobs["a"].life.number == 2


def test_the_end_of_a_job_is_known_after_a_kill(folder: Path) -> None:
    process = Process(folder)
    process.engine.leave("a", 0, 7, "finished")
    process.kill()
    assert Process(folder).engine.shard.jobs["a"].is_over


@pytest.mark.parametrize("is_former", [False, True])
def test_the_launch_of_a_worker_is_known_after_a_kill(folder: Path, *, is_former: bool) -> None:
    """A journal of a former version, which has none, is read as well."""
    process = Process(folder)
    process.engine.shard.jobs["a"].membership.members[0].run_id = "night"
    process.engine.leave("a", 0, 7, "finished")
    process.kill()
    if is_former:
        (path,) = folder.glob("*/job.json")
        members = read_json(path)["members"]
        resealed(
            path, members=[{k: v for k, v in each.items() if k != "run_id"} for each in members]
        )
    engine = Process(folder).engine
    former = engine.shard.jobs["a"]
    engine.join("a", 1, dataclasses.replace(worker(8), run_id="night"))
    assert (engine.shard.jobs["a"] is former) == (not is_former)


def test_an_older_folder_of_the_same_name_takes_nothing_from_the_newer(tmp_path: Path) -> None:
    journals, shard = JournalDir(tmp_path), Shard(0, 1, 10.0)
    Recovery(journals, shard).recorder(begin(shard)).note()
    (newer,) = journals.found()
    older = JobJournal(tmp_path / f"0-{newer.name.rpartition('-')[2]}", is_new=True)
    older.write_job({"name": "run"})
    (older.folder / "0.json").write_text("half a fi")
    journals.close()
    again, shard = JournalDir(tmp_path), Shard(0, 1, 10.0)
    Recovery(again, shard).recover(0.0, lambda *_: None)
    (job,) = shard.jobs.values()
    assert job.membership.members[0].incarnation == 7
    assert job.membership.size == "1 to 3"
    assert not older.folder.exists()
    assert again.instance == journals.instance


def test_changes_of_the_participants_are_written(tmp_path: Path) -> None:
    journals, shard = JournalDir(tmp_path), Shard(0, 1, 10.0)
    job = begin(shard)
    recorder = Recovery(journals, shard).recorder(job)
    recorder.note()
    (path,) = tmp_path.glob("*/job.json")
    path.write_text("as it was")
    recorder.note()
    assert path.read_text() == "as it was"
    shard.barrier(job, "end", 0, 0, holds=True)
    recorder.note()
    meta = json.loads(path.read_text())["meta"]
    assert meta["barriers"] == [["end", 0, [0], True, 0.0, 0.0, -1]]
    assert meta["holds"]
    recovered = Shard(0, 1, 10.0)
    Recovery(journals, recovered).recover(0.0, lambda *_: None)
    assert recovered.jobs[job.name].barriers.holds
