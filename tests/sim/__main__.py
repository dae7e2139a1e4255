"""Records the transcripts: `python -m tests.sim` writes transcripts/*.txt."""

import sys

from tests.sim.scenarios import SCENARIOS, TRANSCRIPTS, transcript

if __name__ == "__main__":
    for name in SCENARIOS:
        (TRANSCRIPTS / f"{name}.txt").write_text(transcript(name), encoding="ascii")
        sys.stdout.write(f"recorded {name}\n")
