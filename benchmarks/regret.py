"""Time that `mode="auto"` loses to the best mode in hindsight, on six traces of links and workers.

    python -m benchmarks.regret --json

The state machine of the shard decides (psserver/decisions/auto_mode.py). The seconds of a step are
those of the simulator, which runs every message (pssim/timing), and of the closed form for
all-reduce; so the machine's own forms are not compared with themselves. Four workers, the model of
ResNet-50, 0.3 s of computing, `STEPS` steps; a shard on a host of its own, or with each worker.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable

import numpy as np

from pscore.rules import parse_mode
from pscore.timing.auto import FIRST, AutoMode, auto_candidates
from pscore.timing.closed import ring_form
from pscore.timing.deployment import GBIT, Deployment, cut_slices
from pscore.timing.evidence import EVIDENCE, LOW_POINTS
from psserver.decisions.auto_mode import ModeChoice, ModeReport
from psserver.decisions.worker_reports import ReportedPace
from pssim.timing.run import run_in_time

WORKERS, STEPS, COMPUTE_S, WISH = 4, 3000, 0.3, AutoMode()
MOST = {"none": 0.0, "low": LOW_POINTS, "any": float("inf")}  # Points that may be lost, by risk.
NUMEL = 25_557_032
SHARDS = {"apart": (WORKERS,), "beside": tuple(range(WORKERS))}  # The host of each shard.
# By trace: Gbit/s and the factor on the computing of the last worker at a step.
TRACES: dict[str, Callable[[int], tuple[float, float]]] = {
    "steady": lambda step: (1.0, 1.0),
    "rate falls": lambda step: (40.0 if step < STEPS // 4 else 1.0, 1.0),
    "rate rises": lambda step: (1.0 if step < STEPS // 4 else 40.0, 1.0),
    "saw-tooth": lambda step: ((40.0, 1.0)[step // 300 % 2], 1.0),
    "straggler": lambda step: (40.0, 3.0 if step < 300 else 1.0),  # About five minutes.
    "hiccups": lambda step: (1.0, 7.0 if step % 40 == 17 else 1.0),
}


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


def run(trace: str, where: str, mode: str | None, risk: str = "none") -> tuple[float, str, int]:
    """Returns the seconds of a trace in a mode, the last mode, and the number of switches.

    Args:
        mode: The mode; None: the job chooses.
    """
    rng, choice, now = np.random.default_rng(0), ModeChoice(), mode or FIRST.mode
    possible = frozenset(str(parse_mode(one.mode)) for one in auto_candidates(WORKERS))
    total_s, waited_s, switches = 0.0, np.zeros(WORKERS), 0
    base = deployment_of(where, 1.0, 1.0)
    for step in range(STEPS):
        if mode is None and not choice.mode and WISH.is_due(step):
            for rank in range(WORKERS):
                pace = ReportedPace(num_steps=step, steps_s=total_s, waits_s=waited_s[rank])
                choice.report(step, rank, _report(rank, where, pace, possible))
            choice.decide(step, range(WORKERS), base.slices, base.num_state, risk)
            switches += bool(choice.mode) and choice.mode != now
            now = choice.mode or now
        gbit, factor = TRACES[trace](step)
        took_s = step_s(now, where, gbit, factor) * rng.lognormal(0.0, 0.02)
        total_s += took_s
        factors = np.array([1.0] * (WORKERS - 1) + [factor])
        waited_s += np.maximum(0.0, took_s - COMPUTE_S * factors)
    return total_s, now, switches


def _report(rank: int, where: str, pace: ReportedPace, possible: frozenset[str]) -> ModeReport:
    return ModeReport(
        incarnation=1,
        pace=pace,
        near=tuple(host == rank for host in SHARDS[where]),
        possible=possible,
        overlaps=False,
        host=str(rank),
    )


def regret(trace: str, where: str, risk: str) -> dict[str, float | str | int]:
    """Returns the shares of time by which a trace takes longer than in the best mode and `ssgd`."""
    allowed = [
        one.mode
        for one in auto_candidates(WORKERS)
        if -(EVIDENCE[one.evidence].points or 0.0) <= MOST[risk]
    ]
    fixed_s = {mode: run(trace, where, mode)[0] for mode in allowed}
    best = min(fixed_s, key=lambda mode: fixed_s[mode])
    auto_s, mode, switches = run(trace, where, None, risk)
    return {
        "trace": trace,
        "shards": where,
        "risk": risk,
        "regret": round(auto_s / fixed_s[best] - 1, 4),
        "behind_ssgd": round(auto_s / fixed_s[FIRST.mode] - 1, 4),
        "mode": mode,
        "best": best,
        "switches": switches,
    }


def main() -> None:
    """Prints a line for each trace and risk."""
    parser = argparse.ArgumentParser(description="Regret of mode='auto' on six traces.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    as_json = parser.parse_args().json
    found = [regret(one, where, risk) for where in SHARDS for risk in MOST for one in TRACES]
    for one in found:
        print(
            f"{one['shards']:<6} {one['risk']:<5} {one['trace']:<11} {one['regret']:>7.1%} behind "
            f"{one['best']}, {one['behind_ssgd']:>7.1%} behind ssgd; ended in {one['mode']}"
        )
    if as_json:
        worst = max(float(one["regret"]) for one in found)
        behind = max(float(one["behind_ssgd"]) for one in found)
        print(json.dumps({"worst_regret": worst, "worst_behind_ssgd": behind, "traces": found}))


if __name__ == "__main__":
    main()
