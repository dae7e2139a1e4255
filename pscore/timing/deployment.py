"""A job as its time depends on it: hosts, links, slices, computing, and the costs of a machine.

A host has one full-duplex link, which its workers and its shards share; two processes of one host
exchange through memory. `psworker advise` and the closed forms (closed.py) read it, and the
simulation of a job in time (pssim/timing) runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.partition import SLICE_NUMEL_MAX, make_layout
from pscore.types import TensorSpec

FORWARD_SHARE = 1 / 3  # Share of a step's computing before the first gradient can be ready.
FAR_S = 5e-3  # Longest round trip without pacing (pscore/net/congestion.py).
PACED = 0.8  # Share of a link that paced connections fill.
GBIT = 125e6  # Bytes per second of 1 Gbit/s.


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Costs of a machine; `RATE_SOURCES` says where each number comes from."""

    link_share: float = 0.93  # Payload bytes that a link carries, over its nominal bandwidth.
    # Share of that which connections carry over a round trip beyond `FAR_S`: `PACED` where the
    # system paces them (BBR).
    far_share: float = 1.0
    memory: float = 3.2e9  # Bytes per second between two processes of one host.
    receive: float = 2.0e9  # Bytes per second that a thread of a shard receives and adds.
    send: float = 4.0e9  # Bytes per second that a thread of a shard sends.
    update: float = 2.5e9  # Bytes of weights per second of a shard's optimizer, on one thread.
    worker: float = 2.5e9  # Bytes per second that a worker sends or receives.
    ring: float = 2.5e9  # Bytes per second that a process exchanges in all-reduce, links aside.
    local: float = 3.2e9  # Bytes per second of a local update, which reads or writes two arrays.
    encode: float = 1.5e9  # Bytes of gradients per second that a worker compresses.
    # Bytes of gradients per second that a thread of a shard decompresses and adds.
    decode: float = 2.0e9
    # Seconds of a thread for one push or pull, beside its bytes, of the shard and of the worker.
    message_s: float = 0.2e-3
    tls: float = 0.6e9  # Bytes per second that one thread encrypts or decrypts.
    # Hosts, at most, between which all-reduce sends a model once each way: it adds up within each
    # host first. Between more hosts it is a ring of all processes.
    tree_hosts: int = 0


# Rates of a model on a GPU: local updates and compressors run there, and payloads cross its bus.
GPU_RATES = replace(MachineRates(), ring=1e11, local=5e11, encode=2e10, worker=2.2e9, tree_hosts=2)
GPU_SOURCE = (
    "assumed: 500 GB/s of its memory, 20 GB/s of compressors, all-reduce by NCCL at 100 GB/s"
)

RATE_SOURCES = {
    "link_share": "assumed: 4.4 % are headers (docs/links.md), 2.5 % pauses of connections",
    "far_share": "docs/links.md: BBR leaves links idle for a fifth of the time",
    "memory": "docs/dataplane.md: 3.2 GB/s between two processes of one machine",
    "receive": "docs/results/transport.jsonl: CPU seconds of the TCP plane, half of them a shard's",
    "send": "docs/results/transport.jsonl: CPU seconds of the TCP plane, a quarter of them",
    "update": "assumed: SGD with momentum reads three arrays and writes two",
    "worker": "docs/results/transport.jsonl: CPU seconds of the TCP plane, half of them a worker's",
    "ring": "assumed: Gloo is as fast as a worker's sockets",
    "local": "docs/dataplane.md: 3.2 GB/s of memory",
    "encode": "assumed for 2-bit; `psworker bench compressors` measures it",
    "decode": "assumed for 2-bit; `psworker bench compressors` measures it",
    "message_s": "docs/dataplane.md: 0.76 ms of a round of one slice, by TCP, in four such parts",
    "tls": "assumed: 0.3 GB/s on two cores that do both sides",
    "tree_hosts": "NCCL takes a tree on two nodes: github.com/NVIDIA/nccl/issues/946",
}


