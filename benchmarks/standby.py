"""Moves of a shard while its job trains, and losses of its machine: the pause, beside a step.

    python -m benchmarks.standby --quick --json                  # 2.56 million parameters
    python -m benchmarks.standby --only lost --out FILE          # one part; adds to FILE's losses
    python -m benchmarks.standby --quick --only lost --losses 200 --out FILE   # until FILE has 200

Two shards and two workers in `ssgd` with momentum, over TCP, each on a host of its own: a network
namespace (root is needed). The second shard moves to an empty process on another host, then to
another one, and so on, each time by `psserver drain`; the process that it leaves is stopped.

    drain             `pause_s`: the longest time in which a shard answered no worker;
                      `step_s`: the median of a step; `worst_step_s`: the longest step of a run;
                      `moves`; `identical`: whether the weights at the end are those, to the bit, of
                      a run without a move
    turns             four shards move in turn in one training: `cost_s`: the time that this takes
                      longer than as many steps without a move do; `share`: of ten minutes
    machine_lost      the second shard has a standby that takes over after `FAILOVER_S`; the link of
                      its host is cut, so that nobody hears of its end, and its processes are
                      killed, again and again until the last step. `times`: the longest time
                      without a finished step of a worker from each loss until some steps later,
                      before the next standby is filled; `p99_s`; `identical` as
                      above; of all acknowledged `pushes` (each of a slice) the numbers that are
                      `lost`, `double`, `torn`, and steps that are `partial`, by tickets in the
                      weights (survival/momentum_proof.py)
    refill            the second shard has no standby, and the workers run the optimizer
                      (`optimizer_on="worker"`): its machine is lost, an empty process starts at its
                      address, and the workers fill it. `times` and `identical` as above
    catch_up          on links of `SLOW` the second shard gets a standby with `CATCH_UP_MBIT`:
                      `seconds`, `nbytes`, and `training`, the pace meanwhile over that before
    cost              a training in which the second shard has a standby and none by turns:
                      `measured`: a step with it, relative to one without (`step_s`, `nbytes`
                      sent); `formula`: the same if it took longer by the time of the standby's
                      `stream_nbytes` on the link of the shard's host, as its shaper counts them
                      (medians of `turns`); `copies`: these bytes in copies of the shard's weights;
                      `bound`: the same on a link that was full already (docs/standby.md)
    cost CASE         the same with more workers, on slower links, or while workers compute: `costs`
    off_cost          what the product's code for standbys adds to a round where there is none:
                      two checkouts by turns (`--off BEFORE AFTER`); else null
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import kit, measured, netlab, versions
from benchmarks.forked import enter
from benchmarks.survival.momentum_proof import (
    LedgerNotebook,
    check_ledgers,
    keep_ledgers,
    ledger_numel,
)
from benchmarks.survival.proof import Proof
from pscore.json_text import to_json
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.standby_pb2 import MoveRequest
from psserver.remote.drain import move, withdraw

MODULE = "benchmarks.standby"
NUM_WORKERS = 2
NUM_TURNS = 4  # Shards that move in turn.
FIRST, SECOND, WORKERS = 0, 1, 2 * NUM_TURNS  # Hosts; this program is on that of shard 0.
NUM_HOSTS = WORKERS + 8
NUM_SECOND = 3  # Hosts for the second shard: its own, its standby's, and one that comes back.
FAST, SLOW, SLOWER = "10gbit", "1gbit", "100mbit"
FAILOVER_S = 0.5  # Silence after which a standby takes over.
COMPUTE_S = 0.05  # A worker sleeps so long in each step, as if it computed.
CATCH_UP_MBIT = 200  # A fifth of a link of `SLOW`.
LR, MOMENTUM = 0.1, 0.9
QUICK_NUMEL = 2_560_000
LOOK_S = 0.02
QUIET_STEPS = 5  # Between two troubles.
PERIOD_S = 600.0  # In which they do.
OFF_ROUNDS = 12  # In one turn.
WARM_STEPS = 10  # The first steps of a job compile loops; they are left out of the times.
STEP = struct.Struct("<q")
COUNTS = ("pushes", "lost", "double", "torn", "partial")  # Of pushes, by slice (proof.py).


def train(
    rank: int,
    numel: int,
    steps: int,
    compute_s: float,
    optimizer_on: str,
    mode: str,
    num_workers: int,
    folder: str,
) -> dict[str, Any]:
    """Trains on drawn gradients and tickets; returns the times of its steps, and a hash."""
    import torch

    import psworker

    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(rank)
    parts = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    named = {str(number): part for number, part in enumerate(parts)}
    inner = torch.optim.SGD(parts, lr=LR, momentum=MOMENTUM)
    where: dict[str, Any] = {"mode": mode} if mode else {"optimizer_on": optimizer_on}
    optimizer = psworker.DistributedOptimizer(inner, named.items(), **where)
    exchange, has_ledgers = optimizer._table.exchange, optimizer_on == "shards" and not mode
    if has_ledgers:
        LedgerNotebook(book_of(Path(folder), rank), rank, num_workers, steps).attach(exchange)
    for part in parts:
        part.grad = torch.randn(numel // 8, generator=drawn)
    grads = [part.grad.clone() for part in parts if part.grad is not None]
    measured.await_go()
    times_s, ends_s = [], []
    with progress_of(Path(folder), rank).open("wb", buffering=0) as file:
        for step in range(steps):
            begin_s = time.perf_counter()
            time.sleep(compute_s)
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad * (1.0 if has_ledgers else 1 + 1 / (1 + step))
            optimizer.step()
            times_s.append(time.perf_counter() - begin_s)
            ends_s.append(time.monotonic())
            os.pwrite(file.fileno(), STEP.pack(step + 1), 0)
    with optimizer.global_weights():
        whole = torch.cat([part.detach() for part in parts])
        if not rank and has_ledgers:
            keep_ledgers(Path(folder), exchange.layout, named, ledger_numel(num_workers, steps))
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    optimizer.close()
    psworker.shutdown()
    return {"times_s": times_s, "ends_s": ends_s, "digest": digest}


ROLES = {"train": train}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job whose second shard has a standby and none by turns."""

    num_workers: int
    numel: int  # 0: as many as `--numel` says.
    rate: str = SLOW
    mode: str = "ssgd"
    compute_s: float = 0.0  # In each step.
    steps: int = 6  # Of a turn with a standby, and of one without.
    turns: int = 3


