"""Learning from rollouts that play with weights of some versions ago: `examples/rollouts.py`.

    python -m benchmarks.rollouts --quick --json
    python -m benchmarks.rollouts --out docs/results/rollouts.json    # Also draws the plot.
    python -m benchmarks.rollouts --only 4 --out FILE   # One staleness; keeps the others of FILE.

Two learners and four rollout processes on one shard; for each staleness, and once without the
correction, the mean length of the episodes that ended last, after each update (500 is the most).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks import curves, kit
from examples import rollouts
from psserver.process.embedded import start_embedded

PLOT = kit.ROOT / "docs" / "plots" / "rollouts.png"
UNCORRECTED = "4, uncorrected"
FORMS = {
    "0": (),
    "1": ("--staleness", "1"),
    "2": ("--staleness", "2"),
    "4": ("--staleness", "4"),
    UNCORRECTED: ("--staleness", "4", "--uncorrected"),
}
LAST = 20  # Updates whose mean is the result.
SMOOTHED = 10  # Updates, in the plot.


def train(form: str, seed: int, updates: int) -> list[float]:
    """Returns the mean length of episodes after each update, in steps."""
    words = [*FORMS[form], "--seed", str(seed), "--updates", str(updates)]
    args = rollouts.parse([*words, "--job", f"{form}-{seed}".replace(", ", "-")])
    return [round(length, 1) for length in rollouts.run(args)]


def draw(found: dict[str, Any], path: Path) -> Path:
    """Draws the mean over the seeds, by form; returns the file."""
    figure = curves.new_figure(6.4, 3.2)
    axes = figure.subplots()
    for color, (form, runs) in zip(curves.COLORS, found["lengths"].items(), strict=False):
        means = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        style = "--" if form == UNCORRECTED else "-"
        axes.plot(curves.smoothed(means, SMOOTHED), style, color=color, lw=1.2, label=form)
    curves.dress(axes, "update", "steps of an episode")
    axes.legend(title="versions old", frameon=False, fontsize=8)
    return curves.save(figure, path)


def main() -> None:
    """Trains all forms, and writes the result and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 20 updates")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--only", choices=list(FORMS), help="train these, and keep the others")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, help="write the figures to this file, and the plot")
    parser.add_argument("--draw", type=Path, help="only draw the plot of this file")
    args = parser.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), PLOT)
        return
    seeds, updates = (1, 20) if args.quick else (args.seeds, args.updates)
    found: dict[str, Any] = {"lengths": {}}
    if args.only and args.out is not None and args.out.exists():
        found = json.loads(args.out.read_text(encoding="utf-8"))
    multiprocessing.set_forkserver_preload(["torch", "examples.rollouts"])
    with start_embedded(1) as shards:
        os.environ["PACELINE_SERVERS"] = ",".join(shards.addresses)
        for form in [args.only] if args.only else FORMS:
            found["lengths"][form] = [train(form, seed, updates) for seed in range(seeds)]
            print(form, [statistics.fmean(run[-LAST:]) for run in found["lengths"][form]])
    found["lengths"] = {form: found["lengths"][form] for form in FORMS if form in found["lengths"]}
    found["last"] = {
        form: round(statistics.fmean(statistics.fmean(run[-LAST:]) for run in runs), 1)
        for form, runs in found["lengths"].items()
    }
    found |= kit.describe_run("benchmarks.rollouts")
    lines = [f"{form} versions old: {length} steps" for form, length in found["last"].items()]
    kit.publish(found, "\n".join(lines), args.out, as_json=args.json)
    if args.out is not None:
        draw(found, PLOT)


if __name__ == "__main__":
    main()
