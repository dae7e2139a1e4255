"""Hours of ordinary life: workers that join and leave, and what grows in the shards meanwhile.

    python -m benchmarks.soak --seconds 1800 --json

Eight workers push without end; every few seconds one of them leaves in order, or is killed, and
comes back. Memory, files, threads and mapped segments of each shard are looked at all the time;
growth is the median of the last quarter of the run less that of the second. In the end the weights
tell whether any push was lost or counted twice (`proof.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks import kit, proof
from benchmarks.stage import Setup, Stage

COLUMNS = ("memory MB", "files", "threads", "segments")
SAMPLE_S = 1.0
TOLERANCE = {"memory MB": 8.0, "files": 4.0, "threads": 4.0, "segments": 2.0}


def sample(pid: int) -> dict[str, float]:
    """Returns what a shard holds now."""
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "memory MB": process.memory_info().rss / 1e6,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "segments": sum("memfd:" in line for line in maps.splitlines()),
    }


def churn(stage: Stage, rng: random.Random, absent: dict[int, Path]) -> bool:
    """Lets one worker leave or die, and those who have left come back; returns whether any went."""
    for rank in [rank for rank in absent if stage.roles[rank].popen.poll() == 0]:
        absent.pop(rank).unlink()
        stage.revive(rank)
    rank = rng.randrange(stage.setup.workers)
    if rank in absent:
        return False
    if rng.random() < 0.5:
        stage.roles[rank].popen.kill()  # `tend` starts it again.
    else:
        absent[rank] = stage.folder / f"leave-{rank}"
        absent[rank].touch()
    return True


def soak(
    stage: Stage, seconds: float, gap_s: float, seed: int
) -> tuple[list[list[dict[str, float]]], int]:
    """Runs it; returns the samples of each shard, and how often somebody went."""
    rng, absent = random.Random(seed), dict[int, Path]()
    samples: list[list[dict[str, float]]] = [[] for _ in range(stage.setup.shards)]
    everybody = {
        (rank, spec.index) for rank in range(stage.setup.workers) for spec in stage.layout.slices
    }
    stage.await_all(everybody)
    end_s, due_s, num_gone = time.monotonic() + seconds, 0.0, 0
    while (now_s := time.monotonic()) < end_s:
        if now_s >= due_s:
            due_s = now_s + gap_s * rng.uniform(0.5, 1.5)
            num_gone += churn(stage, rng, absent)
        stage.watch(SAMPLE_S)
        for index, found in enumerate(samples):
            found.append(sample(stage.shard_pid(index)))
    for rank, path in absent.items():
        stage.roles[rank].popen.wait(60.0)
        path.unlink()
        stage.revive(rank)
    return samples, num_gone


def growth(found: Sequence[dict[str, float]], what: str) -> tuple[float, float]:
    """Returns the median of the last quarter, and how much that is beyond the second quarter's."""
    quarter = max(1, len(found) // 4)
    before = statistics.median(one[what] for one in found[quarter : 2 * quarter])
    after = statistics.median(one[what] for one in found[-quarter:])
    return after, after - before


def main() -> None:
    """Runs it and says what has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--numel", type=int, default=1 << 20, help="parameters")
    parser.add_argument("--gap-s", type=float, default=4.0, help="until the next one goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    setup = Setup(
        workers=args.workers, shards=args.shards, numel=args.numel, think_s=0.02, net=False,
        disk=False,
    )  # fmt: skip
    with Stage(setup) as stage:
        samples, num_gone = soak(stage, args.seconds, args.gap_s, args.seed)
        found = proof.check(stage.books, stage.finish(), by_step=False)
        failures = stage.failures
    rows, grown = [], {}
    for index, taken in enumerate(samples):
        figures = {what: growth(taken, what) for what in COLUMNS}
        grown[f"shard {index}"] = {what: round(more, 1) for what, (_, more) in figures.items()}
        rows.append(
            [f"shard {index}", *(f"{now:.1f} ({more:+.1f})" for now, more in figures.values())]
        )
    kit.show(f"{args.workers} workers, {num_gone} went and came back, {args.seconds:g} s: at the "
             "end (growth)", ["", *COLUMNS], rows)  # fmt: skip
    print(f"{found.pushes} pushes acknowledged, {found.lost} lost, {found.double} double")
    for text in (*found.told, *sorted(set(failures))):
        print(text)
    is_flat = all(
        more <= TOLERANCE[what] for shard in grown.values() for what, more in shard.items()
    )
    if args.json:
        values = {"pushes": found.pushes, "lost": found.lost, "double": found.double}
        print(json.dumps({**values, "went": num_gone, "growth": grown, "is_flat": is_flat}))
    sys.exit(0 if is_flat and found.is_exact else 1)


if __name__ == "__main__":
    main()
