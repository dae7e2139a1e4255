"""Decoupled rounds under kills: 12 learners, 3 shards, one killed every 15 seconds.

    python -m benchmarks.chaos --seconds 120
    python -m benchmarks.chaos --seconds 1800 --out docs/results/chaos.json

Learners train a small classifier in `diloco` with a quorum; a step is a sleep and a minibatch, so
that 12 of them fit on two cores, and the last one has half the speed. First they train undisturbed,
then as long while every few seconds a learner or a shard is killed (SIGKILL). A killed learner is
forked again from the measuring process at once; a shard is started again by its supervisor, on its
journal.

A token counts once the push of its round is acknowledged, which the learner writes down. Goodput is
tokens that count over those of the undisturbed run in the same time. The loss on held-out data is
that of the global weights that a learner begins a round with; it is compared at equal tokens. Lost
and double pushes are not looked for here: the simulator does that exactly (`make simulate`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import kit
from benchmarks.forked import Forked, prepare
from benchmarks.survival.shards import Shards, free_ports

LEARNERS, SHARDS = 12, 3
FEATURES, CLASSES, BATCH = 32, 10, 16
RECORD = struct.Struct("<ddd")  # Time of the monotonic clock, tokens of the round, held-out loss.
SHARE_OF_SHARDS = 0.2  # Of the kills: as 3 are of 15 processes.
TAIL = 0.1  # Share of the tokens over which a loss is averaged.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run.

    Attributes:
        seconds: Length of the training, from the first round of all learners.
        every_s: Seconds from kill to kill; 0: none.
        mode: Mode of the learners.
        think_s: Sleep of a step.
        lease_s: Lease of a silent learner.
    """

    seconds: float
    every_s: float
    mode: str
    think_s: float
    lease_s: float = 20.0


def task() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns the learners' model and the one that labels the data."""
    torch.manual_seed(0)
    teacher = torch.nn.Linear(FEATURES, CLASSES)
    return (
        torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, CLASSES)
        ),
        teacher,
    )


