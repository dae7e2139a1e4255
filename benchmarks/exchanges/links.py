"""Step times on slow links: part of `benchmarks.decentralised` (`--links`). Needs root.

Each worker is in a network namespace of its own (`netlab.py`), with a link of 0.1 or 1 Gbit/s; in
two of the four cases each packet is held for 20 ms on its way (`links/delay.py`). A step computes
for 10 ms, which is sleeping; the rest is exchange, beside torch's DDP over Gloo on the same links,
in the same run, of the same model. `ssgd` has one shard on the first host, or one on each host. A
worker of `adpsgd` makes steps without waiting for its exchange, so its figure counts with
`exchanges`.

    MB out, by the formula, of n float32 numbers and k workers, in one step:
    allreduce, DDP   8n (k - 1) / k        dpsgd(exp)   4n          adpsgd   4n for each exchange
    ssgd             8n (k - 1) / k        mean over the hosts, with weights that shards send
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import psworker
from benchmarks import forked, hosts, kit
from benchmarks.forked import Forked
from benchmarks.links.link_use import counters
from benchmarks.links.simulated_gpu import SimulatedModel
from benchmarks.netlab import Lab

SHAPES = ((400, 400),) * 10
NUMEL = kit.numel_of(SHAPES)
COMPUTE_S, DELAY_S = 0.01, 0.02
NETS = {
    "0.1 Gbit/s": ("100mbit", 0.0),
    "1 Gbit/s": ("1gbit", 0.0),
    "1 Gbit/s, 20 ms": ("1gbit", DELAY_S),
    "0.1 Gbit/s, 20 ms": ("100mbit", DELAY_S),
}
DDP = "DDP, Gloo"
MODES = {
    DDP: "ddp",
    "allreduce": "allreduce",
    "dpsgd": "dpsgd",
    "adpsgd": "adpsgd",
    "ssgd, 1 shard": "ssgd",
    "ssgd, a shard each": "ssgd",
}
WARM_STEPS, NUM_FREE = 3, 20  # NUM_FREE: times as many steps where no step waits.
NUM_ROUNDS = 2  # Of all modes; the better one of a mode counts.
ONE_SHARD_PORT, GLOO_PORT = 7170, 29600


@dataclass(slots=True, kw_only=True)
class Measured:
    """One mode on one net."""

    net: str  # Name in `NETS`.
    workers: int  # Number of workers.
    mode: str  # Name in `MODES`.
    step_ms: float  # Mean over the workers.
    out_mb: float  # Bytes that a worker's link carried out in one step, in 10**6, headers included.
    formula_mb: float  # By the formula.
    exchanges: float  # In one step of a worker; of `adpsgd`.


# ----- a worker


def work(line: Connection) -> None:
    """Trains once for each run that the line brings: mode, number of steps, variables."""
    while True:
        mode, num_steps, variables = line.recv()
        os.environ.update(variables)
        line.send(train(line, mode, num_steps))


def train(line: Connection, mode: str, num_steps: int) -> tuple[float, float, float]:
    """Returns seconds, bytes out and exchanges of one step."""
    model: Any = SimulatedModel(SHAPES, COMPUTE_S)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    gossip = None
    if mode == MODES[DDP]:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    else:
        optimizer = psworker.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), mode=mode
        )
        if mode != "ssgd":
            gossip = optimizer._table.local_step._peers.gossip

    def one_step() -> None:
        optimizer.zero_grad()
        model(time.perf_counter()).backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        one_step()
    line.send("warm")
    line.recv()
    before, start_s = counters()["net"].sent, time.perf_counter()
    first = gossip.stats.num_exchanges if gossip else 0
    for _ in range(num_steps):
        one_step()
    seconds, sent = time.perf_counter() - start_s, counters()["net"].sent - before
    exchanges = (gossip.stats.num_exchanges if gossip else 0) - first
    line.send("done")
    line.recv()
    if mode == MODES[DDP]:
        del model  # It would end the group's thread while it holds the GIL, which that needs.
        torch.distributed.destroy_process_group()
    else:
        psworker.shutdown()
    return seconds / num_steps, sent / num_steps, exchanges / num_steps


# ----- the measuring process


class Net:
    """Hosts with their workers and shards, all on links of one kind."""

    def __init__(self, lab: Lab, workers: Sequence[Forked]) -> None:
        """Measures with workers that are ready."""
        self._lab, self._workers = lab, workers
        self._num_runs = 0

    def run(self, name: str, num_steps: int) -> tuple[float, float, float]:
        """Returns mean seconds, bytes out and exchanges of a step of one mode."""
        self._num_runs += 1
        mode = MODES[name]
        for rank, worker in enumerate(self._workers):
            worker.tell((mode, num_steps, self._variables(name, rank)))
        for answer in ("go", "end"):  # After all are warm, and after all have done their steps.
            for worker in self._workers:
                worker.hear()
            for worker in self._workers:
                worker.tell(answer)
        found = [worker.hear() for worker in self._workers]
        seconds, sent, exchanges = (statistics.fmean(part) for part in zip(*found, strict=True))
        return seconds, sent, exchanges

    def _variables(self, name: str, rank: int) -> Mapping[str, str]:
        num = len(self._workers)
        has_one = name != "ssgd, a shard each"
        servers = [
            f"{self._lab.address(host)}:{ONE_SHARD_PORT if has_one else hosts.PORT}"
            for host in range(1 if has_one else num)
        ]
        job = f"links-{os.getpid()}-{self._num_runs}"
        return kit.worker_environment(servers, rank, num, "auto", job) | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._lab.address(0),
            "MASTER_PORT": str(GLOO_PORT + self._num_runs),
            "GLOO_SOCKET_IFNAME": "net",
        }


@contextmanager
def net(num: int, rate: str, delay_s: float) -> Iterator[Net]:
    """Makes the hosts, and starts their shards and workers; ends all in any case."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(num, rate, delay_s))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-links-"))
        workers = [Forked(work, namespace=lab.name(host)) for host in range(num)]
        stack.enter_context(forked.ending(workers))
        shards = [_shard(lab, host, num, hosts.PORT, folder) for host in range(num)]
        shards.append(_shard(lab, 0, 1, ONE_SHARD_PORT, folder))
        stack.enter_context(kit.roles(*shards))
        for shard in shards:
            assert shard.popen.stdout is not None
            if not shard.popen.stdout.readline():
                raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
        yield Net(lab, workers)


