"""Step time on several hosts, beside DDP over Gloo: `python -m benchmarks.hosts [--json]`.

Hosts are those of `benchmarks.netlab`: network namespaces on one switch, with shaped links. Each
runs a worker and a shard, as people deploy on a cluster without machines to spare; with
`--dedicated 2` the shards have two hosts of their own instead. Computing is simulated by sleeping
(`benchmarks.simulated_gpu`), so that two cores can stand for four hosts. All runs of one call use
the same links and the same model:

    four_hosts   4 hosts, 500 Mbit/s, 6.4 million parameters in 40 tensors, 300 ms of computing

`link_mb` is the traffic of the busiest link in one step, counted by the kernel at the host's end,
the busier way. `bound_ms` is max(compute, bytes / bandwidth) with these bytes and the nominal
bandwidth: no schedule is faster. It cannot quite be reached by a synchronous mode, which has
nothing to send while forward runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import kit, measured
from benchmarks.netlab import Lab, available, bits_per_s

MODULE = "benchmarks.hosts"
ROUND_STEPS = 5  # As many as a round of ssd(5), so that a mean is over whole rounds.
DDP = "ddp_gloo"
GLOO_PORT = 29500
PORT = 7070  # Of each shard: every host has an address of its own.
MODES = {
    "ssgd": ("ssgd", "none"),
    "od": ("od(warmup=5)", "none"),
    "ssd": ("ssd(steps=5, warmup=5)", "none"),
    "cd": ("cd(steps=5, warmup=5)", "2bit"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Hosts, their links, a model and how long a step computes."""

    num_hosts: int
    rate: str  # Of each link, each way, as tc writes it.
    shapes: tuple[tuple[int, ...], ...]
    compute_s: float

    @property
    def bytes_per_s(self) -> float:
        """Nominal bandwidth of a link, each way."""
        return bits_per_s(self.rate) / 8


FOUR_HOSTS = Case(4, "500mbit", ((400, 400),) * 40, 0.3)


# ----- the processes


def serve(host: str, index: int, num_shards: int) -> None:
    """Becomes `psserver start` for one shard of several, in this process's network namespace."""
    options = {
        "--host": host,
        "--port": PORT,
        "--metrics-port": 0,
        "--shards": num_shards,
        "--shard-index": index,
        "--cluster": "hosts",
        "--log-level": "error",
        "--durability": "memory",
    }
    command = [sys.executable, "-m", "psserver", "start", "--insecure"]
    os.execv(command[0], [*command, *(str(part) for option in options.items() for part in option)])


def train(
    mode: str, compression: str, shapes: list[list[int]], compute_s: float, rounds: int
) -> None:
    """Runs one worker; mode `ddp_gloo` is torch's DistributedDataParallel over Gloo."""
    import torch

    from benchmarks.simulated_gpu import SimulatedModel

    torch.set_num_threads(1)
    model: Any = SimulatedModel([tuple(shape) for shape in shapes], compute_s)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if mode == DDP:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        import psworker

        optimizer = psworker.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            mode=mode,
            compression=compression,
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
    before, times_s = _link_nbytes(), []
    for _ in range(rounds):
        start_s = time.perf_counter()
        for _ in range(ROUND_STEPS):
            one_step()
        times_s.append((time.perf_counter() - start_s) / ROUND_STEPS)
    steps = rounds * ROUND_STEPS
    counted = zip(before, _link_nbytes(), strict=True)
    measured.report(
        {"times_s": times_s, "link_nbytes": max(end - start for start, end in counted) / steps}
    )
    if mode == DDP:
        torch.distributed.destroy_process_group()
    else:
        psworker.shutdown()


def _link_nbytes() -> tuple[int, int]:
    """Returns the bytes that this host's link has carried so far, out and in."""
    with open("/proc/net/dev", encoding="ascii") as file:
        (fields,) = [line.split() for line in file if line.strip().startswith("net:")]
    return int(fields[9]), int(fields[1])


# ----- the measuring process


