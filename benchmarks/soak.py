"""Hours of ordinary use: workers join and leave, and nothing may grow in the shards.

    python -m benchmarks.soak --seconds 1800 --json

Eight workers push without end; every few seconds one of them leaves in order, or is killed, and
comes back. Now and then nobody goes until all are there and push: then memory, files, threads and
mapped segments of each shard are counted, as each worker that is there has some. Growth is that of
the last count over that after a quarter of the time. In the end the weights tell whether any push
was lost or counted twice (`survival/proof.py`).

glibc has an arena for each thread that comes upon a busy one, and gives back little of the memory
freed in them: shards have one arena here, so that the count is the memory in use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import psutil

from benchmarks import kit
from benchmarks.survival import proof
from benchmarks.survival.cluster import Cluster, Setup

COLUMNS = ("memory MB", "files", "threads", "segments")
NUM_COUNTS = 8  # In a run, the first of them after an eighth of it.
SETTLE_S = 5.0  # Longer than a lease: the memory of dead workers is free.
TOLERANCE = {"memory MB": 8.0, "files": 4.0, "threads": 4.0, "segments": 2.0}


def sample(pid: int) -> dict[str, float]:
    """Returns a shard's memory, files and threads now."""
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "memory MB": process.memory_info().rss / 1e6,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "segments": sum("memfd:" in line for line in maps.splitlines()),
    }


def churn(cluster: Cluster, rng: random.Random, absent: dict[int, Path]) -> bool:
    """Stops or kills one worker and restarts those that left; returns whether one left."""
    for rank in [rank for rank in absent if cluster.roles[rank].popen.poll() == 0]:
        absent.pop(rank).unlink()
        cluster.revive(rank)
    rank = rng.randrange(cluster.setup.workers)
    if rank in absent:
        return False
    if rng.random() < 0.5:
        cluster.roles[rank].popen.kill()  # `tend` starts it again.
    else:
        absent[rank] = cluster.folder / f"leave-{rank}"
        absent[rank].touch()
    return True


def count(cluster: Cluster, absent: dict[int, Path]) -> list[dict[str, float]]:
    """Waits until all workers push; returns each shard's memory, files and threads."""
    for rank in list(absent):
        cluster.roles[rank].popen.wait(60.0)
        absent.pop(rank).unlink()
        cluster.revive(rank)
    cluster.watch(SETTLE_S)
    cluster.progress.mark(time.monotonic())
    slices = [spec.index for spec in cluster.layout.slices]
    wanted = {(rank, index) for rank in range(cluster.setup.workers) for index in slices}
    if cluster.await_all(wanted) == float("inf"):
        raise RuntimeError(f"not all workers push\n{cluster.shards.log()[-2000:]}")
    found = []
    for index in range(cluster.setup.shards):
        samples = []
        for _ in range(5):
            samples.append(sample(cluster.shards.pids()[index]))
            cluster.watch(0.2)
        found.append({what: statistics.median(one[what] for one in samples) for what in COLUMNS})
    return found


def soak(
    cluster: Cluster, seconds: float, gap_s: float, seed: int
) -> tuple[list[list[dict[str, float]]], int]:
    """Runs it; returns the counts of each shard, and the number of workers that left."""
    rng, absent = random.Random(seed), dict[int, Path]()
    counts = [count(cluster, absent)]
    start_s, num_gone = time.monotonic(), 0
    for number in range(1, NUM_COUNTS + 1):
        while time.monotonic() < start_s + seconds * number / NUM_COUNTS:
            num_gone += churn(cluster, rng, absent)
            cluster.watch(gap_s * rng.uniform(0.5, 1.5))
        counts.append(count(cluster, absent))
        told = "; ".join(
            ", ".join(f"{what} {one[what]:.1f}" for what in COLUMNS) for one in counts[-1]
        )
        print(f"{time.monotonic() - start_s:.0f} s, {num_gone} went: {told}", flush=True)
    return counts, num_gone


def growth(counts: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Returns how much more each shard holds in the last count than after a quarter of the time."""
    early, last = counts[NUM_COUNTS // 4], counts[-1]
    return [
        {what: after[what] - before[what] for what in COLUMNS}
        for before, after in zip(early, last, strict=True)
    ]


def main() -> None:
    """Runs it and prints what has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--numel", type=int, default=1 << 20, help="parameters")
    parser.add_argument("--think-ms", type=float, default=20.0, help="between two pushes")
    parser.add_argument("--gap-s", type=float, default=4.0, help="until the next one goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    setup = Setup(
        workers=args.workers, shards=args.shards, numel=args.numel, think_s=args.think_ms / 1e3,
        net=False, disk=False,
    )  # fmt: skip
    with Cluster(setup) as cluster:
        counts, num_gone = soak(cluster, args.seconds, args.gap_s, args.seed)
        found = proof.check(cluster.books, cluster.finish(), by_step=False)
        failures = cluster.failures
    rows, grown = [], {}
    for index, (after, more) in enumerate(zip(counts[-1], growth(counts), strict=True)):
        grown[f"shard {index}"] = {what: round(value, 1) for what, value in more.items()}
        rows.append(
            [f"shard {index}", *(f"{after[what]:.1f} ({more[what]:+.1f})" for what in COLUMNS)]
        )
    kit.show(f"{args.workers} workers, {num_gone} went and came back, {args.seconds:g} s: at the "
             "end (growth)", ["", *COLUMNS], rows)  # fmt: skip
    print(f"{found.pushes} pushes acknowledged, {found.lost} lost, {found.double} double")
    for text in (*found.told, *sorted(set(failures))):
        print(text)
    is_flat = all(
        value <= TOLERANCE[what] for shard in grown.values() for what, value in shard.items()
    )
    if args.json:
        values = {"pushes": found.pushes, "lost": found.lost, "double": found.double}
        print(json.dumps({**values, "went": num_gone, "growth": grown, "is_flat": is_flat}))
    sys.exit(0 if is_flat and found.is_exact else 1)


if __name__ == "__main__":
    main()
