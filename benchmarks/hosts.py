"""Step time on several hosts, beside DDP over Gloo: `python -m benchmarks.hosts [--json]`.

Hosts are those of `benchmarks.netlab`: network namespaces on one switch, with shaped links. Each
runs its workers and a shard, as people deploy on a cluster without machines to spare (for shards
on hosts of their own see `benchmarks.step --hosts 4 --shards 2`). Computing is simulated by
sleeping (`links/simulated_gpu.py`), so that two cores can stand for four hosts. All runs of a
case use the same links, the same processes and the same model:

    four_hosts   4 hosts, 500 Mbit/s, 6.4 million parameters in 40 tensors, 300 ms of computing
    two_by_two   2 hosts of 2 workers, 1 Gbit/s, 25.6 million parameters, 800 ms of computing

`link_mb` is the traffic of the busiest link in one step, the busier way, as the link's shaper
counts it: with the headers of each packet, which take 4.4 % of a link that is full. `bound_ms` is
max(compute, bytes / bandwidth) with these bytes and the nominal bandwidth: no schedule is faster.
It cannot quite be reached by a synchronous mode, which has nothing to send while forward runs.
`--draw FILE.png` shows when each link is busy in a step, without these headers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import kit, measured
from benchmarks.links import link_use
from benchmarks.netlab import Lab, available, bits_per_s, shaped_nbytes

MODULE = "benchmarks.hosts"
ROUND_STEPS = 5  # As many as a round of ssd(5), so that a mean is over whole rounds.
DDP = "ddp_gloo"
GLOO_PORT = 29500  # Of the first run; each has a port of its own.
PORT = 7070  # Of each shard: every host has an address of its own.


class Mode(NamedTuple):
    """The model and settings of a run."""

    rule: str
    compression: str = "none"
    local_group: str | None = None  # "host": the processes of a host are one worker.


MODES = {
    "ssgd": Mode("ssgd"),
    "od": Mode("od(warmup=5)"),
    "ssd": Mode("ssd(steps=5, warmup=5)"),
    "cd": Mode("cd(steps=5, warmup=5)", "2bit"),
    "ssgd_2bit": Mode("ssgd", "2bit"),
}
# Modes of `two_by_two`: every process pushes to the shards, or all of a host are one worker.
LEVELS = {"flat_ssgd": Mode("ssgd"), "two_level_ssgd": Mode("ssgd", local_group="host")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hosts, their links, a model and how long a step computes."""

    num_hosts: int
    workers_per_host: int = 1
    num_dedicated: int = 0  # Hosts with a shard and no worker; 0: each host has a shard.
    rate: str  # Of each link, each way, as tc writes it.
    shapes: Sequence[tuple[int, ...]]
    compute_s: float
    delay_s: float = 0.0  # Of every packet on its way through the switch, each way.
    slow: Mapping[int, float] = field(default_factory=dict)  # Factors on `compute_s`, by worker.

    @property
    def bytes_per_s(self) -> float:
        """Nominal bandwidth of a link, each way."""
        return bits_per_s(self.rate) / 8

    @property
    def num_workers(self) -> int:
        """Workers on all hosts."""
        return self.num_hosts * self.workers_per_host

    @property
    def shard_hosts(self) -> range:
        """Hosts that have a shard."""
        first = self.num_hosts if self.num_dedicated else 0
        return range(first, first + (self.num_dedicated or self.num_hosts))

    def __str__(self) -> str:
        """Describes it for a table's title."""
        where = f"{self.num_dedicated} dedicated shards" if self.num_dedicated else "a shard each"
        workers = "" if self.workers_per_host == 1 else f" of {self.workers_per_host} workers"
        numel = kit.numel_of(self.shapes) / 1e6
        return (
            f"{self.num_hosts} hosts{workers} at {self.rate}, {where}, {numel:.1f}M parameters, "
            f"{1e3 * self.compute_s:.0f} ms computing"
        )


FOUR_HOSTS = Case(num_hosts=4, rate="500mbit", shapes=((400, 400),) * 40, compute_s=0.3)
TWO_BY_TWO = Case(
    num_hosts=2, workers_per_host=2, rate="1gbit", shapes=((800, 800),) * 40, compute_s=0.8
)
CASES = {"four_hosts": FOUR_HOSTS, "two_by_two": TWO_BY_TWO}


# ----- the processes


def serve(host: str, index: int, num_shards: int, folder: str, port: int = PORT) -> None:
    """Becomes `psserver start` for one shard of several, in this process's network namespace."""
    options = {
        "--host": host,
        "--port": port,
        "--metrics-port": 0,
        "--shards": num_shards,
        "--shard-index": index,
        "--cluster": "hosts",
        "--log-level": "error",
        "--durability": "memory",
        "--state-dir": f"{folder}/{index}",
    }
    command = [sys.executable, "-m", "psserver", "start", "--insecure"]
    os.execv(command[0], [*command, *(str(part) for option in options.items() for part in option)])


