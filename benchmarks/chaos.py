"""Decoupled rounds under kills: learners and shards are killed and started again, without end.

    python -m benchmarks.chaos --quick --json
    python -m benchmarks.chaos --seconds 270 --folder /tmp/chaos --out docs/results/chaos.json
    python -m benchmarks.chaos --seconds 1800 --folder /tmp/chaos --out docs/results/chaos.json
    python -m benchmarks.chaos --machines --seconds 1800 --folder /tmp/lost --out FILE

12 learners train a small classifier in `diloco` with a quorum and `overlap=mirror` on 3 shards; a
step is a sleep and a minibatch, so that 12 of them fit on two cores, and the last one has half the
speed. A shard that is back before the answer to a round is due stops nobody. First they
train undisturbed, then as long while every 15 seconds a learner or a shard is killed (SIGKILL). A
killed learner is forked again from the measuring process at once; a shard is started again by its
supervisor, on its journal. With `--machines` each shard has a standby that takes over by itself,
also in the undisturbed run, and every 30 seconds a machine is lost for good: that of a learner, a
shard or a standby (`survival/machines.py`). Each of the two runs is kept in `--folder`: the
command, given again, continues with the run that is not there yet.

A token counts if the move of its round is in the weights of all slices, as of the time of the last
answer to that move. Goodput is tokens that count over those of the undisturbed run in the same
time. The loss on held-out data is that of the global weights that a learner begins a round with; it
is compared at equal tokens. Every move is accounted for (`survival/round_proof.py`): none that was
acknowledged may be missing from the weights or be in them twice. The exit code is 1 if one is.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
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
from benchmarks.survival import round_proof
from benchmarks.survival.loop import KilledJob
from benchmarks.survival.proof import COPIES
from benchmarks.survival.round_proof import Outer, Part, RoundNotebook, RoundProof
from pscore.partition import make_layout
from pscore.rules import DiLoCo
from pscore.types import TensorSpec

JOB = "chaos"
FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 10, 16
SHARPNESS = 4.0  # Of the labels: factor of the scores that they are drawn from.
RECORD = struct.Struct("<dd")  # Time of the monotonic clock, held-out loss.
TAIL = 0.1  # Share of the tokens over which a loss is averaged.
SHARES_OF_SHARDS = {False: 0.2, True: 1 / 3}  # Of the kills; with machines that of their number.
SPARE = 60  # Rounds for which the ledger has room beyond those of the run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run."""

    learners: int = 12  # Learners; the last one has half the speed.
    shards: int = 3  # Shards.
    seconds: float = 120.0  # Length of the training, from the first round of all learners.
    every_s: float = 15.0  # Seconds from kill to kill; 0: none.
    quorum: int = 8  # Learners with which a round may close.
    steps: int = 40  # Steps of a round.
    overlap: str = "mirror"  # Start of a round without the answer to the one before.
    delay: int = 30  # Steps of the next round after which that answer lands.
    think_s: float = 0.1  # Sleep of a step.
    lease_s: float = 20.0  # Lease of a silent learner.
    seed: int = 0  # Seed of the kills.
    machines: bool = False  # Whether machines are lost, and shards have standbys.

    @property
    def rule(self) -> DiLoCo:
        """The mode of the learners."""
        return DiLoCo(steps=self.steps, quorum=self.quorum, overlap=self.overlap, delay=self.delay)

    def ledger(self) -> tuple[int, list[Part]]:
        """Returns the length of the ledger, and its part in each slice."""
        rooms = int(self.seconds / (self.steps * self.think_s)) + SPARE
        needed = COPIES * self.learners * rooms
        numel = needed * self.shards
        while True:
            named = task(numel)[0].named_parameters()
            tensors = [TensorSpec(name=n, shape=tuple(p.shape), dtype="float32") for n, p in named]
            found = round_proof.parts(make_layout(tensors, self.shards))
            if min(part.numel for part in found) >= needed:
                return numel, found
            numel += numel // 4