def batch(teacher: torch.nn.Module, seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels, the latter drawn from the teacher's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, FEATURES, generator=generator)
    with torch.no_grad():
        chances = torch.softmax(4.0 * teacher(inputs), dim=1)
    return inputs, torch.multinomial(chances, 1, generator=generator)[:, 0]


def learn(line: Connection, rank: int, environment: dict[str, str], plan: dict[str, Any]) -> None:
    """Trains as one learner until the file `stop` is there."""
    import psworker

    os.environ.update(environment)
    model, teacher = task()
    held_out = batch(teacher, 1 << 40, 2000)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = psworker.DistributedOptimizer(
        inner, model.named_parameters(), mode=plan["mode"], samples=float(BATCH)
    )
    stop, seed = Path(plan["folder"]) / "stop", random.SystemRandom().getrandbits(40)
    with (Path(plan["folder"]) / f"{rank}.book").open("ab", buffering=0) as book:
        while not stop.exists():
            with torch.no_grad():
                loss = float(torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
            for _ in range(plan["steps"]):
                time.sleep(plan["think_s"])
                inputs, classes = batch(teacher, seed, BATCH)
                seed += 1
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
            book.write(RECORD.pack(time.monotonic(), plan["steps"] * BATCH, loss))
    psworker.shutdown()
    line.send("done")


class Run:
    """The learners and shards of one run."""

    def __init__(self, setup: Setup, folder: Path, steps: int, seed: int) -> None:
        self.setup, self.folder, self.steps = setup, folder, steps
        self.rng = random.Random(seed)
        self.kills: list[str] = []
        self._restarts = [0] * LEARNERS
        self.learners: list[Forked] = []
        (folder / "state").mkdir()
        flags = ["--shards", str(SHARDS), "--lease-s", str(setup.lease_s)]
        self.shards = Shards(folder, folder / "state", flags, port=free_ports(SHARDS))

    def learner(self, rank: int) -> Forked:
        """Starts a learner, or starts it again."""
        environment = kit.worker_environment(self.shards.addresses, rank, LEARNERS, "auto", "chaos")
        environment["TORCHELASTIC_RESTART_COUNT"] = str(self._restarts[rank])
        slow = 2.0 if rank == LEARNERS - 1 else 1.0
        plan = {
            "folder": str(self.folder),
            "mode": self.setup.mode,
            "steps": self.steps,
            "think_s": slow * self.setup.think_s,
        }
        return Forked(learn, rank, environment, plan)

    def train(self) -> tuple[float, float]:
        """Trains; returns begin and end, of the monotonic clock."""
        self.shards.start()
        try:
            self.learners = [self.learner(rank) for rank in range(LEARNERS)]
            while not all(self.book(rank) for rank in range(LEARNERS)):
                self.tend(0.1)
            begin_s = time.monotonic()
            next_s = begin_s + (self.setup.every_s or float("inf"))
            while time.monotonic() < begin_s + self.setup.seconds:
                self.tend(0.05)
                if time.monotonic() >= next_s:
                    next_s += self.setup.every_s
                    self.kill()
            end_s = time.monotonic()
            (self.folder / "stop").touch()
            for learner in self.learners:
                learner.hear(120.0)
            return begin_s, end_s
        finally:
            for learner in self.learners:
                learner.end()
            self.shards.stop()

    def tend(self, seconds: float) -> None:
        """Waits, and raises what a learner has raised."""
        time.sleep(seconds)
        for learner in self.learners:
            if learner.has_told():
                learner.hear()

    def kill(self) -> None:
        """Kills a learner, which is started again, or a shard."""
        if self.rng.random() < SHARE_OF_SHARDS:
            index = self.rng.randrange(SHARDS)
            if self.shards.signal(index, 9):
                self.kills.append(f"shard {index}")
            return
        rank = self.rng.randrange(LEARNERS)
        self.learners[rank].end()
        self._restarts[rank] += 1
        self.learners[rank] = self.learner(rank)
        self.kills.append(f"learner {rank}")

    def book(self, rank: int) -> list[tuple[float, float, float]]:
        """Returns a learner's rounds: time, tokens and loss."""
        path = self.folder / f"{rank}.book"
        data = path.read_bytes() if path.exists() else b""
        whole = len(data) - len(data) % RECORD.size
        return list(RECORD.iter_unpack(data[:whole]))

    def rounds(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Returns tokens so far and loss, of all rounds in the order of time."""
        found = sorted(entry for rank in range(LEARNERS) for entry in self.book(rank))
        total, curve = 0.0, []
        for at_s, tokens, loss in found:
            if begin_s <= at_s < end_s:
                total += tokens
                curve.append((total, loss))
        return curve


def loss_at(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """Returns the mean loss of the rounds in the tenth of the tokens that ends there."""
    return statistics.fmean(loss for at, loss in curve if (1.0 - TAIL) * tokens <= at <= tokens)


def measure(setup: Setup, steps: int, seed: int) -> tuple[list[tuple[float, float]], list[str]]:
    """Returns the curve of tokens and loss, and the kills."""
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
        run = Run(setup, Path(folder), steps, seed)
        begin_s, end_s = run.train()
        return run.rounds(begin_s, end_s), run.kills


def main() -> None:
    """Runs both, prints the comparison, and writes the result file."""
    parser = argparse.ArgumentParser(description="decoupled rounds under kills")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the two runs")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from kill to kill")
    parser.add_argument("--quorum", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--think", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    prepare()
    mode = f"diloco(steps={args.steps}, quorum={args.quorum})"
    calm, _ = measure(
        Setup(seconds=args.seconds, every_s=0.0, mode=mode, think_s=args.think),
        args.steps,
        args.seed,
    )
    storm, kills = measure(
        Setup(seconds=args.seconds, every_s=args.every, mode=mode, think_s=args.think),
        args.steps,
        args.seed,
    )
    equal = min(calm[-1][0], storm[-1][0])
    losses = loss_at(calm, equal), loss_at(storm, equal)
    result = {
        "command": " ".join(["python -m benchmarks.chaos", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "mode": mode,
        "learners": LEARNERS,
        "shards": SHARDS,
        "seconds": args.seconds,
        "kills": kills,
        "tokens": {"undisturbed": calm[-1][0], "kills": storm[-1][0]},
        "goodput": storm[-1][0] / calm[-1][0],
        "loss": {"undisturbed": losses[0], "kills": losses[1], "ratio": losses[1] / losses[0]},
        "equal_tokens": equal,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