def work(shapes: list[list[int]], compute_s: float, port: list[str]) -> None:
    """Runs one worker: trains once for each line of standard input, which is a run's JSON.

    Args:
        shapes: Shapes of the parameters.
        compute_s: Seconds of a step.
        port: Device and namespace of the switch's end of this host's link.
    """
    import torch

    torch.set_num_threads(1)
    print("{}", flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        os.environ.update(run.pop("environment"))
        train([tuple(shape) for shape in shapes], compute_s, port, **run)


def train(
    shapes: Sequence[tuple[int, ...]],
    compute_s: float,
    port: Sequence[str],
    *,
    mode: str,
    compression: str,
    local_group: str | None,
    rounds: int,
) -> None:
    """Trains in one mode; `ddp_gloo` is torch's DistributedDataParallel over Gloo."""
    import torch

    from benchmarks.links.simulated_gpu import SimulatedModel

    model: Any = SimulatedModel(shapes, compute_s)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if mode == DDP or local_group is not None:
        torch.distributed.init_process_group("gloo")
    if mode == DDP:
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        import psworker

        optimizer = psworker.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            mode=mode,
            compression=compression,
            local_group=local_group,
            overlap=True,
        )

    def one_step() -> None:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model(start_s).backward()
        optimizer.step()

    for _ in range(2 * ROUND_STEPS):
        one_step()
    measured.await_go()
    for _ in range(ROUND_STEPS):  # All messages under way have landed by the end of this wait.
        one_step()
    before, starts_s = _link_nbytes(port), [time.perf_counter()]
    for _ in range(rounds * ROUND_STEPS):
        one_step()
        starts_s.append(time.perf_counter())
    counted = zip(before, _link_nbytes(port), strict=True)
    nbytes = max(end - start for start, end in counted) / (rounds * ROUND_STEPS)
    print(json.dumps({"starts_s": starts_s, "link_nbytes": nbytes}), flush=True)
    sys.stdin.readline()  # Until all have finished.
    if mode != DDP:
        psworker.shutdown()
    if torch.distributed.is_initialized():
        del model  # It would end the group's thread while it holds the GIL, which that needs.
        torch.distributed.destroy_process_group()
    print("{}", flush=True)


def _link_nbytes(port: Sequence[str]) -> tuple[int, int]:
    """Returns the bytes that this host's link has carried so far, out and in."""
    return shaped_nbytes("net"), shaped_nbytes(*port)


# ----- the measuring process


class Hosts:
    """The hosts of a case with their processes, inside a `with` block."""

    def __init__(self, case: Case, *, watches: bool = False) -> None:
        """Starts nothing yet.

        Args:
            watches: Whether to look when links are busy, which costs CPU.
        """
        self.case, self._watches = case, watches
        self.uses: dict[str, link_use.LinkUse] = {}  # When links were busy, by mode.
        self._num_runs = 0

    @contextlib.contextmanager
    def started(self) -> Iterator[Hosts]:
        """Starts the shards and the workers, and ends them in any case."""
        case = self.case
        num_all = case.num_hosts + case.num_dedicated
        with (
            Lab(num_all, case.rate, case.delay_s) as lab,
            tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder,
        ):
            self._lab = lab
            addresses = [lab.address(host) for host in case.shard_hosts]
            self._servers = [f"{address}:{PORT}" for address in addresses]
            shards = [
                kit.Role(
                    MODULE,
                    "serve",
                    {
                        "host": lab.address(host),
                        "index": index,
                        "num_shards": len(addresses),
                        "folder": folder,
                    },
                    prefix=lab.inside(host),
                )
                for index, host in enumerate(case.shard_hosts)
            ]
            self._workers = [
                kit.Role(MODULE, "work", self._arguments(rank), prefix=lab.inside(self._host(rank)))
                for rank in range(case.num_workers)
            ]
            with kit.roles(*shards, *self._workers):
                for shard in shards:
                    assert shard.popen.stdout is not None
                    if not shard.popen.stdout.readline():
                        raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
                for worker in self._workers:
                    worker.line()
                yield self

    def measure(self, name: str, mode: Mode, rounds: int) -> dict[str, float]:
        """Returns the step time in ms and the busiest link's MB per step of one mode.

        Args:
            name: Name of the mode.
            mode: The mode; its rule is `ddp_gloo` for torch's DistributedDataParallel.
            rounds: Number of rounds, of five steps each; the median round counts.
        """
        self._num_runs += 1
        for rank, worker in enumerate(self._workers):
            run = {
                "mode": mode.rule,
                "compression": mode.compression,
                "local_group": mode.local_group,
                "rounds": rounds,
                "environment": self._environment(rank, f"hosts-{self._num_runs}-{name}"),
            }
            worker.tell(json.dumps(run))
        for worker in self._workers:
            worker.line()
        with contextlib.ExitStack() as stack:
            watched = stack.enter_context(link_use.watch(self._lab)) if self._watches else []
            self._tell_all("go")
            results = [worker.line() for worker in self._workers]
        starts_s = [result["starts_s"] for result in results]
        if self._watches:
            self.uses[name] = link_use.LinkUse(watched, starts_s[0])
        self._tell_all("end")
        for worker in self._workers:
            worker.line()
        return {
            "step_ms": max(1e3 * _median_step_s(moments) for moments in starts_s),
            "link_mb": max(1e-6 * result["link_nbytes"] for result in results),
        }

    def _tell_all(self, text: str) -> None:
        for worker in self._workers:
            worker.tell(text)

    def _host(self, rank: int) -> int:
        return rank // self.case.workers_per_host

    def _arguments(self, rank: int) -> Mapping[str, Any]:
        """Returns the arguments of `work` for a worker."""
        port = [f"port{self._host(rank)}", self._lab.name("switch")]
        compute_s = self.case.compute_s * self.case.slow.get(rank, 1.0)
        return {"shapes": self.case.shapes, "compute_s": compute_s, "port": port}

    def _environment(self, rank: int, job: str) -> Mapping[str, str]:
        case = self.case
        return kit.worker_environment(self._servers, rank, case.num_workers, "auto", job) | {
            "LOCAL_RANK": str(rank % case.workers_per_host),
            "LOCAL_WORLD_SIZE": str(case.workers_per_host),
            "MASTER_ADDR": self._lab.address(0),
            "MASTER_PORT": str(GLOO_PORT + self._num_runs),
            "GLOO_SOCKET_IFNAME": "net",
        }


