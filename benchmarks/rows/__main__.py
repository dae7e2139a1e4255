"""Row tables beside other ways to train large embeddings: `python -m benchmarks.rows [--json]`.

`pull_push_ms`: milliseconds of pull and push of a step's rows at a shard with its journal on, by
data plane, and `bytes_of_formula` (benchmarks/rows/shard.py); `step_ms`: milliseconds of a step
(benchmarks/rows/step.py); `auc`: AUC on a computed click log (benchmarks/rows/auc.py); `kills`:
rows that were counted wrongly while shards and workers are killed (benchmarks/rows/kills.py), of
which one makes the exit code 1; `wire_ms`: a step on links of 1 Gbit/s (benchmarks/rows/wire.py),
and `others_ms`: with two hosts, and with eight.
These are of many rows: `back` (back.py), time of a shard to come back after a kill; `journal`
(journal.py), its share of a step; `copies` (copies.py), checkpoints of changes, and restoring them
on other shards; `bounded` (bounded.py), rows that come late and go; `early` (early.py), prefetched
and cached rows; `loops` (loops.py), the loops of a shard beside copies by numpy.

With `--quick` the cases are small, and only the first four are measured unless `--only` names one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import kit
from benchmarks.rows import (
    auc,
    back,
    bounded,
    copies,
    early,
    journal,
    kills,
    loops,
    shard,
    step,
    wire,
)

MEASURES: dict[str, Callable[[bool], Any]] = {
    "pull_push_ms": shard.measure,
    "step_ms": step.measure,
    "auc": auc.measure,
    "kills": kills.measure,
    "wire_ms": wire.measure,
    "others_ms": wire.measure_others,
    "back": back.measure,
    "journal": journal.measure,
    "copies": copies.measure,
    "bounded": bounded.measure,
    "early": early.measure,
    "loops": loops.measure,
}
QUICK = ("pull_push_ms", "step_ms", "auc", "kills")
# The keys of `--json` for `QUICK`; all figures are in the file of `--out`.
SAID: dict[str, tuple[str, ...]] = {
    "pull_push_ms": ("shm", "tcp"),
    "step_ms": ("rows", "gloo_sparse", "torchrec_cpu", "ddp_dense"),
    "auc": ("one_process", "ssgd", "asgd", "bayes"),
    "kills": ("faults", *kills.WRONG),
}


def main() -> None:
    """Measures everything, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, for a few minutes")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--only", choices=list(MEASURES), help="measure one, and keep the other figures of --out"
    )
    parser.add_argument(
        "--seconds", type=float, help="time of kills while rows go (600; 40 with --quick)"
    )
    parser.add_argument(
        "--samples", type=int, help="clicks of the AUC (10^7; 400,000 with --quick)"
    )
    parser.add_argument("--seeds", type=int, help="logs of clicks of the AUC (3)")
    args = parser.parse_args()
    auc.SAMPLES, auc.SEEDS = args.samples, args.seeds or auc.SEEDS
    kills.SECONDS = args.seconds or (kills.QUICK_SECONDS if args.quick else kills.SECONDS)
    console = Console(highlight=False)
    console.print(kit.machine(), markup=False)
    found: dict[str, Any] = {}
    if args.only and args.out is not None:
        found = json.loads(args.out.read_text(encoding="utf-8"))
    here = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": kit.commit(),
        "machine": kit.machine(),
        "is_quick": args.quick,
    }
    if found:
        found.setdefault("later", {})[args.only] = here
    else:
        found |= here
    for name in [args.only] if args.only else QUICK if args.quick else MEASURES:
        found[name] = MEASURES[name](args.quick)
        grid = Table(name, "", box=box.SIMPLE_HEAD)
        for key, value in (found[name] or {}).items():
            grid.add_row(key, "-" if value is None else f"{value:.4g}")
        console.print(grid)
    if "bytes_of_formula" in found.get("pull_push_ms", {}):
        found["bytes_of_formula"] = found["pull_push_ms"].pop("bytes_of_formula")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(found if args.only or not args.quick else _said(found)))
    sys.exit(any(found.get("kills", {}).get(name) for name in kills.WRONG))


def _said(found: dict[str, Any]) -> dict[str, Any]:
    said = {name: {key: found[name][key] for key in keys} for name, keys in SAID.items()}
    return {**said, "bytes_of_formula": found["bytes_of_formula"]}


if __name__ == "__main__":
    main()
