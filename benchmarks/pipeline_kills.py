"""A pipeline under kills: workers and shards are killed and started again while it trains.

    python -m benchmarks.pipeline_kills --quick --json
    python -m benchmarks.pipeline_kills --seconds 600 --out docs/results/pipeline_kills.json

Five workers train three stages of 2, 2 and 1 replicas with `on_lost="continue"` on two shards. A
forward and a backward pass are sleeps. Every 10 seconds a worker or a shard is killed (SIGKILL). A
killed worker is forked again at once; a shard is started again by its supervisor, on its journal.

Each stage adds a vector to its input, and the loss of minibatch m is one of its components, drawn
each time it is computed among the `COPIES` components of m. So the gradient of every stage is 1 at
that component and does not depend on the weights. The components of m that have changed in the end
are the times that a stage has counted it: exactly one, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import kit
from benchmarks.forked import Forked, prepare
from benchmarks.markdown import machine
from benchmarks.survival.loop import KilledJob

RESULTS = kit.ROOT / "docs" / "results" / "pipeline_kills.json"
JOB = "pipeline-kills"
REPLICAS = (2, 2, 1)
COPIES = 16  # Components of a minibatch.
TIME = struct.Struct("<d")  # Of the monotonic clock.
STALL_S = 1.0  # A gap between two losses that is called a stop.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run."""

    minibatches: int  # Minibatches of the training.
    every_s: float = 10.0  # Seconds from kill to kill.
    think_s: float = 0.03  # Sleep of a forward pass of the last stage, which has one replica.
    lease_s: float = 5.0  # Lease of a silent worker.
    seed: int = 0  # Seed of the kills.

    @property
    def numel(self) -> int:
        """Components of a stage's vector."""
        return self.minibatches * COPIES