# On links of a tenth of the rate two cores do the work of all hosts.
COSTS = {
    "cost": Case(num_workers=2, numel=0),
    "cost 4": Case(num_workers=4, numel=6_400_000),
    "cost 8": Case(num_workers=8, numel=3_200_000),
    "cost 2 slow": Case(num_workers=2, numel=1_280_000, rate=SLOWER),
    "cost 4 slow": Case(num_workers=4, numel=640_000, rate=SLOWER),
    "cost 8 slow": Case(num_workers=8, numel=320_000, rate=SLOWER),
    "cost ssd": Case(num_workers=2, numel=QUICK_NUMEL, mode="ssd", compute_s=0.3, steps=12),
    "cost diloco": Case(
        num_workers=2,
        numel=QUICK_NUMEL,
        mode="diloco(steps=100, overlap=mirror)",
        compute_s=0.03,
        steps=200,
    ),
}


def book_of(folder: Path, rank: int) -> Path:
    """Returns the file of a worker's pushes."""
    return folder / f"{rank}.book"


def progress_of(folder: Path, rank: int) -> Path:
    """Returns the file with the number of a worker's steps."""
    return folder / f"{rank}.steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The process of a shard, with its supervisor, on a host."""

    host: int
    address: str
    supervisor: subprocess.Popen[str]

    def await_ready(self) -> None:
        """Waits until it serves."""
        assert self.supervisor.stdout is not None
        if not self.supervisor.stdout.readline().startswith("PACELINE_SERVERS="):
            raise SystemExit("a shard did not start")

    def end(self) -> None:
        """Ends it in order."""
        self.supervisor.terminate()
        self.supervisor.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Names what is trained, and how often the second shard has trouble meanwhile."""

    numel: int
    steps: int
    moves: int
    compute_s: float = COMPUTE_S  # In each step.
    optimizer_on: str = "shards"
    mode: str = ""  # Empty: `ssgd`, whose pushes are counted.
    num_workers: int = NUM_WORKERS

    def is_that_of(self, run: Mapping[str, Any]) -> bool:
        """Returns whether a run without trouble has trained the same."""
        ledger = ledger_numel(NUM_WORKERS, self.steps)
        mine = (self.numel, self.steps, ledger)
        return (run.get("numel"), run.get("steps"), run.get("ledger")) == mine


class Scene:
    """Shards and workers that train once, each on its host.

    Attributes:
        places: The processes that have the shards at the start.
        second: The process that has the second shard.
        others: Empty processes for it, and processes that start, oldest first.
    """

    def __init__(self, lab: netlab.Lab, folder: Path, num_shards: int) -> None:
        """Starts nothing yet; files are below `folder`."""
        self._lab, self._folder, self._num_shards = lab, folder, num_shards
        self._all: list[Place] = []
        self._hosts = itertools.count(SECOND)  # Those without a process.
        self.others: list[Place] = []
        self._starting: list[Place] = []  # Of them, those that may not serve yet.
        (folder / "register").mkdir()

    def start(self, index: int, host: int | None = None) -> Place:
        """Starts a process of a shard; without a host on the next one that has none."""
        host = next(self._hosts) if host is None else host
        folder = self._folder / str(host)
        folder.mkdir(exist_ok=True)
        words = ["start", "--shards", str(self._num_shards), "--shard-index", str(index)]
        words += ["--cluster", "bench", "--host", self._lab.address(host), "--insecure"]
        words += ["--port", "7070", "--metrics-port", "0"]
        command = [*self._lab.inside(host), sys.executable, "-m", "psserver", *words]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "PACELINE_SPARE": "false"}
        address = f"{self._lab.address(host)}:7070"
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--log-level", "error"],
                env=env, cwd=kit.ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._all.append(Place(host=host, address=address, supervisor=process))
        return self._all[-1]

    def train(self, job: Job, num_second: int, trouble: Trouble) -> dict[str, Any]:
        """Trains once.

        Args:
            job: The model, and the number of steps.
            num_second: Number of processes of the second shard at the start.
            trouble: Is done to the second shard meanwhile; its numbers are returned as `trouble`.
        """
        self._last, self._num_workers = job.steps, job.num_workers
        first = self.start(0, FIRST)
        self.second, *self.others = [self.start(1) for _ in range(num_second)]
        more = [self.start(index) for index in range(2, self._num_shards)]
        for place in (first, self.second, *self.others, *more):
            place.await_ready()
        self.places = [first, self.second, *more]
        addresses = [place.address for place in self.places]
        roles = [
            kit.Role(
                MODULE, "train",
                {
                    "rank": rank,
                    "numel": job.numel,
                    "steps": job.steps,
                    "compute_s": job.compute_s,
                    "optimizer_on": job.optimizer_on,
                    "mode": job.mode,
                    "num_workers": job.num_workers,
                    "folder": str(self._folder),
                },
                kit.worker_environment(addresses, rank, job.num_workers, "tcp", "standby"),
                self._lab.inside(WORKERS + rank),
            )
            for rank in range(job.num_workers)
        ]  # fmt: skip
        with kit.roles(*roles) as workers:
            for worker in workers:
                worker.line()
            for worker in workers:
                worker.tell()
            troubles = trouble(self, job)
            results = [worker.result() for worker in workers]
        books = [book_of(self._folder, rank) for rank in range(job.num_workers)]
        has_ledgers = job.optimizer_on == "shards" and not job.mode
        proof = check_ledgers(self._folder, books, job.steps, LR, MOMENTUM) if has_ledgers else None
        return {
            "trouble": troubles,
            "proof": proof,
            "ends_s": [result["ends_s"] for result in results],
            "times_s": [time_s for result in results for time_s in result["times_s"][WARM_STEPS:]],
            "digests": {result["digest"] for result in results},
        }

    def steps(self) -> int:
        """Returns the steps that all workers have made."""
        paths = [progress_of(self._folder, rank) for rank in range(self._num_workers)]
        read = [path.read_bytes() for path in paths if path.exists()]
        return min((STEP.unpack(one)[0] if one else 0 for one in read), default=0)

    def reach(self, steps: int) -> None:
        """Waits until all workers have made so many steps, or their last one."""
        while self.steps() < min(steps, self._last):
            time.sleep(LOOK_S)

    def sent(self) -> tuple[float, int]:
        """Returns the time, and the bytes that the second shard's host has sent by then."""
        nbytes = netlab.shaped_nbytes("net", self._lab.name(self.second.host))
        return time.monotonic(), nbytes

    def stand(self, mbit: int = 0) -> int:
        """Gives the second shard a standby on the next host; returns the bytes sent."""
        wanted = MoveRequest(same_host=True, register=str(self._folder / "register"))
        wanted.failover_s = FAILOVER_S
        to = self.others[0]
        if to in self._starting:
            self._starting.remove(to)
            to.await_ready()
        here = self.second.address
        reply = move(here, to.address, mbit, ANYONE, lambda _: None, standby=wanted)
        return int(reply.sent_nbytes)

    def lose(self) -> float:
        """Loses the host of the second shard; returns when. Its standby, if any, is its place."""
        lost = self.second
        if self.others:
            self.second = self.others.pop(0)
        now_s = time.monotonic()
        self._lab.cut(lost.host)  # So that its kernel tells nobody.
        supervised = psutil.Process(lost.supervisor.pid)
        supervised.suspend()
        for child in supervised.children(recursive=True):
            child.kill()
        lost.supervisor.kill()
        lost.supervisor.wait()
        return now_s

    def come_back(self, host: int) -> None:
        """Starts an empty process on a host that was lost."""
        self._lab.cut(host, restore=True)
        self.others.append(self.start(1, host))
        self._starting.append(self.others[-1])

    def replace(self, host: int) -> None:
        """Starts an empty process of the second shard on its host, which was lost."""
        self.come_back(host)
        self.second = self.others.pop()

    def close(self) -> None:
        """Ends all processes, and restores all links."""
        for place in self._all:
            place.end()
        for host in range(SECOND, SECOND + NUM_SECOND):
            self._lab.cut(host, restore=True)


