"""Runs one simulation and prints its messages, or runs many and prints the seeds that fail.

python -m pssim run ssd 1234       # one seed, with every message
python -m pssim elastic ssd 1234   # the same with workers that join late, die and return
python -m pssim sweep 500          # 500 seeds of each kind for every rule, on all cores
python -m pssim peers 0 10000      # these seeds of modes whose workers exchange models
python -m pssim pipelines 0 1000   # these seeds of pipelines whose workers die and return
python -m pssim events "ssd(steps=2, warmup=1)"  # two workers and a shard, event by event
"""

import multiprocessing
import sys
import tempfile
from pathlib import Path

from pscore.rules import RULES
from pssim import continued, peer_case
from pssim.case import Case, draw, draw_elastic
from pssim.faulty import FaultyCluster, simulate
from pssim.transcript import text, transcript
from psworker.pipeline.run import members


def run(case: Case) -> None:
    """Shows one case to its end, or to the invariant that it breaks."""
    sys.stdout.write(f"{case!r}\n")
    with tempfile.TemporaryDirectory() as folder:
        cluster = FaultyCluster(case, Path(folder), trace=True)
        try:
            cluster.run()
        finally:
            sys.stdout.write("\n".join(cluster.network.trace or []) + "\n")


def find_failure(job: tuple[str, str, int]) -> str:
    """Runs one seed; returns the command that shows its failure, or nothing."""
    kind, rule, seed = job
    try:
        simulate(draw(rule, seed) if kind == "run" else draw_elastic(rule, seed))
    except AssertionError as problem:
        return f"python -m pssim {kind} {rule} {seed}: {str(problem).partition(chr(10))[0]}"
    return ""


def sweep(num_seeds: int) -> int:
    """Runs seeds of every rule on all cores; returns how many failed."""
    jobs = [
        (kind, rule, seed)
        for seed in range(num_seeds)
        for rule in sorted(name for name, found in RULES.items() if not found.gossip)
        for kind in ("run", "elastic")
    ]
    num_failed = 0
    with multiprocessing.Pool() as pool:
        for failure in filter(None, pool.imap_unordered(find_failure, jobs, chunksize=8)):
            num_failed += 1
            sys.stdout.write(f"{failure}\n")
    sys.stdout.write(f"{len(jobs)} seeds, {num_failed} failed\n")
    return num_failed


def sweep_peers(first: int, end: int) -> int:
    """Runs seeds of workers that exchange models, on all cores; returns how many failed."""
    with multiprocessing.Pool() as pool:
        failures = list(filter(None, pool.imap(peer_case.find_failure, range(first, end), 16)))
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    sys.stdout.write(f"{end - first} seeds, {len(failures)} failed\n")
    return len(failures)


def sweep_pipelines(first: int, end: int) -> int:
    """Runs seeds of pipelines whose workers die, on all cores; returns how many failed."""
    members.LOOK_S = 0.0  # Time does not pass there.
    with multiprocessing.Pool() as pool:
        failures = list(filter(None, pool.imap(continued.find_failure, range(first, end), 16)))
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    sys.stdout.write(f"{end - first} seeds, {len(failures)} failed\n")
    return len(failures)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", rule, number]:
            run(draw(rule, int(number)))
        case ["elastic", rule, number]:
            run(draw_elastic(rule, int(number)))
        case ["sweep", number]:
            sys.exit(min(1, sweep(int(number))))
        case ["peers", first, end]:
            sys.exit(min(1, sweep_peers(int(first), int(end))))
        case ["pipelines", first, end]:
            sys.exit(min(1, sweep_pipelines(int(first), int(end))))
        case ["events", mode]:
            sys.stdout.write(text(transcript(mode)))
        case _:
            sys.exit(__doc__)
