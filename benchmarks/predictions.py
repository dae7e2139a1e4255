"""Predicted beside measured step times: `python -m benchmarks.predictions [--quick] [--json]`.

Twelve cases on four hosts of `benchmarks.netlab`, each with a worker and a shard: links of 0.1, 0.5
and 1 Gbit/s, in the modes `ssgd`, `od`, `ssd(steps=5)` and `cd` with 2-bit pushes. Three of them
have a round trip of 20 ms, and in three one worker computes for twice as long. A prediction is made
before its case runs, by the simulation of every message (pssim/timing), for hosts that share the
cores of this machine, and by the closed form (pscore/timing/closed.py); nothing is fitted to these
runs. Computing is simulated by sleeping, as in `benchmarks.hosts`.

    error     predicted / measured - 1
    ranking   whether, of each two cases on the same links that differ by more than 10 %, the
              faster one is predicted to be faster

`--results docs/results/predictions.json` keeps every case: `psworker advise` prints the worst error
of that file.
Without `--quick` all four modes are measured on each of the links.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import hosts, kit
from benchmarks.netlab import available, bits_per_s
from pscore.compressors import parse_compressor
from pscore.net.congestion import system_paces
from pscore.partition import make_layout
from pscore.rules import parse_mode
from pscore.timing.closed import closed_form
from pscore.timing.deployment import PACED, Deployment, MachineRates, TimedSlice
from pscore.types import TensorSpec
from pssim.timing.run import run_in_time

NUM_HOSTS = 4
MODES = {name: hosts.MODES[name] for name in ("ssgd", "od", "ssd", "cd")}
ROUNDS = 3
DELAY_S = 10e-3  # Each way: a round trip of 20 ms.
TRIP_S = 0.2e-3
SLOW = {3: 2.0}
DIFFERS = 0.1  # Modes that differ by less have no ranking.
# Shapes and seconds of computing by rate: links need about twice as long for a step of ssgd.
MODELS = {
    "100mbit": (((200, 200),) * 40, 0.4),
    "500mbit": (((400, 400),) * 40, 0.3),
    "1gbit": (((500, 500),) * 50, 0.4),
}
PLAIN, FAR, UNEQUAL = "plain", "20 ms", "one at half speed"
QUICK = {
    ("100mbit", PLAIN): ("od", "cd"),
    ("100mbit", FAR): ("ssgd",),
    ("100mbit", UNEQUAL): ("ssd",),
    ("500mbit", PLAIN): ("ssgd", "cd"),
    ("500mbit", FAR): ("ssd",),
    ("500mbit", UNEQUAL): ("od",),
    ("1gbit", PLAIN): ("ssd", "cd"),
    ("1gbit", FAR): ("od",),
    ("1gbit", UNEQUAL): ("ssgd",),
}
ALL = {key: tuple(MODES) for key in QUICK}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCase:
    """One case: its links, its mode, and the step times in ms."""

    links: str
    mode: str
    simulated_ms: float
    closed_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Error of the simulation."""
        return self.simulated_ms / self.measured_ms - 1

    @property
    def closed_error(self) -> float:
        """Error of the closed form."""
        return self.closed_ms / self.measured_ms - 1


def case_of(rate: str, variant: str) -> hosts.Case:
    """Returns the hosts of a case."""
    shapes, compute_s = MODELS[rate]
    case = hosts.Case(num_hosts=NUM_HOSTS, rate=rate, shapes=shapes, compute_s=compute_s)
    if variant == FAR:
        return replace(case, delay_s=DELAY_S)
    return replace(case, slow=SLOW) if variant == UNEQUAL else case


