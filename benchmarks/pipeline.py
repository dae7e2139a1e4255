"""A pipeline beside data parallelism on slow links: `python -m benchmarks.pipeline [--json]`.

Four hosts (`benchmarks.netlab`: network namespaces with shaped links), each with a worker and a
shard, train VGG-16 as PipeDream's authors measured it (128 images a minibatch). Computing is a
sleep of each layer's time, and weights and activations have its bytes. To let two cores carry it,
all bytes are divided by `NBYTES_SCALE`, all times by a scale of the link, and the link's bandwidth
by the quotient of both: the share of computing and sending is that of the full size, and so are
the figures here, in minibatches a second of all workers together:

    ssgd        `DistributedOptimizer`, synchronous, on shards
    ddp         torch's DistributedDataParallel over Gloo
    ssd         `DistributedOptimizer(mode="ssd(steps=5)")`, on shards
    torch       torch's `Schedule1F1B` over Gloo, with the cuts that suit it best; at 1 Gbit/s only
    pipeline    `psworker.Pipeline` with the plan that the partitioner finds for the link
    predicted   the partitioner's figure for that plan

Updates are real: those of an unreplicated stage by torch's SGD with momentum, whose time for each
layer is measured first and is a part of the profile.

    python -m benchmarks.pipeline --quick --json                                # under five minutes
    python -m benchmarks.pipeline --json --results docs/results/pipeline.json

Torch's pipeline has one worker for each of up to four stages, and empties itself after each update,
of `MICRO_BATCHES` minibatches. A run that stands still ends with the stacks of all workers.

`bytes_saved` is the part of `ssgd`'s bytes a minibatch that the pipeline does not send, as counted
by the kernel at all hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import forked, kit
from benchmarks.hosts import PORT
from benchmarks.links import link_use
from benchmarks.netlab import Lab, available, bits_per_s
from psworker.pipeline.plan.costs import ShardsCost
from psworker.pipeline.plan.measure import update_s, with_momentum
from psworker.pipeline.plan.partition import Level, Partition
from psworker.pipeline.plan.profile import Layer, Profile, read_profile
from psworker.pipeline.plan.verdict import compare

MODULE = "benchmarks.pipeline"
PROFILE = kit.ROOT / "tests/unit/psworker/pipeline/plan/profiles" / "vgg16.json"
NUM_WORKERS = 4
FLOAT_NBYTES = 4
SLEEP_S_MIN = 1e-3  # Shorter ones are added to the next.
MASTER_PORT = 29700  # Of the first run of DDP.
WARM_STEPS = 3  # Of data parallelism; more than the warm-up of ssd.
MINIBATCHES = 6  # Of a pipeline, for a step of data parallelism.
MICRO_BATCHES = 8  # Minibatches between two flushes of torch's pipeline: one update.
RUN_S_MAX = 150.0  # A run that takes longer stands still.
PIPELINE, DDP, TORCH = "pipeline", "ddp", "torch"
TORCH_LINKS = ("1gbit",)
MODES = {"ssgd": "ssgd", DDP: DDP, "ssd": "ssd(steps=5, warmup=1)", TORCH: TORCH}


class Scale(NamedTuple):
    """The numbers that times and bytes are divided by."""

    time: int
    nbytes: int


class Link(NamedTuple):
    """A bandwidth, and the scales at which two cores carry its steps."""

    rate: str
    parallel: Scale  # Of data parallelism: a step of about a second.
    pipeline: Scale  # Fewer bytes cross the link: they need not be divided as much.

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the full size, each way."""
        return bits_per_s(self.rate) / 8

    def shaped(self, scale: Scale) -> str:
        """Returns the rate of the link as it is made."""
        return f"{bits_per_s(self.rate) * scale.time / scale.nbytes / 1e6:g}mbit"

    def scale(self, mode: str) -> Scale:
        """Returns the scales of a mode."""
        return self.pipeline if mode in (PIPELINE, TORCH) else self.parallel


