"""Row tables beside other ways to train large embeddings: `python -m benchmarks.rows [--json]`.

`step_ms`: milliseconds of a step (benchmarks/rows/step.py); `auc`: AUC on a computed click log
(benchmarks/rows/auc.py). With `--quick` the cases are small.
"""

from __future__ import annotations

import argparse
import json

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import kit
from benchmarks.rows import auc, step

MEASURES = {"step_ms": step.measure, "auc": auc.measure}


def main() -> None:
    """Measures everything, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, for a few minutes")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    args = parser.parse_args()
    console = Console(highlight=False)
    console.print(kit.machine(), markup=False)
    found = {}
    for name, measure in MEASURES.items():
        found[name] = measure(args.quick)
        grid = Table(name, "", box=box.SIMPLE_HEAD)
        for key, value in found[name].items():
            grid.add_row(key, "-" if value is None else f"{value:.4g}")
        console.print(grid)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
