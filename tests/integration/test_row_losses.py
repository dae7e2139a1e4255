"""Rows whose step did not count: a shard and a worker die together, and the other one is told.

Each step of a worker adds 1 to rows of its own. So the rows say how often each step has counted in
each slice: never twice, and where it is none, the worker that made it has logged so.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from pscore.net.channel import FrameChannel
from psworker.rows.row_exchange import RowExchange
from tests.integration.cluster import Station, Worker, new_job
from tests.integration.command import Command, eventually, gone, lasting_ports, live_shards

GO = "go"
PER_STEP, STEPS_MAX = 16, 64  # Ids of a step, some of them on each shard; steps of a worker.


def ids_of(rank: int, life: int, step: int) -> torch.Tensor:
    return PER_STEP * (STEPS_MAX * (2 * rank + life) + step) + torch.arange(PER_STEP)


def train(me: Station, folder: Path, rows_mode: str, life: int) -> None:
    """Does as it is told: makes a step, looks up how often steps have counted, or stops somewhere.

    Args:
        me: Its line.
        folder: Where a file lets it continue (`Job.let_go`).
        rows_mode: Mode of the rows.
        life: How often a worker of this rank was killed before.
    """
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 1, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode="asgd",
        rows_mode=rows_mode,
    )
    step = 0
    me.tell("begun")
    while (said := me.hear()) != "end":
        if said == "step":
            optimizer.zero_grad()
            rows = table(ids_of(me.rank, life, step))
            torch.autograd.backward(-rows.sum() + 0.0 * model["top"](rows).sum())
            me.tell("computed")
            while (said := me.hear()) in STOPS:
                stop_at(me, folder / GO, *STOPS[said])
            optimizer.step()
            step += 1
            me.tell("stepped")
        else:
            with torch.no_grad():
                values = [
                    table(ids_of(said[0], said[1], each)).flatten() for each in range(said[2])
                ]
            me.tell([each.tolist() for each in values])


def await_loss(exchange: RowExchange) -> None:
    """Waits until a heartbeat has found out that this worker is lost."""
    eventually(lambda: exchange.session.heartbeats.failure is not None)


Place = tuple[type, str, Callable[[Any], bool], Callable[[Any], None]]
STOPS: dict[str, Place] = {
    "stop in a resend": (
        FrameChannel,
        "_resume",
        lambda channel: bool(vars(channel)["_open"]),
        lambda _: None,
    ),
    "stop in a rejoin": (
        RowExchange,
        "wait",
        lambda exchange: not any(exchange.counts),
        lambda _: None,
    ),
    "stop in a push": (RowExchange, "push", lambda _: True, await_loss),
}


def stop_at(
    me: Station,
    go: Path,
    kind: type,
    name: str,
    is_there: Callable[[Any], bool],
    before: Callable[[Any], None],
) -> None:
    """Makes the next call of a method that `is_there` tell so at its end, and wait for a file.

    It may be on another thread than the one that hears what the worker is told.
    """
    call = getattr(kind, name)

    def stopping(of: Any, *given: Any, **named: Any) -> Any:
        is_now = is_there(of)
        result = call(of, *given, **named)
        if is_now:
            setattr(kind, name, call)
            me.tell("stops")
            eventually(go.exists)
            go.unlink()
            before(of)
        return result

    setattr(kind, name, stopping)


class Job:
    """Shards with journals under their supervisor, and two workers."""

    def __init__(self, command: Command, servers: str, rows_mode: str) -> None:
        self._command, self._rows_mode = command, rows_mode
        self._environment = {
            "WORLD_SIZE": "2",
            "PACELINE_SERVERS": servers,
            "PACELINE_JOB": new_job(),
        }
        self._life = 0
        self.workers = [self._start(rank, 0) for rank in range(2)]
        for worker in self.workers:
            assert worker.hear() == "begun"

    def _start(self, rank: int, life: int) -> Worker:
        about = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(life)}
        given = (self._command.folder, self._rows_mode, life)
        return Worker(train, rank, given, self._environment | about)

    def shards(self) -> list[int]:
        return live_shards(self._command.folder)

    def kill_shards(self) -> None:
        for pid in self.shards():
            os.kill(pid, signal.SIGKILL)
            eventually(partial(gone, pid))

    def step(self, rank: int, times: int = 1) -> None:
        worker = self.workers[rank]
        for _ in range(times):
            worker.tell("step")
            assert worker.hear() == "computed"
            worker.tell("continue")
            assert worker.hear() == "stepped"

    def start_again(self, rank: int) -> None:
        """Starts a worker again that was killed; returns when it has begun."""
        self.workers[rank].close()
        self._life += 1
        self.workers[rank] = self._start(rank, self._life)
        assert self.workers[rank].hear() == "begun"

    def lose_others(self) -> None:
        """Stops worker 0, kills worker 1 and the shards, and starts these again."""
        self.workers[0].kill(signal.SIGSTOP)
        self.workers[1].kill()
        self.kill_shards()
        self.start_again(1)

    def stop_shards(self) -> None:
        """Stops the shards: a push that is sent to them from now on does not count."""
        for pid in self.shards():
            os.kill(pid, signal.SIGSTOP)

    def begin_step(self, rank: int) -> None:
        """Begins a step of a worker, which ends it when it is told to continue."""
        self.workers[rank].tell("step")
        assert self.workers[rank].hear() == "computed"

    def let_go(self) -> None:
        """Makes the worker that stops somewhere continue."""
        (self._command.folder / GO).touch()

    def look(self, rank: int, life: int, steps: int) -> list[set[float]]:
        """Returns how often the rows of each step of a worker have counted, as rank 0 reads it."""
        return self.look_by(0, rank, life, steps)

    def look_by(self, reader: int, rank: int, life: int, steps: int) -> list[set[float]]:
        """Returns the same, as another worker reads it."""
        self.workers[reader].tell((rank, life, steps))
        return [set(each) for each in self.workers[reader].hear()]

    def num_told(self) -> int:
        """Returns how many steps of worker 0 do not count in every slice, as it has logged."""
        written = self.workers[0].written()
        return sum(map(int, re.findall(r"worker 0: (\d+) steps up to \d+ of the row", written)))


@contextmanager
def job(folder: Path, num_shards: int, rows_mode: str, lease_s: float = 3000) -> Iterator[Job]:
    command = Command(folder)
    options = ("--shards", num_shards, *lasting_ports(num_shards), "--lease-s", lease_s)
    with command.spawn("start", *options) as process:
        assert process.stdout is not None
        servers = process.stdout.readline().strip().partition("=")[2]
        found = Job(command, servers, rows_mode)
        try:
            yield found
        finally:
            for worker in found.workers:
                worker.close()


ONCE, NEVER = {1.0}, {0.0}
MODES = pytest.mark.parametrize("rows_mode", ["asgd", "ssp(bound=30)"])


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_worker_is_told_of_a_step_that_shards_had_not_counted_when_they_died(
    tmp_path: Path, rows_mode: str, num_shards: int
) -> None:
    """A worker that was ahead is killed with them: the clock of the other one follows its."""
    with job(tmp_path, num_shards, rows_mode) as found:
        found.step(0, 3)
        found.step(1, 9)
        first = found.workers[0]
        found.begin_step(0)
        found.stop_shards()
        first.tell("continue")
        found.lose_others()  # The shards doubt all that they know: another life begins.
        first.kill(signal.SIGCONT)
        assert first.hear() == "stepped"
        found.step(0)
        assert found.look(0, 0, 5) == [ONCE, ONCE, ONCE, NEVER, ONCE]
        assert found.num_told() == 1
        assert found.look(1, 0, 9)[:8] == [ONCE] * 8


@pytest.mark.slow
@MODES
def test_a_worker_is_told_of_it_also_if_all_die_again_while_it_rejoins(
    tmp_path: Path, rows_mode: str
) -> None:
    """One slice has answered by then: its clock there is that of the worker ahead."""
    with job(tmp_path, 2, rows_mode) as found:
        found.step(0, 3)
        found.step(1, 9)
        first = found.workers[0]
        found.begin_step(0)
        first.tell("stop in a rejoin")
        found.stop_shards()
        first.tell("continue")
        found.lose_others()
        found.step(1, 2)
        first.kill(signal.SIGCONT)
        assert first.hear() == "stops"
        found.lose_others()
        first.kill(signal.SIGCONT)
        found.let_go()
        assert first.hear() == "stepped"
        found.step(0, 2)
        assert found.look(0, 0, 6) == [ONCE, ONCE, ONCE, NEVER, ONCE, ONCE]
        assert found.num_told() == 1
        assert found.look(1, 1, 2) in ([ONCE, ONCE], [ONCE, NEVER])


@pytest.mark.slow
@MODES
def test_a_worker_is_told_of_a_step_of_which_not_every_slice_had_left(
    tmp_path: Path, rows_mode: str
) -> None:
    with job(tmp_path, 2, rows_mode, lease_s=20) as found:
        found.step(0, 3)
        first = found.workers[0]
        found.begin_step(0)
        first.tell("stop in a push")
        first.tell("continue")
        assert first.hear() == "stops"  # One slice has left, and will count.
        eventually(lambda: found.look_by(1, 0, 0, 4)[-1] == ONCE | NEVER)
        found.lose_others()
        first.kill(signal.SIGCONT)
        found.let_go()
        assert first.hear() == "stepped"
        found.step(0)
        assert found.look(0, 0, 5) == [ONCE, ONCE, ONCE, ONCE | NEVER, ONCE]
        assert found.num_told() == 1


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_step_that_is_sent_again_counts_once_or_the_worker_is_told(
    tmp_path: Path, rows_mode: str, num_shards: int
) -> None:
    """The shards are killed again while it is sent, after they may have counted it."""
    with job(tmp_path, num_shards, rows_mode) as found:
        first = found.workers[0]
        for step in range(4):
            found.step(1, 2)
            found.begin_step(0)
            first.tell("stop in a resend")
            found.stop_shards()
            first.tell("continue")
            found.kill_shards()
            assert first.hear() == "stops"
            if step % 2:
                found.workers[1].kill()
            found.kill_shards()
            found.let_go()
            if step % 2:
                found.start_again(1)
            assert first.hear() == "stepped"
            found.look(0, 0, step)  # In a step that finds its worker lost nothing is sent.
        counted = found.look(0, 0, 4)
        assert set.union(*counted) <= ONCE | NEVER
        assert sum(each >= NEVER for each in counted) == found.num_told()
