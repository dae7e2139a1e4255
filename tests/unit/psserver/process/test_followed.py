"""A shard is followed while workers push: all that was answered is there, once, at any moment."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.pb.ps.v1 import data_pb2
from pscore.rows.spec import RowTable
from pscore.rules import ASGD, SSGD
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, TensorSpec
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.placement import Placement
from psserver.engine.resume import recover
from psserver.process.followed import FollowedShard
from psserver.standby.pieces import ArrivingJournals
from psserver.standby.spans import JournalPiece
from tests.row_driver import RowShards, row_spec
from tests.unit.psserver.front import push_header, stores_of

JOB, WORKERS, STEPS = "run", 2, 16
SMALL = WORKERS * STEPS  # Each push changes an element of its own.
LARGE = 2 * Placement().inline_numel_max  # A slice whose work an executor does.
MARK: dict[str, object] = {"id": "m", "instance": 7}


class Answers:
    """The pushes that were acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: set[int] = set()

    def to(self, number: int) -> Answers.One:
        return Answers.One(self.acknowledged, number)

    class One:
        """The reply to one push."""

        def __init__(self, acknowledged: set[int], number: int) -> None:
            self._acknowledged, self._number = acknowledged, number

        def pushed(self, reply: data_pb2.PushReply) -> None:
            self._acknowledged.add(self._number)

        def pulled(self, reply: object, arrays: object, release: object) -> None:
            raise AssertionError


