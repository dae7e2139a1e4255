"""The block of docs/dataplane.md about work that grows, from docs/results/growth.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import growth, kit
from benchmarks.markdown import machine, table

RESULT = kit.ROOT / "docs" / "results" / "growth.json"
MODEL_NUMEL, SLICE_NUMEL = 70_000_000_000, 1 << 20  # Of a large model, in slices of usual length.
NUM_SHARDS = NUM_WORKERS = 16
SIDES = ("shard", "worker")


def grown(path: Path = RESULT) -> str:
    """Returns the CPU time of a push as work grows, and a large model by these constants."""
    if not path.exists():
        return f"Not measured yet: `python -m {growth.MODULE} --results {path.name}`."
    run = json.loads(path.read_text(encoding="utf-8"))
    cases = {growth.key(case): case for case in run["cases"]}
    tensors = sorted({name[0] for name in cases})
    slices = sorted({name[2] for name in cases})
    rows = []
    for workers in sorted({name[1] for name in cases}):
        row = [str(workers)]
        for number in slices:
            found = [cases.get((each, workers, number)) for each in tensors]
            row.append("; ".join(_times(one) for one in found if one is not None))
        rows.append(row)
    newest = max(run["cases"], key=lambda case: case["date"])
    head = ["workers", *(f"{number:,} slices" for number in slices)]
    numbers = "; ".join(f"{each:,}" for each in tensors)
    about = f"`{run['command']}`, {newest['date']}, commit {newest['commit']}"
    return "\n".join(
        [
            f"{about}, {machine(newest['machine'])}. CPU of the shard + CPU of a worker for one "
            f"slice's push and pull, in ms, with {numbers} tensors:",
            "",
            table(head, rows, "r" * len(head)),
            "",
            *_plan(cases, tensors[0], slices[-2:]),
        ]
    )


def _times(case: dict[str, Any]) -> str:
    return f"{case['shard_ms']:.2f} + {case['worker_ms']:.2f}"


def _plan(
    cases: dict[tuple[int, int, int], dict[str, Any]], tensors: int, slices: list[int]
) -> list[str]:
    """Returns the constants of a slice, and a large model by them."""
    less, more = (cases[tensors, 1, number] for number in slices)
    ms, kb, seconds = {}, {}, {}
    between = more["slices"] - less["slices"]
    for side in SIDES:
        ms[side] = more[f"{side}_ms"]
        kb[side] = (more[f"{side}_nbytes"] - less[f"{side}_nbytes"]) / between / 1e3
    kb["shard"] -= 4 * growth.SLICE_NUMEL / 1e3  # The optimizer's state.
    for name in ("declare", "read", "restore"):
        seconds[name] = (more[f"{name}_s"] - less[f"{name}_s"]) / between
    number = -(-MODEL_NUMEL // SLICE_NUMEL)
    own = -(-number // NUM_SHARDS)
    return [
        f"A slice takes {kb['shard']:.0f} KB of the shard beside its arrays and {kb['worker']:.0f} "
        f"of a worker, {1e3 * seconds['declare']:.2f} ms to declare, "
        f"{1e3 * seconds['read']:.1f} to read for a checkpoint and "
        f"{1e3 * seconds['restore']:.1f} to restore.",
        "",
        f"**70B on paper**, {NUM_SHARDS} shards and {NUM_WORKERS} workers: {number:,} slices, "
        f"{own:,} on a shard. Besides bytes, a step takes "
        f"{own * NUM_WORKERS * ms['shard'] / 1e3:.0f} s of a shard's interpreter and "
        f"{number * ms['worker'] / 1e3:.0f} s of a worker's, "
        f"{own * kb['shard'] / 1e3:.0f} MB and {number * kb['worker'] / 1e3:.0f} MB, "
        f"{number * seconds['declare']:.0f} s to declare and "
        f"{own * seconds['restore']:.0f} s to restore.",
    ]


BLOCKS = {"growth": grown}
