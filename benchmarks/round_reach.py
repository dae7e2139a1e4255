"""How far `mirror` holds: its loss by delay, momentum and workers.

    python -m benchmarks.round_reach --out docs/results/round_reach.json

The transformer of `rounds.py` at H = 20, with one setting changed at a time: the steps after which
the answer lands, the outer momentum, or the number of workers. Beside each stand rounds that block,
with the same outer rate, momentum and workers. Losses are means over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import kit, rounds
from benchmarks.markdown import table

OUTER_LR, STEPS, LENGTH, NUM_SEEDS = 0.4, 200, 20, 2
BASE = {"delay": 4, "momentum": 0.9, "num_workers": 4}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"delay": 1},
    {"delay": 10},
    {"delay": 20},
    {"momentum": 0.0},
    {"momentum": 0.6},
    {"num_workers": 2},
    {"num_workers": 8},
)


def measure() -> dict[str, Any]:
    """Returns the losses of all settings, each trained once."""
    torch.set_num_threads(1)
    known: dict[rounds.Setting, list[float]] = {}

    def losses(form: str, settings: Mapping[str, Any]) -> list[float]:
        setting = rounds.Setting(form=form, length=LENGTH, steps=STEPS, **settings)
        if form == "blocking":
            setting = replace(setting, delay=-1)
        if setting not in known:
            known[setting] = [setting.train(OUTER_LR, seed) for seed in range(NUM_SEEDS)]
        return [round(loss, 4) for loss in known[setting]]

    rows = [
        {**settings, "blocking": losses("blocking", settings), "mirror": losses("mirror", settings)}
        for settings in ({**BASE, **change} for change in CHANGES)
    ]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "outer_lr": OUTER_LR,
        "steps": STEPS,
        "length": LENGTH,
        "rows": rows,
    }


def rows_of(run: Mapping[str, Any]) -> str:
    """Returns the table of a run."""
    rows = []
    for row in run["rows"]:
        blocking, mirror = (statistics.fmean(row[form]) for form in ("blocking", "mirror"))
        rows.append(
            [
                str(row["delay"]),
                f"{row['momentum']:g}",
                str(row["num_workers"]),
                f"{blocking:.3f}",
                f"{mirror:.3f}",
                f"{100 * (mirror / blocking - 1):+.1f} %",
            ]
        )
    head = ["lands after", "outer momentum", "workers", "blocking", "`mirror`", "beside blocking"]
    return table(head, rows, "rrrrrr")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="writes the result to a file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    found = measure()
    kit.publish(found, rows_of(found), args.out, as_json=args.json)


if __name__ == "__main__":
    main()