def task(ledger: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns the learners' model, with a ledger of so many elements, and the one that labels."""
    torch.manual_seed(0)
    teacher = torch.nn.Linear(FEATURES, CLASSES)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    model.register_parameter(round_proof.LEDGER, torch.nn.Parameter(torch.zeros(ledger)))
    return model, teacher


def batch(teacher: torch.nn.Module, seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels, the latter drawn from the teacher's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, FEATURES, generator=generator)
    with torch.no_grad():
        chances = torch.softmax(SHARPNESS * teacher(inputs), dim=1)
    return inputs, torch.multinomial(chances, 1, generator=generator)[:, 0]


def held_out() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Returns the teacher, and inputs and labels that no learner trains with."""
    teacher = task(1)[1]
    return teacher, *batch(teacher, 1 << 40, 2000)


def learn(
    line: Connection, rank: int, environment: dict[str, str], setup: Setup, folder: Path
) -> None:
    """Trains as one learner until the file `stop` is there."""
    import psworker

    os.environ.update(environment)
    numel, ledger = setup.ledger()
    model = task(numel)[0]
    teacher, inputs_out, classes_out = held_out()
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    optimizer = psworker.DistributedOptimizer(
        inner, model.named_parameters(), mode=setup.rule, samples=float(BATCH)
    )
    exchange = optimizer._table.exchange
    assert round_proof.parts(exchange.layout) == ledger
    RoundNotebook(folder / f"{rank}.moves", rank, setup.learners, ledger).attach(exchange)
    stop, seed = folder / "stop", random.SystemRandom().getrandbits(40)
    think_s = setup.think_s * (2.0 if rank == setup.learners - 1 else 1.0)
    with (folder / f"{rank}.losses").open("ab", buffering=0) as losses:
        while not stop.exists():
            with torch.no_grad():
                loss = float(torch.nn.functional.cross_entropy(model(inputs_out), classes_out))
            losses.write(RECORD.pack(time.monotonic(), loss))
            for _ in range(setup.steps):
                time.sleep(think_s)
                inputs, classes = batch(teacher, seed, BATCH)
                seed += 1
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
    psworker.shutdown()
    line.send("done")


class Run:
    """The learners and shards of one run."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.job = KilledJob(
            JOB,
            folder,
            lambda rank, _, environment: Forked(learn, rank, environment, setup, folder),
            num_workers=setup.learners,
            num_shards=setup.shards,
            lease_s=setup.lease_s,
            seed=setup.seed,
            share_of_shards=SHARES_OF_SHARDS[setup.machines],
            on_machines=setup.machines,
        )

    def train(self) -> dict[str, Any]:
        """Trains; returns the account of the run."""
        job = self.job
        with job.running():
            while any(len(self.losses(rank)) < 2 for rank in range(self.setup.learners)):
                job.tend(0.1)
            job.begin_s = time.monotonic()
            self._disturb()
            end_s = time.monotonic()
            (self.folder / "stop").touch()
            for learner in job.workers:
                learner.hear(120.0)
            proof = self._check()
        return self._account(proof, job.begin_s, end_s)

    def losses(self, rank: int) -> list[tuple[float, float]]:
        """Returns the time and the held-out loss of each round that a learner has begun."""
        path = self.folder / f"{rank}.losses"
        data = path.read_bytes() if path.exists() else b""
        whole = len(data) - len(data) % RECORD.size
        return list(RECORD.iter_unpack(data[:whole]))

    def _disturb(self) -> None:
        every_s = self.setup.every_s or float("inf")
        next_s = self.job.begin_s + every_s
        while time.monotonic() < self.job.begin_s + self.setup.seconds:
            self.job.tend(0.05)
            if time.monotonic() >= next_s:
                next_s += every_s
                self.job.kill()

    def _check(self) -> RoundProof:
        """Compares the learners' files with the weights, when all learners have ended."""
        books = [self.folder / f"{rank}.moves" for rank in range(self.setup.learners)]
        ledger = self.job.shards.exported(JOB, round_proof.LEDGER)
        rule = self.setup.rule
        outer = Outer(rule.outer_lr, rule.outer_momentum)
        return round_proof.check(books, round_proof.cut(ledger, self.setup.ledger()[1]), outer)

    def _account(self, proof: RoundProof, begin_s: float, end_s: float) -> dict[str, Any]:
        """Returns the tokens that count, the curve of tokens and loss, the kills and the proof."""
        times = [when for when, _ in proof.counted if begin_s <= when < end_s]
        tokens = self.setup.steps * BATCH
        found = sorted(entry for rank in range(self.setup.learners) for entry in self.losses(rank))
        curve = [(tokens * bisect.bisect(times, at_s), loss) for at_s, loss in found]
        numbers = dataclasses.asdict(proof)
        del numbers["counted"]
        return {
            "seconds": end_s - begin_s,
            "tokens": tokens * len(times),
            "kills": self.job.kills,
            "proof": numbers,
            "curve": curve,
        }


def loss_at(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """Returns the mean loss of the rounds in the tenth of the tokens that ends there."""
    return statistics.fmean(loss for at, loss in curve if (1.0 - TAIL) * tokens <= at <= tokens)


def floor() -> float:
    """Returns the held-out loss of the model that has made the labels."""
    teacher, inputs, classes = held_out()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(SHARPNESS * teacher(inputs), classes))


def measure(setup: Setup, kept: Path) -> dict[str, Any]:
    """Returns the account of a run: one that is kept, or a new one, which is then kept.

    Raises:
        ValueError: The one that is kept has another setup.
    """
    asked = dataclasses.asdict(setup)
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if found["setup"] != asked:
            raise ValueError(f"{kept} is of another setup: give another --folder, or remove it")
        return found
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
        account = {"setup": asked, **Run(setup, Path(folder)).train()}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(account) + "\n", encoding="utf-8")
    return account


