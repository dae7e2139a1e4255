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
    few, *many = sorted({name[0] for name in cases})
    slices = sorted({name[2] for name in cases})
    rows = [
        [str(workers), *(_times(cases.get((few, workers, number))) for number in slices)]
        for workers in sorted({name[1] for name in cases})
    ]
    newest = max(run["cases"], key=lambda case: case["date"])
    cores = machine(newest["machine"]).partition(", ")[0]
    loads = [float(case["machine"].rpartition("load ")[2]) for case in run["cases"]]
    about = f"{newest['date']}, {cores}, load {min(loads)} to {max(loads)}"
    return "\n".join(
        [
            f"CPU ms of shard+worker, one slice's push and pull, {few:,} tensors"
            f"{_beside(cases, few, many)}; {about}, `{run['command']}`:",
            "",
            table(["workers\\slices", *(f"{number:,}" for number in slices)], rows, "r" * 9),
            "",
            *_plan(cases, few, slices[-2:]),
        ]
    )


def _times(case: dict[str, Any] | None) -> str:
    return "" if case is None else f"{case['shard_ms']:.2f}+{case['worker_ms']:.2f}"


def _beside(cases: dict[tuple[int, int, int], dict[str, Any]], few: int, many: list[int]) -> str:
    """Returns how much longer pushes of the tables with more tensors take, together."""
    texts = []
    for tensors in many:
        pairs = [(cases[few, *rest], case) for (each, *rest), case in cases.items()
                 if each == tensors]  # fmt: skip
        less, more = (sum(_ms(pair[place]) for pair in pairs) for place in (0, 1))
        texts.append(f" ({tensors:,}: {more / less:.2f} times as long)")
    return "".join(texts)


def _ms(case: dict[str, Any]) -> float:
    return float(case["shard_ms"] + case["worker_ms"])


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
        f"A slice takes {kb['shard']:.0f} KB of a shard beside its arrays, {kb['worker']:.0f} of a "
        f"worker, {1e3 * seconds['declare']:.2f} ms to declare, {1e3 * seconds['read']:.1f} to "
        f"read for a checkpoint, {1e3 * seconds['restore']:.1f} to restore.",
        "",
        f"**70B on paper**, {NUM_SHARDS} shards and workers, {number:,} slices: a step takes "
        f"{own * NUM_WORKERS * ms['shard'] / 1e3:.0f} s of a shard's interpreter, "
        f"{number * ms['worker'] / 1e3:.0f} of a worker's; slices take "
        f"{own * kb['shard'] / 1e3:.0f} and {number * kb['worker'] / 1e3:.0f} MB, "
        f"{number * seconds['declare']:.0f} s to declare, "
        f"{own * seconds['restore']:.0f} to restore.",
    ]


BLOCKS = {"growth": grown}
