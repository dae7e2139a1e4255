"""Tables of docs/results/decentralised.json, for docs/rules/decentralised.md (`pages.py`)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import machine, table

DDP = "DDP, Gloo"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "decentralised.json"


def part(name: str) -> dict[str, Any]:
    """Returns one part of the result file: figures, command, date, commit, machine."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    return found


def origin(found: dict[str, Any]) -> str:
    """Returns the line that tells where figures come from."""
    made = f"`{found['command']}`, {found['date']}, commit {found['commit']}"
    return f"{made}, {machine(found['machine'])}."


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
    """Returns the figures of the kill loop, the runs of a mode together."""
    found = part("kills")
    rows = []
    for mode in dict.fromkeys(run["mode"] for run in found["figures"]):
        runs = [run for run in found["figures"] if run["mode"] == mode]
        counts = ("kills", "exchanges", "applied_twice")
        rows.append(
            [
                f"`{mode}`",
                *(f"{sum(run[count] for run in runs):.0f}" for count in counts),
                f"{max(run['longest_wait_s'] for run in runs):.1f} (lease {runs[0]['lease_s']:g})",
            ]
        )
    head = ["mode", "kills", "exchanges", "applied twice", "longest wait, s"]
    return "\n".join([origin(found), "", table(head, rows, "lrrrr")])


def links() -> str:
    """Returns the step of DDP on slow links, and the steps of the modes as multiples of it."""
    found = part("links")
    modes = list(dict.fromkeys(run["mode"] for run in found["figures"]))
    steps_ms: dict[tuple[str, int], dict[str, float]] = {}
    for run in found["figures"]:
        steps_ms.setdefault((run["net"], run["workers"]), {})[run["mode"]] = run["step_ms"]
    rows = [
        [net, str(workers), f"{own[DDP]:.0f}"]
        + [f"{own[mode] / own[DDP]:.2f}" for mode in modes if mode != DDP]
        for (net, workers), own in steps_ms.items()
    ]
    head = ["links", "workers", f"{DDP}, ms", *(mode for mode in modes if mode != DDP)]
    return "\n".join([origin(found), "", table(head, rows, "l" + "r" * len(head))])


BLOCKS = {
    "accuracy without weights": learning,
    "kills without weights": kills,
    "links without weights": links,
}