Trouble = Callable[[Scene, Job], Sequence[Any]]


def run(
    lab: netlab.Lab, job: Job, num_second: int, trouble: Trouble, num_shards: int = 2
) -> dict[str, Any]:
    """Trains once (`Scene.train`)."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(lab, Path(folder), num_shards)
        with contextlib.closing(scene):
            return scene.train(job, num_second, trouble)


def nothing(scene: Scene, job: Job) -> list[float]:
    """Leaves the shard alone."""
    return []


def alternate(scene: Scene, job: Job) -> list[tuple[float, int]]:
    """Gives the shard a standby and withdraws it, by turns of `moves` steps, as long as there are.

    Returns:
        `sent` at begin and end of each turn; every second one has a standby.
    """
    found = []
    scene.reach(WARM_STEPS)
    while scene.steps() < job.steps - 4 * job.moves:
        for has_standby in (False, True):
            if has_standby:
                scene.stand()
            scene.reach(scene.steps() + 2)
            found.append(scene.sent())
            scene.reach(scene.steps() + job.moves)
            found.append(scene.sent())
            if has_standby:
                withdraw(scene.second.address, ANYONE, lambda _: None)
    return found


def drain(scene: Scene, job: Job) -> list[float]:
    """Moves the shard from host to host; returns the pauses."""
    pauses = []
    while scene.others and scene.steps() < job.steps - QUIET_STEPS:
        to = scene.others.pop(0)
        pauses.append(move(scene.second.address, to.address, 0, ANYONE, lambda _: None).pause_s)
        scene.second.end()
        scene.second = to
        scene.reach(scene.steps() + QUIET_STEPS)
    return pauses


def turn(scene: Scene, job: Job) -> list[float]:
    """Moves each shard to a host of its own; returns the pauses, and when all began and ended."""
    new = [scene.start(index) for index in range(NUM_TURNS)]
    for place in new:
        place.await_ready()
    scene.reach(scene.steps() + job.steps // 4)
    begin_s, pauses = time.monotonic(), []
    for place, to in zip(scene.places, new, strict=True):
        pauses.append(move(place.address, to.address, 0, ANYONE, lambda _: None).pause_s)
        place.end()
        scene.reach(scene.steps() + QUIET_STEPS)
    return [*pauses, begin_s, time.monotonic()]


def lose(scene: Scene, job: Job) -> list[tuple[float, float]]:
    """Loses one host after the other, each with a standby.

    Returns:
        When each was lost, and when some steps had been made since.
    """
    times: list[tuple[float, float]] = []
    while len(times) < job.moves:
        scene.stand()
        if scene.steps() >= job.steps - 3 * QUIET_STEPS:
            break  # The next steps would be the last ones.
        scene.reach(scene.steps() + QUIET_STEPS)
        lost, before = scene.second.host, scene.steps()
        lost_s = scene.lose()
        scene.reach(before + 1 + QUIET_STEPS)
        times.append((lost_s, time.monotonic()))
        scene.come_back(lost)
    return times


def lose_alone(scene: Scene, job: Job) -> list[tuple[float, float]]:
    """Loses the host of a shard without a standby, again and again; returns as `lose` does."""
    times: list[tuple[float, float]] = []
    while len(times) < job.moves and scene.steps() < job.steps - 3 * QUIET_STEPS:
        scene.reach(scene.steps() + QUIET_STEPS)
        host, before = scene.second.host, scene.steps()
        lost_s = scene.lose()
        scene.replace(host)
        scene.reach(before + 1 + QUIET_STEPS)
        times.append((lost_s, time.monotonic()))
    return times


def fill(scene: Scene, job: Job) -> list[float]:
    """Gives the shard a standby in the middle; returns when that began and ended, and its bytes."""
    scene.reach(job.steps // 3)
    begin_s = time.monotonic()
    nbytes = scene.stand(CATCH_UP_MBIT)
    return [begin_s, time.monotonic(), nbytes]


def outages(
    lost_s: Sequence[tuple[float, float]], ends_s: Sequence[Sequence[float]]
) -> list[float]:
    """Returns the longest time without a finished step after each loss, of any worker.

    Args:
        lost_s: When each machine was lost, and when all workers had made some steps since.
        ends_s: When each worker has finished its steps.
    """
    found = []
    for begin_s, back_s in lost_s:
        gaps = [
            later - max(earlier, begin_s)
            for ends in ends_s
            for earlier, later in itertools.pairwise(ends)
            if begin_s < later <= back_s
        ]
        if not gaps:
            raise SystemExit("training was over before a loss: give more --steps")
        found.append(round(max(gaps), 3))
    return found


def still(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Returns a run of the job without trouble: one that a result has, or a new one."""
    runs: list[dict[str, Any]] = former.setdefault("still", [])
    for calm in runs:
        if job.is_that_of(calm):
            return calm
    found = run(lab, job, 1, nothing)
    if len(found["digests"]) != 1:
        raise SystemExit("the workers of a run without trouble have different weights")
    step_s = round(kit.median(found["times_s"]), 4)
    ledger = ledger_numel(NUM_WORKERS, job.steps)
    runs.append({"step_s": step_s, "digest": found["digests"].pop(), "ledger": ledger})
    runs[-1] |= asdict(job)
    return runs[-1]


