"""Modes whose workers exchange models with each other, beside modes with shards.

    python -m benchmarks.decentralised --quick --json                    # under 5 minutes
    python -m benchmarks.decentralised --data ../shared/data/fashion-mnist --seeds 1 2 3 --epochs 5
    python -m benchmarks.decentralised --links --json                    # as root
    python -m benchmarks.decentralised --kills --seconds 600 --json      # of each mode

Three figures for each mode, with 8 workers. `straggler`: seconds an epoch of the workers that are
not slowed while one is, with real processes (`exchanges/straggler.py`). `accuracy`, `consensus`: of
LeNet on Fashion-MNIST at equal samples, with simulated workers (`exchanges/learning.py`); `--quick`
takes one seed and the 10,000 images of the repository. `--results` keeps the figures of the parts
that were run, beside those of other runs, for the tables of docs/rules/decentralised.md.

`--links` measures step times on slow links beside torch's DDP over Gloo (`exchanges/links.py`);
figures of other `--nets` and `--workers` stay in the result file, so that it may take several runs.
`--kills` kills workers of `adpsgd` and `allreduce`, also by Gloo, all the time
(`exchanges/kills.py`), and ends with 1 if one waits longer than a lease, an exchange is applied
twice, or the loss does not fall; figures of other `--kill-modes` and `--seeds` stay in the file,
and so do accuracies with other `--seeds` after as many steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import kit, netlab, tasks
from benchmarks.exchanges import kills, learning, links, straggler

PARTS = ("straggler", "learning")
MODES = (*straggler.MODES, "sgp")  # `sgp` waits as `dpsgd` does: its accuracy alone is measured.
QUICK_EPOCHS = 2.0


def learn(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in each mode with each seed; returns all results."""
    found: list[dict[str, Any]] = []
    for seed in args.seeds:
        task = tasks.fashion(args.data, seed, learning.NUM_WORKERS)
        steps = args.steps or round(args.epochs * task.steps_per_epoch)
        for mode in args.modes:
            result = learning.learn(mode, task, steps)
            found.append(result.as_dict())
            print(
                f"{mode}, seed {seed}: {100 * result.accuracy:.2f} %, models {result.consensus:.4f}"
                f" apart, {result.cpu_s:.0f} s of CPU",
                flush=True,
            )
    base = {run["seed"]: run["accuracy"] for run in found if run["mode"] == "ssgd"}
    rows = []
    for mode in args.modes:
        runs = [run for run in found if run["mode"] == mode]
        gaps = [run["accuracy"] - base[run["seed"]] for run in runs if run["seed"] in base]
        gap = f"{100 * statistics.fmean(gaps):+.2f}" if gaps else ""
        rows.append([mode, f"{100 * mean(runs, 'accuracy'):.2f}", gap, mean(runs, "consensus")])
    title = f"LeNet, Fashion-MNIST, {found[0]['steps']} steps of {tasks.BATCH} images a worker"
    kit.show(title, ["mode", "test accuracy, %", "from ssgd", "consensus distance"], rows)
    return found


def mean(runs: list[dict[str, Any]], what: str) -> float:
    """Returns the mean of a figure over runs."""
    return statistics.fmean(run[what] for run in runs)


def keep(path: Path, figures: dict[str, Any]) -> None:
    """Writes figures to the result file; those of parts that were not run stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = kit.describe_run("benchmarks.decentralised")
    for part, values in figures.items():
        if part == "links":
            values = links.joined(known.get(part, {}).get("figures", ()), values)
        if part == "kills":
            values = kills.joined(known.get(part, {}).get("figures", ()), values)
        if part == "learning":
            values = joined_seeds(known.get(part, {}).get("figures", ()), values)
        known[part] = about | {"figures": values}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def joined_seeds(
    former: Sequence[dict[str, Any]], found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns all training runs of the same number of steps; a new one replaces its like."""
    new, steps = {(run["mode"], run["seed"]) for run in found}, found[0]["steps"]
    kept = [run for run in former if (run["mode"], run["seed"]) not in new]
    runs = [run for run in kept if run["steps"] == steps] + found
    return sorted(runs, key=lambda run: (run["seed"], MODES.index(run["mode"])))


def brief(figures: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Returns the last line of output: accuracy and consensus are means over the seeds."""
    said = {"straggler": figures.get("straggler", {}), "accuracy": {}, "consensus": {}}
    for mode in modes:
        runs = [run for run in figures.get("learning", ()) if run["mode"] == mode]
        for what in ("accuracy", "consensus") if runs else ():
            said[what][mode] = round(mean(runs, what), 5)
    return said


def main() -> None:
    """Runs the parts one after the other."""
    args = parse_args()
    torch.set_num_threads(1)
    if args.kills:
        runs, is_good = kills.measure(args.kill_modes, args.seconds, args.seeds[0])
        report(args, {"kills": runs}, {"kills": runs})
        sys.exit(0 if is_good else 1)
    if args.links:
        if (reason := netlab.available()) is not None:
            sys.exit(f"no network namespaces here: {reason}")
        measured = links.measure(args.nets, args.workers, args.link_steps)
        report(args, {"links": measured}, {"links": measured})
        return
    figures: dict[str, Any] = {}
    if "straggler" in args.parts:
        figures["straggler"] = straggler.measure([m for m in args.modes if m in straggler.MODES])
        if args.out:
            print(f"plot: {straggler.plot(figures['straggler'], args.out)}")
    if "learning" in args.parts:
        figures["learning"] = learn(args)
    report(args, figures, brief(figures, args.modes))


def report(args: argparse.Namespace, figures: dict[str, Any], said: dict[str, Any]) -> None:
    """Keeps the figures, and prints the last line, where that is asked for."""
    if args.results:
        keep(args.results, figures)
    if args.json:
        print(json.dumps(said))


def parse_args() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(straggler.MODES))
    parser.add_argument("--links", action="store_true", help="step times on slow links, no more")
    parser.add_argument("--nets", nargs="+", choices=links.NETS, default=list(links.NETS))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], help="of --links")
    parser.add_argument("--link-steps", type=int, default=8, help="measured steps of --links")
    parser.add_argument("--kills", action="store_true", help="kill workers, measure nothing else")
    parser.add_argument(
        "--kill-modes", nargs="+", choices=kills.MODES, default=list(kills.MODES), help="of --kills"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of --kills, each mode")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=float, default=QUICK_EPOCHS, help="of all images")
    parser.add_argument("--steps", type=int, help="of each worker, in the place of --epochs")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="keep the figures here")
    parser.add_argument("--out", type=Path, help="folder of the plot")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.epochs = args.seeds[:1], QUICK_EPOCHS
    return args


if __name__ == "__main__":
    main()
