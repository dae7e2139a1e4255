"""Runs one simulation and shows it, or records the transcripts.

python -m tests.sim run ssd 1234       # one seed of test_seeds.py, with every message
python -m tests.sim elastic ssd 1234   # one of test_elastic.py
python -m tests.sim record             # writes transcripts/*.txt anew
"""

import sys
import tempfile
from pathlib import Path

from tests.sim.case import Case, draw, draw_elastic
from tests.sim.cluster import Cluster, small_slices
from tests.sim.scenarios import SCENARIOS, TRANSCRIPTS, transcript


def run(case: Case) -> None:
    """Shows one case to its end, or to the invariant that it breaks."""
    sys.stdout.write(f"{case!r}\n")
    with small_slices(), tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(case, Path(folder), trace=True)
        try:
            cluster.run()
        finally:
            sys.stdout.write("\n".join(cluster.network.trace or []) + "\n")


def record() -> None:
    """Writes every transcript."""
    for name in SCENARIOS:
        (TRANSCRIPTS / f"{name}.txt").write_text(transcript(name), encoding="ascii")
        sys.stdout.write(f"recorded {name}\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", rule, number]:
            run(draw(rule, int(number)))
        case ["elastic", rule, number]:
            run(draw_elastic(rule, int(number)))
        case ["record"]:
            record()
        case _:
            sys.exit(__doc__)
