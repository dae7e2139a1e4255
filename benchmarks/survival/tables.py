"""The table of docs/results/recovery.json, for docs/recovery.md (`pages.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.survival.shards import CHECKPOINT_S

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "recovery.json"
TARGET = 0.9  # Of the throughput without faults, with one fault a minute.
NAMES = {
    "worker": "a worker is killed",
    "shard": "a shard is killed",
    "coordinator": "the coordinator (shard 0) is killed",
    "worker and shard": "a worker and a shard are killed at once",
    "power cut": "everything is killed at once, and the boot is another",
    "worker stopped": "a worker is stopped for up to 6 s, twice its lease",
    "shard stopped": "a shard is stopped for up to 4.5 s",
    "link cut": "a link is cut for up to 4.5 s",
    "link slow": "a link has a hundredth of its rate",
    "disk full": "the shards' disk is full for up to 4.5 s, and a shard is killed meanwhile",
    "descriptors": "a shard has 600 connections to each port, and a worker is killed meanwhile",
    "status polled": "`status` is polled from 8 clients",
}


def recovery() -> str:
    """Returns the recoveries from each kind of fault, and the sums of the proof."""
    run = _runs()["all faults"]
    rows = [
        [name, str(found["count"]), f"{found['median']:.2g} s", f"{found['p99']:.2g} s"]
        for kind, name in NAMES.items()
        if (found := run["recovery"][kind])["count"]
    ]
    kept = 100 * run["throughput_kept"]
    is_met = "met" if run["throughput_kept"] >= TARGET else "**not met**"
    return "\n".join(
        [
            f"`{run['command']}`, one run on {run['date']}, commit {run['commit']}, "
            f"{run['machine']}: {_setup(run)}, a checkpoint every {CHECKPOINT_S:g} s, links in "
            f"namespaces, {run['faults']} faults.",
            "",
            table(["fault", "count", "recovery, median", "p99"], rows, "lrrr"),
            "",
            f"**{run['pushes']:,} pushes of slices acknowledged, {run['lost']} lost, "
            f"{run['double']} double, {run['torn']} torn, {run['partial']} partial; "
            f"{run['healthy_ended']} healthy processes ended, {run['workers_failed']} workers "
            f"ended with an error.** {run['rolled_back']:,} pushes were behind the checkpoint to "
            f"which a power cut went back, and {run['open_in'] + run['open_out']} were never "
            f"acknowledged because a process died ({run['open_in']} of these are in the weights). "
            f"{run['status_answers']:,} answers to `status` while it was polled. One fault a "
            f"minute keeps {kept:.1f} % of the throughput (target 90 %: {is_met}).",
        ]
    )


def others() -> str:
    """Returns the runs with other models, modes and settings."""
    rows = [
        [
            name,
            _setup(run),
            ", ".join(
                f"{kind} {found['median']:.2g} s ({found['count']})"
                for kind, found in run["recovery"].items()
                if found["count"]
            ),
            f"{run['pushes']:,}",
            f"{run['lost']:,} / {run['double']:,} / {run['torn']:,} / {run['partial']:,}",
            f"`{run['command']}`",
        ]
        for name, run in _runs().items()
        if name != "all faults"
    ]
    head = ["run", "of", "recovery, median (faults)", "pushes"]
    return table([*head, "lost / double / torn / partial", "command"], rows, "lllrrl")


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def _setup(run: dict[str, Any]) -> str:
    setup = run["setup"]
    plural = "s" * (setup["workers"] > 1)
    return (
        f"{setup['workers']} worker{plural}, {setup['shards']} shards, "
        f"{setup['numel']:,} parameters, `{setup['mode']}`"
    )


BLOCKS = {"recovery": recovery, "other recoveries": others}
