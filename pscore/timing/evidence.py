"""The accuracy that modes lost where it was measured: rows of docs/convergence.md.

No theory gives this number for another model. A test compares each row with that page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DDP = "ddp"  # Its row: all-reduce by torch's DistributedDataParallel.
ALONE = "one process"  # The row of one worker: no job.
SETTING = "LeNet on Fashion-MNIST, 4 workers"
LOW_POINTS = 0.5  # At `--risk low`: as much may have been lost.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The effect of a mode on accuracy where that was measured."""

    # Percentage points of test accuracy from `ssgd`; 0 for the same updates; None: it was not
    # measured.
    points: float | None
    source: str  # The page, and the row in it.
    seeds: int = 0  # Runs; 0: there was nothing to measure.
    more: str = ""  # Another difference of these runs, or a need of the mode, for people.

    @property
    def short(self) -> str:
        """The effect alone, for people."""
        return f"{self.points:+.1f} points" if self.seeds else "same updates"

    @property
    def text(self) -> str:
        """The effect and its setting, for people."""
        if not self.seeds:
            return f"{self.short} as one large batch"
        more = f"; {self.more}" if self.more else ""
        return f"{self.short} ({SETTING}, {self.seeds} seeds){more}"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return {"points": self.points, "text": self.text, "source": self.source}


def _measured(points: float, row: str, more: str = "", seeds: int = 3) -> Evidence:
    return Evidence(points=points, source=f"docs/convergence.md, {row}", seeds=seeds, more=more)


EQUAL = Evidence(points=0.0, source="docs/rules/ssgd.md")
# By the mode's row in the table of advice.
EVIDENCE = {
    "ssgd": EQUAL,
    "ssgd backup": _measured(-0.7, "row `ssgd backup=1`", "one of four gradients was dropped"),
    "od": _measured(-1.3, "row `od dc`"),
    "ssd k=1 kept": _measured(-0.3, "row k=1, `mirror kept`", seeds=2),
    "ssd k=5": _measured(-0.5, "row k=5, `mirror`"),
    "ssd k=5 kept": _measured(-0.6, "row k=5, `mirror kept`", seeds=2),
    "cd": _measured(-3.0, "row `cd k=5, 2-bit`"),
    "asgd": _measured(-3.2, "row `asgd`", "divide the rate by N"),
    "local H=8": _measured(-0.8, "row `local H=8`"),
    "diloco": _measured(-3.0, "row `diloco H=16`", "H was 16; tune its rates"),
    DDP: EQUAL,
    ALONE: EQUAL,
}
