"""Bytes and step times of rounds on a link of 100 Mbit/s: `python -m benchmarks.rounds --links`.

Four workers and four shards, each in a network namespace of its own (`netlab.py`), train a model of
10.2 million weights; a step computes for 50 ms, which is sleeping, and its gradients are random.
Each figure is of one step of one worker, behind the first rounds, whose answers are whole: seconds,
and the bytes that the worker's link has carried out and in, with all headers and heartbeats. Beside
it torch's DDP over Gloo on the same links, in the same run. All take the same tokens in a step, so
shares of bytes are the same per token. Needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import psworker
from benchmarks import forked, hosts, kit
from benchmarks.forked import Forked
from benchmarks.links.link_use import counters
from benchmarks.links.simulated_gpu import SimulatedModel
from benchmarks.markdown import table
from benchmarks.netlab import Lab

SHAPES = ((640, 640),) * 25
COMPUTE_S = 0.05
RATE = "100mbit"
NUM_WORKERS = NUM_SHARDS = 4
GLOO_PORT = 29700
TARGET = 0.015  # Share of DDP's bytes, each way.


class Form(NamedTuple):
    """A mode and its compressors; without a mode torch's DDP."""

    mode: str = ""
    pushes: str = "none"
    pulls: str = "none"
    steps: int = 4  # Of each measurement.
    warm: int = 2


DDP = "DDP, Gloo"
FORMS = {
    DDP: Form(),
    "diloco, H = 20": Form("diloco(steps=20)", steps=40, warm=20),
    "sparseloco both ways, k = 512, H = 20": Form(
        "local(steps=20)", "sparseloco(k=512)", "sparseloco(k=512, decay=1.0)", 60, 60
    ),
    "sparseloco both ways, k = 64, H = 20": Form(
        "local(steps=20)", "sparseloco", "sparseloco(decay=1.0)", 60, 60
    ),
}


class Figures(NamedTuple):
    """One step of one worker."""

    seconds: float
    out_nbytes: float
    in_nbytes: float


# ----- a worker


def work(line: Connection) -> None:
    """Trains once for each run that the line brings: the form and the variables."""
    while True:
        form, variables = line.recv()
        os.environ.update(variables)
        line.send(train(line, form))


def train(line: Connection, form: Form) -> Figures:
    """Returns the figures of a step."""
    model: Any = SimulatedModel(SHAPES, COMPUTE_S, seed=0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if not form.mode:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    else:
        optimizer = psworker.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            mode=form.mode,
            compression=form.pushes,
            pull_compression=form.pulls,
        )

    def go_on(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(time.perf_counter()).backward()
            optimizer.step()

    go_on(form.warm)
    line.send("warm")
    line.recv()
    before, start_s = counters()["net"], time.perf_counter()
    go_on(form.steps)
    seconds, after = time.perf_counter() - start_s, counters()["net"]
    line.send("done")
    line.recv()
    if form.mode:
        psworker.shutdown()
    else:
        del model  # It would end the group's thread while it holds the GIL, which that needs.
        torch.distributed.destroy_process_group()
    moved = after.sent - before.sent, after.received - before.received
    return Figures(*(each / form.steps for each in (seconds, *moved)))


# ----- the measuring process


@contextmanager
def hosts_of_all() -> Iterator[tuple[Lab, list[Forked]]]:
    """Makes the hosts, and starts workers and shards; ends all in any case."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(NUM_WORKERS + NUM_SHARDS, RATE))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-rounds-"))
        workers = [Forked(work, namespace=lab.name(host)) for host in range(NUM_WORKERS)]
        stack.enter_context(forked.ending(workers))
        shards = []
        for index in range(NUM_SHARDS):
            arguments = {
                "host": lab.address(NUM_WORKERS + index),
                "index": index,
                "num_shards": NUM_SHARDS,
                "folder": folder,
            }
            prefix = lab.inside(NUM_WORKERS + index)
            shards.append(kit.Role(hosts.MODULE, "serve", arguments, prefix=prefix))
        stack.enter_context(kit.roles(*shards))
        for shard in shards:
            assert shard.popen.stdout is not None
            if not shard.popen.stdout.readline():
                raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
        yield lab, workers


def run_form(lab: Lab, workers: Sequence[Forked], number: int, form: Form) -> Figures:
    """Returns the means over the workers."""
    for rank, worker in enumerate(workers):
        worker.tell((form, _variables(lab, rank, number)))
    for answer in ("go", "end"):  # After all are warm, and after all have done their steps.
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell(answer)
    found = [worker.hear() for worker in workers]
    return Figures(*(statistics.fmean(part) for part in zip(*found, strict=True)))


def _variables(lab: Lab, rank: int, number: int) -> Mapping[str, str]:
    servers = [f"{lab.address(NUM_WORKERS + i)}:{hosts.PORT}" for i in range(NUM_SHARDS)]
    job = f"rounds-{os.getpid()}-{number}"
    return kit.worker_environment(servers, rank, NUM_WORKERS, "auto", job) | {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(GLOO_PORT + number),
        "GLOO_SOCKET_IFNAME": "net",
    }


def measure() -> dict[str, Any]:
    """Returns the figures of all forms."""
    forked.prepare()
    found = {}
    with hosts_of_all() as (lab, workers):
        for number, (name, form) in enumerate(FORMS.items()):
            found[name] = run_form(lab, workers, number, form)._asdict()
            print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "numel": kit.numel_of(SHAPES),
        "forms": found,
    }


def rows_of(run: Mapping[str, Any]) -> str:
    """Returns the table of a run."""
    base = run["forms"][DDP]
    head = ["", "a step, s", "MB out a step", "of DDP's", "MB in a step", "of DDP's"]
    rows = [
        [
            name,
            f"{row['seconds']:.3f}",
            f"{1e-6 * row['out_nbytes']:.3f}",
            f"{row['out_nbytes'] / base['out_nbytes']:.2%}",
            f"{1e-6 * row['in_nbytes']:.3f}",
            f"{row['in_nbytes'] / base['in_nbytes']:.2%}",
        ]
        for name, row in run["forms"].items()
    ]
    return table(head, rows, "lrrrrr")


def verdict(run: Mapping[str, Any]) -> str:
    """Returns whether the sparse forms of a run stay within the target, in words."""
    base = run["forms"][DDP]
    shares = [
        row[way] / base[way]
        for name, row in run["forms"].items()
        if FORMS[name].pushes != "none"
        for way in ("out_nbytes", "in_nbytes")
    ]
    is_met = "met" if max(shares) <= TARGET else "not met"
    return f"At most {TARGET:.1%} of DDP's bytes, each way, with sparseloco: {is_met}."


def run(out: Path | None, *, as_json: bool) -> None:
    """Measures, prints the table, and writes the result file."""
    found = measure()
    print(f"{rows_of(found)}\n{verdict(found)}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found))
