"""Paceline beside peers, in one run: `python -m benchmarks.peers [--quick] [--json]`.

One round pushes 25.6 million float32, applies SGD with momentum where there is a server, and pulls:
as one tensor (flat) and as ResNet-50's 161 (keys), with one worker and one server, and two and two.
GB/s is payload pushed and pulled by all workers over the median round. Peers take turns with
Paceline in shared memory and over TCP; compare within one run only. Gloo has no server: its
all-reduce takes the place of the round, and it makes no optimizer step. MXNet, TensorFlow and Ray
are installed by pip below `.peers`, each in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import kit
from benchmarks.peers.cases import PEERS
from benchmarks.peers.environments import LeftOutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="few rounds, one turn")
    parser.add_argument("--only", nargs="+", default=[""], help="peers, by part of their names")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    options = parser.parse_args()
    turns, rounds = (1, 3) if options.quick else (3, 5)
    chosen = [name for name in PEERS if any(part in name for part in options.only)]
    if not chosen:
        parser.error(f"no peer is named so: choose from {', '.join(PEERS)}")
    times_s = measure(chosen, turns, rounds)
    rows: list[list[Any]] = []
    for (name, case, num), taken_s in times_s.items():
        nbytes = 2 * 4 * num * kit.numel_of(kit.shapes_of(case))
        middle_s = kit.median(taken_s)
        gbps = nbytes / middle_s / 1e9
        rows.append([name, case, f"{num}x{num}", 1e3 * middle_s, 1e3 * min(taken_s), gbps])
    rows.sort(key=lambda row: (row[1], row[2], -row[5]))
    columns = ["peer", "case", "workers x servers", "median ms", "best ms", "GB/s"]
    kit.show("push + pull of 25.6M float32", columns, rows)
    kit.plot_bars(
        options.out / "peers.png",
        "Push + pull of 25.6M float32",
        "GB/s",
        {f"{row[0]}, {row[1]} {row[2]}": row[5] for row in rows},
    )
    if options.json:
        print(json.dumps({f"{row[0]}, {row[1]} {row[2]}": round(row[5], 3) for row in rows}))


def measure(names: list[str], turns: int, rounds: int) -> dict[tuple[str, str, int], list[float]]:
    """Returns the seconds of rounds by peer, case and number of workers; peers take turns."""
    times_s: dict[tuple[str, str, int], list[float]] = {}
    left_out: set[tuple[str, str, int]] = set()
    for _ in range(turns):
        for case, num in [(case, num) for case in ("flat", "keys") for num in (1, 2)]:
            for name in names:
                key = (name, case, num)
                if key in left_out:
                    continue
                try:
                    times_s.setdefault(key, []).extend(PEERS[name](case, num, rounds))
                except (LeftOutError, RuntimeError) as problem:
                    left_out.add(key)
                    times_s.pop(key, None)
                    print(f"{name}, {case} {num}x{num}: left out, {problem}", flush=True)
    return times_s


if __name__ == "__main__":
    main()
