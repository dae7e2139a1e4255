"""How long a round takes on slow links: `python -m benchmarks.rounds --times`.

Four workers and four shards, each in a network namespace of its own (`netlab.py`), train a model of
1.6 million weights with `diloco` on links of 0.1 and 1 Gbit/s; in the last case each frame is held
for 20 ms on its way (`links/relay.py`). A step computes for 50 ms, which is sleeping, and a round
has 50 steps. An answer lands 30 steps into the next round; in `late` and `eager` it is used at its
end. Each figure is of the slowest worker: the mean seconds of two rounds, behind two others.
Beside it stands the same model in plain torch, in the same processes: the computing of a round.
The result file is written after each kind of link; started again, the command continues with those
that are missing. Needs root.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import psworker
from benchmarks import forked, kit
from benchmarks.links.simulated_gpu import SimulatedModel
from benchmarks.markdown import table
from benchmarks.round_links import Cluster, hosts_of_all, make_steps

SHAPES = ((400, 400),) * 10
COMPUTE_S, STEPS, DELAY_STEPS = 0.05, 50, 30
WARM_ROUNDS, ROUNDS = 2, 2  # The first answer brings the momentum along.
NETS = {
    "0.1 Gbit/s": ("100mbit", 0.0),
    "1 Gbit/s": ("1gbit", 0.0),
    "1 Gbit/s, 20 ms": ("1gbit", 0.02),
}
PLAIN, BLOCKING = "plain torch", "blocking"
OVERLAPS = ("late", "blend", "eager", "mirror")
FRAGMENTS = "mirror, 5 fragments"
TARGET = 0.03  # Of the computing, that an overlapped round may take longer.


def modes() -> dict[str, str]:
    """Returns the mode of each form; that of plain torch is empty."""
    rounds = f"diloco(steps={STEPS}"
    overlapped = {name: f"{rounds}, overlap={name}, delay={DELAY_STEPS})" for name in OVERLAPS}
    parts = f"{rounds}, overlap=mirror, delay={DELAY_STEPS}, fragments=5)"
    return {PLAIN: "", BLOCKING: f"{rounds})", **overlapped, FRAGMENTS: parts}


def train(line: Connection, mode: str) -> float:
    """Returns the seconds of a round."""
    model: Any = SimulatedModel(SHAPES, COMPUTE_S)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if mode:
        optimizer = psworker.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), mode=mode
        )

    make_steps(model, optimizer, WARM_ROUNDS * STEPS if mode else 0)
    line.send("warm")
    line.recv()
    start_s = time.perf_counter()
    make_steps(model, optimizer, ROUNDS * STEPS)
    seconds = (time.perf_counter() - start_s) / ROUNDS
    line.send("done")
    line.recv()
    if mode:
        psworker.shutdown()
    return seconds


def measure(out: Path | None) -> dict[str, Any]:
    """Returns the seconds of a round of all forms on all nets; nets in the file are kept."""
    forked.prepare()
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "numel": kit.numel_of(SHAPES),
        "compute_s": COMPUTE_S,
        "steps": STEPS,
        "delay": DELAY_STEPS,
    }
    found: dict[str, dict[str, float]] = {}
    if out is not None and out.exists():
        found = json.loads(out.read_text(encoding="utf-8"))["seconds"]
    for net, (rate, delay_s) in NETS.items():
        if net in found:
            continue
        with hosts_of_all(train, rate, delay_s) as cluster:
            found[net] = {name: _slowest(cluster, mode) for name, mode in modes().items()}
        kit.publish({**about, "seconds": found}, f"{net}: {found[net]}", out, as_json=False)
    return {**about, "seconds": found}


def _slowest(cluster: Cluster, mode: str) -> float:
    seconds: list[float] = cluster.run(mode)
    return max(seconds)


def rows_of(run: Mapping[str, Any]) -> str:
    """Returns the table of a run."""
    nets = run["seconds"]
    head = ["", *(part for net in nets for part in (f"{net}: a round, s", "above computing"))]
    rows = []
    for name in next(iter(nets.values())):
        cells = [name]
        for found in nets.values():
            above = found[name] / found[PLAIN] - 1
            cells += [f"{found[name]:.3f}", "" if name == PLAIN else f"{100 * above:+.1f} %"]
        rows.append(cells)
    return table(head, rows, "l" + "r" * (len(head) - 1))


def verdict(run: Mapping[str, Any]) -> str:
    """Returns on which nets all overlapped forms stay within the target, in words."""
    parts = []
    for net, found in run["seconds"].items():
        names = [name for name in found if name not in (PLAIN, BLOCKING)]
        most = max(found[name] / found[PLAIN] - 1 for name in names)
        parts.append(f"{'met' if most <= TARGET else '**not met**'} at {net}")
    return f"Overlapped rounds take at most {TARGET:.0%} more than computing: {'; '.join(parts)}."


def run(out: Path | None, *, as_json: bool) -> None:
    """Measures, prints the table, and writes the result file."""
    found = measure(out)
    kit.publish(found, f"{rows_of(found)}\n{verdict(found)}", out, as_json=as_json)
