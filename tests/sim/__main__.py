"""Runs one simulation and shows it, or records the transcripts.

python -m tests.sim run ssd 1234       # one seed of test_seeds.py, with every message
python -m tests.sim record             # writes transcripts/*.txt anew
"""

import sys
import tempfile
from pathlib import Path

from tests.sim.case import draw
from tests.sim.cluster import Cluster, small_slices
from tests.sim.scenarios import SCENARIOS, TRANSCRIPTS, transcript


def run(name: str, seed: int) -> None:
    """Shows one seed to its end, or to the invariant that it breaks."""
    case = draw(name, seed)
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
            run(rule, int(number))
        case ["record"]:
            record()
        case _:
            sys.exit(__doc__)
