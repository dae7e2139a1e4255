"""The cost of journals: `python -m benchmarks.durability [--json]`.

ssgd with SGD and momentum over shared memory, by turns with `--durability memory` and with journals
in memory and on the disk of the temporary directory. `flat` are rounds of 25.6 million float32 with
one worker and one shard, nothing but communication; `2x2` the same with two of each; `resnet20` are
training steps of a real ResNet-20 with batches of 32. The share is throughput with journals over
throughput without, of medians over all turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import kit, transport

PLACES = {"memory": "/dev/shm", "disk": tempfile.gettempdir()}
ROUNDS, STEPS = 10, 12


def flat(num: int) -> Callable[[Path | None], list[float]]:
    """Returns what measures the seconds of rounds of `num` workers and shards."""
    return lambda folder: transport.measure_ours("local", "flat", num, ROUNDS, folder)[0]


def resnet20(folder: Path | None) -> list[float]:
    """Returns the seconds of training steps of one worker."""
    results, _ = kit.run_workers(
        "benchmarks.small",
        "worker",
        {"name": "resnet20", "mode": "ssgd", "turns": 1, "steps": STEPS, "threads": 1},
        plane="local",
        num_workers=1,
        num_shards=1,
        journal_dir=folder,
    )
    return [1.0 / rate for rate in results[0]["ours"]]


CASES: dict[str, Callable[[Path | None], list[float]]] = {
    "flat": flat(1),
    "2x2": flat(2),
    "resnet20": resnet20,
}


def measure(case: str, turns: int) -> dict[str, float]:
    """Returns the median seconds without journals, and with them by place."""
    times_s: dict[str, list[float]] = {"none": [], **{place: [] for place in PLACES}}
    for _ in range(turns):
        times_s["none"] += CASES[case](None)
        for place, parent in PLACES.items():
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                times_s[place] += CASES[case](Path(folder))
    return {place: kit.median(values) for place, values in times_s.items()}


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    rows, shares = [], {}
    for case in options.case or CASES:
        seconds = measure(case, options.turns)
        shares[case] = {place: seconds["none"] / seconds[place] for place in PLACES}
        rows.append([case, *(1000 * value for value in seconds.values()), *shares[case].values()])
    columns = ["case", "ms without", *(f"ms {p}" for p in PLACES), *(f"share {p}" for p in PLACES)]
    kit.show("throughput with journals", columns, rows)
    if options.json:
        print(json.dumps(shares))


if __name__ == "__main__":
    main()