def _median_step_s(starts_s: Sequence[float]) -> float:
    """Returns the seconds of a step in the median round."""
    rounds = starts_s[::ROUND_STEPS]
    spans = [(end - start) / ROUND_STEPS for start, end in itertools.pairwise(rounds)]
    return kit.median(spans)


def measure_case(
    name: str, case: Case, modes: Mapping[str, Mode], rounds: int, draw: Path | None = None
) -> dict[str, dict[str, float]]:
    """Measures modes beside DDP on the same links, and prints a table.

    Args:
        name: Name of the case, as printed.
        case: Hosts and model.
        modes: By name.
        rounds: Number of rounds, of five steps each.
        draw: Where to draw the use of the links, with the case's name in the file's.

    Returns:
        `step_ms`, `bound_ms` and `link_mb` by mode.
    """
    rows: list[list[Any]] = []
    figures: dict[str, dict[str, float]] = {"bound_ms": {}, "step_ms": {}, "link_mb": {}}
    hosts = Hosts(case, watches=draw is not None)
    with hosts.started():
        for label, mode in {DDP: Mode(DDP), **modes}.items():
            result = hosts.measure(label, mode, rounds)
            bound_ms = 1e3 * max(case.compute_s, 1e6 * result["link_mb"] / case.bytes_per_s)
            over = 100 * (result["step_ms"] / bound_ms - 1)
            rows.append([label, result["step_ms"], bound_ms, over, result["link_mb"]])
            for key, value in (*result.items(), ("bound_ms", bound_ms)):
                figures[key][label] = round(value, 1)
            print(f"{name} {label}: {result['step_ms']:.0f} ms", flush=True)
    columns = ["mode", "step ms", "bound ms", "over bound %", "MB on the busiest link"]
    kit.show(str(case), columns, rows)
    if draw is not None:
        link_use.draw(draw.with_stem(f"{draw.stem}-{name}"), hosts.uses, case.bytes_per_s)
    return figures


def by_level(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the figures of `two_by_two`, with the busiest link's MB by level."""
    link_mb = figures["link_mb"]
    levels = {mode.removesuffix("_ssgd"): link_mb[mode] for mode in LEVELS}
    return {"link_mb": levels, "step_ms": figures["step_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="ssgd, od and ssd, three rounds")
    parser.add_argument("--modes", default=",".join(MODES), help="of these")
    parser.add_argument("--rounds", type=int, default=4, help="of five steps each")
    parser.add_argument("--cases", default=",".join(CASES), help="of these")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="write the figures here")
    parser.add_argument("--draw", type=Path, metavar="FILE.png", help="when each link is busy")
    options = parser.parse_args()
    for what, given, known in (("mode", options.modes, MODES), ("case", options.cases, CASES)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"no {what} {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    if options.quick:
        options.rounds, options.modes = 3, "ssgd,od,ssd"
    figures: dict[str, Any] = {}
    cases = options.cases.split(",")
    if "four_hosts" in cases:
        modes = {name: MODES[name] for name in options.modes.split(",")}
        figures_of = measure_case("four_hosts", FOUR_HOSTS, modes, options.rounds, options.draw)
        figures["four_hosts"] = {key: figures_of[key] for key in ("bound_ms", "step_ms")}
    if "two_by_two" in cases:
        rounds = max(2, options.rounds - 1)
        figures["two_by_two"] = by_level(
            measure_case("two_by_two", TWO_BY_TWO, LEVELS, rounds, options.draw)
        )
    if options.results is not None:
        about = kit.describe_run(MODULE)
        options.results.write_text(json.dumps(about | figures, indent=1) + "\n")
    if options.json:
        print(json.dumps(figures))


ROLES = {"work": work, "serve": serve}

if __name__ == "__main__" and not measured.serve(sys.argv[1:], ROLES):
    main()
