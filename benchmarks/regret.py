"""Time that `mode="auto"` loses to the best mode in hindsight, on six traces of links and workers.

    python -m benchmarks.regret --json [--results docs/results/regret.json]

The state machine of the shard decides (psserver/decisions/auto_mode.py). The seconds of a step are
those of the simulator, which runs every message (pssim/timing), and of the closed form for
all-reduce; so the machine's own forms are not compared with themselves. Each trace is then run once
more with the changes that the log of its decisions names, without measuring: `replays` says whether
it takes the same modes at the same steps, and the same time. Four workers, the model of
ResNet-50, 0.3 s of computing, `STEPS` steps; a shard on a host of its own, or with each worker.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks import kit
from pscore.rules import parse_mode
from pscore.timing.auto import FIRST, AutoMode, auto_candidates, read_switches
from pscore.timing.closed import ring_form
from pscore.timing.deployment import GBIT, Deployment, cut_slices
from pscore.timing.evidence import EVIDENCE, LOW_POINTS
from pscore.timing.plans import warmup_of
from psserver.decisions.auto_mode import ModeChoice, ModeReport
from psserver.decisions.worker_reports import ReportedPace
from pssim.timing.run import run_in_time

WORKERS, STEPS, COMPUTE_S, WISH = 4, 3000, 0.3, AutoMode()
MOST = {"none": 0.0, "low": LOW_POINTS, "any": float("inf")}  # Points that may be lost, by risk.
NUMEL = 25_557_032
SHARDS = {"apart": (WORKERS,), "beside": tuple(range(WORKERS))}  # The host of each shard.
# Gbit/s and the factor on the computing of the last worker at a step.
Trace: TypeAlias = Callable[[int], tuple[float, float]]
TRACES: dict[str, Trace] = {
    "steady": lambda step: (1.0, 1.0),
    "rate falls": lambda step: (40.0 if step < STEPS // 4 else 1.0, 1.0),
    "rate rises": lambda step: (1.0 if step < STEPS // 4 else 40.0, 1.0),
    "saw-tooth": lambda step: ((40.0, 1.0)[step // 300 % 2], 1.0),
    "straggler": lambda step: (40.0, 3.0 if step < 300 else 1.0),  # About five minutes.
    "hiccups": lambda step: (1.0, 7.0 if step % 40 == 17 else 1.0),
}


RATES, FACTORS, LENGTHS = (0.5, 1.0, 2.5, 5.0, 10.0, 40.0), (1.0, 1.0, 1.0, 1.5, 3.0), (100, 1500)


def drawn(seed: int) -> Trace:
    """Returns a trace whose rate and slow worker change at steps of chance."""
    rng = np.random.default_rng(seed)
    parts: list[tuple[float, float]] = []
    while len(parts) < STEPS:
        part = float(rng.choice(RATES)), float(rng.choice(FACTORS))
        parts += [part] * int(rng.integers(*LENGTHS))
    return parts.__getitem__


def deployment_of(where: str, gbit: float, factor: float) -> Deployment:
    """Returns the job at a moment.

    Args:
        where: A key of `SHARDS`.
        gbit: Bandwidth of each link, in 10^9 bit/s.
        factor: Factor on the computing of the last worker.
    """
    hosts = SHARDS[where]
    return Deployment(
        worker_hosts=tuple(range(WORKERS)),
        shard_hosts=hosts,
        slices=cut_slices(NUMEL, len(hosts), 8),
        link=gbit * GBIT,
        compute_s=COMPUTE_S,
        overlap=False,
        slow={WORKERS - 1: factor} if factor != 1.0 else {},
    )


@functools.cache
def step_s(mode: str, where: str, gbit: float, factor: float) -> float:
    """Returns the seconds of a step of a mode; arguments as of `deployment_of`."""
    deployment = deployment_of(where, gbit, factor)
    rule = parse_mode(mode)
    if rule.gossip:
        return ring_form(deployment, overlap=False).step_s
    return run_in_time(deployment, rule).step_s


def run(
    trace: Trace,
    where: str,
    mode: str | None,
    risk: str = "none",
    replayed: Mapping[int, str] | None = None,
) -> tuple[float, list[str]]:
    """Returns the seconds of a trace in a mode, and the log of the decisions.

    Args:
        mode: The mode; None: the job chooses.
        replayed: The changes of mode by step; None: the job measures.
    """
    rng, choice, now = np.random.default_rng(0), ModeChoice(), mode or FIRST.mode
    possible = frozenset(str(parse_mode(one.mode)) for one in auto_candidates(WORKERS))
    total_s, lines, passes_slow = 0.0, list[str](), False
    waited_s, steps = np.zeros(WORKERS), np.zeros(WORKERS)
    base = deployment_of(where, 1.0, 1.0)
    for step in range(STEPS):
        gbit, factor = trace(step)
        if mode is None and WISH.is_due(step, passes_slow=passes_slow):
            if passes_slow:  # All wait for the slow one's present step.
                total_s += COMPUTE_S * max(0.0, factor - 1.0)
            for rank in range(WORKERS) if replayed is None else ():
                pace = ReportedPace(
                    num_steps=int(steps[rank]), steps_s=total_s, waits_s=waited_s[rank]
                )
                choice.report(step, rank, _report(rank, where, pace, possible))
            if replayed is None:
                choice.decide(step, range(WORKERS), base.slices, base.num_state, risk)
            chosen = choice.mode if replayed is None else replayed.get(step, now)
            if (chosen or FIRST.mode) != now:
                lines.append(choice.text)
            now = chosen or now
            passes_slow = "backup" in now
        as_mode = now if step >= warmup_of(parse_mode(now)) else FIRST.mode
        took_s = step_s(as_mode, where, gbit, factor) * rng.lognormal(0.0, 0.02)
        total_s += took_s
        own_s = np.array([COMPUTE_S] * (WORKERS - 1) + [factor * COMPUTE_S])
        made = np.minimum(1.0, took_s / own_s)  # A slow worker leaves out steps of the others.
        steps += made
        waited_s += np.maximum(0.0, took_s - made * own_s)
    return total_s, lines


def _report(rank: int, where: str, pace: ReportedPace, possible: frozenset[str]) -> ModeReport:
    return ModeReport(
        incarnation=1,
        pace=pace,
        near=tuple(host == rank for host in SHARDS[where]),
        possible=possible,
        overlaps=False,
        host=str(rank),
    )


def regret(name: str, where: str, risk: str) -> dict[str, Any]:
    """Returns the shares of time by which a trace takes longer than in the best mode and `ssgd`.

    Args:
        name: A key of `TRACES`, or the seed of a trace of chance.
    """
    trace = TRACES[name] if name in TRACES else drawn(int(name))
    allowed = [
        one.mode
        for one in auto_candidates(WORKERS)
        if -(EVIDENCE[one.evidence].points or 0.0) <= MOST[risk]
    ]
    fixed_s = {mode: run(trace, where, mode)[0] for mode in allowed}
    best = min(fixed_s, key=lambda mode: fixed_s[mode])
    auto_s, lines = run(trace, where, None, risk)
    switches = read_switches(lines)
    again_s, again = run(trace, where, None, risk, switches)
    return {
        "trace": name,
        "shards": where,
        "risk": risk,
        "regret": round(auto_s / fixed_s[best] - 1, 4),
        "behind_ssgd": round(auto_s / fixed_s[FIRST.mode] - 1, 4),
        "mode": [FIRST.mode, *switches.values()][-1],
        "best": best,
        "switches": len(lines),
        "log": lines,
        "replays": again_s == auto_s and len(again) == len(lines) == len(switches),
    }


def main() -> None:
    """Prints a line for each trace and risk."""
    parser = argparse.ArgumentParser(description="Regret of mode='auto' on six traces and more.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="keep the figures here")
    parser.add_argument("--drawn", type=int, default=0, help="traces of chance, with seeds from 0")
    options = parser.parse_args()
    names = [*TRACES, *map(str, range(options.drawn))]
    found = [regret(one, where, risk) for where in SHARDS for risk in MOST for one in names]
    for one in found:
        print(
            f"{one['shards']:<6} {one['risk']:<5} {one['trace']:<11} {one['regret']:>7.1%} behind "
            f"{one['best']}, {one['behind_ssgd']:>7.1%} behind ssgd; ended in {one['mode']}, "
            f"{one['switches']} switches{'' if one['replays'] else ', NOT REPLAYED'}"
        )
    data = {
        **kit.describe_run("benchmarks.regret"),
        "worst_regret": max(one["regret"] for one in found),
        "worst_behind_ssgd": max(one["behind_ssgd"] for one in found),
        "replays": all(one["replays"] for one in found),
        "traces": found,
    }
    if options.results is not None:
        options.results.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(data))


if __name__ == "__main__":
    main()
