"""A kill loop under load: seconds to recovery, and the exact number of lost and double pushes.

    python -m benchmarks.recovery --seconds 60 --json
    python -m benchmarks.recovery --seconds 600 \
        --results docs/results/recovery.json --out docs/plots
    python -m benchmarks.recovery --seconds 600 --mode ssgd --json
    python -m benchmarks.recovery --seconds 90 --numel 100000000 --workers 2 --kinds shard --json

Workers push whole numbers to real shards (`survival/cluster.py`), without a pause except for
simulated computing. A plan drawn from a seed kills and stops workers and shards, cuts and slows
links, fills the shards' disk, uses up their descriptors, holds thousands of idle connections,
polls their status, and kills everything at once (`survival/faults.py`); the next fault comes a
while after the job has recovered from the last one. Meanwhile probes ask for the shards' health
(`survival/monitors.py`). In the end the weights show for every single push whether it is in them
(`survival/proof.py`).

Recovery is the time from a fault (where it lasts, from its end) until every worker that it concerns
has had a push of every slice that it concerns acknowledged. Of a killed worker that includes the
start of its interpreter, most of it for importing torch. `shard` is any shard but the first, which
is the `coordinator`. Throughput kept is measured if the run is long enough for a stretch with one
kill a minute, of a worker or a shard at any time; else it is what one fault of the loop costs,
spread over a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.survival.monitors  # noqa: F401 - the monitors of a run
from benchmarks import kit, measured
from benchmarks.survival import moments, proof
from benchmarks.survival.cluster import Cluster, Setup
from benchmarks.survival.faults import KILLS
from benchmarks.survival.injector import (
    FAULTS,
    MONITORS,
    ROLES,
    Fault,
    FaultInjector,
    possible,
)
from benchmarks.survival.shards import NUM_FILES
from pscore.json_text import to_json

CALM_SHARE, MINUTES_SHARE = 0.15, 0.4
CALM_S_MIN, CALM_S_MAX = 3.0, 90.0
MEASURED_S_MIN = 400.0  # A run of this length has a stretch with one fault a minute.
FINISH_S = 4.0  # Of a run, for its end.


# ----- a worker


def work(folder: str, rank: int, workers: int, numel: int, mode: str, think_s: float) -> None:
    """Runs a worker, which pushes until it is stopped; the first one then writes the weights."""
    import torch

    import psworker

    Path(folder, f"{rank}.imported").touch()
    torch.set_num_threads(1)
    moments.attach(Path(folder), rank)
    weights = torch.nn.Parameter(torch.zeros(numel))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0), [("w", weights)], mode=mode, overlap=False
    )
    book = proof.Notebook(
        Path(folder, f"{rank}.book"), rank, workers, by_step=optimizer.rule.by_step
    )
    book.attach(optimizer._table.exchange)
    end, leave = Path(folder, "stop" if rank else "last"), Path(folder, f"leave-{rank}")
    weights.grad = torch.zeros(numel)
    while not end.exists() and not leave.exists():
        optimizer.step()
        time.sleep(think_s)
    optimizer.close()
    if rank == 0 and not leave.exists():
        np.save(Path(folder, "weights.npy"), weights.detach().numpy())
    psworker.shutdown()


# ----- a run


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a run."""

    proof: proof.Proof
    faults: list[Fault]
    rate: float  # Acknowledged pushes per second without faults.
    kept: float
    is_measured: bool  # Whether `kept` was measured with one fault a minute.
    skipped: list[str]
    failures: list[str]
    bystanders: list[str]  # Healthy processes that ended.
    figures: dict[str, float]  # Of faults and monitors, by their names in the JSON.


