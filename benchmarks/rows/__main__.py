"""Row tables beside other ways to train large embeddings: `python -m benchmarks.rows [--json]`.

`pull_push_ms`: milliseconds of pull and push of a step's rows at a shard with its journal on, by
data plane, and `bytes_of_formula` (benchmarks/rows/shard.py); `step_ms`: milliseconds of a step
(benchmarks/rows/step.py); `auc`: AUC on a computed click log (benchmarks/rows/auc.py); `kills`:
rows that were counted wrongly while shards and workers are killed (benchmarks/rows/kills.py), of
which one makes the exit code 1; `wire_ms`: a step on links of 1 Gbit/s (benchmarks/rows/wire.py).
With `--quick` the cases are small.
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
from benchmarks.rows import auc, kills, shard, step, wire

MEASURES: dict[str, Callable[[bool], Any]] = {
    "pull_push_ms": shard.measure,
    "step_ms": step.measure,
    "auc": auc.measure,
    "wire_ms": wire.measure,
    "kills": kills.measure,
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
    args = parser.parse_args()
    auc.SAMPLES = args.samples
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
    for name in [args.only] if args.only else MEASURES:
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
        print(json.dumps(found))
    sys.exit(any(found.get("kills", {}).get(name) for name in kills.WRONG))


if __name__ == "__main__":
    main()