class Offset(nn.Module):
    """Adds a vector, and takes some time for it."""

    def __init__(self, numel: int, seconds: float) -> None:
        """Begins with zeros.

        Args:
            numel: Length of the vector.
            seconds: Sleep of a forward pass.
        """
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(numel))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` plus the vector, `(1, numel)`."""
        time.sleep(self._seconds)
        return x + self.offset


def work(
    line: Connection, rank: int, environment: dict[str, str], setup: Setup, folder: Path
) -> None:
    """Trains as one worker."""
    import psworker

    os.environ.update(environment)
    losses = (folder / f"{rank}.losses").open("ab", buffering=0)

    def loss_of(output: torch.Tensor, minibatch: int) -> torch.Tensor:
        losses.write(TIME.pack(time.monotonic()))
        copy = random.SystemRandom().randrange(COPIES)
        return output[0, minibatch * COPIES + copy]

    run = psworker.Pipeline(
        nn.Sequential(*(Offset(setup.numel, setup.think_s * count) for count in REPLICAS)),
        torch.zeros(1, setup.numel),
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        [(str(stage), count) for stage, count in enumerate(REPLICAS)],
        on_lost="continue",
    )
    inputs = torch.zeros(1, setup.numel)
    for minibatch in range(run.minibatches, setup.minibatches):
        run.step(inputs, minibatch)
    run.finish()
    values = next(iter(run.state_dict().values())).numpy()
    with (folder / f"{rank}.draft").open("wb") as file:
        np.save(file, values)
    os.replace(folder / f"{rank}.draft", folder / f"{rank}.npy")
    line.send("done")


class Run:
    """The workers and shards of one run."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """Prepares them; starts nothing yet."""
        self.setup, self.folder = setup, folder
        self.job = KilledJob(
            JOB,
            folder,
            lambda rank, _, environment: Forked(work, rank, environment, setup, folder),
            num_workers=sum(REPLICAS),
            num_shards=2,
            lease_s=setup.lease_s,
            seed=setup.seed,
        )

    def train(self) -> dict[str, Any]:
        """Trains; returns the account of the run."""
        job = self.job
        with job.running():
            while not self._losses():
                job.tend(0.05)
            job.begin_s = time.monotonic()
            next_s = job.begin_s + self.setup.every_s
            while not all(done := [self._is_done(rank) for rank in range(sum(REPLICAS))]):
                job.tend(0.05, self._is_done)
                if time.monotonic() >= next_s:
                    next_s += self.setup.every_s
                    if not any(done):  # Else the training is over.
                        job.kill()
            return self._account(job.begin_s, time.monotonic())

    def _is_done(self, rank: int) -> bool:
        return (self.folder / f"{rank}.npy").exists()

    def _losses(self) -> list[float]:
        """Returns the times of all losses that the last stage has computed."""
        times: list[float] = []
        for rank in range(sum(REPLICAS[:-1]), sum(REPLICAS)):
            path = self.folder / f"{rank}.losses"
            data = path.read_bytes() if path.exists() else b""
            whole = data[: len(data) - len(data) % TIME.size]
            times += [when for (when,) in TIME.iter_unpack(whole)]
        return sorted(times)

    def _account(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Returns the minibatches by how often each stage has counted them, and the stops."""
        stages = []
        for stage, count in enumerate(REPLICAS):
            ranks = range(sum(REPLICAS[:stage]), sum(REPLICAS[:stage]) + count)
            weights = [np.load(self.folder / f"{rank}.npy") for rank in ranks]
            times = (weights[0].reshape(-1, COPIES) != 0).sum(1)
            stages.append(
                {
                    "once": int((times == 1).sum()),
                    "lost": int((times == 0).sum()),
                    "double": int((times > 1).sum()),
                    "replicas_differ": sum(bool((other != weights[0]).any()) for other in weights),
                }
            )
        times_s = [begin_s, *(when for when in self._losses() if when > begin_s)]
        gaps = np.diff(times_s)
        return {
            "seconds": end_s - begin_s,
            "kills": self.job.kills,
            "stages": stages,
            "computed": len(self._losses()),
            "stopped_s": float(gaps[gaps > STALL_S].sum()),
            "longest_stop_s": float(gaps.max()),
            "stops_of_workers_s": self._stops(gaps, times_s, "worker"),
            "stops_of_shards_s": self._stops(gaps, times_s, "shard"),
        }

    def _stops(self, gaps: np.ndarray, times_s: list[float], kind: str) -> list[float]:
        """Returns for each kill of a kind the longest gap in the following seconds."""
        found = []
        for when, name in self.job.kills:
            first = times_s[0] + when
            near = [
                float(gap)
                for gap, begin in zip(gaps, times_s, strict=False)
                if begin + gap >= first and begin <= first + self.setup.every_s / 2
            ]
            if name.startswith(kind) and near:
                found.append(round(max(near), 3))
        return found


def results() -> str:
    """Returns the account of docs/pipelines.md."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    counts = zip(*(one.values() for one in found["stages"]), strict=True)
    once, lost, twice, differ = map(sum, counts)
    stops = {name: statistics.median(found[f"stops_of_{name}s_s"]) for name in ("worker", "shard")}
    of_shards = sum(name.startswith("shard") for _, name in found["kills"])
    about = (
        f"`{found['command']}`, {found['date']}, commit {found['commit']}, "
        f"{machine(found['machine'])}: "
        f"{len(found['kills'])} kills in {found['seconds'] / 60:.0f} minutes, {of_shards} of them "
        "of shards."
    )
    said = (
        f"The stages together have counted {once:,} minibatches once, lost {lost} and counted "
        f"{twice} twice; {differ} replicas differ at the end. No minibatch ended for "
        f"{stops['worker']:.1f} s after a killed worker and "
        f"{stops['shard']:.1f} s after a killed shard (medians), at most for "
        f"{found['longest_stop_s']:.1f} s. {found['computed'] - found['setup']['minibatches']} "
        "minibatches were computed again."
    )
    return f"{about} {said}"


def main() -> None:
    """Runs it, prints the account, and writes the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60 s, a kill every 5 s")
    parser.add_argument("--seconds", type=float, default=600.0, help="about; sets the minibatches")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from kill to kill")
    parser.add_argument("--think", type=float, default=0.03, help="seconds of a forward pass")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    seconds = 60.0 if args.quick else args.seconds
    setup = Setup(
        minibatches=max(1, int(0.6 * seconds / args.think)),
        every_s=5.0 if args.quick else args.every,
        think_s=args.think,
        seed=args.seed,
    )
    prepare()
    with tempfile.TemporaryDirectory(prefix="paceline-pipeline-kills-") as folder:
        account = Run(setup, Path(folder)).train()
    result = {
        **kit.describe_run("benchmarks.pipeline_kills"),
        "replicas": REPLICAS,
        "setup": dataclasses.asdict(setup),
        **account,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    columns = ["stage", "counted once", "lost", "double", "replicas that differ"]
    rows = [[stage, *one.values()] for stage, one in enumerate(account["stages"])]
    kit.show(
        f"{len(account['kills'])} kills in {account['seconds']:.0f} s, longest stop "
        f"{account['longest_stop_s']:.1f} s",
        columns,
        rows,
    )
    if args.json:
        print(json.dumps(result))
    wrong = ("lost", "double", "replicas_differ")
    sys.exit(1 if any(one[key] for one in account["stages"] for key in wrong) else 0)


if __name__ == "__main__":
    main()