class Machine:
    """A process of the shard with its journals."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor | None = None) -> None:
        self.journals = JournalDir(folder)
        self.engine = Engine(
            Shard(0, 1, 10.0), now=lambda: 0.0, executor=executor, journals=self.journals
        )
        self.followed = FollowedShard(self.engine, self.journals)
        self.answers = Answers()
        recover(self.engine)

    def begin(self, rule: Rule, numel: int, name: str = "model") -> None:
        for rank in range(WORKERS):
            member = Member(
                rank=rank, incarnation=100 + rank, restart=0, host="a", pid=1, heard_s=0.0
            )
            self.engine.join(JOB, WORKERS, member)
        spec = TableSpec(
            name=name,
            tensors=(TensorSpec(name="w", shape=(numel,), dtype="float32"),),
            num_shards=1,
            rule=rule,
            compressor=NoCompression(),
            optimizer="sgd",
            num_groups=1,
        )
        self.engine.define(self.engine.jobs[JOB], spec)
        zeros = np.zeros(numel, np.float32).view(np.uint8)
        header = replace_header(push_header(0, 0), role=data_pb2.ROLE_WEIGHTS)
        self.engine.requests.on_push(header, zeros, self.answers.to(-1))

    def push(self, number: int) -> None:
        step, rank = divmod(number, WORKERS)
        grad = np.zeros(len(self.weights()), np.float32)
        grad[number] = WORKERS if is_mean(self) else 1.0
        self.engine.requests.on_push(
            push_header(rank, step), grad.view(np.uint8), self.answers.to(number)
        )

    def weights(self) -> FloatArray:
        return stores_of(self.engine.jobs[JOB])[0].weights

    async def rest(self) -> None:
        while self.engine.is_busy:
            await asyncio.sleep(0)


def is_mean(machine: Machine) -> bool:
    return machine.engine.jobs[JOB].job.table(0).spec.rule.by_step


def replace_header(header: data_pb2.PushHeader, role: data_pb2.Role) -> data_pb2.PushHeader:
    header.role = role
    del header.hyper[:]
    return header


@dataclass
class Tape:
    """The other process, and a picture of it after each group, with the answers before."""

    folder: Path
    answers: Answers
    pictures: list[tuple[Path, set[int]]] = field(default_factory=list)
    fails_at: int = -1
    takes_pictures: bool = False
    _waiting: list[JournalPiece] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        self.arriving = ArrivingJournals(self.folder / "standby")
        self.arriving.start()

    def send(self, pieces: Sequence[JournalPiece], more: bool) -> None:
        self._waiting += pieces
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("no room")
        if more:
            return
        answered = set(self.answers.acknowledged)
        for piece in self._waiting:
            self.arriving.write(piece)
        self._waiting = []
        if self.takes_pictures:
            picture = self.folder / f"picture-{len(self.pictures)}"
            shutil.copytree(self.folder / "incoming-standby", picture)
            self.pictures.append((picture, answered))


async def follow(machine: Machine, tape: Tape) -> None:
    """Sends all slices; from then on each answer waits for the other process."""
    stream = machine.followed.follow(tape.send, machine.followed.unfollow)
    for one in machine.followed.slices(stream):
        await one.send()
    assert stream.flush(10)
    stream.is_whole = True


def begin_at(picture: Path) -> Machine:
    """Returns the process that takes over from a picture."""
    folder = picture.with_name(f"{picture.name}-begun")
    JournalDir(folder).close()  # Of this boot.
    for job in picture.glob("*/"):
        job.rename(folder / job.name)
    return Machine(folder)


RULES = [ASGD(), SSGD()]


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_machine_is_lost_at_any_moment_and_each_push_counts_once(
    rule: Rule, numel: int, tmp_path: Path
) -> None:
    async def scene() -> Tape:
        with ThreadPoolExecutor(1) as pool:
            machine = Machine(tmp_path / "primary", pool)
            machine.begin(rule, numel)
            machine.push(0)
            await machine.rest()
            tape = Tape(tmp_path, machine.answers)
            await follow(machine, tape)
            tape.takes_pictures = True
            for number in range(1, SMALL):
                machine.push(number)
                if number % 5 == 0:  # Several groups, however late the stream's thread gets to run.
                    await machine.rest()
            await machine.rest()
            machine.followed.unfollow()
            assert machine.answers.acknowledged == {-1, *range(SMALL)}
            return tape

    tape = asyncio.run(scene())
    assert len(tape.pictures) > SMALL // 5
    for picture, answered in tape.pictures:
        machine = begin_at(picture)
        machine.answers.acknowledged |= answered
        for number in range(SMALL):
            if number not in answered:
                machine.push(number)
        assert machine.answers.acknowledged == {-1, *range(SMALL)}
        assert machine.weights()[:SMALL].tolist() == [-1.0] * SMALL
        machine.journals.close()


def test_an_answer_waits_for_the_other_process_and_leaves_when_that_fails(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path / "primary")
        machine.begin(ASGD(), SMALL)
        tape = Tape(tmp_path, machine.answers)
        await follow(machine, tape)
        with machine.engine.lock:  # The stream needs it to send.
            machine.push(0)
            assert 0 not in machine.answers.acknowledged
            assert machine.engine.is_busy
        await machine.rest()
        assert 0 in machine.answers.acknowledged
        tape.fails_at = tape.calls + 1
        machine.push(1)
        await machine.rest()
        assert 1 in machine.answers.acknowledged
        machine.push(2)
        assert {0, 1, 2} <= machine.answers.acknowledged

    asyncio.run(scene())


def test_a_table_that_is_made_meanwhile_is_followed_and_a_job_that_is_freed_is_gone(
    tmp_path: Path,
) -> None:
    async def scene() -> Tape:
        machine = Machine(tmp_path / "primary")
        machine.begin(ASGD(), SMALL)
        tape = Tape(tmp_path, machine.answers)
        await follow(machine, tape)
        tape.takes_pictures = True
        machine.begin(ASGD(), SMALL, "second")
        machine.push(0)
        await machine.rest()
        machine.engine.forget(JOB, is_forced=True)
        while any(tape.pictures[-1][0].glob("*/")):  # The picture comes after the files.
            await asyncio.sleep(0)
        machine.followed.unfollow()
        return tape

    tape = asyncio.run(scene())
    found = []
    for picture, _ in tape.pictures:
        machine = begin_at(picture)
        found.append([len(job.tables) for job in machine.engine.jobs.values()])
        machine.journals.close()
    assert [2] in found
    assert found[-1] == []
    assert all(one in ([1], [2], []) for one in found)  # Not one that cannot be used.


def test_spans_are_all_that_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path / "primary")
        machine.begin(ASGD(), SMALL)
        tape = Tape(tmp_path, machine.answers)
        await follow(machine, tape)
        machine.push(0)
        await machine.rest()
        spans = machine.followed.sent_spans()
        tape.arriving.prepare(spans, MARK)
        changed = [replace(spans[0], digest=spans[0].digest ^ 1), *spans[1:]]
        with pytest.raises(Exception, match="did not arrive"):
            tape.arriving.prepare(changed, MARK)
        machine.followed.unfollow()

    asyncio.run(scene())


def test_rows_are_followed_and_those_of_the_other_process_are_the_same_after_each_step(
    tmp_path: Path,
) -> None:
    tables = (("a", 0, 2, RowTable(seed=1, init="uniform(1)")), ("b", 40, 3, RowTable(seed=2)))
    shards = RowShards(row_spec(*tables, optimizer="sparse_adam"), WORKERS, tmp_path / "primary")
    shards.begin()
    hyper = np.array([[0.1, 0.9, 0.999, 1e-8, 0.0]])
    wanted: list[list[FloatArray]] = []
    everything = [np.arange(200), np.arange(40)]

    def push(step: int) -> None:
        for worker in range(WORKERS):
            drawn = np.random.default_rng((step, worker))
            ids = [drawn.choice(200, 60, replace=False), drawn.choice(40, 9, replace=False)]
            grads = [drawn.standard_normal((60, 2)), drawn.standard_normal((9, 3))]
            shards.push(worker, step, ids, grads, hyper)

    async def scene() -> Tape:
        machine, tape = shards.engines[0], Tape(tmp_path, Answers())
        (journals,) = shards.journals
        assert journals is not None
        followed = FollowedShard(machine, journals)
        push(0)
        stream = followed.follow(tape.send, followed.unfollow)
        for one in followed.slices(stream):
            await one.send()
        assert stream.flush(10)
        stream.is_whole = tape.takes_pictures = True
        for step in range(1, 4):
            push(step)
            while machine.is_busy:
                await asyncio.sleep(0)
            wanted.append(shards.pull(everything, with_state=True))
        tape.arriving.prepare(followed.sent_spans(), MARK)
        followed.unfollow()
        return tape

    tape = asyncio.run(scene())
    found = []
    for picture, _ in tape.pictures:
        folder = tmp_path / f"{picture.name}-begun"
        (folder / "0").mkdir(parents=True)
        JournalDir(folder / "0").close()
        for job in picture.glob("*/"):
            job.rename(folder / "0" / job.name)
        shards.continue_from(folder)
        found.append(shards.pull(everything, with_state=True))
    for each in wanted:
        assert any(all(map(np.array_equal, each, other)) for other in found)
    assert all(map(np.array_equal, wanted[-1], found[-1]))
