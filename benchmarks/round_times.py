"""How long a round takes on slow links: `python -m benchmarks.rounds --times`.

Four workers and four shards, each in a network namespace of its own (`netlab.py`), train a model of
1.6 million weights with `diloco` on links of 0.1 and 1 Gbit/s; in some cases each packet is held
for 20 ms on its way (`links/delay.py`). A step computes for 50 or 100 ms, which is sleeping, and a
round has 50 or 100 steps. An answer lands 30 steps into the next round; in `late` and `eager` it is
used at its end. Each figure is of the slowest worker: the mean seconds of two rounds, behind two
others. Beside it stands the same model in plain torch, in the same processes: the computing of a
round. The result file is written after each case; started again, the command continues with those
that are missing. Needs root.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import psworker
from benchmarks import forked, kit
from benchmarks.links.simulated_gpu import SimulatedModel
from benchmarks.markdown import table
from benchmarks.round_links import Cluster, hosts_of_all, make_steps

SHAPES = ((400, 400),) * 10
DELAY_STEPS = 30
WARM_ROUNDS, ROUNDS = 2, 2  # The first answer brings the momentum along.
NETS = {
    "0.1 Gbit/s": ("100mbit", 0.0),
    "1 Gbit/s": ("1gbit", 0.0),
    "1 Gbit/s, 20 ms": ("1gbit", 0.02),
}
LENGTHS = {"50 steps of 50 ms": (50, 0.05), "100 steps of 100 ms": (100, 0.1)}
PLAIN, BLOCKING = "plain torch", "blocking"
OVERLAPS = ("late", "blend", "eager", "mirror")
FRAGMENTS = "mirror, 5 fragments"
TARGET = 0.03  # Of the computing, that an overlapped round may take longer.


class Run(NamedTuple):
    """One training of the workers."""

    mode: str
    steps: int  # Of a round.
    compute_s: float  # Of a step.


def modes(steps: int) -> dict[str, str]:
    """Returns the mode of each form, for rounds of so many steps; that of plain torch is empty."""
    rounds = f"diloco(steps={steps}"
    overlapped = {name: f"{rounds}, overlap={name}, delay={DELAY_STEPS})" for name in OVERLAPS}
    parts = f"{rounds}, overlap=mirror, delay={DELAY_STEPS}, fragments=5)"
    return {PLAIN: "", BLOCKING: f"{rounds})", **overlapped, FRAGMENTS: parts}


def train(line: Connection, run: Run) -> float:
    """Returns the seconds of a round."""
    model: Any = SimulatedModel(SHAPES, run.compute_s)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if run.mode:
        optimizer = psworker.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), mode=run.mode
        )

    make_steps(model, optimizer, WARM_ROUNDS * run.steps if run.mode else 0)
    line.send("warm")
    line.recv()
    start_s = time.perf_counter()
    make_steps(model, optimizer, ROUNDS * run.steps)
    seconds = (time.perf_counter() - start_s) / ROUNDS
    line.send("done")
    line.recv()
    if run.mode:
        psworker.shutdown()
    return seconds


def measure(out: Path | None) -> dict[str, Any]:
    """Returns the seconds of a round of all forms in all cases; cases in the file are kept."""
    forked.prepare()
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "numel": kit.numel_of(SHAPES),
        "delay": DELAY_STEPS,
    }
    found: dict[str, dict[str, dict[str, float]]] = {length: {} for length in LENGTHS}
    if out is not None and out.exists():
        found = json.loads(out.read_text(encoding="utf-8"))["seconds"]
    for (length, (steps, compute_s)), net in itertools.product(LENGTHS.items(), NETS):
        if net in found.setdefault(length, {}):
            continue
        with hosts_of_all(train, *NETS[net]) as cluster:
            found[length][net] = {
                name: _slowest(cluster, Run(mode, steps, compute_s))
                for name, mode in modes(steps).items()
            }
        said = f"{length}, {net}: {found[length][net]}"
        kit.publish({**about, "seconds": found}, said, out, as_json=False)
    return {**about, "seconds": found}


def _slowest(cluster: Cluster, run: Run) -> float:
    seconds: list[float] = cluster.run(run)
    return max(seconds)


def rows_of(run: Mapping[str, Any]) -> str:
    """Returns the table of a run: a row for each case."""
    cases = [(length, net) for length, nets in run["seconds"].items() for net in nets]
    names = [name for name in run["seconds"][cases[0][0]][cases[0][1]] if name != PLAIN]
    rows = []
    for length, net in cases:
        found = run["seconds"][length][net]
        above = [f"{found[name] / found[PLAIN] - 1:+.1%}" for name in names]
        rows.append([length, net, f"{found[PLAIN]:.3f}", *above])
    return table(["round", "links", f"{PLAIN}, s", *names], rows, "llr" + "r" * len(names))


def verdict(run: Mapping[str, Any]) -> str:
    """Returns in how many cases all overlapped forms stay within the target, in words."""
    longest = [
        max(found[name] / found[PLAIN] - 1 for name in found if name not in (PLAIN, BLOCKING))
        for nets in run["seconds"].values()
        for found in nets.values()
    ]
    num_met = sum(most <= TARGET for most in longest)
    return (
        f"Overlapped rounds take at most {TARGET:.0%} more than computing: met in {num_met} of "
        f"{len(longest)} cases."
    )


def run(out: Path | None, *, as_json: bool) -> None:
    """Measures, prints the table, and writes the result file."""
    found = measure(out)
    kit.publish(found, f"{rows_of(found)}\n{verdict(found)}", out, as_json=as_json)
