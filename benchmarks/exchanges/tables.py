"""Tables of docs/results/decentralised.json, for docs/rules/decentralised.md (`pages.py`)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "decentralised.json"


def part(name: str) -> dict[str, Any]:
    """Returns one part of the result file: figures, command, date, commit, machine."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    return found


def origin(found: dict[str, Any]) -> str:
    """Returns the line that tells where figures come from."""
    return f"`{found['command']}`, {found['date']}, commit {found['commit']}, {found['machine']}."


def straggler() -> str:
    """Returns the seconds an epoch of the workers that are not slowed."""
    found = part("straggler")
    rows = [
        [f"`{mode}`", *(f"{seconds:.2f}" for seconds in row.values())]
        for mode, row in found["figures"].items()
    ]
    head = ["mode", *next(iter(found["figures"].values()))]
    return "\n".join([origin(found), "", table(head, rows, "l" + "r" * len(head))])


def learning() -> str:
    """Returns accuracy and consensus distance, means over the seeds."""
    found = part("learning")
    runs = found["figures"]
    base = {run["seed"]: run["accuracy"] for run in runs if run["mode"] == "ssgd"}
    rows = []
    for mode in dict.fromkeys(run["mode"] for run in runs):
        own = [run for run in runs if run["mode"] == mode]
        gaps = [100 * (run["accuracy"] - base[run["seed"]]) for run in own]
        rows.append(
            [
                f"`{mode}`",
                f"{100 * statistics.fmean(run['accuracy'] for run in own):.2f}",
                f"{statistics.fmean(gaps):+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})",
                f"{statistics.fmean(run['consensus'] for run in own):.4f}",
            ]
        )
    head = ["mode", "test accuracy, %", "from `ssgd`, points", "consensus distance"]
    about = f"{len(base)} seeds, {runs[0]['steps']} steps. "
    return "\n".join([about + origin(found), "", table(head, rows, "lrrr")])


def kills() -> str:
    """Returns the figures of the kill loop."""
    found = part("kills")
    rows = [
        [
            f"`{mode}`",
            str(row["kills"]),
            str(row["exchanges"]),
            str(row["applied_twice"]),
            f"{row['longest_wait_s']:.1f} (lease {row['lease_s']:g})",
            f"{row['first_loss']:.2f} to {row['last_loss']:.2f}",
        ]
        for mode, row in found["figures"].items()
    ]
    head = ["mode", "kills", "exchanges", "applied twice", "longest wait, s", "loss"]
    return "\n".join([origin(found), "", table(head, rows, "lrrrrr")])


def links() -> str:
    """Returns step times on slow links, each beside DDP on the same links."""
    found = part("links")
    runs = found["figures"]
    base = {(run["net"], run["workers"]): run["step_ms"] for run in runs if "DDP" in run["mode"]}
    rows = [
        [
            run["net"],
            str(run["workers"]),
            run["mode"],
            f"{run['step_ms']:.0f}",
            f"{run['step_ms'] / base[run['net'], run['workers']]:.2f}",
            f"{run['out_mb']:.2f}",
            f"{run['formula_mb']:.2f}",
        ]
        for run in runs
    ]
    head = ["links", "workers", "mode", "step, ms", "of DDP's", "MB out a step", "by formula"]
    return "\n".join([origin(found), "", table(head, rows, "lrlrrrr")])


BLOCKS = {
    "pace beside a slow worker": straggler,
    "accuracy without weights": learning,
    "kills without weights": kills,
    "links without weights": links,
}