LINKS = (
    Link("100mbit", Scale(60, 160), Scale(1, 10)),
    Link("1gbit", Scale(8, 160), Scale(1, 10)),
    Link("10gbit", Scale(2, 80), Scale(1, 40)),
)


# ----- the model


class Sleep:
    """Sleeps for the exact sum of the given times: a sleep ends late, and the next one is shorter.

    Attributes:
        due_s: Seconds still to sleep; below 0: slept too much.
    """

    def __init__(self) -> None:
        """Begins with nothing to sleep."""
        self.due_s = 0.0

    def __call__(self, seconds: float, begin_s: float | None = None) -> None:
        """Sleeps.

        Args:
            seconds: The time.
            begin_s: When it has begun, on the clock of `time.perf_counter`; None: now.
        """
        self.due_s += seconds - (0.0 if begin_s is None else time.perf_counter() - begin_s)
        if self.due_s > SLEEP_S_MIN:
            start_s = time.perf_counter()
            time.sleep(self.due_s)
            self.due_s -= time.perf_counter() - start_s


sleep = Sleep()


class SleepingLayer(nn.Module):
    """A layer with the times and bytes of a profile, divided by the scales."""

    def __init__(self, layer: Layer, scale: Scale) -> None:
        """Makes its parameters: zeros."""
        super().__init__()
        self.times = layer.forward_s / scale.time, layer.backward_s / scale.time
        self.numel = max(1, layer.output_nbytes // FLOAT_NBYTES // scale.nbytes)
        numel = layer.parameter_nbytes // FLOAT_NBYTES // scale.nbytes
        self.weight = nn.Parameter(torch.zeros(numel)) if numel else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sleeps, and returns zeros; their backward sleeps too."""
        found: torch.Tensor = _Sleep.apply(inputs, self.weight, self.numel, *self.times)
        return found


class _Sleep(torch.autograd.Function):
    """Sleeps forward and backward; results and gradients are zeros."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Any, weight: Any, numel: int, forward_s: float, backward_s: float
    ) -> Any:
        ctx.inputs, ctx.weight = inputs.shape, None if weight is None else weight.shape
        ctx.backward_s = backward_s
        sleep(forward_s)
        return torch.zeros(1).expand(numel)  # A zero that takes no memory.

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        begin_s = time.perf_counter()
        weight = None if ctx.weight is None else torch.zeros(ctx.weight)
        sleep(ctx.backward_s, begin_s)
        return torch.zeros(1).expand(ctx.inputs), weight, None, None, None


class Whole(nn.Module):
    """Passes activations and gradients on as arrays with memory of their own: Gloo sends those."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the input."""
        found: torch.Tensor = _Whole.apply(inputs)
        return found


class _Whole(torch.autograd.Function):
    """Copies forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Any) -> Any:
        return inputs.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return upstream.clone(memory_format=torch.contiguous_format)


def make_model(scale: Sequence[int]) -> nn.Sequential:
    """Returns the sleeping model; a child has the index of its layer as name."""
    layers = read_profile(PROFILE.read_text("utf-8"), str(PROFILE)).layers
    return nn.Sequential(*(SleepingLayer(layer, Scale(*scale)) for layer in layers))


# ----- a worker


def work(line: Connection) -> None:
    """Runs one worker: trains once for each run that it gets, until the line is closed."""
    while True:
        run = line.recv()
        os.environ.update(run.pop("environment"))
        train = TRAININGS.get(run["mode"], train_in_parallel)
        faulthandler.dump_traceback_later(RUN_S_MAX)
        line.send(train(**run))
        faulthandler.cancel_dump_traceback_later()


def train_pipeline(
    mode: str, scale: Sequence[int], steps: int, plan: list[tuple[str, int]]
) -> dict[str, Any]:
    """Trains this worker's stage; returns when each of its minibatches ended, and bytes sent."""
    import psworker

    run = psworker.Pipeline(
        make_model(scale),
        torch.zeros(1),
        loss=lambda outputs, _: outputs.sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        plan=plan,
    )
    warm, moments, before = steps // 3, {}, 0
    for number in range(steps):
        if number == warm:
            before = _sent_nbytes()
        run.step(torch.zeros(1), None)
        if run.place.has(number):
            moments[number] = time.perf_counter()
    sent = _sent_nbytes() - before
    run.finish()
    psworker.shutdown()
    ended = moments if run.place.is_last else {}
    return {
        "ended": [moment for number, moment in ended.items() if number >= warm],
        "sent": sent / (steps - warm),
    }