@dataclass(frozen=True, slots=True)
class TimedSlice:
    """One slice: its shard, its elements, and whether its pushes may be compressed."""

    shard: int
    numel: int
    compress: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return FLOAT_NBYTES * self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Workers and shards on hosts, a model in slices, and the time that a step computes."""

    worker_hosts: tuple[int, ...]  # The host of each worker.
    shard_hosts: tuple[int, ...]  # The host of each shard.
    # The slices, in the order of the flat vector: the first is ready first in backward.
    slices: tuple[TimedSlice, ...]
    link: float  # Nominal bandwidth of each host's link, each way, in bytes per second.
    # Factors on it, by host, where a link is slower or faster.
    link_factors: Mapping[int, float] = field(default_factory=dict)
    round_trip_s: float = 0.2e-3  # Round trip between two hosts, in seconds.
    compute_s: float  # Seconds of forward and backward.
    deviation: float = 0.0  # Standard deviation of them from step to step, over the mean.
    slow: Mapping[int, float] = field(default_factory=dict)  # Factors on `compute_s`, by worker.
    group: int = 1  # Processes of each worker, which share its slices.
    overlap: bool = True  # Whether pushes leave during backward.
    num_state: int = 1  # State arrays of the shards' optimizer.
    threads: int = 2  # Threads of each shard.
    # Cores that all hosts share, where one machine stands for them; None: no thread waits for a
    # core. The closed forms do not know it.
    cores: int | None = None
    tls: bool = False  # Whether connections between hosts are encrypted.
    rates: MachineRates = MachineRates()  # Costs of a machine.

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.worker_hosts)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shard_hosts)

    @property
    def hosts(self) -> tuple[int, ...]:
        """All hosts, in order."""
        return tuple(sorted({*self.worker_hosts, *self.shard_hosts}))

    @property
    def numel(self) -> int:
        """Elements of the model."""
        return sum(each.numel for each in self.slices)

    @property
    def nbytes(self) -> int:
        """Bytes of the model in float32."""
        return FLOAT_NBYTES * self.numel

    def payload_rate(self, host: int) -> float:
        """Returns the payload bytes per second that a host's link carries, each way."""
        far_share = self.rates.far_share if self.round_trip_s > FAR_S else 1.0
        return self.link * self.link_factors.get(host, 1.0) * self.rates.link_share * far_share

    def shares(self) -> list[float]:
        """Returns the share of the model that each shard has."""
        numels: Counter[int] = Counter()
        for each in self.slices:
            numels[each.shard] += each.numel
        numel = self.numel
        return [numels[shard] / numel for shard in range(self.num_shards)]

    def computing_s(self, waited_for: int | None = None) -> float:
        """Returns the computing seconds of the slowest worker that a step waits for.

        Args:
            waited_for: Number of the fastest workers that a step waits for; None: all.
        """
        number = self.num_workers
        rank = number if waited_for is None else min(waited_for, number)
        means = sorted(self.slow.get(worker, 1.0) for worker in range(number))
        steady = means[rank - 1]
        if not self.deviation or number == 1:
            return self.compute_s * steady
        # The expected value of an order statistic of normal values (Blom 1958), among equal ones.
        near = sum(mean > steady / (1 + 2 * self.deviation) for mean in means[:rank])
        quantile = NormalDist().inv_cdf((near - 0.375) / (near + number - rank + 0.25))
        return self.compute_s * steady * (1 + self.deviation * max(0.0, quantile))


def cut_slices(
    numel: int, num_shards: int, per_shard_max: int | None = None
) -> tuple[TimedSlice, ...]:
    """Returns the slices of a model of one large tensor.

    Args:
        per_shard_max: The most slices of a shard; a coarser layout is made where there are more.
            None: the layout of a real job.

    Raises:
        ConfigError: There is no such layout.
    """
    per_shard = -(-numel // num_shards)
    if per_shard_max is not None and per_shard > per_shard_max * SLICE_NUMEL_MAX:
        longest = -(-per_shard // per_shard_max)
        return tuple(
            TimedSlice(number % num_shards, longest) for number in range(per_shard_max * num_shards)
        )
    if numel < 1:
        raise ConfigError(f"the model has {numel} elements, must be 1 or more")
    tensor = TensorSpec(name="model", shape=(numel,), dtype="float32")
    return tuple(
        TimedSlice(spec.shard, spec.numel) for spec in make_layout([tensor], num_shards).slices
    )
