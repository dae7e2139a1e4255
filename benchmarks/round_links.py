"""Bytes and step times of rounds on a link of 100 Mbit/s: `python -m benchmarks.rounds --links`.

Four workers and four shards, each in a network namespace of its own (`netlab.py`), train a model of
10.2 million weights; a step computes for 50 ms, which is sleeping, and its gradients are random.
Each figure is of one step of one worker, behind the first rounds, whose answers are whole: seconds,
and the bytes that the worker's link has carried out and in, with all headers and heartbeats. Beside
it torch's DDP over Gloo on the same links, in the same run. All take the same tokens in a step, so
shares of bytes are the same per token. Needs root.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def work(line: Connection, train: Callable[[Connection, Any], Any]) -> None:
    """Trains once for each run that the line brings, with the variables of a launcher."""
    while True:
        what, variables = line.recv()
        os.environ.update(variables)
        line.send(train(line, what))


def make_steps(model: Any, optimizer: Any, steps: int) -> None:
    """Makes steps of a simulated model."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(time.perf_counter()).backward()
        optimizer.step()


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

    make_steps(model, optimizer, form.warm)
    line.send("warm")
    line.recv()
    before, start_s = counters()["net"], time.perf_counter()
    make_steps(model, optimizer, form.steps)
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


class Cluster:
    """The hosts with their workers and shards, on links of one kind."""

    def __init__(self, lab: Lab, workers: Sequence[Forked]) -> None:
        """Measures with workers that are ready."""
        self._lab, self._workers = lab, workers
        self._num_runs = 0

    def run(self, what: Any) -> list[Any]:
        """Returns what each worker has measured.

        Args:
            what: Told to the workers, with the variables of a launcher.
        """
        for rank, worker in enumerate(self._workers):
            worker.tell((what, self._variables(rank)))
        for answer in ("go", "end"):  # After all are warm, and after all have done their steps.
            for worker in self._workers:
                worker.hear()
            for worker in self._workers:
                worker.tell(answer)
        self._num_runs += 1
        return [worker.hear() for worker in self._workers]

    def _variables(self, rank: int) -> Mapping[str, str]:
        lab = self._lab
        servers = [f"{lab.address(NUM_WORKERS + i)}:{hosts.PORT}" for i in range(NUM_SHARDS)]
        job = f"rounds-{os.getpid()}-{self._num_runs}"
        return kit.worker_environment(servers, rank, NUM_WORKERS, "auto", job) | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": str(GLOO_PORT + self._num_runs),
            "GLOO_SOCKET_IFNAME": "net",
        }


@contextmanager
def hosts_of_all(
    train: Callable[[Connection, Any], Any], rate: str, delay_s: float = 0.0
) -> Iterator[Cluster]:
    """Makes the hosts, and starts workers and shards; ends all in any case.

    Args:
        train: Trains a worker once, and returns what it has measured.
        rate: Rate of each link, each way, as tc writes it.
        delay_s: Seconds for which the switch holds each packet.
    """
    with ExitStack() as stack:
        num = NUM_WORKERS + NUM_SHARDS
        lab = stack.enter_context(Lab(num, rate, delay_s))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-rounds-"))
        workers = [Forked(work, train, namespace=lab.name(host)) for host in range(NUM_WORKERS)]
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
        yield Cluster(lab, workers)


def measure() -> dict[str, Any]:
    """Returns the figures of all forms."""
    forked.prepare()
    found = {}
    with hosts_of_all(train, RATE) as cluster:
        for name, form in FORMS.items():
            parts = zip(*cluster.run(form), strict=True)  # The means over the workers.
            found[name] = Figures(*map(statistics.fmean, parts))._asdict()
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
    head = ["", "a step, s", "MB out a step", "of DDP's", "in, of DDP's"]
    rows = [
        [
            name,
            f"{row['seconds']:.3f}",
            f"{1e-6 * row['out_nbytes']:.3f}",
            f"{row['out_nbytes'] / base['out_nbytes']:.2%}",
            f"{row['in_nbytes'] / base['in_nbytes']:.2%}",
        ]
        for name, row in run["forms"].items()
    ]
    return table(head, rows, "lrrrr")


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
    kit.publish(found, f"{rows_of(found)}\n{verdict(found)}", out, as_json=as_json)