def measure(case: Case, name: str, rounds: int, dedicated: int) -> dict[str, float]:
    """Returns the step time in ms and the busiest link's MB per step of one mode.

    Args:
        case: Hosts and model.
        name: A key of `MODES`, or `ddp_gloo`.
        rounds: Of five steps each.
        dedicated: Hosts with a shard and no worker; 0: each host has a worker and a shard.
    """
    mode, compression = MODES.get(name, (name, "none"))
    with Lab(case.num_hosts + dedicated, case.rate) as lab:
        if name == DDP:
            environments = [
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(case.num_hosts),
                    "MASTER_ADDR": lab.address(0),
                    "MASTER_PORT": str(GLOO_PORT),
                    "GLOO_SOCKET_IFNAME": "net",
                }
                for rank in range(case.num_hosts)
            ]
            return _run(lab, case, (mode, compression), rounds, environments)
        places = range(case.num_hosts, lab.num_hosts) if dedicated else range(case.num_hosts)
        shards = [
            kit.Role(
                MODULE,
                "serve",
                {"host": lab.address(host), "index": index, "num_shards": len(places)},
                prefix=lab.inside(host),
            )
            for index, host in enumerate(places)
        ]
        with kit.roles(*shards):
            for shard in shards:
                assert shard.popen.stdout is not None
                if not shard.popen.stdout.readline():
                    raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
            addresses = [f"{lab.address(host)}:{PORT}" for host in places]
            environments = [
                kit.worker_environment(addresses, rank, case.num_hosts, "auto", f"hosts-{name}")
                | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                for rank in range(case.num_hosts)
            ]
            return _run(lab, case, (mode, compression), rounds, environments)


def _run(
    lab: Lab,
    case: Case,
    mode: tuple[str, str],
    rounds: int,
    environments: Sequence[dict[str, str]],
) -> dict[str, float]:
    arguments = {
        "mode": mode[0],
        "compression": mode[1],
        "shapes": case.shapes,
        "compute_s": case.compute_s,
        "rounds": rounds,
    }
    workers = [
        kit.Role(MODULE, "train", arguments, env, lab.inside(rank))
        for rank, env in enumerate(environments)
    ]
    with kit.roles(*workers):
        for worker in workers:
            worker.line()
        for worker in workers:
            worker.tell("go")
        results = [worker.line() for worker in workers]
        for worker in workers:
            assert worker.popen.stdin is not None
            worker.popen.stdin.close()
        for worker in workers:
            worker.popen.wait(kit.ROLE_TIMEOUT_S)
    return {
        "step_ms": max(1e3 * kit.median(result["times_s"]) for result in results),
        "link_mb": max(1e-6 * result["link_nbytes"] for result in results),
    }


def measure_case(
    name: str, case: Case, modes: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Measures modes beside DDP on the same links, and prints a table."""
    rows, figures = [], {"bound_ms": {}, "step_ms": {}, "link_mb": {}}
    for mode in (DDP, *modes):
        result = measure(case, mode, options.rounds, options.dedicated)
        bound_ms = 1e3 * max(case.compute_s, 1e6 * result["link_mb"] / case.bytes_per_s)
        over = 100 * (result["step_ms"] / bound_ms - 1)
        rows.append([mode, result["step_ms"], bound_ms, over, result["link_mb"]])
        for key, value in (*result.items(), ("bound_ms", bound_ms)):
            figures[key][mode] = round(value, 1)
        print(f"{name} {mode}: {result['step_ms']:.0f} ms, bound {bound_ms:.0f}", flush=True)
    where = f"{options.dedicated} dedicated shards" if options.dedicated else "a shard on each"
    kit.show(
        f"{case.num_hosts} hosts at {case.rate}, {where}, {1e3 * case.compute_s:.0f} ms computing",
        ["mode", "step ms", "bound ms", "over bound %", "MB on the busiest link"],
        rows,
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="ssgd, od and ssd, three rounds")
    parser.add_argument("--modes", default=",".join(MODES), help="of these")
    parser.add_argument("--rounds", type=int, default=4, help="of five steps each")
    parser.add_argument("--dedicated", type=int, default=0, help="hosts with a shard and no worker")
    options = parser.parse_args()
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; choose from {', '.join(MODES)}")
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    if options.quick:
        options.rounds, options.modes = 3, "ssgd,od,ssd"
    figures = {
        "four_hosts": measure_case("four_hosts", FOUR_HOSTS, options.modes.split(","), options)
    }
    if options.json:
        print(json.dumps(figures))


ROLES = {"train": train, "serve": serve}

if __name__ == "__main__" and not measured.serve(sys.argv[1:], ROLES):
    main()
