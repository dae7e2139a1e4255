"""More workers and more shards on one machine: `python -m benchmarks.scaling [--quick] [--json]`.

Two measurements. The cost of a step of a small model with 1 to 16 workers over 1 to 4 shards, in
time and in CPU: on few cores the workers' own work adds up, so the figure is CPU per worker and
step, which must not grow with the number of workers. And the memory of each process: a shard's in
ssgd must not grow with the number of workers, and a worker's in ssd may be at most 3 copies of the
gradient above the same script in plain torch; the model is as large as ResNet-50, so that some
50 MiB of libraries are not taken for a copy. Memory is the resident set without what others have
made and this process only maps: workers map a shard's weights, shards map workers' gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import kit, measured

MODULE = "benchmarks.scaling"
SMALL = (64, 128, 80, 16)  # 19,936 parameters in 6 tensors.
LARGE = (2400, 3200, 3200, 2400)  # 25,608,800 parameters, as ResNet-50: 97.7 MiB of gradients.
WARM_STEPS = 8
COPIES_MAX = 3.0


def worker(widths: list[int], mode: str, steps: int) -> None:
    """Runs a worker, or plain torch where there is no mode."""
    import torch

    import psworker

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    inputs = torch.randn(16, widths[0])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if mode:
        optimizer = psworker.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            mode=mode,
            overlap=True,
            gradient_as_bucket_view=True,
        )

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    grad_nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    for _ in range(WARM_STEPS):
        step()
    measured.await_go()
    cpu_s, start_s = measured.own_cpu_s(), time.perf_counter()
    for _ in range(steps):
        step()
    measured.report(
        {
            "step_s": (time.perf_counter() - start_s) / steps,
            "cpu_s": (measured.own_cpu_s() - cpu_s) / steps,
            "own_nbytes": own_nbytes(os.getpid(), grad_nbytes, maps_weights=True),
            "shards_nbytes": [own_nbytes(pid, grad_nbytes) for pid in shards_of(os.getppid())],
            "grad_nbytes": grad_nbytes,
        }
    )
    psworker.shutdown()


def shards_of(pid: int) -> list[int]:
    """Returns the shards that the measuring process has started, by process id."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if "psserver" in child.cmdline()]


def own_nbytes(pid: int, grad_nbytes: int, *, maps_weights: bool = False) -> int:
    """Returns the resident set in bytes, without the segments that another process has made.

    Args:
        pid: The process.
        grad_nbytes: Bytes of the gradients: a segment as long, up to a page, is a worker's; a
            longer one
            has a shard's weights, which are kept twice.
        maps_weights: Whether it is a worker, which maps these; else a shard, which maps those.
    """
    page = os.sysconf("SC_PAGESIZE")
    rss_nbytes = 0
    for mapped in psutil.Process(pid).memory_maps(grouped=False):
        has_weights = mapped.size > grad_nbytes + page
        is_foreign = mapped.path.startswith("/memfd:") and has_weights == maps_weights
        if not is_foreign:
            rss_nbytes += mapped.rss
    return rss_nbytes


def plain(steps: int) -> dict[str, Any]:
    """Returns the memory of the large model in plain torch."""
    arguments = {"widths": LARGE, "mode": "", "steps": steps}
    with kit.roles(kit.Role(MODULE, "worker", arguments)) as (role,):
        role.line()  # Warm.
        role.tell()
        result = role.line()
        assert role.popen.stdin is not None
        role.popen.stdin.close()
        role.popen.wait(kit.ROLE_TIMEOUT_S)
    return result


def measure(
    widths: tuple[int, ...], mode: str, num_workers: int, num_shards: int, steps: int
) -> dict[str, Any]:
    """Returns the figures of one case; of several workers the mean, of memory the largest."""
    results, marks = kit.run_workers(
        MODULE,
        "worker",
        {"widths": widths, "mode": mode, "steps": steps},
        plane="local",
        num_workers=num_workers,
        num_shards=num_shards,
    )
    shard_cpu_s = (marks[1] - marks[0]) / steps
    return {
        "step_ms": 1e3 * sum(result["step_s"] for result in results) / num_workers,
        "worker_cpu_ms": 1e3 * sum(result["cpu_s"] for result in results) / num_workers,
        "shard_cpu_ms": 1e3 * shard_cpu_s / num_workers,
        "worker_nbytes": max(result["own_nbytes"] for result in results),
        "shard_nbytes": max(max(result["shards_nbytes"]) for result in results),
        "grad_nbytes": results[0]["grad_nbytes"],
    }