def _shard(lab: Lab, host: int, num: int, port: int, folder: str) -> kit.Role:
    arguments = {
        "host": lab.address(host),
        "index": host,
        "num_shards": num,
        "folder": f"{folder}/{port}",
        "port": port,
    }
    return kit.Role(hosts.MODULE, "serve", arguments, prefix=lab.inside(host))


def formula_mb(name: str, num: int, exchanges: float) -> float:
    """Returns the 10**6 bytes that a worker sends in one step.

    Args:
        name: In `MODES`.
        num: Number of workers.
        exchanges: In one step, of `adpsgd`.
    """
    models = {"dpsgd": 1.0, "adpsgd": exchanges}.get(name, 2 * (num - 1) / num)
    return 4e-6 * NUMEL * models


def measure(nets: Sequence[str], nums: Sequence[int], num_steps: int) -> list[dict[str, Any]]:
    """Returns the figures of all modes on all nets, and prints a table of each."""
    forked.prepare()
    found: list[Measured] = []
    for name in nets:
        rate, delay_s = NETS[name]
        for num in nums:
            with net(num, rate, delay_s) as made:
                own = [_best(made, name, num, mode, num_steps) for mode in MODES]
            found += own
            base = own[0].step_ms
            rows = [
                [m.mode, m.step_ms, m.step_ms / base, m.out_mb, m.formula_mb, m.exchanges]
                for m in own
            ]
            columns = ["mode", "step ms", "of DDP", "MB out", "formula", "exchanges"]
            kit.show(f"{num} workers, {name}, {NUMEL / 1e6:.1f}M parameters", columns, rows)
    return [
        {key: round(x, 3) if isinstance(x, float) else x for key, x in asdict(one).items()}
        for one in found
    ]


def joined(
    former: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Returns the figures of a run, with those of former runs for other nets and workers."""

    def key(one: Mapping[str, Any]) -> tuple[str, int]:
        return one["net"], one["workers"]

    new = {key(one) for one in found}
    every = [one for one in former if key(one) not in new] + list(found)
    return sorted(every, key=lambda one: (list(NETS).index(one["net"]), one["workers"]))


def _best(made: Net, name: str, num: int, mode: str, num_steps: int) -> Measured:
    """Returns the better one of the runs of a mode."""
    steps = num_steps * (NUM_FREE if mode == "adpsgd" else 1)
    seconds, sent, exchanges = min(made.run(mode, steps) for _ in range(NUM_ROUNDS))
    return Measured(
        net=name,
        workers=num,
        mode=mode,
        step_ms=1e3 * seconds,
        out_mb=1e-6 * sent,
        formula_mb=formula_mb(mode, num, exchanges),
        exchanges=exchanges,
    )