def run(setup: Setup, seconds: float, gap_s: float, seed: int, kinds: Sequence[str]) -> Outcome:
    """Runs a cluster for about so long, with faults, and proves what its weights hold."""
    with Cluster(setup) as cluster, contextlib.ExitStack() as monitors:
        injector = FaultInjector(cluster, random.Random(seed), possible(cluster, kinds))
        started_s = time.monotonic()
        cluster.progress.mark(started_s)
        cluster.await_all(injector.everything())
        for monitor in MONITORS:
            monitors.enter_context(monitor(injector))
        end_s = time.monotonic() + seconds - FINISH_S - (time.monotonic() - started_s)
        calm_s = time.monotonic()
        cluster.watch(min(max(CALM_S_MIN, CALM_SHARE * seconds), CALM_S_MAX))
        rate = cluster.progress.rate(calm_s, time.monotonic())
        if not rate:
            sys.exit("no push was acknowledged before the first fault: the machine is too busy")
        is_measured = seconds >= MEASURED_S_MIN and not set(KILLS).isdisjoint(injector.kinds)
        kept = _minutes(injector, MINUTES_SHARE * seconds) / rate if is_measured else 0.0
        loop_s, before = time.monotonic(), len(injector.faults)
        _loop(injector, end_s, gap_s)
        if not is_measured:
            took_s = time.monotonic() - loop_s
            lost_s = took_s * (1.0 - cluster.progress.rate(loop_s, time.monotonic()) / rate)
            kept = 1.0 - lost_s / max(1, len(injector.faults) - before) / 60.0
        weights = cluster.finish()
        monitors.close()
        by_step = setup.mode.partition("(")[0] == "ssgd"
        return Outcome(
            proof=proof.check(cluster.books, weights, by_step=by_step, eras=cluster.eras),
            faults=injector.faults,
            rate=rate,
            kept=kept,
            is_measured=is_measured,
            skipped=cluster.skipped,
            failures=cluster.failures,
            bystanders=injector.bystanders,
            figures=injector.figures | {"stuck_waits": cluster.num_stuck},
        )


def _minutes(injector: FaultInjector, seconds: float) -> float:
    """Kills something once a minute; returns the rate."""
    cluster, started_s = injector.cluster, time.monotonic()
    kinds = [kind for kind in KILLS if kind in injector.kinds]
    for number in range(max(1, round(seconds / 60.0))):
        cluster.watch(started_s + 60.0 * number + 20.0 - time.monotonic())
        injector.inject(kinds[number % len(kinds)])
        cluster.watch(started_s + 60.0 * (number + 1) - time.monotonic())
    return cluster.progress.rate(started_s, time.monotonic())


def _loop(injector: FaultInjector, end_s: float, gap_s: float) -> None:
    """Makes each kind of fault once, however long it takes, and then at random until the end."""
    number, kinds = 0, injector.kinds
    while number < len(kinds) or time.monotonic() < end_s:
        kind = kinds[number] if number < len(kinds) else injector.rng.choice(kinds)
        injector.inject(kind)
        injector.cluster.watch(gap_s * injector.rng.uniform(0.5, 1.5))
        number += 1


# ----- figures


def summary(faults: Sequence[Fault], kind: str) -> dict[str, Any]:
    """Returns median, p99 and number of the recoveries from one kind of fault."""
    values = sorted(fault.recovery_s for fault in faults if fault.kind == kind)
    if not values:
        return {"median": None, "p99": None, "count": 0}
    median, p99 = np.percentile(values, [50, 99], method="inverted_cdf")
    return {"median": round(float(median), 2), "p99": round(float(p99), 2), "count": len(values)}


def show(outcome: Outcome, setup: Setup) -> None:
    """Prints the tables."""
    rows = []
    for kind in FAULTS:
        figures = summary(outcome.faults, kind)
        if figures["count"]:
            rows.append([kind, figures["count"], figures["median"], figures["p99"]])
    kit.show(
        f"{setup.workers} workers, {setup.shards} shards, {setup.numel:,} parameters, {setup.mode}",
        ["fault", "count", "recovery s, median", "p99"],
        rows,
    )
    found = outcome.proof
    kit.show(
        "pushes by slice",
        [
            "acknowledged",
            "lost",
            "double",
            "torn",
            "partial",
            "open, in",
            "open, out",
            "rolled back",
        ],
        [
            [
                found.pushes,
                found.lost,
                found.double,
                found.torn,
                found.partial,
                found.open_in,
                found.open_out,
                found.rolled_back,
            ]
        ],
    )
    how = "measured" if outcome.is_measured else "from the cost of each fault"
    print(f"{outcome.rate:.0f} pushes/s without faults; one fault a minute keeps "
          f"{100 * outcome.kept:.1f} % ({how})")  # fmt: skip
    for text in (*found.told, *(f"skipped: {text}" for text in outcome.skipped)):
        print(text)
    for text in sorted(set(outcome.failures)):
        print(f"ended with an error: {text}")
    for text in outcome.bystanders:
        print(f"healthy, and ended: {text}")
    for name, value in outcome.figures.items():
        print(f"{name}: {value:,.6g}")