def measure_speed(options: argparse.Namespace) -> list[list[Any]]:
    """Returns the lines of the table of times."""
    rows = []
    for num_shards in options.shards:
        for num_workers in options.workers:
            found = measure(SMALL, "ssgd", num_workers, num_shards, options.steps)
            cpu_ms = num_workers * (found["worker_cpu_ms"] + found["shard_cpu_ms"])
            rows.append(
                [
                    num_workers,
                    num_shards,
                    found["step_ms"],
                    cpu_ms,
                    found["worker_cpu_ms"],
                    found["shard_cpu_ms"],
                    found["shard_nbytes"] / 2**20,
                ]
            )
    return rows


def measure_memory(options: argparse.Namespace) -> list[list[Any]]:
    """Returns the lines of the table of memory: of a shard, and of a worker above plain torch."""
    if not options.memory_workers:
        return []
    bare = plain(options.memory_steps)
    grad_nbytes = bare["grad_nbytes"]
    rows: list[list[Any]] = [["torch", 1, bare["own_nbytes"] / 2**20, 0.0, 0.0]]
    cases = [("ssgd", count) for count in options.memory_workers]
    for mode, num_workers in [*cases, ("ssd(steps=5, warmup=3)", 1)]:
        found = measure(LARGE, mode, num_workers, 1, options.memory_steps)
        copies = (found["worker_nbytes"] - bare["own_nbytes"]) / grad_nbytes
        worker_mib, shard_mib = found["worker_nbytes"] / 2**20, found["shard_nbytes"] / 2**20
        rows.append([mode, num_workers, worker_mib, copies, shard_mib])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="few steps, at most 4 workers")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=counts, default=[1, 2, 4, 8, 16], help="as in 1,2,4")
    parser.add_argument("--shards", type=counts, default=[1, 2, 4])
    parser.add_argument("--memory-workers", type=counts, default=[1, 2, 4], help="empty: none")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    options = parser.parse_args()
    options.memory_steps = 12
    if options.quick:
        options.workers, options.shards, options.steps = [1, 2, 4], [1, 2], 50
        options.memory_workers = [1, 2]
    speed, memory = measure_speed(options), measure_memory(options)
    kit.show(
        f"steps of {sum_of(SMALL)} parameters, ssgd, through shared memory",
        ["workers", "shards", "step ms", "CPU ms/step", "worker's", "shards' per worker", "MiB"],
        speed,
    )
    kit.show(
        f"memory with {sum_of(LARGE)} parameters, 1 shard, SGD with momentum on the shard",
        ["mode", "workers", "worker MiB", "gradients above torch", "shard MiB"],
        memory,
    )
    if speed:
        plot(options.out, speed)
    if options.json:
        print(json.dumps(figures(speed, memory)))


def counts(text: str) -> list[int]:
    """Returns the numbers of a list with commas."""
    return [int(part) for part in text.split(",") if part]


def plot(folder: Path, speed: list[list[Any]]) -> None:
    """Draws the CPU of each case."""
    kit.plot_bars(
        folder / "scaling.png",
        f"One step of {sum_of(SMALL)} parameters, ssgd, {os.cpu_count()} cores",
        "CPU ms per worker and step, shards' part with it",
        {f"{row[0]} workers, {row[1]} shards": row[4] + row[5] for row in speed},
    )


def sum_of(widths: tuple[int, ...]) -> int:
    """Returns the number of parameters of a model."""
    return sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths))


def figures(speed: list[list[Any]], memory: list[list[Any]]) -> dict[str, Any]:
    """Returns the line of JSON."""
    shards = [row[4] for row in memory if row[0] == "ssgd"]
    copies = [row[3] for row in memory if str(row[0]).startswith("ssd")]
    return {
        "step_ms": {f"{row[0]}x{row[1]}": round(row[2], 3) for row in speed},
        "cpu_ms": {f"{row[0]}x{row[1]}": round(row[3], 3) for row in speed},
        "shard_mib_ssgd": [round(value, 1) for value in shards],
        "worker_copies_ssd": [round(value, 2) for value in copies],
        "worker_copies_max": COPIES_MAX,
    }


if __name__ == "__main__" and not measured.serve(sys.argv[1:], {"worker": worker}):
    main()
