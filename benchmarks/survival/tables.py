"""The tables of docs/results/recovery.json and chaos.json, for the pages (`pages.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmarks.recovery  # noqa: F401 - adds all kinds of faults
from benchmarks.markdown import machine, table
from benchmarks.survival.injector import FAULTS
from benchmarks.survival.moments import COUNTS
from benchmarks.survival.monitors import GAP_S_MAX, PROBE_S_MAX
from benchmarks.survival.shards import CHECKPOINT_S

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "recovery.json"
CHAOS = RESULTS.parent / "chaos.json"
GOODPUT, NEAR = 0.95, 0.01  # Targets of rounds under kills: tokens that count, and the loss.
NONE = {"count": 0}  # The recoveries from a kind that a run did not make.
TARGET = 0.9  # Of the throughput without faults, with one fault a minute.


def recovery() -> str:
    """Returns the recoveries from each kind of fault, and the sums of the proof."""
    run = _runs()["all faults"]
    rows = [
        [kind.label, str(found["count"]), f"{found['median']:.2g}"]
        for name, kind in FAULTS.items()
        if (found := run["recovery"].get(name, NONE))["count"]
    ]
    kept = 100 * run["throughput_kept"]
    is_met = "met" if run["throughput_kept"] >= TARGET else "**not met**"
    return "\n".join(
        [
            f"`{run['command']}`, one run on {run['date']}, commit {run['commit']}, "
            f"{machine(run['machine'])}: {_setup(run)}, a checkpoint every "
            f"{CHECKPOINT_S:g} s, links in namespaces, {run['faults']} faults.",
            "",
            table(["fault", "count", "recovery, s (median)"], rows, "lrr"),
            "",
            f"**{run['pushes']:,} pushes of slices acknowledged, {run['lost']} lost, "
            f"{run['double']} double, {run['torn']} torn, {run['partial']} partial; "
            f"{run['healthy_ended']} healthy processes ended, {run['workers_failed']} workers "
            f"ended with an error.** {run['rolled_back']:,} pushes were behind the checkpoint to "
            f"which a power cut went back. {_moments(run)}One fault a minute keeps {kept:.1f}% of "
            f"the throughput (target 90%: {is_met}).{_monitored(run)}",
        ]
    )


def _monitored(run: dict[str, Any]) -> str:
    """Returns the results of the monitors; runs before 2026-11-25 had none."""
    if not run.get("probes"):
        return ""
    probe_s, gap_s = run["probe_s_max"], run["checkpoint_gap_s_max"]
    is_quick = "met" if probe_s <= PROBE_S_MAX else "**not met**"
    is_often = "met" if gap_s <= GAP_S_MAX else "**not met**"
    return (
        f" Of {run['probes']:,} probes of health, the slowest was answered within {probe_s:.2g} s "
        f"(target {PROBE_S_MAX:g} s: {is_quick}); two checkpoints were at most {gap_s:.2g} s apart "
        f"(target {GAP_S_MAX:g} s: {is_often}). Each port had {run['idle_connections']:,} idle "
        "connections for a while."
    )


def _moments(run: dict[str, Any]) -> str:
    """Returns how many kills fell into each moment; runs before 2026-11-25 made none."""
    kills = ", ".join(f"{run[key]} into {what}" for key, what in COUNTS.items() if run.get(key))
    return f"Kills fell into moments: {kills}; {run['stuck_waits']} stuck waits. " if kills else ""


def moments() -> str:
    """Returns how many kills fell into each moment in all runs, and the pushes lost there."""
    runs = [run for run in _runs().values() if any(run.get(key) for key in COUNTS)]
    kills = ", ".join(
        f"{sum(run.get(key, 0) for run in runs):,} into {what}" for key, what in COUNTS.items()
    )
    sums = {name: sum(run[name] for run in runs) for name in ("lost", "double", "torn", "partial")}
    counts = ", ".join(f"{count} {name}" for name, count in sums.items())
    return (
        f"In the {len(runs)} runs with such kills: {kills}. {counts}; "
        f"{sum(run['stuck_waits'] for run in runs)} stuck waits; the longest time between two "
        f"checkpoints was {max(run['checkpoint_gap_s_max'] for run in runs):.2g} s at an interval "
        f"of {CHECKPOINT_S:g} s."
    )


def others() -> str:
    """Returns the runs with other models, modes and settings; `moments` has those of moments."""
    rows = [
        [
            name,
            ", ".join(
                f"{kind} {found['median']:.2g} s ({found['count']})"
                for kind, found in run["recovery"].items()
                if found["count"]
            ),
            f"{run['lost']:,} / {run['double']:,} / {run['torn']:,} / {run['partial']:,}",
        ]
        for name, run in _runs().items()
        if name != "all faults" and not name.startswith(("kills in ", "more kills in "))
    ]
    head = ["run", "recovery, median (faults)", "lost / double / torn / partial"]
    return table(head, rows, "llr")


def chaos() -> str:
    """Returns goodput, loss and the proof of decoupled rounds under kills."""
    run = json.loads(CHAOS.read_text(encoding="utf-8"))
    setup, loss, goodput = run["setup"], run["loss"], run["goodput"]
    proof = run["proof"]["kills"]
    shards = sum(name.startswith("shard") for _, name in run["kills"])
    arms = ("undisturbed", "kills")
    rows = [["tokens that count", *(f"{run['tokens'][arm]:,}" for arm in arms)]]
    for label, key in (
        ("rounds closed, by slice", "rounds"),
        ("moves acknowledged, by slice", "acknowledged"),
        ("of these in a later round", "late"),
    ):
        rows.append([label, *(f"{run['proof'][arm][key]:,}" for arm in arms)])
    is_kept = "met" if goodput >= GOODPUT else "**not met**"
    differs = loss["ratio"] - 1.0
    is_near = "met" if abs(differs) <= NEAR else "**not met**"
    return "\n".join(
        [
            f"`{run['command']}`, {run['date']}, {machine(run['machine'])}: "
            f"{setup['learners']} learners, {setup['shards']} shards, "
            f"`{run['mode']}`, {setup['seconds'] / 60:g} minutes each, "
            f"{len(run['kills'])} kills, {shards} of them of shards.",
            "",
            table(["", "undisturbed", f"a kill every {setup['every_s']:g} s"], rows, "lrr"),
            "",
            f"**{proof['lost']} moves lost, {proof['double']} double, {proof['torn']} torn.** "
            f"Goodput {100 * goodput:.1f}% (target 95%: {is_kept}); the loss at "
            f"{run['equal_tokens']:,} tokens differs by {100 * differs:+.2f}% (target 1%: "
            f"{is_near}).",
        ]
    )


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


BLOCKS = {"recovery": recovery, "moments": moments, "other recoveries": others, "chaos": chaos}
