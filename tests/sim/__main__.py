"""Runs one simulation and prints its messages, or runs many and prints the seeds that fail.

python -m tests.sim                     # writes transcripts/*.txt
python -m tests.sim run ssd 1234       # one seed, with every message
python -m tests.sim elastic ssd 1234   # the same with workers that join late, die and return
python -m tests.sim sweep 500          # 500 seeds of each kind for every rule, on all cores
python -m tests.sim peers 0 10000      # these seeds of modes whose workers exchange models
python -m tests.sim pipelines 0 1000   # these seeds of pipelines whose workers die and return
python -m tests.sim events "ssd(steps=2, warmup=1)"  # two workers and a shard, event by event
"""

import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pscore.rules import RULES
from pssim.case import Case
from pssim.faulty import FaultyCluster, simulate
from pssim.transcript import text, transcript
from psworker.pipeline.run import members
from tests.sim import continuing_world, peer_cases, scenarios
from tests.sim.draws import draw, draw_elastic


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
        return f"python -m tests.sim {kind} {rule} {seed}: {str(problem).partition(chr(10))[0]}"
    return ""


def sweep(find: Callable[[Any], str], cases: Iterable[Any]) -> int:
    """Prints the failures of cases, found on all cores; returns 1 if there are some, else 0."""
    cases, num_failed = list(cases), 0
    with multiprocessing.Pool() as pool:
        for failure in filter(None, pool.imap_unordered(find, cases, chunksize=8)):
            num_failed += 1
            sys.stdout.write(f"{failure}\n")
    sys.stdout.write(f"{len(cases)} seeds, {num_failed} failed\n")
    return min(1, num_failed)


def each_rule(num_seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yields kind, rule and seed of the cases of every rule whose workers use shards."""
    rules = sorted(name for name, found in RULES.items() if not found.gossip)
    yield from itertools.product(("run", "elastic"), rules, range(num_seeds))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            for name in scenarios.SCENARIOS:
                path = scenarios.TRANSCRIPTS / f"{name}.txt"
                path.write_text(scenarios.transcript(name), encoding="ascii")
                sys.stdout.write(f"recorded {name}\n")
        case ["run", rule, number]:
            run(draw(rule, int(number)))
        case ["elastic", rule, number]:
            run(draw_elastic(rule, int(number)))
        case ["sweep", number]:
            sys.exit(sweep(find_failure, each_rule(int(number))))
        case ["peers", first, end]:
            sys.exit(sweep(peer_cases.find_failure, range(int(first), int(end))))
        case ["pipelines", first, end]:
            members.LOOK_S = 0.0  # Time does not pass there.
            sys.exit(sweep(continuing_world.find_failure, range(int(first), int(end))))
        case ["events", mode]:
            sys.stdout.write(text(transcript(mode)))
        case _:
            sys.exit(__doc__)
