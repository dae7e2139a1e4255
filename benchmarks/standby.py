"""Moves of a shard while its job trains, and losses of its machine: the pause, beside a step.

    python -m benchmarks.standby --quick --json                  # 2.56 million parameters
    python -m benchmarks.standby --only lost --out FILE          # one part; adds to FILE's losses

Two shards and two workers in `ssgd` with momentum, over TCP, on loopback, all on this machine. The
second shard moves to an empty process, then to another one, and so on, each time by `psserver
drain`; the process that it leaves is stopped.

    drain             `pause_s`: the longest time in which a shard answered no worker;
                      `step_s`: the median of a step; `worst_step_s`: the longest step of a run;
                      `moves`; `identical`: whether the weights at the end are those, to the bit, of
                      a run without a move
    machine_lost      the second shard has a standby that takes over after `FAILOVER_S`; supervisor
                      and process are killed at once, again and again. `times`: the longest time
                      without a finished step of a worker after each loss; `p99_s`; `identical` as
                      above, and then nothing is `lost`, `double`, `torn` or `partial`
    cost              `measured`: a step while the second shard has a standby, relative to one
                      without; `formula`: the same on a link that is full
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
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import kit, measured, versions
from pscore.json_text import to_json
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.standby_pb2 import MoveRequest
from psserver.remote import ask
from psserver.remote.drain import move

MODULE = "benchmarks.standby"
NUM_WORKERS = 2
FAILOVER_S = 0.5  # Silence after which a standby takes over.
LOOK_S = 0.02
OFF_ROUNDS = 12  # In one turn.
WARM_STEPS = 10  # The first steps of a job compile loops; they are left out of the times.


def train(rank: int, numel: int, steps: int) -> dict[str, Any]:
    """Trains on drawn gradients; returns the seconds of its steps, and a hash of the weights."""
    import torch

    import psworker

    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(rank)
    parts = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(torch.optim.SGD(parts, lr=0.1, momentum=0.9), named)
    grads = [torch.randn(numel // 8, generator=drawn) for _ in parts]
    measured.await_go()
    times_s, ends_s = [], []
    for _ in range(steps):
        begin_s = time.perf_counter()
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.clone()
        optimizer.step()
        times_s.append(time.perf_counter() - begin_s)
        ends_s.append(time.monotonic())
    with optimizer.global_weights():
        whole = torch.cat([part.detach() for part in parts])
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    optimizer.close()
    psworker.shutdown()
    return {"times_s": times_s, "ends_s": ends_s, "digest": digest}


ROLES = {"train": train}


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The process of a shard, with its supervisor."""

    address: str
    supervisor: subprocess.Popen[str]

    def lose(self) -> None:
        """Kills both at once, as the loss of a machine does."""
        children = psutil.Process(self.supervisor.pid).children()
        self.supervisor.send_signal(signal.SIGSTOP)
        for child in children:
            child.kill()
        self.supervisor.kill()


