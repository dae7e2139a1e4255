"""Tables of docs/results/decentralised.json, for docs/rules/decentralised.md (`pages.py`)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "decentralised.json"

NEAR_POINTS = 0.5  # Points of accuracy that count as equal.


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
    slower = {
        mode: max(row["10x"], row["100x"]) / row["1x"] for mode, row in found["figures"].items()
    }
    said = "The longer of 10x and 100x, as a multiple of 1x: " + ", ".join(
        f"`{mode}` {times:.1f}" for mode, times in sorted(slower.items(), key=lambda one: one[1])
    )
    return "\n".join([origin(found), "", table(head, rows, "l" + "r" * len(head)), "", f"{said}."])


def learning() -> str:
    """Returns accuracy and consensus distance, means over the seeds."""
    found = part("learning")
    runs = found["figures"]
    base = {run["seed"]: run["accuracy"] for run in runs if run["mode"] == "ssgd"}
    rows, means = [], {}
    for mode in dict.fromkeys(run["mode"] for run in runs):
        own = [run for run in runs if run["mode"] == mode]
        gaps = [100 * (run["accuracy"] - base[run["seed"]]) for run in own]
        means[mode] = statistics.fmean(gaps)
        rows.append(
            [
                f"`{mode}`",
                f"{100 * statistics.fmean(run['accuracy'] for run in own):.2f}",
                f"{means[mode]:+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})",
                f"{statistics.fmean(run['consensus'] for run in own):.4f}",
            ]
        )
    head = ["mode", "test accuracy, %", "from `ssgd`, points", "consensus distance"]
    about = f"{len(base)} seeds, {runs[0]['steps']} steps. "
    return "\n".join([about + origin(found), "", table(head, rows, "lrrr"), "", near(means)])


def near(means: dict[str, float]) -> str:
    """Returns which modes are as accurate as `ssgd`, and which are not.

    Args:
        means: Mean difference to `ssgd`, in points, by mode.
    """
    others = {mode: gap for mode, gap in means.items() if mode != "ssgd"}
    there = ", ".join(f"`{mode}`" for mode, gap in others.items() if abs(gap) <= NEAR_POINTS)
    far = [f"`{mode}` ({gap:+.2f})" for mode, gap in others.items() if abs(gap) > NEAR_POINTS]
    said = f"On average within {NEAR_POINTS} points of `ssgd`: {there or 'none'}."
    return f"{said} Further from it: {', '.join(far)}." if far else said


def kills() -> str:
    """Returns the figures of the kill loop, the runs of a mode together."""
    found = part("kills")
    rows = []
    for mode in dict.fromkeys(run["mode"] for run in found["figures"]):
        runs = [run for run in found["figures"] if run["mode"] == mode]
        counts = ("kills", "exchanges", "applied_twice", "seconds")
        rows.append(
            [
                f"`{mode}`",
                str(len(runs)),
                *(f"{sum(run[count] for run in runs):.0f}" for count in counts),
                f"{max(run['longest_wait_s'] for run in runs):.1f} (lease {runs[0]['lease_s']:g})",
                ", ".join(f"{run['first_loss']:.2f} to {run['last_loss']:.2f}" for run in runs),
            ]
        )
    head = ["mode", "runs", "kills", "exchanges", "applied twice", "s", "longest wait, s", "loss"]
    return "\n".join([origin(found), "", table(head, rows, "lrrrrrrr")])


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