def compare(setup: Setup, folder: Path) -> dict[str, Any]:
    """Runs undisturbed and with kills, and returns the comparison."""
    calm = measure(dataclasses.replace(setup, every_s=0.0), folder / "undisturbed.json")
    storm = measure(setup, folder / "kills.json")
    equal = min(calm["tokens"], storm["tokens"])
    losses = loss_at(calm["curve"], equal), loss_at(storm["curve"], equal)
    return {
        **kit.describe_run("benchmarks.chaos"),
        "mode": (
            f"diloco(steps={setup.steps}, quorum={setup.quorum}, overlap={setup.overlap}, "
            f"delay={setup.delay})"
        ),
        "setup": dataclasses.asdict(setup),
        "kills": storm["kills"],
        "tokens": {"undisturbed": calm["tokens"], "kills": storm["tokens"]},
        "goodput": storm["tokens"] / storm["seconds"] * calm["seconds"] / calm["tokens"],
        "loss": {
            "undisturbed": losses[0],
            "kills": losses[1],
            "ratio": losses[1] / losses[0],
            "labels": floor(),
            "first": calm["curve"][0][1],
        },
        "equal_tokens": equal,
        "proof": {"undisturbed": calm["proof"], "kills": storm["proof"]},
    }


def main() -> None:
    """Runs both, prints the comparison, and writes the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60 s each, a kill every 5 s")
    parser.add_argument("--learners", type=int, default=12, help="the last has half the speed")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of each of the two runs")
    parser.add_argument("--every", type=float, help="seconds from kill to kill [15; machines: 30]")
    parser.add_argument("--machines", action="store_true", help="lose machines; with standbys")
    parser.add_argument("--quorum", type=int, help="learners [two thirds of them]")
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--overlap", default="mirror", help="of rounds: none, mirror or another")
    parser.add_argument("--delay", type=int, default=30, help="steps in which it lands")
    parser.add_argument("--think", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--folder", type=Path, help="keeps each run, so that a command continues")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    setup = Setup(
        learners=args.learners,
        shards=args.shards,
        seconds=60.0 if args.quick else args.seconds,
        every_s=5.0 if args.quick else args.every or (30.0 if args.machines else 15.0),
        quorum=args.quorum or max(1, args.learners * 2 // 3),
        steps=args.steps,
        overlap=args.overlap,
        delay=0 if args.overlap == "none" else args.delay,
        think_s=args.think,
        seed=args.seed,
        machines=args.machines,
    )
    prepare()
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-kept-") as folder:
        result = compare(setup, args.folder or Path(folder))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    proofs = result["proof"].values()
    is_exact = not any(proof[key] for proof in proofs for key in ("lost", "double", "torn"))
    columns = ["", "undisturbed", "with kills"]
    rows = [
        ["tokens that count", *result["tokens"].values()],
        ["loss at equal tokens", result["loss"]["undisturbed"], result["loss"]["kills"]],
        *(
            [name, *(proof[name] for proof in proofs)]
            for name in ("rounds", "acknowledged", "late", "lost", "double", "torn", "partial")
        ),
    ]
    kit.show(f"{len(result['kills'])} kills, goodput {result['goodput']:.3f}", columns, rows)
    for text in [text for proof in proofs for text in proof["told"]]:
        print(text)
    if args.json:
        print(json.dumps(result))
    sys.exit(0 if is_exact else 1)


if __name__ == "__main__":
    main()
