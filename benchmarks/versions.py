"""Two checkouts by turns: `python -m benchmarks.versions FOLDER [--planes tcp] [--cases flat]`.

Measures another version of Paceline, checked out in FOLDER, in the round of
`benchmarks.transport`, beside this one and plain sockets; with `--models`, in the training of
`benchmarks.small` too, beside plain torch. This hardware is noisy, so the versions take turns, and
their medians are compared within one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import kit, small, transport

HERE = Path(__file__).resolve().parents[1]
Figures = dict[str, dict[str, float]]
ROUND = """
import json, sys
from benchmarks import transport
plane, case, num, rounds = json.loads(sys.argv[1])
print(json.dumps(transport.measure_ours(plane, case, num, rounds)))
"""
SMALL = """
import argparse, json, sys
from benchmarks import small
name, mode, plane = json.loads(sys.argv[1])
print(json.dumps(small.measure(name, mode, plane, argparse.Namespace(turns=5, threads=1))))
"""


def run(folder: Path, program: str, what: list[Any]) -> Any:
    """Returns what a program prints last, as JSON, run with the version in a folder.

    Raises:
        SystemExit: It cannot be measured; says what it printed.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(what)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the version in {folder} cannot be measured: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, what: list[Any]) -> tuple[list[float], float]:
    """Returns the seconds of each round of the version in a folder, and its CPU seconds a round."""
    times_s, *cpu_s = run(folder, ROUND, what)  # One number, or one of workers and one of shards.
    return times_s, sum(cpu_s)


def compare(folder: Path, plane: str, case: str, num: int, rounds: int, turns: int) -> Figures:
    """Returns the milliseconds of a round and of its CPU time, of both versions and of sockets."""
    what = [plane, case, num, rounds]
    measures = {
        "the other": lambda: measure(folder, what),
        "this one": lambda: measure(HERE, what),
        "plain TCP sockets, 1x1": lambda: transport.measure_socket(case, rounds),
    }
    times_s: dict[str, list[float]] = {name: [] for name in measures}
    cpu_s: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(turns):
        for name, one in measures.items():
            times, cpu = one()
            times_s[name] += times
            cpu_s[name].append(cpu)
    found = {
        name: {
            "median_ms": round(1e3 * kit.median(times), 3),
            "best_ms": round(1e3 * min(times), 3),
            "cpu_ms": round(1e3 * kit.median(cpu_s[name]), 3),
        }
        for name, times in times_s.items()
    }
    kit.show(
        f"{plane} {case} {num}x{num}, {rounds * turns} rounds each by turns",
        ["version", "median ms", "best ms", "CPU ms"],
        [[name, *row.values()] for name, row in found.items()],
    )
    return found


def train(folder: Path, name: str, mode: str, plane: str, turns: int) -> Figures:
    """Returns the steps per second of both versions, and their share of plain torch's."""
    folders = {"the other": folder, "this one": HERE}
    rows: dict[str, list[Any]] = {version: [] for version in folders}
    for _ in range(turns):
        for version, where in folders.items():
            rows[version].append(run(where, SMALL, [name, mode, plane]))
    found = {
        version: {
            "steps_per_s": round(kit.median([row[4] for row in measured]), 1),
            "percent_of_torch": round(kit.median([row[6] for row in measured]), 1),
        }
        for version, measured in rows.items()
    }
    kit.show(
        f"{name} {mode} {plane}, {turns} runs each by turns",
        ["version", "steps/s", "% of torch"],
        [[version, *row.values()] for version, row in found.items()],
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the other version is checked out")
    parser.add_argument("--planes", nargs="+", default=["tcp"], help="local, tcp, grpc")
    parser.add_argument("--cases", nargs="+", default=["flat"], choices=list(transport.SUFFIXES))
    parser.add_argument("--num", type=int, default=1, help="workers, and as many shards")
    parser.add_argument("--rounds", type=int, default=12, help="of each, per turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=[], help="mlp, lenet, resnet20")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="write the figures here")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "benchmarks" / "transport.py").is_file():
        raise SystemExit(f"{folder} is no checkout of Paceline: it has no benchmarks/transport.py")
    cases = [
        {"plane": plane, "case": case, "workers": options.num}
        | compare(folder, plane, case, options.num, options.rounds, options.turns)
        for plane in options.planes
        for case in options.cases
    ]
    models = [
        {"model": name, "mode": mode, "plane": plane}
        | train(folder, name, mode, plane, options.turns)
        for name, mode, plane in small.CASES
        if name in options.models
    ]
    if options.results is not None:
        said = [word for word in sys.argv[1:] if word != str(options.folder)]
        said.insert(0, f"../{folder.name}")
        about = {
            "command": f"python -m benchmarks.versions {shlex.join(said)}",
            "date": datetime.date.today().isoformat(),
            "commit": kit.commit(),
            "other": kit.commit(folder),
            "machine": kit.machine(),
        }
        options.results.write_text(
            json.dumps(about | {"cases": cases, "models": models}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