def drains(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Moves the shard."""
    calm = still(lab, job, former)
    moved = run(lab, job, NUM_SECOND, drain)
    return {
        "drain": {
            "numel": job.numel,
            "pause_s": round(max(moved["trouble"]), 3),
            "step_s": calm["step_s"],
            "worst_step_s": round(max(moved["times_s"]), 3),
            "moves": len(moved["trouble"]),
            **counted(moved["proof"]),
            "identical": moved["digests"] == {calm["digest"]},
        }
    }


def turns(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Moves four shards in turn; the tickets of a run lie otherwise for another number of them."""
    calm, moved = (run(lab, job, 1, trouble, NUM_TURNS) for trouble in (nothing, turn))
    *pauses, begin_s, end_s = moved["trouble"]
    cost_s = max(extra_s(ends[WARM_STEPS:], begin_s, end_s) for ends in moved["ends_s"])
    return {
        "turns": {
            "cost_s": round(cost_s, 3),
            "share": round(cost_s / PERIOD_S, 4),
            "pause_s": round(max(pauses), 3),
            "worst_step_s": round(max(moved["times_s"]), 3),
            "moves": len(pauses),
            **counted(moved["proof"]),
            "identical": len(calm["digests"]) == 1 and moved["digests"] == calm["digests"],
        }
    }


def extra_s(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Returns the time that steps of a period took longer than as many before and after it.

    Args:
        ends_s: When a worker has finished its steps.
    """
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(ends_s)]
    inside = [gap for gap, at in gaps if begin_s < at <= end_s]
    outside = [gap for gap, at in gaps if not begin_s < at <= end_s]
    if not (inside and outside) or ends_s[-1] <= end_s:
        raise SystemExit("training was over before the moves: give more --steps")
    return sum(inside) - len(inside) * sum(outside) / len(outside)


def losses(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Loses machines, and adds to those that the same job has lost before."""
    calm = still(lab, job, former)
    lost = run(lab, job, NUM_SECOND, lose)
    before = former.get("machine_lost", {})
    if not job.is_that_of(before):
        before = {"times": [], "identical": True}
    times = [*before["times"], *outages(lost["trouble"], lost["ends_s"])]
    return {
        "machine_lost": {
            **{key: calm[key] for key in ("numel", "steps", "ledger", "step_s")},
            "times": times,
            "p99_s": sorted(times)[int(0.99 * len(times))],
            **{key: before.get(key, 0) + found for key, found in counted(lost["proof"]).items()},
            "identical": before["identical"] and lost["digests"] == {calm["digest"]},
        }
    }


def refills(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Loses machines of a shard that the workers fill."""
    mine = replace(job, optimizer_on="worker")
    calm, lost = (run(lab, mine, 1, trouble) for trouble in (nothing, lose_alone))
    times = outages(lost["trouble"], lost["ends_s"])
    is_identical = len(calm["digests"]) == 1 and lost["digests"] == calm["digests"]
    return {"refill": {"times": times, "worst_s": max(times), "identical": is_identical}}


def catch_ups(lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Fills a standby over slow links while workers train."""
    for host in range(lab.num_hosts):
        lab.slow(host, SLOW)
    filled = run(lab, job, 2, fill)
    for host in range(lab.num_hosts):
        lab.slow(host)
    begin_s, end_s, nbytes = filled["trouble"]
    paces = []
    for ends in filled["ends_s"]:
        before = [one for one in ends[WARM_STEPS:] if one < begin_s]
        during = [one for one in ends if begin_s <= one <= end_s]
        if len(before) < 2 or len(during) < 2:
            raise SystemExit("too few steps before or during the copy: give another --numel")
        usual_s = (before[-1] - before[0]) / (len(before) - 1)
        paces.append(usual_s * (len(during) - 1) / (during[-1] - during[0]))
    return {
        "catch_up": {
            "seconds": round(end_s - begin_s, 3),
            "nbytes": int(nbytes),
            "mbit": CATCH_UP_MBIT,
            "training": round(min(paces), 3),
        }
    }


def counted(proof: Proof) -> dict[str, int]:
    """Returns the counts of a proof, and says what it has found."""
    for text in proof.told:
        print(text, file=sys.stderr)
    return {key: getattr(proof, key) for key in COUNTS}


def costs(name: str, lab: netlab.Lab, job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Measures one of `COSTS`."""
    case = COSTS[name]
    found = cost_of(lab, replace(case, numel=case.numel or job.numel))
    return {name: found} if name == "cost" else {"costs": former.get("costs", {}) | {name: found}}


def cost_of(lab: netlab.Lab, case: Case) -> dict[str, Any]:
    """Returns what a standby costs."""
    job = Job(
        numel=case.numel,
        steps=WARM_STEPS + 3 * case.steps * (1 + case.turns),
        moves=case.steps,
        mode=case.mode,
        compute_s=case.compute_s,
        num_workers=case.num_workers,
    )
    for host in range(lab.num_hosts):
        lab.slow(host, case.rate)
    done = run(lab, job, 2, alternate)
    for host in range(lab.num_hosts):
        lab.slow(host)
    read = done["trouble"]
    paces = [pace(*ends, done["ends_s"]) for ends in zip(read[::2], read[1::2], strict=True)]
    without, with_it = np.array(paces[::2]).T, np.array(paces[1::2]).T  # Seconds, bytes.
    streams = with_it[1] - without[1]
    link_s = 8 * streams / netlab.bits_per_s(case.rate)
    return {
        **asdict(case),
        "turns": [round(float(one), 3) for one in with_it[0] / without[0]],
        "measured": round(float(np.median(with_it[0] / without[0])), 3),
        "formula": round(float(np.median(1 + link_s / without[0])), 3),
        "bound": 1 + (case.num_workers + 1) / case.num_workers,
        "step_s": round(float(np.median(without[0])), 4),
        "nbytes": int(np.median(without[1])),
        "stream_nbytes": int(np.median(streams)),
        "copies": round(float(np.median(streams)) / (4 * case.numel / 2), 2),
    }


def pace(
    begin: tuple[float, int], end: tuple[float, int], ends_s: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Returns seconds and bytes of a step between two readings of `sent`."""
    (begin_s, begin_nbytes), (end_s, end_nbytes) = begin, end
    made = [np.interp([begin_s, end_s], ends, range(len(ends))) for ends in ends_s]
    steps = float(np.mean([after - before for before, after in made]))
    return (end_s - begin_s) / steps, (end_nbytes - begin_nbytes) / steps


def off(before: Path, after: Path, turns: int) -> dict[str, Any]:
    """Returns the share that a round of one checkout takes longer than one of another."""
    times_s: dict[Path, list[float]] = {before: [], after: []}
    for _ in range(turns):
        for folder, times in times_s.items():
            times += versions.measure(folder.resolve(), ["tcp", "flat", 1, OFF_ROUNDS])[0]
    share = kit.median(times_s[after]) / kit.median(times_s[before]) - 1
    commits = {"before": kit.commit(before), "after": kit.commit(after)}
    return {"off_cost": round(share, 4), "off": {**commits, "rounds": turns * OFF_ROUNDS}}


PARTS = {
    "drain": drains,
    "turns": turns,
    "lost": losses,
    "refill": refills,
    "catch_up": catch_ups,
    **{name: partial(costs, name) for name in COSTS},
}
QUICK = ("drain", "lost", "cost")  # Of them, those within five minutes.


def measure(
    lab: netlab.Lab,
    job: Job,
    parts: Sequence[str],
    found: dict[str, Any],
    num_losses: int,
    out: Path | None,
) -> None:
    """Adds parts to a result, and writes each, so that it stays if a later one fails.

    Args:
        num_losses: Trains and loses machines again until there were so many.
    """
    for name in parts:
        found |= PARTS[name](lab, job, found)
        while name == "lost" and len(found["machine_lost"]["times"]) < num_losses:
            write(found, out)
            found |= PARTS[name](lab, job, found)
        found.setdefault("parts", {})[name] = kit.describe_run(MODULE)
        print(f"{name}: {found}", flush=True)
        write(found, out)


def write(found: Mapping[str, Any], out: Path | None) -> None:
    """Writes a result, if there is a place."""
    if out is not None:
        out.write_text(to_json(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measures the parts, and writes the result."""
    if measured.serve(sys.argv[1:], ROLES):
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the parameters")
    parser.add_argument("--only", choices=list(PARTS), help="measure this part, keep the others")
    parser.add_argument("--off", nargs=2, type=Path, metavar="FOLDER", help="only `off_cost`")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--moves", type=int, default=30, help="the most losses of one training")
    parser.add_argument(
        "--losses", type=int, default=0, help="train again until there were so many"
    )
    parser.add_argument("--numel", type=int, help="another number of parameters")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    numel = options.numel or (QUICK_NUMEL if options.quick else 25_600_000)
    job = Job(numel=numel, steps=options.steps, moves=options.moves)
    found: dict[str, Any] = {"off_cost": None}
    if (options.only or options.off) and options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    if options.off:
        found |= off(*options.off, turns=4)
        found.setdefault("parts", {})["off"] = kit.describe_run(MODULE)
    else:
        if (reason := netlab.available()) is not None:
            raise SystemExit(f"no network namespaces here: {reason}")
        with netlab.Lab(NUM_HOSTS, FAST) as lab:
            enter(lab.name(FIRST))  # So that the shards can be asked.
            every = list(QUICK) if options.quick else list(PARTS)
            parts = [options.only] if options.only else every
            measure(lab, job, parts, found, options.losses, options.out)
    lines = [f"{name}: {value}" for name, value in found.items()]
    kit.publish(found, "\n".join(lines), options.out, as_json=options.json)


if __name__ == "__main__":
    main()