def train_in_parallel(mode: str, scale: Sequence[int], steps: int, plan: object) -> dict[str, Any]:
    """Trains the whole model; returns when each step ended, and bytes sent for a minibatch."""
    import psworker

    model: Any = make_model(scale)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if mode == DDP:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25 / scale[1])
    else:
        optimizer = psworker.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), mode=mode, overlap=True
        )
    ended, before = [], 0
    for number in range(WARM_STEPS + steps):
        if number == WARM_STEPS:
            before = _sent_nbytes()
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
        ended.append(time.perf_counter())
    sent = _sent_nbytes() - before
    if mode == DDP:
        del model  # It would end the group's thread while it holds the GIL, which that needs.
        torch.distributed.destroy_process_group()
    else:
        psworker.shutdown()
    return {"ended": ended[WARM_STEPS - 1 :], "sent": sent / steps / NUM_WORKERS}


def train_torch(
    mode: str, scale: Sequence[int], steps: int, plan: list[tuple[str, int]]
) -> dict[str, Any]:
    """Trains this worker's stage in torch's pipeline; returns when each flush ended."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.distributed.init_process_group("gloo")
    layers: list[Any]
    number, layers = torch.distributed.get_rank(), [*make_model(scale)]
    ends = [0, *(int(last) + 1 for last, _ in plan)]
    first, last = ends[number], ends[number + 1]
    part = nn.Sequential(*layers[first:last], Whole())
    entry = torch.zeros(layers[first - 1].numel if first else 1)
    stage = PipelineStage(
        nn.Sequential(Whole(), part) if first else part,
        number,
        len(plan),
        torch.device("cpu"),
        input_args=entry.requires_grad_(first > 0),
        output_args=torch.zeros(layers[last - 1].numel, requires_grad=True),
    )
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda outputs, _: outputs.sum())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    inputs = [] if first else [torch.zeros(MICRO_BATCHES)]
    target = torch.zeros(MICRO_BATCHES) if number + 1 == len(plan) else None
    ended, before = [], 0
    for flush in range(1 + steps):
        schedule.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        ended.append(time.perf_counter())
        if not flush:
            before = _sent_nbytes()
    sent = _sent_nbytes() - before
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {"ended": ended, "sent": sent / steps / MICRO_BATCHES}


TRAININGS = {PIPELINE: train_pipeline, TORCH: train_torch}


def _sent_nbytes() -> int:
    """Returns the bytes that this host has sent so far."""
    return link_use.counters()["net"].sent


# ----- the measuring process


class Hosts:
    """Four hosts with a shard and a worker each, inside a `with` block of `started`."""

    def __init__(self, lab: Lab) -> None:
        """Starts nothing yet."""
        self._lab = lab
        self._num_runs = 0
        self._servers = [f"{lab.address(host)}:{PORT}" for host in range(NUM_WORKERS)]
        self._workers: Sequence[forked.Forked] = []

    @contextlib.contextmanager
    def started(self) -> Iterator[Hosts]:
        """Starts shards and workers, and ends them in any case."""
        with tempfile.TemporaryDirectory(prefix="paceline-pipeline-") as folder:
            shards = [
                kit.Role(
                    "benchmarks.hosts",
                    "serve",
                    {
                        "host": self._lab.address(host),
                        "index": host,
                        "num_shards": NUM_WORKERS,
                        "folder": folder,
                    },
                    prefix=self._lab.inside(host),
                )
                for host in range(NUM_WORKERS)
            ]
            with kit.roles(*shards), forked.ending(self._forked()) as self._workers:
                for shard in shards:
                    assert shard.popen.stdout is not None
                    if not shard.popen.stdout.readline():
                        raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
                yield self

    def _forked(self) -> list[forked.Forked]:
        """Starts a worker on each host: forked, because all of them need the same imports."""
        forked.prepare()
        for name in (
            "torch.nn.parallel",
            "torch.distributed.pipelining",
            "psworker.pipeline.run.pipeline",
        ):
            importlib.import_module(name)
        hosts = range(NUM_WORKERS)
        return [forked.Forked(work, namespace=self._lab.name(host)) for host in hosts]

    def measure(
        self, mode: str, link: Link, steps: int, plan: Sequence[tuple[str, int]] = ()
    ) -> tuple[float, float]:
        """Returns minibatches a second and bytes sent for a minibatch, both of the full size."""
        self._num_runs += 1
        scale = link.scale(mode)
        for host in range(NUM_WORKERS):
            self._lab.slow(host, link.shaped(scale))
        run = {"mode": mode, "scale": scale, "steps": steps, "plan": list(plan)}
        num_workers = sum(replicas for _, replicas in plan) or NUM_WORKERS
        workers = self._workers[:num_workers]
        for rank, worker in enumerate(workers):
            worker.tell(run | {"environment": self._environment(rank, num_workers)})
        # A little longer than a run may take, so that the workers have written their stacks.
        results = [worker.hear(RUN_S_MAX + 10) for worker in workers]
        if mode == PIPELINE:
            # Replicas of a stage end theirs at the same time: the first of each begins the count.
            last = [result["ended"] for result in results if result["ended"]]
            rate = sum((len(ended) - 1) / (ended[-1] - ended[0]) for ended in last)
        else:
            ended = results[0]["ended"]
            at_once = MICRO_BATCHES if mode == TORCH else NUM_WORKERS
            rate = at_once * (len(ended) - 1) / (ended[-1] - ended[0])
        return rate / scale.time, scale.nbytes * sum(result["sent"] for result in results)

    def _environment(self, rank: int, num_workers: int) -> Mapping[str, str]:
        job = f"pipeline-{self._num_runs}"
        return kit.worker_environment(self._servers, rank, num_workers, "auto", job) | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._lab.address(0),
            "MASTER_PORT": str(MASTER_PORT + self._num_runs),
            "GLOO_SOCKET_IFNAME": "net",
        }


def stages_of(partition: Partition) -> list[tuple[str, int]]:
    """Returns each stage's last layer and replicas."""
    return [(str(stage.last), stage.replicas) for stage in partition.stages]