def deployment_of(case: hosts.Case) -> Deployment:
    """Returns a case as the predictions see it: links and cores, and nothing measured."""
    tensors = [
        TensorSpec(name=str(number), shape=shape, dtype="float32", compress=True)
        for number, shape in enumerate(case.shapes)
    ]
    layout = make_layout(tensors, len(case.shard_hosts))
    per_host = case.workers_per_host
    return Deployment(
        worker_hosts=tuple(rank // per_host for rank in range(case.num_workers)),
        shard_hosts=tuple(case.shard_hosts),
        slices=tuple(TimedSlice(each.shard, each.numel) for each in layout.slices),
        link=bits_per_s(case.rate) / 8,
        round_trip_s=TRIP_S + 2 * case.delay_s,
        compute_s=case.compute_s,
        slow=case.slow,
        cores=len(os.sched_getaffinity(0)),
        rates=MachineRates(far_share=PACED if system_paces() else 1.0),
    )


def predict(case: hosts.Case, mode: hosts.Mode) -> tuple[float, float]:
    """Returns the ms of a step: as simulated, and in closed form."""
    rule, compressor = parse_mode(mode.rule), parse_compressor(mode.compression)
    deployment = deployment_of(case)
    simulated = run_in_time(deployment, rule, compressor)
    return 1e3 * simulated.step_s, 1e3 * closed_form(deployment, rule, compressor).step_s


def measure(wanted: dict[tuple[str, str], tuple[str, ...]], rounds: int) -> list[PredictedCase]:
    """Predicts and measures cases, by their rate and variant."""
    found: list[PredictedCase] = []
    for (rate, variant), names in wanted.items():
        case = case_of(rate, variant)
        predicted = {name: predict(case, MODES[name]) for name in names}
        running = hosts.Hosts(case)
        with running.started():
            for name in names:
                simulated_ms, closed_ms = predicted[name]
                measured_ms = running.measure(name, MODES[name], rounds)["step_ms"]
                one = PredictedCase(
                    links=f"{rate}, {variant}",
                    mode=name,
                    simulated_ms=round(simulated_ms, 1),
                    closed_ms=round(closed_ms, 1),
                    measured_ms=round(measured_ms, 1),
                )
                found.append(one)
                print(f"{one.links} {name}: {simulated_ms:.0f} ms predicted, {measured_ms:.0f} "
                      f"measured ({one.error:+.1%}; closed form {one.closed_error:+.1%})",
                      flush=True)  # fmt: skip
    return found


def is_ranked(cases: Sequence[PredictedCase]) -> bool:
    """Returns whether the simulation ranks all modes rightly that differ enough."""
    for one, two in itertools.combinations(cases, 2):
        if one.links != two.links:
            continue
        fast, slow = sorted((one, two), key=lambda case: case.measured_ms)
        differ = slow.measured_ms > (1 + DIFFERS) * fast.measured_ms
        if differ and fast.simulated_ms >= slow.simulated_ms:
            return False
    return True


def summary(cases: Sequence[PredictedCase]) -> dict[str, Any]:
    """Returns the figures of all cases."""
    errors = [abs(case.error) for case in cases]
    closed = [abs(case.closed_error) for case in cases]
    return {
        "cases": len(cases),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "ranking_right": is_ranked(cases),
        "closed_median_error": round(statistics.median(closed), 4),
        "closed_worst_error": round(max(closed), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="twelve cases instead of 36")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of five steps each")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="keep the figures here")
    options = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    cases = measure(QUICK if options.quick else ALL, options.rounds)
    figures = summary(cases)
    kit.show(
        "step times in ms, predicted and measured",
        ["links", "mode", "simulated", "closed form", "measured", "error %", "closed error %"],
        [
            [case.links, case.mode, case.simulated_ms, case.closed_ms, case.measured_ms,
             100 * case.error, 100 * case.closed_error]
            for case in cases
        ],
    )  # fmt: skip
    if options.results is not None:
        about = kit.describe_run("benchmarks.predictions")
        rows = [
            {
                "links": case.links,
                "mode": case.mode,
                "simulated_ms": case.simulated_ms,
                "closed_ms": case.closed_ms,
                "measured_ms": case.measured_ms,
            }
            for case in cases
        ]
        text = json.dumps(about | figures | {"rows": rows}, indent=1)
        options.results.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