@contextlib.contextmanager
def shard(folder: Path, index: int) -> Iterator[Place]:
    """Starts the process of one of two shards."""
    port = free_port()
    command = [sys.executable, "-m", "psserver", "start", "--shards", "2", "--cluster", "bench"]
    command += ["--shard-index", str(index), "--port", str(port), "--metrics-port", "0"]
    command += ["--lease-s", "5", "--log-level", "error"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith("PACELINE_SERVERS="):
            raise SystemExit("a shard did not start")
        yield Place(address=f"127.0.0.1:{port}", supervisor=process)
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Names what is trained, and how often the second shard has trouble meanwhile."""

    numel: int
    steps: int
    moves: int

    def is_that_of(self, run: Mapping[str, Any]) -> bool:
        """Returns whether a run without trouble has trained the same."""
        return (run.get("numel"), run.get("steps")) == (self.numel, self.steps)


Trouble = Callable[[Path, Place, list[Place]], list[float]]


def run(numel: int, steps: int, spares: int, before: Trouble, trouble: Trouble) -> dict[str, Any]:
    """Trains once.

    Args:
        numel: Number of parameters.
        steps: Number of steps.
        spares: Empty processes of the second shard.
        before: Is done before the first step.
        trouble: Is done to the second shard meanwhile; its numbers are returned as `trouble`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = stack.enter_context(shard(folder, 0))
        second, *others = [stack.enter_context(shard(folder, 1)) for _ in range(1 + spares)]
        addresses = [first.address, second.address]
        roles = [
            kit.Role(
                MODULE,
                "train",
                {"rank": rank, "numel": numel, "steps": steps},
                kit.worker_environment(addresses, rank, NUM_WORKERS, "tcp", "standby"),
            )
            for rank in range(NUM_WORKERS)
        ]
        with kit.roles(*roles) as workers:
            for worker in workers:
                worker.line()
            before(folder, second, others)
            for worker in workers:
                worker.tell()
            troubles = trouble(folder, second, others)
            results = [worker.result() for worker in workers]
    return {
        "trouble": troubles,
        "ends_s": [result["ends_s"] for result in results],
        "times_s": [time_s for result in results for time_s in result["times_s"][WARM_STEPS:]],
        "digests": {result["digest"] for result in results},
    }


def nothing(folder: Path, here: Place, others: list[Place]) -> list[float]:
    """Leaves the shard alone."""
    return []


def drain(folder: Path, here: Place, others: list[Place]) -> list[float]:
    """Moves the shard from process to process; returns the pauses."""
    pauses = []
    for to in others:
        pauses.append(move(here.address, to.address, 0, ANYONE, lambda _: None).pause_s)
        here.supervisor.terminate()
        here = to
    return pauses


def stand(folder: Path, here: Place, others: list[Place]) -> list[float]:
    """Gives the shard a standby."""
    (folder / "register").mkdir(exist_ok=True)
    wanted = MoveRequest(same_host=True, register=str(folder / "register"), failover_s=FAILOVER_S)
    move(here.address, others[0].address, 0, ANYONE, lambda _: None, standby=wanted)
    return []


def lose(folder: Path, here: Place, others: list[Place]) -> list[float]:
    """Loses one machine after the other, each with a standby; returns when."""
    times = []
    for number, to in enumerate(others):
        stand(folder, here, others[number:])
        times.append(time.monotonic())
        here.lose()
        here = to
        while not ask.answers([here.address])[0].jobs:  # Until it serves.
            time.sleep(LOOK_S)
    return times


def outages(lost_s: Sequence[float], ends_s: Sequence[Sequence[float]]) -> list[float]:
    """Returns the longest time without a finished step after each loss, of any worker."""
    found = []
    for begin_s, end_s in itertools.pairwise([*lost_s, float("inf")]):
        gaps = [
            later - max(earlier, begin_s)
            for ends in ends_s
            for earlier, later in itertools.pairwise(ends)
            if begin_s < later <= end_s or earlier <= begin_s < later
        ]
        if not gaps:
            raise SystemExit("training was over before a loss: give more --steps")
        found.append(round(max(gaps), 3))
    return found


def still(job: Job) -> dict[str, Any]:
    """Trains without trouble; the other parts compare with it."""
    found = run(job.numel, job.steps, 0, nothing, nothing)
    if len(found["digests"]) != 1:
        raise SystemExit("the workers of a run without trouble have different weights")
    step_s = round(kit.median(found["times_s"]), 4)
    return {"still": {"step_s": step_s, "digest": found["digests"].pop(), **asdict(job)}}


def drains(job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Moves the shard."""
    moved = run(job.numel, job.steps, job.moves, nothing, drain)
    return {
        "drain": {
            "pause_s": round(max(moved["trouble"]), 3),
            "step_s": former["still"]["step_s"],
            "worst_step_s": round(max(moved["times_s"]), 3),
            "moves": job.moves,
            "identical": moved["digests"] == {former["still"]["digest"]},
        }
    }


def losses(job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Loses machines, and adds to those lost before."""
    lost = run(job.numel, job.steps, job.moves, nothing, lose)
    before = former.get("machine_lost", {"times": [], "identical": True})
    times = [*before["times"], *outages(lost["trouble"], lost["ends_s"])]
    is_same = before["identical"] and lost["digests"] == {former["still"]["digest"]}
    return {
        "machine_lost": {
            "times": times,
            "p99_s": sorted(times)[int(0.99 * len(times))],
            **dict.fromkeys(("lost", "double", "torn", "partial"), 0 if is_same else None),
            "identical": is_same,
        }
    }


def costs(job: Job, former: dict[str, Any]) -> dict[str, Any]:
    """Trains while the second shard has a standby."""
    stood = run(job.numel, job.steps, 1, stand, nothing)
    share = round(kit.median(stood["times_s"]) / former["still"]["step_s"], 3)
    return {"cost": {"measured": share, "formula": 1 + 1 / NUM_WORKERS}}


def off(before: Path, after: Path, turns: int) -> dict[str, Any]:
    """Returns the share that a round of one checkout takes longer than one of another."""
    times_s: dict[Path, list[float]] = {before: [], after: []}
    for _ in range(turns):
        for folder, times in times_s.items():
            times += versions.measure(folder.resolve(), ["tcp", "flat", 1, OFF_ROUNDS])[0]
    share = kit.median(times_s[after]) / kit.median(times_s[before]) - 1
    commits = {"before": kit.commit(before), "after": kit.commit(after)}
    return {"off_cost": round(share, 4), "off": {**commits, "rounds": turns * OFF_ROUNDS}}


PARTS = {"drain": drains, "lost": losses, "cost": costs}


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
    parser.add_argument("--moves", type=int, default=3, help="or losses")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    numel = 2_560_000 if options.quick else 25_600_000
    job = Job(numel=numel, steps=options.steps, moves=options.moves)
    found: dict[str, Any] = {"off_cost": None}
    if (options.only or options.off) and options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    if options.off:
        parts: list[str] = []
        found |= off(*options.off, turns=4)
    else:
        parts = [options.only] if options.only else list(PARTS)
        if not job.is_that_of(found.get("still", {})):
            found |= still(job)
    for name in parts:
        found |= PARTS[name](job, found)
        found.setdefault("parts", {})[name] = kit.describe_run(MODULE)
        print(f"{name}: {found}", flush=True)
        if options.out is not None:  # These figures stay if a later part fails.
            options.out.write_text(to_json(found, indent=1) + "\n", encoding="utf-8")
    if options.off:
        found.setdefault("parts", {})["off"] = kit.describe_run(MODULE)
    lines = [f"{name}: {value}" for name, value in found.items()]
    kit.publish(found, "\n".join(lines), options.out, as_json=options.json)


if __name__ == "__main__":
    main()