def with_updates(profile: Profile, scale: Scale) -> Profile:
    """Returns a profile with the seconds of real updates of the scaled layers, in full size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # As the workers, which share the cores.
    layers = [
        replace(layer, update_s=scale.time * update_s([*made.parameters()], with_momentum))
        for layer, made in zip(profile.layers, make_model(scale), strict=True)
    ]
    torch.set_num_threads(threads)
    return replace(profile, layers=tuple(layers))


def plan_for(profile: Profile, link: Link) -> tuple[Partition, str]:
    """Returns the best pipeline at a bandwidth, and the verdict on it."""
    levels = [Level(NUM_WORKERS, link.bytes_per_s)]
    cost = ShardsCost(hides=False, num_shards=NUM_WORKERS, on_workers=True)
    found = compare(profile, levels, cost)
    assert found.pipeline is not None
    verdict = "pipeline: " if found.is_pipeline else "do not pipeline: "
    return found.pipeline, verdict + found.reason


def torch_stages(profile: Profile, link: Link) -> list[tuple[str, int]]:
    """Returns the stages, of a worker each, that suit a pipeline with a flush best.

    A minibatch takes `(M + S - 1) / M` times the slowest of S stages: its computing, or its
    activations and their gradients on its link in one direction.
    """
    layers = profile.layers
    weighted = [n for n, layer in enumerate(layers) if layer.parameter_nbytes]

    def seconds(ends: Sequence[int]) -> float:
        slowest, first = 0.0, 0
        for end in ends:
            nbytes = layers[first - 1].output_nbytes if first else 0
            nbytes += layers[end].output_nbytes if end + 1 < len(layers) else 0
            computing = sum(layer.compute_s for layer in layers[first : end + 1])
            slowest = max(slowest, computing, nbytes / link.bytes_per_s)
            first = end + 1
        return slowest * (MICRO_BATCHES + len(ends) - 1) / MICRO_BATCHES

    cuts = range(weighted[0], weighted[-1])
    choices = itertools.chain.from_iterable(
        itertools.combinations(cuts, number) for number in range(1, NUM_WORKERS)
    )
    best = min(([*chosen, len(layers) - 1] for chosen in choices), key=seconds)
    return [(str(end), 1) for end in best]


def measure_link(
    hosts: Hosts, profile: Profile, link: Link, steps: int, modes: Sequence[str]
) -> dict[str, Any]:
    """Returns the figures of one bandwidth, and prints them as they come."""
    partition, verdict = plan_for(with_updates(profile, link.pipeline), link)
    print(f"{link.rate}: {verdict}", flush=True)
    plan = stages_of(partition)
    figures: dict[str, Any] = {}
    sent: dict[str, float] = {}
    fitting = [name for name in modes if name != TORCH or link.rate in TORCH_LINKS]
    for name in (*fitting, PIPELINE):
        if name == PIPELINE:
            rate, sent[name] = hosts.measure(PIPELINE, link, MINIBATCHES * steps, plan)
        elif name == TORCH:
            stages = torch_stages(profile, link)
            rate, sent[name] = hosts.measure(TORCH, link, steps // 5, stages)
            figures["torch_stages"] = [profile.layers[int(last)].name for last, _ in stages]
        else:
            rate, sent[name] = hosts.measure(MODES[name], link, steps)
        figures[name] = float(f"{rate:.4g}")
        print(f"{link.rate} {name}: {rate:.4g} minibatches a second", flush=True)
    figures["predicted"] = float(f"{1 / partition.seconds:.4g}")
    if "ssgd" in sent:
        figures["bytes_saved"] = round(1 - sent[PIPELINE] / sent["ssgd"], 3)
    name = "-".join(str(replicas) for _, replicas in plan)
    return figures | {"plan": name, "verdict": verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="five steps of each mode, not ten")
    parser.add_argument("--links", default=",".join(link.rate for link in LINKS), help="of these")
    parser.add_argument("--modes", default=",".join(MODES), help="of these, beside the pipeline")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="write the figures here")
    options = parser.parse_args()
    links = [link for link in LINKS if link.rate in options.links.split(",")]
    if len(links) != len(options.links.split(",")):
        parser.error(f"--links must be of {', '.join(link.rate for link in LINKS)}")
    if not set(options.modes.split(",")) <= set(MODES):
        parser.error(f"--modes must be of {', '.join(MODES)}")
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    profile = read_profile(PROFILE.read_text("utf-8"), str(PROFILE))
    with Lab(NUM_WORKERS, links[0].rate) as lab, Hosts(lab).started() as hosts:
        figures = {
            link.rate: measure_link(
                hosts, profile, link, 5 if options.quick else 10, options.modes.split(",")
            )
            for link in links
        }
    if options.results is not None:
        about = kit.describe_run(MODULE)
        options.results.write_text(json.dumps(about | figures, indent=1) + "\n")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