def figures(outcome: Outcome) -> dict[str, Any]:
    """Returns the figures as they are printed in JSON."""
    found = outcome.proof
    return {
        "pushes": found.pushes,
        "lost": found.lost,
        "double": found.double,
        "torn": found.torn,
        "partial": found.partial,
        "open_in": found.open_in,
        "open_out": found.open_out,
        "rolled_back": found.rolled_back,
        "healthy_ended": len(outcome.bystanders),
        **{name: round(value, 2) for name, value in outcome.figures.items()},
        "faults": len(outcome.faults),
        "recovery_s": {kind: summary(outcome.faults, kind)["median"] for kind in KILLS},
        "recovery": {kind: summary(outcome.faults, kind) for kind in FAULTS},
        "throughput_kept": round(outcome.kept, 3),
        "throughput_measured": outcome.is_measured,
        "workers_failed": len(outcome.failures),
        "skipped": outcome.skipped,
    }


def main() -> None:
    """Runs it."""
    if measured.serve(sys.argv[1:], {"worker": work, **ROLES}):
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run, about")
    parser.add_argument("--mode", default="asgd", help="asgd or ssgd")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--numel", type=int, default=1 << 20, help="parameters")
    parser.add_argument("--think-ms", type=float, default=5.0, help="pause between two steps")
    parser.add_argument("--lease-s", type=float, default=3.0, help="of the workers")
    parser.add_argument("--gap-s", type=float, default=3.0, help="from a recovery to a fault")
    parser.add_argument("--seed", type=int, default=1, help="of the plan of faults")
    parser.add_argument("--kinds", nargs="*", default=[], help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--no-net", action="store_true", help="without namespaces")
    parser.add_argument("--no-disk", action="store_true", help="without a disk that can be full")
    parser.add_argument("--shard-option", action="append", default=[], help="of psserver start")
    parser.add_argument("--files", type=int, default=NUM_FILES, help="open files of a shard")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the plot")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="add the figures here")
    parser.add_argument("--name", default="all faults", help="of this run in the result file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    setup = Setup(
        workers=args.workers,
        shards=args.shards,
        numel=-(-args.numel // 64) * 64,
        mode=args.mode,
        think_s=args.think_ms / 1e3,
        lease_s=args.lease_s,
        options=tuple(args.shard_option),
        num_files=args.files,
        net=not args.no_net,
        disk=not args.no_disk,
    )
    outcome = run(setup, args.seconds, args.gap_s, args.seed, args.kinds)
    show(outcome, setup)
    bars = {kind: summary(outcome.faults, kind)["median"] for kind in FAULTS}
    bars = {kind: value for kind, value in bars.items() if value is not None}
    kit.plot_bars(args.out / "recovery.png", "recovery, median", "seconds", bars)
    found = figures(outcome)
    if args.results is not None:
        about = {
            **kit.describe_run("benchmarks.recovery"),
            "setup": {name: getattr(args, name) for name in ("mode", "workers", "shards", "numel")},
        }
        runs = json.loads(args.results.read_text()) if args.results.exists() else {}
        runs[args.name] = about | found
        args.results.write_text(to_json(runs, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(to_json(found))
    sys.exit(0 if outcome.proof.is_exact and not outcome.bystanders else 1)


if __name__ == "__main__":
    main()
