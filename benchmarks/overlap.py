"""Step time with and without pushes during backward: `python -m benchmarks.overlap [--json]`.

The default, `overlap=False`, sends gradients at `step()`, because a script may change them until
then. This measures the cost: the worker, shard, links and simulated GPU of `benchmarks.step`, in
modes that wait for the push of a step and modes that do not, each with `overlap` off and on. The
result, with its machine and date, is the source of the table in docs/training.md:

    python -m benchmarks.overlap --result docs/results/overlap.json
    python -m benchmarks.pages
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import kit
from benchmarks.netlab import Lab, available
from benchmarks.step import MODES, measure_link, measure_mode


def measure(rate: str, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Returns the figures of each mode on links of one rate; computing takes as long as a push."""
    found = []
    with Lab(2, rate) as lab:
        compute_s = 4 * kit.numel_of(kit.resnet50_shapes()) / measure_link(lab)
        for mode in modes:
            times_ms = {
                overlap: 1e3
                * kit.median(measure_mode(lab, mode, compute_s, rounds, overlap=overlap)["times_s"])
                for overlap in (False, True)
            }
            found.append(
                {
                    "rate": rate,
                    "mode": MODES[mode][0],
                    "compression": MODES[mode][1],
                    "compute_ms": round(1e3 * compute_s, 1),
                    "default_ms": round(times_ms[False], 1),
                    "overlap_ms": round(times_ms[True], 1),
                }
            )
            print(f"{rate} {mode}: {times_ms[False]:.0f} ms, with overlap {times_ms[True]:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="1gbit,10gbit")
    parser.add_argument("--modes", default="ssgd,od,ssd,cd", help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=2, help="of five steps each")
    parser.add_argument("--result", type=Path, help="file for the result, as JSON")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    result = {
        **kit.describe_run("benchmarks.overlap"),
        "cases": [
            case
            for rate in options.rates.split(",")
            for case in measure(rate, options.modes.split(","), options.rounds)
        ],
    }
    kit.show(
        "step time, ResNet-50-sized, 1 worker, 1 shard, simulated GPU",
        ["link", "mode", "compute ms", "default ms", "overlap=True ms"],
        [[c["rate"], c["mode"], c["compute_ms"], c["default_ms"], c["overlap_ms"]]
         for c in result["cases"]],
    )  # fmt: skip
    if options.result is not None:
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
